"""C48: 500 for empty messages or list content, an empty assistant turn refused, an empty prompt stops the server.

Reported for letta (#3381), vLLM (#21089), langchaingo (#667), llama.cpp (#5246). Every body gets an answer in OpenAI's
error shape, none a 500, and the service goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import MODEL, SharedStack, chat_body, shared_stack

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "a"}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack() as running:
        yield running


@pytest.fixture(scope="module")
def client(shared: SharedStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=30) as http:
        yield http


def messages(content: Any, role: str = "user") -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    "body",
    [
        messages([{"type": "text", "text": "hi"}]),
        {"model": MODEL, "messages": [*ASK, {"role": "assistant", "content": ""}, *ASK]},
    ],
    ids=["list of text", "empty assistant"],
)  # fmt: skip
def test_c48_good_shape_is_served(client: httpx.Client, body: Any) -> None:
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        (CHAT, json.dumps({"model": MODEL, "messages": []}), JSON, 400),
        (CHAT, json.dumps(messages(None)), JSON, 400),
        (CHAT, json.dumps(messages({})), JSON, 400),
        (CHAT, json.dumps(messages([{"type": "image_url", "image_url": {"url": "x"}}])), JSON, 400),
        (CHAT, json.dumps(messages("x", role="wizard")), JSON, 400),
        (CHAT, json.dumps({"messages": messages("x")["messages"]}), JSON, 400),
        (CHAT, "[]", JSON, 400),
        (CHAT, "", JSON, 400),
        (CHAT, "{", JSON, 400),
        (CHAT, "null", JSON, 400),
        (CHAT, b"\xff\xfe", JSON, 400),
        (CHAT, json.dumps(chat_body()), {"Content-Type": "text/plain"}, 415),
        (CHAT, json.dumps(chat_body()), {"Content-Type": "multipart/form-data; boundary=x"}, 415),
        (CHAT, json.dumps(chat_body())[:-1] + ',"model":"other"}', JSON, 400),
        (CHAT, json.dumps(chat_body(temperature=0))[:-1] + ',"top_p":NaN}', JSON, 400),
        ("/v1/completions", json.dumps({"model": MODEL, "prompt": ""}), JSON, 404),
        ("/v1/completions", json.dumps({"model": MODEL, "prompt": [-1]}), JSON, 404),
        ("/v1/responses", json.dumps({"model": MODEL}), JSON, 400),
        ("/v1/responses", json.dumps({"model": MODEL, "input": []}), JSON, 400),
        ("/v1/conversations", "[]", JSON, 400),
        ("/v1/conversations", json.dumps({"metadata": "x"}), JSON, 400),
    ],
)
def test_c48_bad_shape_is_refused_in_openais_shape(
    client: httpx.Client, path: str, content: str | bytes, headers: dict[str, str], status: int
) -> None:
    answer = client.post(path, content=content, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.post(CHAT, json=chat_body()).status_code == 200


def test_c48_missing_content_type_is_refused(client: httpx.Client) -> None:
    request = client.build_request("POST", CHAT, content=json.dumps(chat_body()))
    assert client.send(request).status_code == 415


@pytest.mark.parametrize("is_chunked", [False, True])
def test_c48_body_of_50_mb_is_refused_and_the_service_goes_on(client: httpx.Client, is_chunked: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 1_000_000

    content: Any = chunks() if is_chunked else b" " * 50_000_000
    # The server may close the connection before it has been sent everything.
    with suppress(httpx.WriteError):
        assert client.post(CHAT, content=content, headers=JSON).status_code == 413
    assert client.post(CHAT, json=chat_body()).status_code == 200
