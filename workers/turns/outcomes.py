"""What the operations of turn control answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from snapshot_store.transcript import CacheScope, TranscriptEntry
from workers.turns.events import TurnState
from workers.turns.records import TurnRequest


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A message to send: this turn is runnable. worker None = the model's queue, else that worker's own queue."""

    turn_id: str
    model: str
    worker: str | None


class AcceptKind(StrEnum):
    """How an accept ended. Everything but ACCEPTED and EXISTING is a refusal that wrote nothing."""

    ACCEPTED = "accepted"
    EXISTING = "existing"
    KEY_CONFLICT = "key_conflict"
    QUEUE_FULL = "queue_full"
    MEMORY_FULL = "memory_full"
    PARENT_NOT_FOUND = "parent_not_found"
    PARENT_FAILED = "parent_failed"
    CONVERSATION_NOT_FOUND = "conversation_not_found"
    WORKER_NOT_FOUND = "worker_not_found"


@dataclass(frozen=True, slots=True)
class AcceptOutcome:
    """Answer to accept.

    turn_id: the turn that serves this request (for EXISTING the earlier one), empty when refused. dispatch: the
    message to send now, None when accept has sent it or the turn waits for another. retry_after_s: set for QUEUE_FULL
    and MEMORY_FULL.
    """

    kind: AcceptKind
    turn_id: str = ""
    dispatch: Dispatch | None = None
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class AcceptLimits:
    """What accept refuses, and how long things are kept.

    max_open_per_model / max_open_per_tenant: open turns (waiting, queued and in progress) of a model, and of one
    tenant on it. memory_fraction: share of control's maxmemory above which nothing is accepted. stream_ttl_s: life of
    events after the end (and of everything with store=False). retention_s: life of records and transcripts.
    """

    max_open_per_model: int = 1000
    max_open_per_tenant: int = 1000
    memory_fraction: float = 0.8
    idempotency_ttl_s: int = 24 * 3600
    stream_ttl_s: int = 15 * 60
    retention_s: int = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class FrozenPrompt:
    """The prompt of a turn, fixed by its first run: every later run uses the same ids on the same parent."""

    prompt_ids: tuple[int, ...]
    parent_id: str | None
    root_id: str
    template_time: int


@dataclass(frozen=True, slots=True)
class AppendReply:
    """Answer to append_events. stop: CANCELLED or EXPIRED when the turn should end so, else None."""

    next_number: int
    stop: TurnState | None

    @property
    def cancel_requested(self) -> bool:
        """Whether the runner should finish the turn now, in state `stop`."""
        return self.stop is not None


@dataclass(frozen=True, slots=True)
class RenewReply:
    """Answer to renew: turns whose lease holds, those whose lease is lost, and those that should stop and how."""

    kept: frozenset[str]
    lost: frozenset[str]
    stop: dict[str, TurnState]


@dataclass(frozen=True, slots=True)
class EndReply:
    """Answer to commit, finish, release and cancel: messages to send for turns that became runnable."""

    dispatches: tuple[Dispatch, ...]


class CancelKind(StrEnum):
    """How a cancel ended."""

    NOT_FOUND = "not_found"
    ENDED = "ended"
    REQUESTED = "requested"


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """Answer to cancel.

    ENDED: the turn is in terminal `state` (by this call or before it). REQUESTED: a worker runs it and was told.
    """

    kind: CancelKind
    state: TurnState | None = None
    dispatches: tuple[Dispatch, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as a client may see it.

    Times are unix seconds. output_text: the reply so far (whole once committed; of an ended turn whose stream has
    expired and that was not committed: empty). usage, error and finish_reason are those of the terminal event.
    next_number: number of the next stream event. transcript: the committed entry.
    """

    turn_id: str
    tenant: str
    model: str
    state: TurnState
    request: TurnRequest
    created_at: float
    started_at: float | None
    ended_at: float | None
    worker_id: str | None
    epoch: int
    crashes: int
    parent_id: str | None
    conversation_id: str | None
    next_number: int
    output_text: str
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    transcript: TranscriptEntry | None = None


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation as a client may see it.

    head: its last committed turn. pending: messages added by hand that the next turn takes. open_turns: ids of
    accepted turns that have not ended, in order.
    """

    conversation_id: str
    tenant: str
    created_at: float
    metadata: dict[str, Any]
    head: str | None
    root_id: str | None
    scope: CacheScope | None
    pending: tuple[dict[str, Any], ...]
    open_turns: tuple[str, ...]
    num_turns: int
