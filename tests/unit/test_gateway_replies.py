"""Turn events as chat chunks and response events: shapes, numbering, resuming (field cases C41, C45)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.chat_reply import ChatReply, ResumePoint
from gateway.errors import ApiError, InvalidRequest
from gateway.response_reply import ResponseStream, raise_if_failed, response_object
from gateway.sse import Frame, encode
from gateway.usage import extension
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.outcomes import TurnView
from workers.turns.records import TurnRequest

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 4, "worker_id": "w1"}
STARTED = TurnEvent(0, EventKind.STARTED, info={"prompt_tokens": 7})
HEL = TurnEvent(1, EventKind.DELTA, (1,), "Hel")
LO = TurnEvent(2, EventKind.DELTA, (2, 3), "lo")


def end(number: int, state: TurnState = TurnState.COMPLETED, text: str = "", reason: str = "stop") -> TurnEvent:
    error = {"code": "engine_error", "message": "the step failed"} if state is TurnState.FAILED else None
    return TurnEvent(
        number,
        EventKind.TERMINAL,
        text=text,
        state=state,
        finish_reason=reason,
        usage=USAGE,
        error=error,
        info={"ttft_ms": 5},
    )


def view(**changes: Any) -> TurnView:
    request = TurnRequest("resp_1", "local", "k", "m", 100.5, ({"role": "user", "content": "hi"},), {"seed": 1})
    values: dict[str, Any] = {
        "turn_id": "resp_1", "tenant": "local", "model": "m", "state": TurnState.QUEUED, "request": request,
        "created_at": 100.5, "started_at": None, "ended_at": None, "worker_id": None, "epoch": 0, "crashes": 0,
        "parent_id": None, "conversation_id": None, "next_number": 0, "output_text": "",
    }  # fmt: skip
    return TurnView(**{**values, **changes})


def chat_frames(*events: TurnEvent, include_usage: bool = False) -> tuple[ChatReply, list[Frame]]:
    reply = ChatReply(("chatcmpl-1",), "m", 100, wants_logprobs=False, include_usage=include_usage)
    return reply, [frame for event in events for frame in reply.add(0, event)]


def test_chat_stream_has_one_role_one_id_one_finish() -> None:
    _, frames = chat_frames(STARTED, HEL, LO, end(3))
    choices = [frame.data["choices"][0] for frame in frames]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"].get("content") for c in choices[1:]] == ["Hel", "lo", None]
    assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]
    assert {(frame.data["id"], frame.data["created"]) for frame in frames} == {("chatcmpl-1", 100)}
    assert not any("role" in c["delta"] for c in choices[1:])


def test_chat_stream_without_usage_asked_has_no_usage_anywhere() -> None:
    reply, frames = chat_frames(STARTED, HEL, end(2))
    assert reply.usage_chunk() is None
    assert not any("usage" in frame.data for frame in frames)


def test_chat_stream_with_usage_asked_ends_with_it_alone() -> None:
    reply, frames = chat_frames(STARTED, HEL, end(2), include_usage=True)
    last = reply.usage_chunk()
    assert last is not None
    assert last.data["choices"] == []
    assert last.data["usage"] == reply.completion()["usage"]
    assert all(frame.data["usage"] is None for frame in frames)


def test_chat_completion_equals_its_stream() -> None:
    reply, frames = chat_frames(STARTED, HEL, LO, end(3, text="!", reason="length"))
    whole = reply.completion()
    streamed = "".join(frame.data["choices"][0]["delta"].get("content") or "" for frame in frames)
    assert whole["choices"][0]["message"]["content"] == streamed == "Hello!"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert whole["kvalet"] == {"turn_id": "chatcmpl-1", "worker_id": "w1", "ttft_ms": 5}


def test_chat_choices_share_the_prompt_in_usage() -> None:
    reply = ChatReply(("a", "b"), "m", 1, wants_logprobs=False, include_usage=False)
    for index in (1, 0):
        for event in (STARTED, HEL, end(2)):
            reply.add(index, event)
    assert (reply.completion()["usage"]["prompt_tokens"], reply.completion()["usage"]["completion_tokens"]) == (7, 6)


@pytest.mark.parametrize("state", [TurnState.FAILED, TurnState.CANCELLED, TurnState.EXPIRED])
def test_chat_turn_without_reply_is_an_error(state: TurnState) -> None:
    with pytest.raises(ApiError):
        chat_frames(STARTED, end(1, state))


@pytest.mark.parametrize("cut", range(5))
def test_chat_stream_resumed_anywhere_repeats_and_loses_nothing(cut: int) -> None:
    events = (STARTED, HEL, LO, end(3, text="!"))
    _, frames = chat_frames(*events)
    point = ResumePoint(frames[cut - 1].frame_id if cut else None, 1)
    _, again = chat_frames(*events)
    assert [f for f in again if point.is_new(f, 0)] == frames[cut:]


@pytest.mark.parametrize("last_id", ["", "x", "1,2", "-1", "1.5", "9" * 30])
def test_chat_resume_with_a_foreign_id_is_refused(last_id: str) -> None:
    with pytest.raises(InvalidRequest):
        ResumePoint(last_id, 1)


def test_chat_logprobs_name_bytes_and_alternatives() -> None:
    entry = {"id": 5, "token": "é", "logprob": -0.5, "top": [[5, "é", -0.5], [6, "x", -2.0]]}
    reply = ChatReply(("a",), "m", 1, wants_logprobs=True, include_usage=False)
    for event in (STARTED, TurnEvent(1, EventKind.DELTA, (5,), "é", (entry,)), end(2)):
        reply.add(0, event)
    [token] = reply.completion()["choices"][0]["logprobs"]["content"]
    assert token["bytes"] == [0xC3, 0xA9]
    assert [t["token"] for t in token["top_logprobs"]] == ["é", "x"]


def test_response_stream_has_openais_order_and_consecutive_numbers() -> None:
    stream = ResponseStream(view())
    frames = [frame for event in (STARTED, HEL, LO, end(3)) for frame in stream.add(event)]
    assert [frame.event for frame in frames] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [frame.data["sequence_number"] for frame in frames] == list(range(10))
    assert frames[-1].data["response"]["output"][0]["content"][0]["text"] == "Hello"


def test_response_stream_is_a_function_of_the_events() -> None:
    events = (STARTED, HEL, LO, end(3, text="!"))
    runs = []
    for _ in range(2):
        stream = ResponseStream(view())
        frames = [frame for event in events for frame in stream.add(event)][:-1]
        runs.append([encode(frame) for frame in frames])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("state", "last", "status"),
    [
        (TurnState.INCOMPLETE, "response.incomplete", "incomplete"),
        (TurnState.FAILED, "response.failed", "failed"),
        (TurnState.EXPIRED, "response.failed", "failed"),
        (TurnState.CANCELLED, "response.failed", "cancelled"),
    ],
)
def test_response_stream_end_names_the_state(state: TurnState, last: str, status: str) -> None:
    stream = ResponseStream(view())
    frames = [frame for event in (STARTED, HEL, end(2, state)) for frame in stream.add(event)]
    assert (frames[-1].event, frames[-1].data["response"]["status"]) == (last, status)


def test_response_cancelled_before_it_started_has_created_and_end_only() -> None:
    stream = ResponseStream(view())
    frames = stream.add(end(0, TurnState.CANCELLED))
    assert [frame.event for frame in frames] == ["response.created", "response.failed"]


def test_response_object_of_a_length_end_says_why() -> None:
    shown = response_object(view(state=TurnState.INCOMPLETE, output_text="x", usage=USAGE, finish_reason="length"))
    assert (shown["status"], shown["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert shown["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_response_failure_of_the_prompt_is_a_bad_request() -> None:
    event = TurnEvent(
        0, EventKind.TERMINAL, state=TurnState.FAILED, error={"code": "context_length_exceeded", "message": "300 > 256"}
    )
    with pytest.raises(InvalidRequest) as caught:
        raise_if_failed(event)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "mark", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\x1d", "\x1e", "\r", "\n", "\r\n", "\0"]
)
def test_frame_survives_clients_that_split_lines_differently(mark: str) -> None:
    raw = encode(Frame({"text": f"a{mark}b"}, event="x", frame_id="3")).decode()
    for lines in (raw.split("\n"), raw.splitlines()):
        [data] = [line for line in lines if line.startswith("data: ")]
        assert json.loads(data.removeprefix("data: ")) == {"text": f"a{mark}b"}


def test_part_of_other_numerics_is_told_in_every_shape_of_reply() -> None:
    marks = {"numerics": "mixed", "foreign_pages": {"ab" * 32: 2}, "forced_numerics": ["ab" * 32]}
    told = {"turn_id": "resp_1", "worker_id": "w1", **marks}
    assert extension("resp_1", USAGE | marks, {}) == told
    assert response_object(view(state=TurnState.COMPLETED, usage=USAGE | marks))["kvalet"] == told
