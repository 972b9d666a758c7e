"""C51: a prompt over the context loses its head silently, ends in an empty 200, or crashes.

Reported for ollama (#3839), LM Studio (#2339), llama.cpp (#3969, #3817). Here the prompt is counted at accept and
refused with both numbers, before a stream opens and before anything is queued. The model of this test has a context of
512 tokens and one token per byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import CONTEXT, MODEL, FakeWorker, Script, SharedStack, chat_body, shared_stack, wait_until

# <|im_start|> u s e r \n ... <|im_end|> \n <|im_start|> a s s i s t a n t \n
TEMPLATE_TOKENS = 1 + 5 + 1 + 1 + 1 + 10


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack() as running:
        running.worker.script = lambda _: Script(("ok",))
        yield running


@pytest.fixture(scope="module")
def worker(shared: SharedStack) -> FakeWorker:
    return shared.worker


@pytest.fixture(scope="module")
def client(shared: SharedStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=30) as http:
        yield http


def prompt_of(num_tokens: int) -> str:
    return "The password is ANISE-31." + "x" * (num_tokens - TEMPLATE_TOKENS - 25)


def ways_to_ask(text: str) -> list[tuple[str, dict[str, Any]]]:
    body = {"model": MODEL, "input": text}
    return [
        ("/v1/chat/completions", chat_body(text)),
        ("/v1/chat/completions", chat_body(text, stream=True)),
        ("/v1/responses", body),
        ("/v1/responses", {**body, "stream": True}),
        ("/v1/responses", {**body, "background": True}),
        ("/v1/responses", {**body, "background": True, "stream": True}),
    ]


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_c51_over_long_prompt_is_400_with_both_numbers_and_never_queued(
    client: httpx.Client, worker: FakeWorker, num_tokens: int
) -> None:
    num_seen = len(worker.seen)
    for path, body in ways_to_ask(prompt_of(num_tokens)):
        error = client.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"{num_tokens} tokens" in error["message"]
        assert str(CONTEXT) in error["message"]
    assert len(worker.seen) == num_seen


def test_c51_prompt_that_leaves_one_token_is_served(client: httpx.Client) -> None:
    for path, body in ways_to_ask(prompt_of(CONTEXT - 1)):
        assert client.post(path, json=body).status_code in (200, 202)


def test_c51_history_that_grows_over_the_limit_is_refused(client: httpx.Client) -> None:
    first = client.post("/v1/responses", json={"model": MODEL, "input": prompt_of(400)}).json()["id"]
    second = {"model": MODEL, "input": "x" * 100, "previous_response_id": first}
    answers = [client.post("/v1/responses", json={**second, **extra}) for extra in ({}, {"background": True})]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json()["error"]["param"] == "input"


def test_c51_conversation_that_grows_over_the_limit_is_refused(client: httpx.Client) -> None:
    conversation = client.post("/v1/conversations").json()["id"]
    body = {"model": MODEL, "conversation": conversation}
    assert client.post("/v1/responses", json={**body, "input": prompt_of(400)}).status_code == 200
    wait_until(lambda: client.post("/v1/responses", json={**body, "input": "x" * 100}).status_code == 400)
