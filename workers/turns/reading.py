"""get_turn: a turn as its tenant may see it."""

from __future__ import annotations

from typing import Any

from snapshot_store.transcript_codec import decode_entry
from workers.turns.codec import unpack_events, unpack_request
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.outcomes import TurnView
from workers.turns.replies import fields_of, maybe_text, stream_events, text
from workers.turns.script import ScriptCall, load_script


def get_turn(tenant: str, turn_id: str) -> ScriptCall[TurnView | None]:
    """Read a turn; None when it is unknown, expired, deleted or another tenant's."""
    return ScriptCall(load_script("get_turn", flags="no-writes"), (), (turn_id, tenant), _parse)


def get_turn_state(tenant: str, turn_id: str) -> ScriptCall[TurnState | None]:
    """Read a turn's state alone; None as in get_turn."""

    def parse(reply: Any) -> TurnState | None:
        return None if reply is None else TurnState(text(reply))

    return ScriptCall(load_script("get_turn_state", flags="no-writes"), (), (turn_id, tenant), parse)


def _parse(reply: Any) -> TurnView | None:
    if reply is None:
        return None
    flat, entries, packed_transcript, packed_end = reply
    record = fields_of(flat)
    request = unpack_request(record["request"])
    transcript = decode_entry(packed_transcript) if packed_transcript else None
    events = stream_events(entries)
    end = _terminal_event(packed_end)
    return TurnView(
        turn_id=request.turn_id,
        tenant=request.tenant,
        model=request.model,
        state=TurnState(text(record["state"])),
        request=request,
        created_at=request.created_at,
        started_at=_seconds(record["started_ms"]),
        ended_at=_seconds(record["ended_ms"]),
        worker_id=maybe_text(record["lease_worker"]),
        epoch=int(record["epoch"]),
        crashes=int(record["crashes"]),
        parent_id=maybe_text(record["parent"]),
        conversation_id=request.conversation_id,
        next_number=int(record["next"]),
        output_text=transcript.output_text if transcript else "".join(event.text for event in events),
        finish_reason=end.finish_reason if end else None,
        usage=end.usage if end else {},
        error=end.error if end else None,
        transcript=transcript,
    )


def _terminal_event(packed: bytes | None) -> TurnEvent | None:
    if not packed:
        return None
    return next(event for event in unpack_events(0, packed) if event.kind is EventKind.TERMINAL)


def _seconds(milliseconds: bytes | None) -> float | None:
    return int(milliseconds) / 1000 if milliseconds else None
