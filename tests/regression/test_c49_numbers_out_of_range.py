"""C49: max_tokens 0 or negative clamped silently, n=0, tiny temperatures with empty replies.

Reported for OrcaRouter-Lite (PR#103), dynamo (PR#3914), text-generation-inference (#440). A number out of range is a
400 that names the field; temperatures below 0.001 are greedy, which the API page documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import CONTEXT, MODEL, FakeWorker, SharedStack, chat_body, shared_stack

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack() as running:
        yield running


@pytest.fixture(scope="module")
def worker(shared: SharedStack) -> FakeWorker:
    return shared.worker


@pytest.fixture(scope="module")
def client(shared: SharedStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=30) as http:
        yield http


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 10**9, 1e9, CONTEXT + 1, "5", 1.5, True)),
        *(("n", value) for value in (0, -1, 1000, 1.5, "2", True)),
        *(("temperature", value) for value in (-1, 2.1, "1", True, [1])),
        *(("top_p", value) for value in (0, -1, 1.1)),
        ("top_k", -5),
        *(("seed", value) for value in (2**64, -(2**64), 1.5, "1")),
        *(("stop", value) for value in (["x"] * 100, [""], "")),
        ("best_of", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_c49_value_out_of_range_is_400_with_its_name(
    client: httpx.Client, field: str, value: Any, stream: bool
) -> None:
    answer = client.post(CHAT, json=chat_body(stream=stream, **{field: value}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_c49_nan_literal_is_400(client: httpx.Client) -> None:
    content = json.dumps(chat_body(temperature=float("nan")))
    answer = client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 1}, {"n": 2, "temperature": 0}, {"stop": None}, {"temperature": 1e-5}, {"top_k": -1}, {"top_k": 0}],
)
def test_c49_value_on_the_edge_is_served(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post(CHAT, json=chat_body(**fields))
    assert answer.status_code == 200
    assert all(choice["message"]["content"] for choice in answer.json()["choices"])


def test_c49_tiny_temperature_runs_greedy(client: httpx.Client, worker: FakeWorker) -> None:
    client.post(CHAT, json=chat_body(temperature=1e-5))
    assert worker.seen[-1].sampling["temperature"] == 0.0


def test_c49_response_limit_is_named_as_the_client_wrote_it(client: httpx.Client) -> None:
    body = {"model": MODEL, "input": "x", "max_output_tokens": CONTEXT + 1}
    assert client.post("/v1/responses", json=body).json()["error"]["param"] == "max_output_tokens"
