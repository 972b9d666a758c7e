"""Builders of requests, events and transcript entries for tests of turn control."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from snapshot_store.transcript import CacheScope, TranscriptEntry
from workers.registry import WorkerRecord, beat
from workers.turns.calls import accept, append_events, claim, commit
from workers.turns.control import TurnControl
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.leasing import Claimant
from workers.turns.outcomes import AcceptLimits, AcceptOutcome, EndReply
from workers.turns.records import ClaimedTurn, TurnRequest

MODEL = "tiny"
TENANT = "local"
LIMITS = AcceptLimits()
_numbers = itertools.count(1)


def request(turn_id: str | None = None, **changes: Any) -> TurnRequest:
    """A turn with one user message; unique id unless given."""
    values: dict[str, Any] = {
        "turn_id": turn_id or f"resp_{next(_numbers)}", "tenant": TENANT, "key_id": "key", "model": MODEL,
        "created_at": 1_790_000_000.5, "messages": ({"role": "user", "content": "hi"},), "sampling": {"seed": 1},
    }  # fmt: skip
    return TurnRequest(**{**values, **changes})


def worker(worker_id: str = "w1", **changes: Any) -> Claimant:
    """A worker that serves the test model."""
    values: dict[str, Any] = {"boot_id": f"{worker_id}-boot", "models": (MODEL,)}
    return Claimant(worker_id, **{**values, **changes})


def free(control: TurnControl, worker_id: str, slots: int, model: str = MODEL, ttl_s: float = 10.0) -> None:
    """Register a live worker."""
    record = WorkerRecord(worker_id=worker_id, boot_id=f"{worker_id}-boot", model=model, slots=slots, free=0)
    control.run(beat(record, ttl_s=ttl_s))


def accepted(control: TurnControl, turn_id: str | None = None, **changes: Any) -> str:
    """Accept a turn and return its id."""
    outcome = accept_turn(control, turn_id, **changes)
    assert outcome.kind == "accepted", outcome
    return outcome.turn_id


def accept_turn(control: TurnControl, turn_id: str | None = None, **changes: Any) -> AcceptOutcome:
    """Accept a turn with default limits."""
    return control.run(accept(request(turn_id, **changes), LIMITS))


def claimed(control: TurnControl, turn_id: str = "", claimant: Claimant | None = None) -> ClaimedTurn:
    """Claim a turn that must be there."""
    turn = control.run(claim(turn_id, claimant or worker()))
    assert turn is not None
    return turn


def started(number: int = 0) -> TurnEvent:
    """The started event."""
    return TurnEvent(number, EventKind.STARTED, info={"prompt_tokens": 3})


def delta(number: int, token_id: int | None = None, text: str | None = None) -> TurnEvent:
    """A delta of one token."""
    return TurnEvent(number, EventKind.DELTA, (token_id or 100 + number,), text if text is not None else f"t{number} ")


def terminal(number: int, state: TurnState = TurnState.COMPLETED) -> TurnEvent:
    """A terminal event."""
    return TurnEvent(number, EventKind.TERMINAL, state=state, finish_reason="stop", usage={"output_tokens": 2})


def entry(turn: ClaimedTurn, output: Sequence[int] = (101, 102), **changes: Any) -> TranscriptEntry:
    """The transcript entry of a claimed turn."""
    asked = turn.request
    values: dict[str, Any] = {
        "turn_id": asked.turn_id, "tenant": asked.tenant, "model": asked.model, "parent_id": turn.parent_id,
        "root_id": turn.root_id, "conversation_id": asked.conversation_id, "scope": CacheScope.TENANT, "scope_id": "",
        "created_at": asked.created_at, "committed_at": asked.created_at + 1, "template_time": turn.template_time,
        "shared_length": 0, "input_ids": (1, 2, 3), "output_ids": tuple(output), "messages": asked.messages,
        "output_text": "t1 t2 ", "finish_reason": "stop", "format_digest": b"f" * 32, "numerics_digest": b"n" * 32,
        "worker_id": turn.lease.worker_id, "epoch": turn.lease.epoch, "cached_tokens": 0, "prompt_tokens": 3,
    }  # fmt: skip
    return TranscriptEntry(**{**values, **changes})


def complete(control: TurnControl, turn: ClaimedTurn, **options: Any) -> EndReply:
    """Write what is missing of two deltas and commit."""
    if not turn.started:
        control.run(append_events(turn.lease, [started(), delta(1), delta(2)]))
    number = 3 if not turn.started else turn.next_number
    return control.run(commit(turn.lease, entry(turn), [terminal(number)], **options))
