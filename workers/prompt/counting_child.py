"""The counting process: loads tokenizers and counts prompts for one gateway, over its standard input and output.

Loading a large vocabulary holds the interpreter for a second or more: here nobody else waits for it. Messages as in
sandbox_child.py:

    {"bundle": digest, "block": bytes}                 -> {"loaded": True} or {"unusable": reason}
    {"bundle": digest, "messages": [...], "template_time", "tools", "template_kwargs"}
                                                       -> {"num_tokens": n}, {"refused": [field, value, limit]},
                                                          {"failed": reason}, or {"unknown": True}: load it first
"""

from __future__ import annotations

import signal
import sys
from collections import OrderedDict
from typing import Any, Final

import msgpack

from workers.prompt.builder import PromptBuilder
from workers.prompt.bundle import TokenizerBundle
from workers.prompt.errors import PromptError, SandboxFailure, TokenizerError
from workers.prompt.sandbox import TemplateSandbox
from workers.prompt.sandbox_child import read_frame, write_frame
from workers.prompt.tokenizer import Tokenizer

MAX_TOKENIZERS: Final = 4


class Counter:
    """The tokenizers that were used last, by bundle digest."""

    def __init__(self) -> None:
        self._sandbox = TemplateSandbox()
        self._builders: OrderedDict[str, PromptBuilder] = OrderedDict()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One answer; never raises for what a request says."""
        try:
            return self._load(request) if "block" in request else self._count(request)
        except TokenizerError as error:
            return {"unusable": str(error)}
        except PromptError as error:
            return {"refused": [error.field, _sendable(error.value), error.limit]}
        except Exception as error:  # the worker counts again, and knows better
            kind = "" if isinstance(error, SandboxFailure) else f"{type(error).__name__}: "
            return {"failed": f"{kind}{error}"[:500]}

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        tokenizer = Tokenizer(TokenizerBundle.from_bytes(request["block"]))
        self._builders[request["bundle"]] = PromptBuilder(tokenizer, self._sandbox)
        if len(self._builders) > MAX_TOKENIZERS:
            self._builders.popitem(last=False)
        return {"loaded": True}

    def _count(self, request: dict[str, Any]) -> dict[str, Any]:
        builder = self._builders.get(request["bundle"])
        if builder is None:
            return {"unknown": True}
        self._builders.move_to_end(request["bundle"])
        options = {name: request[name] for name in ("template_time", "tools", "template_kwargs")}
        return {"num_tokens": len(builder.build(request["messages"], **options).ids)}


def _sendable(value: object) -> object:
    try:
        msgpack.packb(value)
    except (ValueError, OverflowError, TypeError):
        return repr(value)
    return value


def main() -> None:
    """Serve until the parent closes our input; ends with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    counter = Counter()
    while True:
        write_frame(answers, counter.answer(msgpack.unpackb(read_frame(requests))))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
