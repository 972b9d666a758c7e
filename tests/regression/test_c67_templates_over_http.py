"""C67: a request brings its own chat template and pins the server with it.

Reported for Megatron-LM (PR#6818): the sandbox stops escape but not work. Here no request can name a template; the few
template arguments that it may set are listed, everything else is refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import FakeWorker, SharedStack, chat_body, shared_stack

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"


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
    ("fields", "param"),
    [
        ({"chat_template": LOOP}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": LOOP}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"enable_thinking": LOOP}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ],
)
def test_c67_template_of_a_request_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    began = time.monotonic()
    answer = client.post("/v1/chat/completions", json=chat_body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.get("/health").status_code == 200
    assert time.monotonic() - began < 1.0


def test_c67_listed_argument_is_passed_on(client: httpx.Client, worker: FakeWorker) -> None:
    assert client.post(
        "/v1/chat/completions", json=chat_body(chat_template_kwargs={"enable_thinking": False})
    ).is_success
    assert worker.seen[-1].template_kwargs == {"enable_thinking": False}
