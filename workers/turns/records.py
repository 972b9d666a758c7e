"""What a client asked for, as stored in the turn record, and what a worker that claimed it holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from snapshot_store.transcript import CacheScope


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """An accepted turn, validated by the gateway. Immutable.

    Exactly one of messages and prompt_ids is set (prompt_ids: raw completion; not served yet). messages hold only the
    request's own new messages when parent_id or conversation_id is given; else the whole history.
    stateless: no conversation and no `store`; its assistant messages find their ids by history hash.
    sampling: fields of gpu.plan.SamplingParams as a dict (seed always set). stop: stop strings. max_tokens None =
    as much as fits. store: keep the transcript entry beyond the stream's life. worker: required worker id (tests,
    demo, admin keys). display: opaque gateway data returned as is (request echo for response objects).
    """

    turn_id: str
    tenant: str
    key_id: str
    model: str
    created_at: float
    messages: tuple[dict[str, Any], ...]
    sampling: dict[str, Any]
    parent_id: str | None = None
    conversation_id: str | None = None
    stateless: bool = False
    store: bool = True
    scope: CacheScope = CacheScope.TENANT
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    deadline: float | None = None
    durability: str = "process"
    worker: str | None = None
    display: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run a turn's branch: minted by `claim` only."""

    turn_id: str
    branch: str
    epoch: int
    nonce: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class ClaimedTurn:
    """A turn whose lease this worker holds.

    parent_id: the committed turn that this one continues, resolved at claim (head of the conversation, or the named
    parent), None for a first turn. crashes: runs that ended in a crash so far; solo: run it alone (design, section 3).
    prompt_ids: frozen ids of an earlier run, None on the first. next_number: the next event number of the stream.
    emitted_ids: ids in the stream's deltas so far. started: whether the started event is in the stream.
    earlier_numerics: ids of the numerics of earlier runs. emitted_numerics: of those whose tokens are in the stream.
    """

    lease: Lease
    request: TurnRequest
    parent_id: str | None
    root_id: str
    template_time: int
    crashes: int
    solo: bool
    prompt_ids: tuple[int, ...] | None
    next_number: int
    emitted_ids: tuple[int, ...]
    started: bool
    earlier_numerics: tuple[str, ...] = ()
    emitted_numerics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A Celery message that names a turn, in two pieces: the JSON text of its queue's name goes between them."""

    head: bytes
    tail: bytes

    def to(self, queue: str) -> bytes:
        """The whole message for one queue."""
        return self.head + json.dumps(queue).encode() + self.tail
