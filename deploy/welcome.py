"""What `kvalet up` says when it is ready: lines that can be pasted."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from deploy.stack import Stack


def welcome(stack: Stack) -> str:
    """How to reach a running stack with curl, an SDK, `kvalet chat` and the inspector."""
    model = next(iter(stack.model_names()), "MODEL")
    authorization = "" if stack.options.keys_file is None else " -H 'Authorization: Bearer KEY'"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0})
    return (
        f"\nready: {_who(stack)}; logs in {stack.options.directory / 'logs'}\n"
        f"base URL for the openai SDK: {stack.base_url}\n\n"
        f"curl {stack.base_url}/chat/completions -H 'Content-Type: application/json'{authorization} -d '{body}'\n\n"
        f"{_program()} chat --url {stack.base_url}\n"
        f"{_inspection_line(stack)}"
    )


def _who(stack: Stack) -> str:
    if stack.worker_ids:
        return ", ".join(stack.worker_ids)
    return "gateway, without workers; start them with `kvalet worker` and these servers"


def _inspection_line(stack: Stack) -> str:
    if stack.options.control_url or stack.options.pages_url:
        # The user knows those addresses, and they may hold passwords.
        return ""
    servers = f"--control {shlex.quote(stack.control_url)} --pages {shlex.quote(stack.pages_url)}"
    return f"{_program()} snapshot ls {servers}\n"


def _program() -> str:
    """How this command was called, so that printed lines can be pasted."""
    return shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "kvalet" else "kvalet"
