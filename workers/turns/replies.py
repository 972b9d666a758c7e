"""Shared readers of script replies."""

from __future__ import annotations

from typing import Any, NoReturn

from workers.turns.codec import unpack_events
from workers.turns.errors import BadTurnData, ParentMoved, StaleLease, StreamConflict, TurnEnded
from workers.turns.events import EventKind, TurnEvent
from workers.turns.outcomes import Dispatch
from workers.turns.records import Lease


def text(value: bytes) -> str:
    """A reply's bytes as text."""
    return value.decode()


def maybe_text(value: bytes | None) -> str | None:
    """A reply's bytes as text; empty and missing are None."""
    return value.decode() if value else None


def fields_of(flat: list[Any] | dict[bytes, Any]) -> dict[str, bytes]:
    """A flat list of names and values as a dict; the client has paired those of stream entries already."""
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return {text(name): value for name, value in pairs}


def dispatch(reply: list[bytes]) -> Dispatch:
    """One message to send."""
    turn_id, model, worker = reply
    return Dispatch(text(turn_id), text(model), maybe_text(worker))


def dispatches(reply: list[list[bytes]]) -> tuple[Dispatch, ...]:
    """Messages to send."""
    return tuple(dispatch(item) for item in reply)


def stream_events(entries: list[Any]) -> tuple[TurnEvent, ...]:
    """Events of XRANGE-like entries [[id, [name, value, ...]], ...]."""
    events: list[TurnEvent] = []
    for _entry_id, flat in entries:
        entry = fields_of(flat)
        events.extend(unpack_events(int(entry["n"]), entry["e"]))
    return tuple(events)


def emitted_ids(events: tuple[TurnEvent, ...]) -> tuple[int, ...]:
    """Token ids of the deltas."""
    return tuple(token_id for event in events if event.kind is EventKind.DELTA for token_id in event.token_ids)


def raise_refusal(lease: Lease, status: str, detail: list[Any]) -> NoReturn:
    """Raise what a fenced script answered instead of its result."""
    if status == "stale":
        raise StaleLease(lease.turn_id, lease.epoch)
    if status == "ended":
        raise TurnEnded(lease.turn_id, text(detail[0]))
    if status == "conflict":
        raise StreamConflict(lease.turn_id, int(detail[0]), int(detail[1]))
    if status == "parent_moved":
        raise ParentMoved(lease.turn_id)
    raise BadTurnData("status", status, "an answer this version knows")
