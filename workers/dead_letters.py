"""Messages that no worker could read: kept (the last thousand), never executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from workers.turns.codec import pack, unpack
from workers.turns.script import ScriptCall, load_script

MAX_BODY_BYTES: Final = 4096
MAX_DEAD_LETTERS: Final = 1000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A refused message: its declared content type, the error's name and the first bytes of its body."""

    content_type: str
    error: str
    body: bytes


def add_dead_letter(letter: DeadLetter) -> ScriptCall[None]:
    """Keep a dead letter; the oldest go when there are too many."""
    packed = pack([letter.content_type, letter.error, letter.body[:MAX_BODY_BYTES]])
    return ScriptCall(load_script("add_dead_letter"), (), (packed, MAX_DEAD_LETTERS), lambda _: None)


def list_dead_letters() -> ScriptCall[tuple[DeadLetter, ...]]:
    """Read the kept dead letters, newest first."""

    def parse(reply: Any) -> tuple[DeadLetter, ...]:
        return tuple(DeadLetter(*unpack("dead letter", packed)) for packed in reply)

    return ScriptCall(load_script("list_dead_letters", flags="no-writes"), (), (), parse)
