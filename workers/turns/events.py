"""Events of a turn's stream. Workers write and number them; gateways only translate.

Sequence numbers are a function of the tokens: 0 is `started`, then one per delta (a token that releases text), the
last is the terminal event. A stream entry packs consecutive events; its stream id is `<last number + 1>-0`, so that
resuming after number n is a read from id `<n + 1>-0`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TurnState(StrEnum):
    """States of a turn; the first terminal transition wins."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """Whether no transition follows."""
        return self not in (TurnState.QUEUED, TurnState.IN_PROGRESS)


class EventKind(StrEnum):
    """Kinds of stream events."""

    STARTED = "started"
    DELTA = "delta"
    TERMINAL = "terminal"


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """One numbered event.

    STARTED: `info` holds prompt_tokens and worker_id is left out (a take-over repeats it byte for byte).
    DELTA: token_ids since the last delta (never empty) and the text that they release, with logprobs if asked for
    (one dict per token: {"id", "token", "logprob", "top": [[id, token, logprob], ...]}).
    TERMINAL: state, finish_reason, usage, error ({"code", "message", "param"}), and the ids and text still held back.
    """

    number: int
    kind: EventKind
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()
    state: TurnState | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    info: dict[str, Any] = field(default_factory=dict)
