"""Bytes of requests, events and id lists on control: msgpack with a version, strict fields, limits before parsing.

Events are packed without their numbers: a stream entry names the number of its first event, the others follow. So a
terminal event can be packed before anyone knows which number it will get.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

import msgpack

from snapshot_store.transcript import CacheScope
from workers.turns.errors import BadTurnData
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.records import TurnRequest

REQUEST_VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 64 << 20
MAX_ENTRY_BYTES: Final = 16 << 20
MAX_PROMPT_IDS: Final = 16 << 20

_REQUEST_FIELDS: Final = tuple(field.name for field in fields(TurnRequest))
_EVENT_FIELDS: Final[Mapping[str, type]] = MappingProxyType(
    {"k": str, "i": list, "t": str, "l": list, "s": str, "f": str, "u": dict, "e": dict, "n": dict}
)


def pack(value: Any) -> bytes:
    """Pack plain data. Raises BadTurnData for anything msgpack has no type for."""
    try:
        packed = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadTurnData("value", type(value).__name__, str(error)) from error
    return bytes(packed)


def unpack(field: str, data: bytes, max_bytes: int = MAX_REQUEST_BYTES) -> Any:
    """Unpack plain data. Raises BadTurnData when it is too long or no msgpack."""
    if len(data) > max_bytes:
        raise BadTurnData(field, f"{len(data)} bytes", f"at most {max_bytes} bytes")
    value, rest = _unpack_first(field, data)
    if rest:
        raise BadTurnData(field, f"{len(rest)} bytes more", "one value")
    return value


def pack_request(request: TurnRequest) -> bytes:
    """Pack a request. Raises BadTurnData when it is too long or holds what msgpack has no type for."""
    body = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    body["scope"] = str(request.scope)
    packed = pack({"v": REQUEST_VERSION, **body})
    if len(packed) > MAX_REQUEST_BYTES:
        raise BadTurnData("request", f"{len(packed)} bytes", f"at most {MAX_REQUEST_BYTES} bytes")
    return packed


def unpack_request(data: bytes) -> TurnRequest:
    """Unpack a request. Raises BadTurnData."""
    body = _mapping("request", unpack("request", data))
    version = body.pop("v", None)
    if version != REQUEST_VERSION:
        raise BadTurnData("request.v", version, f"version {REQUEST_VERSION}")
    if set(body) != set(_REQUEST_FIELDS):
        raise BadTurnData("request", sorted(set(body) ^ set(_REQUEST_FIELDS)), "exactly the known fields")
    try:
        body["scope"] = CacheScope(body["scope"])
        for name in ("messages", "stop", "tools"):
            body[name] = tuple(body[name])
    except (ValueError, TypeError) as error:
        raise BadTurnData("request", str(error), "fields of the known types") from error
    return TurnRequest(**body)


def pack_messages(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Pack messages so that packed lists may be joined as bytes; none are b"". Raises BadTurnData."""
    return pack([dict(message) for message in messages]) if messages else b""


def unpack_messages(data: bytes) -> tuple[dict[str, Any], ...]:
    """Unpack joined lists of messages. Raises BadTurnData."""
    if len(data) > MAX_REQUEST_BYTES:
        raise BadTurnData("messages", f"{len(data)} bytes", f"at most {MAX_REQUEST_BYTES} bytes")
    messages: list[dict[str, Any]] = []
    while data:
        part, data = _unpack_first("messages", data)
        if not isinstance(part, list):
            raise BadTurnData("messages", type(part).__name__, "lists")
        messages += (_mapping("message", message) for message in part)
    return tuple(messages)


def pack_events(events: Sequence[TurnEvent]) -> bytes:
    """Pack consecutive events into one stream entry. Raises BadTurnData when they are none or not consecutive."""
    if not events:
        raise BadTurnData("events", 0, "at least one event")
    first = events[0].number
    if [event.number for event in events] != list(range(first, first + len(events))):
        raise BadTurnData("events", [event.number for event in events], "consecutive numbers")
    packed = pack([_event_body(event) for event in events])
    if len(packed) > MAX_ENTRY_BYTES:
        raise BadTurnData("events", f"{len(packed)} bytes", f"at most {MAX_ENTRY_BYTES} bytes")
    return packed


