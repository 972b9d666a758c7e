"""Chat templates run in a process of their own: their time, memory and output end with it, not with ours."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgpack

from workers.prompt.errors import SandboxFailure, TemplateLimit, TemplateRefused
from workers.prompt.piped_child import PipedChild

_START_S: Final = 30.0
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
        self._child: PipedChild | None = None

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

    def _running_child(self) -> PipedChild:
        if self._child is not None and self._child.is_alive():
            return self._child
        self._end_child()
        try:
            self._child = PipedChild([sys.executable, "-P", str(_CHILD)])
            self._child.exchange(msgpack.packb(asdict(self._limits)), _START_S)
        except (OSError, EOFError) as error:
            self._end_child()
            raise SandboxFailure(f"the template process does not start ({error!r})") from error
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
