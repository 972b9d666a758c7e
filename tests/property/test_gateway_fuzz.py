"""Whatever a client sends: an ApiError or a checked request, never another exception; streams resume anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.body import parse_object
from gateway.chat_reply import ChatReply, ResumePoint
from gateway.chat_request import ChatBody, ChatRequest, parse_chat
from gateway.errors import ApiError
from gateway.responses_request import ResponsesBody, ResponsesRequest, parse_responses
from gateway.sse import Frame
from workers.turns.codec import pack_request
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.records import TurnRequest

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
KEYS = st.sampled_from(["role", "content", "type", "text", "id", "format", "worker", "scope", "effort", "x"])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
GOOD_MESSAGES = [{"role": "user", "content": "hi"}]


def bodies(fields: list[str], base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A good body with some fields replaced by anything."""
    changes = st.dictionaries(st.sampled_from(fields), JSON, max_size=3)
    return changes.map(lambda changed: {**base, **changed})


def check_storable(asked: ChatRequest | ResponsesRequest) -> None:
    """What was taken can be written to control."""
    generation = asked.generation
    request = TurnRequest(
        "resp_1", "local", "k", asked.body.model, 1.0, asked.messages, generation.sampling, stop=asked.stops,
        min_tokens=generation.min_tokens, template_kwargs=generation.template_kwargs,
    )  # fmt: skip
    pack_request(request)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300, deadline=None)
def test_body_of_any_bytes_is_an_object_or_an_api_error(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw), dict)
    except ApiError as error:
        assert error.status == 400


@given(bodies([*ChatBody.model_fields, "tools", "store", "x"], {"model": "m", "messages": GOOD_MESSAGES}))
@settings(max_examples=400, deadline=None)
def test_chat_of_any_fields_is_storable_or_an_api_error(body: dict[str, Any]) -> None:
    try:
        check_storable(parse_chat(body, 8, 100))
    except ApiError as error:
        assert (error.status, bool(error.param)) == (400, True)


@given(bodies([*ResponsesBody.model_fields, "tools", "text", "x"], {"model": "m", "input": "hi"}))
@settings(max_examples=400, deadline=None)
def test_response_of_any_fields_is_storable_or_an_api_error(body: dict[str, Any]) -> None:
    try:
        check_storable(parse_responses(body, 100))
    except ApiError as error:
        assert (error.status, bool(error.param)) == (400, True)


def fold(order: list[int], events: list[list[TurnEvent]]) -> list[tuple[int, Frame]]:
    """Frames of several choices whose events arrive in this order."""
    reply = ChatReply(("a", "b"), "m", 1, wants_logprobs=False, include_usage=False)
    left = [iter(own) for own in events]
    return [(index, frame) for index in order for frame in reply.add(index, next(left[index]))]


def events_of(num_deltas: int) -> list[TurnEvent]:
    deltas = [TurnEvent(n, EventKind.DELTA, (n,), f"t{n}") for n in range(1, num_deltas + 1)]
    end = TurnEvent(num_deltas + 1, EventKind.TERMINAL, state=TurnState.COMPLETED, finish_reason="stop", text="!")
    return [TurnEvent(0, EventKind.STARTED), *deltas, end]


@given(st.data(), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_stream_of_two_choices_resumes_anywhere_in_any_order(data: st.DataObject, first: int, second: int) -> None:
    events = [events_of(first), events_of(second)]
    order = [0] * len(events[0]) + [1] * len(events[1])
    whole = fold(data.draw(st.permutations(order)), events)
    cut = data.draw(st.integers(1, len(whole)))
    point = ResumePoint(whole[cut - 1][1].frame_id, 2)
    again = [
        (index, frame) for index, frame in fold(data.draw(st.permutations(order)), events) if point.is_new(frame, index)
    ]
    for choice in (0, 1):
        seen = [frame.data for index, frame in whole[:cut] if index == choice]
        rest = [frame.data for index, frame in again if index == choice]
        assert seen + rest == [frame.data for index, frame in whole if index == choice]


def test_planted_fault_in_the_resume_point_is_seen() -> None:
    whole = fold([0, 0, 0, 1, 1, 1], [events_of(1), events_of(1)])
    point = ResumePoint(whole[2][1].frame_id, 2)
    assert not point.is_new(whole[2][1], 0)
    with pytest.raises(ApiError):
        ResumePoint("1", 2)
