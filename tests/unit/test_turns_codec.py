"""Bytes of turn control: what goes in comes out, and everything else is refused by name."""

from __future__ import annotations

import msgpack
import pytest

from tests.turn_factory import delta, request, started
from workers.turns import codec
from workers.turns.errors import BadTurnData
from workers.turns.events import EventKind, TurnEvent, TurnState


def test_request_with_every_field_survives_packing() -> None:
    sent = request(
        parent_id="p", conversation_id="c", stateless=True, store=False, max_tokens=5, min_tokens=1, stop=("a", "é"),
        ignore_eos=True, tools=({"type": "function"},), template_kwargs={"x": 1}, priority=-3, deadline=1.5,
        durability="host", worker="w", display={"nested": {"list": [1, None]}},
    )  # fmt: skip
    assert codec.unpack_request(codec.pack_request(sent)) == sent


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "request"),
        (b"\xc1", "request"),
        (b"\x80" * 2, "request"),
        (msgpack.packb([1]), "request"),
        (msgpack.packb({"v": 2}), "request.v"),
        (msgpack.packb({"v": 1, "unknown": 1}), "request"),
        (msgpack.packb({1: 2}), "request"),
        (b"\xdd\xff\xff\xff\xff", "request"),
        (b"\x91" * 10_000, "request"),
    ],
    ids=["empty", "reserved", "trailing", "list", "version", "fields", "int-keys", "huge-array", "deep"],
)
def test_request_of_hostile_bytes_raises_naming_the_field(data: bytes, field: str) -> None:
    with pytest.raises(BadTurnData) as error:
        codec.unpack_request(data)
    assert error.value.field == field


def test_request_beyond_the_size_limit_is_refused_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_REQUEST_BYTES", 100)
    with pytest.raises(BadTurnData, match="at most 100 bytes"):
        codec.pack_request(request())


def test_events_survive_packing_with_numbers_from_the_first() -> None:
    logprob = {"id": 5, "token": "x", "logprob": -0.5, "top": [[5, "x", -0.5]]}
    events = (
        started(7),
        TurnEvent(8, EventKind.DELTA, (1, 2**32 - 1), "\u2028é", (logprob,)),
        TurnEvent(
            9, EventKind.TERMINAL, (3,), "rest", state=TurnState.FAILED, finish_reason="error",
            usage={"n": 1}, error={"code": "x", "message": "y", "param": None}, info={"a": [1]},
        ),
    )  # fmt: skip
    assert codec.unpack_events(7, codec.pack_events(events)) == events


@pytest.mark.parametrize("events", [[], [delta(1), delta(3)], [delta(2), delta(1)]], ids=["none", "gap", "backwards"])
def test_events_that_are_not_consecutive_are_refused(events: list[TurnEvent]) -> None:
    with pytest.raises(BadTurnData, match="events"):
        codec.pack_events(events)


@pytest.mark.parametrize(
    "body",
    [{"k": "x"}, {}, {"k": "d", "z": 1}, [], {"k": ["d"]}, {"k": "t", "s": "nonsense"}, {"k": "d", "i": 3}],
    ids=["kind", "none", "field", "list", "kind-type", "state", "ids"],
)
def test_event_of_wrong_shape_raises(body: object) -> None:
    with pytest.raises(BadTurnData):
        codec.unpack_events(0, msgpack.packb([body]))


def test_messages_joined_as_bytes_are_read_in_order() -> None:
    packed = codec.pack_messages([{"a": 1}, {"b": 2}]) + codec.pack_messages([{"c": 3}])
    assert codec.unpack_messages(packed) == ({"a": 1}, {"b": 2}, {"c": 3})


@pytest.mark.parametrize("data", [b"\xc1", msgpack.packb([1]), msgpack.packb(3), msgpack.packb([{}])[:-1] + b"\xd9"])
def test_messages_of_hostile_bytes_raise(data: bytes) -> None:
    with pytest.raises(BadTurnData):
        codec.unpack_messages(data)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"], [1.5]])
def test_token_ids_outside_u32_are_refused(ids: list[int]) -> None:
    with pytest.raises(BadTurnData, match="token_ids"):
        codec.pack_ids(ids)


def test_token_ids_are_little_endian_u32() -> None:
    assert codec.pack_ids([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


def test_token_ids_of_odd_length_are_refused() -> None:
    with pytest.raises(BadTurnData, match="multiple of 4"):
        codec.unpack_ids(b"\x01\0\0")


def test_endings_are_terminal_events_of_their_state() -> None:
    states = {name: codec.unpack_events(0, packed)[0].state for name, packed in codec.ENDINGS.items()}
    assert states == {
        "cancelled": TurnState.CANCELLED,
        "expired": TurnState.EXPIRED,
        "parent_failed": TurnState.FAILED,
        "worker_gone": TurnState.FAILED,
        "crashed": TurnState.FAILED,
    }
