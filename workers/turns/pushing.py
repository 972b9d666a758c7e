"""push_message: a Celery message into its queue."""

from __future__ import annotations

from workers.turns.script import ScriptCall, load_script


def push_message(queue: str, message: bytes) -> ScriptCall[None]:
    """Put a message into a queue, also when control is out of memory. A repeat is a second message: harmless."""
    return ScriptCall(load_script("push_message"), (queue,), (message,), lambda _: None)
