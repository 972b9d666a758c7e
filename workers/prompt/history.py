"""Messages of a branch as a prompt takes them: committed turns, then what a request adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from snapshot_store.transcript import TranscriptEntry

INSTRUCTIONS: Final = "instructions"
"""Marks a message that leads the prompt of its own turn and of no later one."""

Message = dict[str, Any]


def split_instructions(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[Message]]:
    """The marked messages, without their mark, and the others."""
    leading = [{k: v for k, v in message.items() if k != INSTRUCTIONS} for message in messages if is_marked(message)]
    return leading, [dict(message) for message in messages if not is_marked(message)]


def committed_messages(path: Sequence[TranscriptEntry]) -> list[Message]:
    """Messages of committed turns, root first; each reply carries its output ids, which stand for its text."""
    committed: list[Message] = []
    for entry in path:
        committed += split_instructions(entry.messages)[1]
        committed.append({"role": "assistant", "content": entry.output_text, "token_ids": entry.output_ids})
    return committed


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with the mark of instructions."""
    return [{**message, INSTRUCTIONS: True} for message in messages]


def is_marked(message: Mapping[str, Any]) -> bool:
    """Whether a message is instructions of its own turn."""
    return bool(message.get(INSTRUCTIONS))
