"""A process that answers messages over its standard input and output, one at a time."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Final

import msgpack

MAX_ANSWER_BYTES: Final = 1 << 28
_END_S: Final = 5.0


class PipedChild:
    """The process and our ends of its pipes. One thread at a time.

    Each message is a length (u32 little endian) and that many bytes of msgpack.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start `command`, which serves until its input is closed. Raises OSError."""
        child_input, self._input = os.pipe()
        self._output, child_output = os.pipe()
        try:
            # A session of its own: Ctrl-C is for us, and our end of the pipe tells the child when to leave.
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
        """Whether the process has not ended."""
        return self._process.poll() is None

    def exit_status(self) -> int:
        """Exit status of a child that closed its pipes; negative for a signal, 0 while it is still there."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return 0

    def exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        """Send a message and return the answer. Raises TimeoutError, EOFError or BrokenPipeError.

        After an error `is_answering` stays true: an answer may still lie in the pipe, so the child must be ended.
        """
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
        """Kill the process and close the pipes."""
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
                raise EOFError("the process ended")
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        raise TimeoutError
