"""Counts prompts in a process of its own, so that loading a vocabulary and building a prompt stall nobody here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack

from workers.prompt.errors import BundleNeeded, PromptError, SandboxFailure, TokenizerError
from workers.prompt.piped_child import PipedChild

PATIENCE_S: Final = 30.0
_COMMAND: Final = (sys.executable, "-P", "-m", "workers.prompt.counting_child")


class PromptCounter:
    """One long-lived child, started when first needed; one that ended is replaced at the next count.

    Safe to share between threads, which take turns.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._child: PipedChild | None = None

    def count(
        self,
        digest: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_time: int,
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
        block: bytes | None = None,
    ) -> int:
        """Tokens of a prompt; arguments as in PromptBuilder.build.

        digest: names the tokenizer bundle. block: its bytes, for a child that does not hold it.
        Raises PromptError, BundleNeeded (call again with `block`), TokenizerError (the bundle cannot be used) or
        SandboxFailure (not counted).
        """
        request = {
            "bundle": digest,
            "messages": list(messages),
            "template_time": template_time,
            "tools": list(tools),
            "template_kwargs": dict(template_kwargs or {}),
        }
        with self._lock:
            answer = self._exchange(request)
            if "unknown" in answer and block is not None:
                loaded = self._exchange({"bundle": digest, "block": block})
                answer = self._exchange(request) if "loaded" in loaded else loaded
        return _num_tokens(answer, digest)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end_child()

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            block = msgpack.packb(request)
        except (ValueError, OverflowError, TypeError) as error:
            raise SandboxFailure(f"the prompt cannot be sent to be counted ({error})") from None
        child = self._running_child()
        try:
            return child.exchange(block, self._patience_s)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            raise SandboxFailure(f"the counting process gave no answer ({error!r})") from None
        finally:
            if child.is_answering:
                self._end_child()

    def _running_child(self) -> PipedChild:
        if self._child is None or not self._child.is_alive():
            self._end_child()
            try:
                self._child = PipedChild(_COMMAND)
            except OSError as error:
                raise SandboxFailure(f"the counting process does not start ({error!r})") from error
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _num_tokens(answer: Mapping[str, Any], digest: str) -> int:
    if "unknown" in answer:
        raise BundleNeeded(digest)
    if "unusable" in answer:
        raise TokenizerError("bundle", digest[:16], answer["unusable"])
    if "refused" in answer:
        raise PromptError(*answer["refused"])
    if "failed" in answer:
        raise SandboxFailure(answer["failed"])
    return int(answer["num_tokens"])
