"""Chat and response bodies: what is taken, what is refused and under which name (also field cases C48, C49)."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.chat_request import ChatRequest, parse_chat
from gateway.errors import InvalidRequest, UnsupportedField
from gateway.responses_request import ResponsesRequest, parse_responses

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": HI, **fields}, max_choices=8, max_messages=100)


def response(**fields: Any) -> ResponsesRequest:
    return parse_responses({"model": "m", "input": "hi", **fields}, max_messages=100)


def refused(build: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        build(**fields)
    return caught.value


def test_chat_smallest_body_has_openai_defaults() -> None:
    sampling = chat().generation.sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["logprobs"]) == (1.0, 1.0, 0, None)


def test_chat_without_seed_draws_another_each_time() -> None:
    assert chat().generation.sampling["seed"] != chat().generation.sampling["seed"]


@pytest.mark.parametrize(("given", "stored"), [(0, 0), (5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_chat_seed_is_kept_as_64_bits(given: int, stored: int) -> None:
    assert chat(seed=given).generation.sampling["seed"] == stored


@pytest.mark.parametrize("temperature", [0, 1e-5, 1e-4])
def test_chat_tiny_temperature_is_greedy(temperature: float) -> None:
    assert chat(temperature=temperature).generation.sampling["temperature"] == 0.0


@pytest.mark.parametrize(
    ("messages", "plain"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "a\nb"),
        ([{"role": "user", "content": ""}], ""),
    ],
)
def test_chat_text_content_is_taken(messages: Any, plain: str) -> None:
    assert chat(messages=messages).messages[0]["content"] == plain


def test_chat_empty_assistant_between_users_is_taken() -> None:
    messages = [*HI, {"role": "assistant", "content": ""}, *HI]
    assert [m["role"] for m in chat(messages=messages).messages] == ["user", "assistant", "user"]


def test_chat_reply_object_of_the_sdk_is_taken_back() -> None:
    reply = {
        "role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": None,
    }  # fmt: skip
    assert chat(messages=[*HI, reply, *HI]).messages[1] == {"role": "assistant", "content": "x"}


def test_chat_developer_role_is_system() -> None:
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages[0]["role"] == "system"


def test_chat_defaults_of_unserved_fields_are_taken() -> None:
    body = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True,
        "service_tier": "auto", "store": False, "modalities": ["text"], "reasoning_effort": None, "audio": None,
    }  # fmt: skip
    assert chat(**body).num_choices == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": HI * 101}, "messages"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1e9}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"nonsense": 1}, "nonsense"),
        ({"chat_template": "x"}, "chat_template"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"kvalet": {"worker": "../x"}}, "kvalet.worker"),
        ({"kvalet": {"scope": "world"}}, "kvalet.scope"),
        ({"kvalet": {"nonsense": 1}}, "kvalet.nonsense"),
        ({"kvalet": {"top_k": 5}, "top_k": 6}, "top_k"),
    ],
)
def test_chat_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


def test_chat_missing_messages_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat({"model": "m"}, 8, 100)
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_chat_null_stop_is_no_stop() -> None:
    assert chat(stop=None).stops == ()


def test_chat_unserved_field_says_what_is_allowed() -> None:
    with pytest.raises(UnsupportedField, match="'auto'"):
        chat(tool_choice="required")


def test_chat_extension_fields_reach_the_engine() -> None:
    asked = chat(kvalet={"min_p": 0.1, "ignore_eos": True, "priority": 3, "worker": "w1"}, top_k=40)
    assert (asked.generation.sampling["min_p"], asked.generation.sampling["top_k"]) == (0.1, 40)
    assert (asked.generation.ignore_eos, asked.generation.options.priority) == (True, 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1", "store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": HI}, "messages"),
    ],
)
def test_response_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(response, **fields).param == param


def test_response_output_items_are_taken_back_as_input() -> None:
    item = {
        "id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    messages = response(input=[{"role": "user", "content": "hi"}, item]).messages
    assert messages == ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"})


def test_response_conversation_object_is_its_id() -> None:
    assert response(conversation={"id": "conv_1"}).conversation_id == "conv_1"


def test_response_logprobs_are_asked_for_by_include() -> None:
    asked = response(include=["message.output_text.logprobs"], top_logprobs=2)
    assert asked.generation.sampling["logprobs"] == 2