def unpack_events(first_number: int, data: bytes) -> tuple[TurnEvent, ...]:
    """Unpack one stream entry whose first event has `first_number`. Raises BadTurnData."""
    bodies = unpack("events", data, MAX_ENTRY_BYTES)
    if not isinstance(bodies, list):
        raise BadTurnData("events", type(bodies).__name__, "a list")
    return tuple(_event(first_number + index, body) for index, body in enumerate(bodies))


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian u32. Raises BadTurnData for an id outside u32 or too many of them."""
    try:
        ids = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise BadTurnData("token_ids", str(error), "unsigned 32-bit numbers") from error
    if len(ids) > MAX_PROMPT_IDS:
        raise BadTurnData("token_ids", len(ids), f"at most {MAX_PROMPT_IDS}")
    return _little_endian(ids).tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Unpack token ids. Raises BadTurnData for a length that is no multiple of four."""
    if len(data) % 4:
        raise BadTurnData("token_ids", f"{len(data)} bytes", "a multiple of 4 bytes")
    ids = array("I")
    ids.frombytes(data)
    return tuple(_little_endian(ids))


def _unpack_first(field: str, data: bytes) -> tuple[Any, bytes]:
    try:
        return msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True), b""
    except msgpack.ExtraData as more:
        return more.unpacked, bytes(more.extra)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise BadTurnData(field, data[:16], f"msgpack ({type(error).__name__})") from error


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _event_body(event: TurnEvent) -> dict[str, Any]:
    body: dict[str, Any] = {"k": event.kind.value[0]}
    optional = {
        "i": list(event.token_ids), "t": event.text, "l": list(event.logprobs), "f": event.finish_reason,
        "s": event.state.value if event.state else None, "u": event.usage, "e": event.error, "n": event.info,
    }  # fmt: skip
    body.update((name, value) for name, value in optional.items() if value)
    return body


_KINDS: Final = {kind.value[0]: kind for kind in EventKind}
_STATES: Final = {state.value: state for state in TurnState}


def _event(number: int, raw: Any) -> TurnEvent:
    body = _mapping("event", raw)
    for name, value in body.items():
        if not isinstance(value, _EVENT_FIELDS.get(name, ())):
            raise BadTurnData(f"event.{name}", type(value).__name__, f"the types {dict(_EVENT_FIELDS)}")
    kind, state = _KINDS.get(body.get("k", "")), _STATES.get(body.get("s", ""))
    if kind is None or ("s" in body and state is None):
        raise BadTurnData("event", {name: body.get(name) for name in "ks"}, "a known kind and state")
    return TurnEvent(
        number=number,
        kind=kind,
        token_ids=tuple(body.get("i", ())),
        text=body.get("t", ""),
        logprobs=tuple(body.get("l", ())),
        state=state,
        finish_reason=body.get("f"),
        usage=body.get("u", {}),
        error=body.get("e"),
        info=body.get("n", {}),
    )


def _mapping(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadTurnData(field, type(value).__name__, "a map")
    return value


def _ending(state: TurnState, finish_reason: str, code: str = "", message: str = "") -> bytes:
    error = {"code": code, "message": message, "param": None} if code else None
    return pack_events((TurnEvent(0, EventKind.TERMINAL, state=state, finish_reason=finish_reason, error=error),))


# Terminal events that scripts write when no worker holds the turn, by the name that lua/library.lua uses.
ENDINGS: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        "cancelled": _ending(TurnState.CANCELLED, "cancelled"),
        "expired": _ending(TurnState.EXPIRED, "expired", "deadline_exceeded", "the deadline passed before the end"),
        "parent_failed": _ending(
            TurnState.FAILED, "error", "parent_failed", "the turn that this one continues did not complete"
        ),
        "worker_gone": _ending(
            TurnState.FAILED, "error", "worker_gone", "the worker that this turn names has stopped and not come back"
        ),
        "crashed": _ending(
            TurnState.FAILED, "error", "worker_crashed", "workers stopped repeatedly while they ran this turn"
        ),
    }
)
