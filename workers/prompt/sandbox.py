"""Chat templates run in a process of their own: their time, memory and output end with it, not with ours."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgpack

from workers.prompt.errors import SandboxFailure, TemplateLimit, TemplateRefused

MAX_ANSWER_BYTES: Final = 1 << 28
_START_S: Final = 30.0
_END_S: Final = 5.0
_CHILD: Final = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """cpu_s: processor time per request; wall_s: patience per request; memory_bytes: of the process, address space."""

    cpu_s: float = 2.0
    wall_s: float = 20.0
    memory_bytes: int = 1 << 29
    output_chars: int = 1 << 24


class TemplateRenderer(Protocol):
    """Renders one template with several contexts."""

    def render(self, template: str, contexts: Sequence[dict[str, Any]], template_time: int) -> list[str]:
        """The rendered texts. Raises TemplateRefused, TemplateLimit or SandboxFailure."""
        ...


class TemplateSandbox:
    """A `TemplateRenderer` with one long-lived child; a request that ends it costs the next one a start (0.1 s).

    Safe to share between threads, which take turns.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, template: str, contexts: Sequence[dict[str, Any]], template_time: int) -> list[str]:
        """See TemplateRenderer."""
        request = msgpack.packb({"template": template, "contexts": list(contexts), "time": template_time})
        answer = self._answer(request)
        if "limit" in answer:
            raise TemplateLimit("chat template", answer["limit"], "exceeds the limit")
        if "refused" in answer:
            raise TemplateRefused("chat template", answer["refused"], "the template does not take these messages")
        texts: list[str] = answer["texts"]
        return texts

    def start(self) -> None:
        """Start the child now, so that the first request does not wait. Raises SandboxFailure."""
        with self._lock:
            self._running_child()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end_child()

    def _answer(self, request: bytes) -> dict[str, Any]:
        """One exchange. A child that somebody else killed is replaced once; one that ran out of time is not."""
        limits = self._limits
        with self._lock:
            for _ in range(2):
                child = self._running_child()
                try:
                    return child.exchange(request, limits.wall_s)
                except TimeoutError:
                    raise TemplateLimit("chat template", "time", f"at most {limits.wall_s} s") from None
                except (EOFError, BrokenPipeError):
                    if child.exit_status() == -signal.SIGPROF:
                        limit = f"at most {limits.cpu_s} s of processor time"
                        raise TemplateLimit("chat template", "time", limit) from None
                finally:
                    if child.is_answering:
                        self._end_child()  # an exchange cut short leaves its answer in the pipe
        raise TemplateLimit("chat template", "crash", "must not end the template process")

    def _running_child(self) -> _Child:
        if self._child is not None and self._child.is_alive():
            return self._child
        self._end_child()
        try:
            self._child = _Child()
            self._child.exchange(msgpack.packb(asdict(self._limits)), _START_S)
        except (OSError, EOFError) as error:
            self._end_child()
            raise SandboxFailure(f"the template process does not start ({error!r})") from error
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """The process and our ends of its pipes; sandbox_child.py describes the messages."""

    def __init__(self) -> None:
        child_input, self._input = os.pipe()
        self._output, child_output = os.pipe()
        try:
            # A session of its own: Ctrl-C is for us, and our end of the pipe tells the child when to leave.
            command = [sys.executable, "-P", str(_CHILD)]
            self._process = subprocess.Popen(command, stdin=child_input, stdout=child_output, start_new_session=True)
        except OSError:
            os.close(self._input)
            os.close(self._output)
            raise
        finally:
            os.close(child_input)
            os.close(child_output)
        os.set_blocking(self._input, False)
        self.is_answering = False

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_status(self) -> int:
        """Exit status of a child that closed its pipes; negative for a signal, 0 while it is still there."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return 0

    def exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        """Send a message and return the answer. Raises TimeoutError, EOFError or BrokenPipeError."""
        self.is_answering = True
        deadline = time.monotonic() + patience_s
        block = memoryview(len(request).to_bytes(4, "little") + request)
        while block:
            _wait(self._input, select.POLLOUT, deadline)
            block = block[os.write(self._input, block) :]
        size = int.from_bytes(self._read(4, deadline), "little")
        if size > MAX_ANSWER_BYTES:
            raise EOFError(f"an answer of {size} bytes")
        answer: dict[str, Any] = msgpack.unpackb(self._read(size, deadline))
        self.is_answering = False
        return answer

    def end(self) -> None:
        self._process.kill()
        os.close(self._input)
        os.close(self._output)
        self._process.wait()

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        pieces: list[bytes] = []
        while num_bytes:
            _wait(self._output, select.POLLIN, deadline)
            piece = os.read(self._output, min(num_bytes, 1 << 20))
            if not piece:
                raise EOFError("the template process ended")
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        raise TimeoutError
