"""C37: the client leaves in mid-stream and decoding goes on to max_tokens.

Reported for sglang (PR#35255, PR#36552) and others: nobody tells the engine; the slot stays taken and later turns
are refused. Here a chat stream's turns are cancelled when its client is gone, unless it named an idempotency key (it
means to come back); stored responses go on, since anybody may ask for them later.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.gateway_fleet import MODEL, FakeWorker, Script, chat_body, stack, wait_until
from tests.services import ValkeyServer

LONG = Script(("x ",) * 2000, pause_s=0.02)


@pytest.fixture
def worker(control_server: ValkeyServer) -> FakeWorker:
    return FakeWorker(control_server, script=lambda _: LONG)


@pytest.fixture
def client(control_server: ValkeyServer, worker: FakeWorker) -> Iterator[httpx.Client]:
    with stack(control_server, worker) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


def leave_after(client: httpx.Client, path: str, body: dict[str, object], num_lines: int, **headers: str) -> None:
    with client.stream("POST", path, json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        for _ in range(num_lines):
            next(lines)


def test_c37_chat_stream_without_client_stops_within_two_seconds(client: httpx.Client, worker: FakeWorker) -> None:
    leave_after(client, "/v1/chat/completions", chat_body(stream=True, max_tokens=400, n=2), 9)
    wait_until(lambda: len(worker.cancelled) == 2, deadline_s=2.0)
    num_deltas = worker.num_deltas
    time.sleep(0.3)
    assert worker.num_deltas == num_deltas


def test_c37_chat_without_stream_stops_as_well(client: httpx.Client, worker: FakeWorker) -> None:
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(chat_body()), headers)
    wait_until(lambda: len(worker.seen) == 1)
    connection.close()
    wait_until(lambda: len(worker.cancelled) == 1, deadline_s=2.0)


def test_c37_client_that_leaves_while_the_turn_is_queued_cancels_it(client: httpx.Client, worker: FakeWorker) -> None:
    for _ in range(worker.slots):
        client.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True})
    wait_until(lambda: len(worker.seen) == worker.slots)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=chat_body(stream=True), timeout=0.5)
    wait_until(lambda: f"kvalet_demand {worker.slots}.0" in client.get("/metrics").text)
    assert len(worker.seen) == worker.slots


def test_c37_stored_response_goes_on(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(("x ",) * 20, pause_s=0.02)
    leave_after(client, "/v1/responses", {"model": MODEL, "input": "x", "stream": True}, 9)
    turn = worker.seen[0].turn_id
    wait_until(lambda: client.get(f"/v1/responses/{turn}").json()["status"] == "completed")
    assert worker.cancelled == []


def test_c37_unstored_response_stops(client: httpx.Client, worker: FakeWorker) -> None:
    leave_after(client, "/v1/responses", {"model": MODEL, "input": "x", "stream": True, "store": False}, 9)
    wait_until(lambda: len(worker.cancelled) == 1, deadline_s=2.0)


def test_c37_chat_with_idempotency_key_goes_on(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(("x ",) * 20, pause_s=0.02)
    headers = {"Idempotency-Key": "k1"}
    leave_after(client, "/v1/chat/completions", chat_body(stream=True), 9, **headers)
    again = client.post("/v1/chat/completions", json=chat_body(stream=True), headers=headers)
    assert "data: [DONE]" in again.text
    assert (worker.cancelled, len(worker.seen)) == ([], 1)


def test_c37_many_rounds_leave_nothing_behind(client: httpx.Client, worker: FakeWorker) -> None:
    for _ in range(15):
        leave_after(client, "/v1/chat/completions", chat_body(stream=True), 6)
    wait_until(lambda: len(worker.cancelled) == 15)
    for gauge in ("kvalet_demand", 'kvalet_waiting_requests{kind="stream"}', "kvalet_event_subscriptions"):
        wait_until(lambda gauge=gauge: f"{gauge} 0.0" in client.get("/metrics").text)
