"""C45: usage in the wrong chunk, in all chunks, or sent unasked.

Reported for llama.cpp (PR#15444), kubeai (#283), gittensor (#1749).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import SharedStack, chat_body, frames_of, shared_stack


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack() as running:
        yield running


@pytest.fixture(scope="module")
def client(shared: SharedStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=30) as http:
        yield http


def chunks_of(client: httpx.Client, **fields: Any) -> list[Any]:
    frames = frames_of(client.post("/v1/chat/completions", json=chat_body(stream=True, **fields)).text)
    assert frames[-1].data == "[DONE]"
    return [frame.json for frame in frames[:-1]]


def test_c45_asked_for_usage_comes_once_at_the_end_and_equals_the_whole_reply(client: httpx.Client) -> None:
    chunks = chunks_of(client, stream_options={"include_usage": True})
    whole = client.post("/v1/chat/completions", json=chat_body()).json()
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
def test_c45_usage_not_asked_for_does_not_come(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks_of(client, **fields))


def test_c45_one_role_one_id_one_time_one_finish(client: httpx.Client) -> None:
    chunks = chunks_of(client)
    assert [c["choices"][0]["delta"].get("role") for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
