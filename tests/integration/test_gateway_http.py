"""The HTTP edge on a real Valkey: error shapes, tenants, idempotency, resuming, admission, metrics."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.auth import hash_key
from tests.gateway_fleet import (
    MODEL,
    FakeWorker,
    Script,
    SharedStack,
    chat_body,
    echo,
    frames_of,
    gateway,
    shared_stack,
    stack,
    wait_until,
)
from tests.services import ValkeyServer
from workers.registry import retire
from workers.turns.calls import end_worker_leases, sweep
from workers.turns.control import TurnControl, connect


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack() as running:
        yield running


@pytest.fixture
def worker(shared: SharedStack) -> FakeWorker:
    return shared.fresh_worker()


@pytest.fixture
def client(shared: SharedStack, worker: FakeWorker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=20) as http:
        yield http


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": secrets.token_hex(8)}


@pytest.fixture
def tenants(control_server: ValkeyServer, tmp_path: Path) -> Iterator[dict[str, httpx.Client]]:
    keys = {"acme": "sk-a", "beta": "sk-b", "ops": "sk-o"}
    lines = [f"{hash_key(key)} {tenant} {'main admin' if tenant == 'ops' else ''}" for tenant, key in keys.items()]
    (tmp_path / "keys").write_text("\n".join(lines))
    with stack(control_server, FakeWorker(control_server), keys_file=tmp_path / "keys") as url:
        clients = {
            tenant: httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20)
            for tenant, key in keys.items()
        }
        yield {**clients, "nobody": httpx.Client(base_url=url, timeout=20)}
        for http in clients.values():
            http.close()


def response_body(text: str = "a b c", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, **fields}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/files", 404),
        ("GET", "/nonsense", 404),
        ("GET", "/v1/chat/completions", 404),
        ("PUT", "/health", 405),
        ("GET", "/v1/models/nonsense", 404),
    ],
)
def test_http_unserved_endpoint_is_refused_in_openais_shape(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_http_without_key_is_401(tenants: dict[str, httpx.Client]) -> None:
    answer = tenants["nobody"].post("/v1/responses", json=response_body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_http_foreign_ids_are_not_found(tenants: dict[str, httpx.Client]) -> None:
    acme, beta = tenants["acme"], tenants["beta"]
    turn = acme.post("/v1/responses", json=response_body()).json()["id"]
    conversation = acme.post("/v1/conversations", json={}).json()["id"]
    answers = [
        beta.get(f"/v1/responses/{turn}"),
        beta.get(f"/v1/responses/{turn}?stream=true"),
        beta.post(f"/v1/responses/{turn}/cancel"),
        beta.delete(f"/v1/responses/{turn}"),
        beta.get(f"/v1/responses/{turn}/input_items"),
        beta.post("/v1/responses", json=response_body(previous_response_id=turn)),
        beta.get(f"/v1/conversations/{conversation}"),
        beta.post(f"/v1/conversations/{conversation}", json={"metadata": {}}),
        beta.get(f"/v1/conversations/{conversation}/items"),
        beta.post(f"/v1/conversations/{conversation}/items", json={"items": [{"role": "user", "content": "x"}]}),
        beta.delete(f"/v1/conversations/{conversation}"),
        beta.post("/v1/responses", json=response_body(conversation=conversation)),
    ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert acme.get(f"/v1/responses/{turn}").status_code == 200


def test_http_worker_is_forced_by_admin_keys_only(tenants: dict[str, httpx.Client]) -> None:
    body = response_body(kvalet={"worker": "w1"})
    assert tenants["acme"].post("/v1/responses", json=body).json()["error"]["param"] == "kvalet.worker"
    assert tenants["ops"].post("/v1/responses", json=body).json()["kvalet"]["worker_id"] == "w1"


def test_http_worker_that_is_not_there_is_refused_at_once_by_name(client: httpx.Client) -> None:
    for path, body in (("/v1/responses", response_body()), ("/v1/chat/completions", chat_body())):
        answer = client.post(path, json={**body, "kvalet": {"worker": "w9"}}, timeout=2)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "worker_not_found", "kvalet.worker")
        assert "'w9'" in error["message"] and "GET /v1/workers" in error["message"]


def test_http_turn_whose_worker_does_not_come_back_is_503(control_server: ValkeyServer) -> None:
    named, other = FakeWorker(control_server, worker_id="w1"), FakeWorker(control_server, worker_id="w2")
    named.script = lambda _: Script(("x ",) * 100, pause_s=0.05)
    control = TurnControl(connect(control_server.url))
    with stack(control_server, named, other) as url, ThreadPoolExecutor(1) as client:
        body = response_body(kvalet={"worker": "w1"})
        answer = client.submit(httpx.post, f"{url}/v1/responses", json=body, timeout=20)
        wait_until(lambda: bool(named.seen))
        named.join()
        control.run(retire("w1", "w1-boot"))
        control.run(end_worker_leases("w1"))
        wait_until(lambda: not control.run(sweep(named_worker_wait_s=0)) and answer.done())
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "worker_gone")
        assert other.seen == []


def test_http_workers_are_listed_for_admin_keys_only(tenants: dict[str, httpx.Client]) -> None:
    assert tenants["acme"].get("/v1/workers").status_code == 403
    assert [w["id"] for w in tenants["ops"].get("/v1/workers").json()["data"]] == ["w1"]


def test_http_same_idempotency_key_is_one_turn(client: httpx.Client, worker: FakeWorker, key: dict[str, str]) -> None:
    def post(_: int) -> httpx.Response:
        return client.post("/v1/responses", json=response_body(), headers=key)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(post, range(10)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(worker.seen) == 1


def test_http_idempotency_key_with_another_body_is_a_conflict(client: httpx.Client, key: dict[str, str]) -> None:
    for body, status in ((response_body("a"), 200), (response_body("b"), 409)):
        answer = client.post("/v1/responses", json=body, headers=key)
        assert answer.status_code == status


def test_http_idempotent_chat_with_choices_is_one_turn_each(
    client: httpx.Client, worker: FakeWorker, key: dict[str, str]
) -> None:
    answers = [client.post("/v1/chat/completions", json=chat_body(n=2), headers=key).json() for _ in range(2)]
    assert (answers[0]["id"], answers[0]["created"]) == (answers[1]["id"], answers[1]["created"])
    assert len(worker.seen) == 2


@pytest.mark.parametrize("bad", ["", "x" * 256])
def test_http_unusable_idempotency_key_is_refused(client: httpx.Client, bad: str) -> None:
    answer = client.post("/v1/responses", json=response_body(), headers={"Idempotency-Key": bad})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_http_chat_stream_resumes_on_another_gateway(
    client: httpx.Client, shared: SharedStack, worker: FakeWorker, key: dict[str, str]
) -> None:
    body, headers = chat_body(stream=True), key
    whole = frames_of(client.post("/v1/chat/completions", json=body, headers=headers).text)
    with gateway(shared.server) as other:
        for seen in (0, 2, len(whole) - 2):
            last_id = {"Last-Event-ID": whole[seen].frame_id or ""}
            resumed = httpx.post(f"{other}/v1/chat/completions", json=body, headers={**headers, **last_id})
            assert [f.data for f in frames_of(resumed.text)] == [f.data for f in whole[seen + 1 :]]
    assert len(worker.seen) == 1


def test_http_response_stream_resumes_by_header_on_another_gateway(client: httpx.Client, shared: SharedStack) -> None:
    whole = frames_of(client.post("/v1/responses", json=response_body(stream=True)).text)
    turn = whole[0].json["response"]["id"]
    with gateway(shared.server) as other:
        resumed = httpx.get(f"{other}/v1/responses/{turn}?stream=true", headers={"Last-Event-ID": "4"})
    assert [f.frame_id for f in frames_of(resumed.text)] == [f.frame_id for f in whole[5:]]


def test_http_response_stream_resumes_while_it_is_written(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(tuple(f"{n} " for n in range(20)), pause_s=0.02)
    turn = client.post("/v1/responses", json=response_body(background=True)).json()["id"]
    frames = frames_of(client.get(f"/v1/responses/{turn}?stream=true&starting_after=5").text)
    assert [f.json["sequence_number"] for f in frames] == list(range(6, 28))
    assert frames[-1].event == "response.completed"


@pytest.mark.parametrize("query", ["stream=maybe", "stream=true&starting_after=x", "stream=true&starting_after=-1"])
def test_http_malformed_query_is_refused(client: httpx.Client, query: str) -> None:
    turn = client.post("/v1/responses", json=response_body()).json()["id"]
    assert client.get(f"/v1/responses/{turn}?{query}").status_code == 400


def test_http_background_is_accepted_with_202_and_an_object(client: httpx.Client) -> None:
    answer = client.post("/v1/responses", json=response_body(background=True))
    assert (answer.status_code, answer.json()["object"], answer.json()["background"]) == (202, "response", True)


def test_http_failed_turn_is_an_error_before_the_stream_opens(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script((), error="context_length_exceeded")
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json=chat_body(stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_http_failed_response_can_be_read(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(("x ",), error="engine_error")
    turn = client.post("/v1/responses", json=response_body(background=True)).json()["id"]
    wait_until(lambda: client.get(f"/v1/responses/{turn}").json()["status"] == "failed")
    assert client.get(f"/v1/responses/{turn}").json()["error"] == {"code": "engine_error", "message": "it went wrong"}


def test_http_turn_waits_for_its_open_parent(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(("x ",) * 5, pause_s=0.05)
    first = client.post("/v1/responses", json=response_body(background=True)).json()["id"]
    second = client.post("/v1/responses", json=response_body("b", previous_response_id=first))
    assert second.json()["status"] == "completed"
    assert [request.turn_id for request in worker.seen] == [first, second.json()["id"]]


def test_http_deadline_passed_ends_the_turn_expired(client: httpx.Client, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(("x ",) * 1000, pause_s=0.02)
    answer = client.post("/v1/responses", json=response_body(kvalet={"deadline_s": 0.3}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_http_slow_first_event_opens_the_stream_with_a_heartbeat(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server)
    release = threading.Event()

    def late(_: Any) -> Script:
        release.wait(10)
        return Script(("x",))

    worker.script = late
    with (
        stack(control_server, worker, first_event_s=0.2, heartbeat_s=0.2) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=chat_body(stream=True), timeout=20) as answer,
    ):
        lines = answer.iter_lines()
        assert (answer.status_code, next(lines)) == (200, ": keep-alive")
        release.set()
        assert [line for line in lines if line.startswith("data")][-1] == "data: [DONE]"


def test_http_whole_reply_beyond_the_time_limit_is_504_and_cancelled(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server)
    worker.script = lambda _: Script(("x ",) * 1000, pause_s=0.05)
    with stack(control_server, worker, request_timeout_s=0.5) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(), timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        wait_until(lambda: bool(worker.cancelled))


def test_http_requests_beyond_the_process_limit_are_429(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server)
    worker.script = lambda _: Script(("x ",) * 100, pause_s=0.05)
    with (
        stack(control_server, worker, max_streams=1) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=chat_body(stream=True)) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "id: 1"
        refused = httpx.post(f"{url}/v1/chat/completions", json=chat_body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


def test_http_metrics_show_demand_slots_and_requests(client: httpx.Client) -> None:
    client.post("/v1/responses", json=response_body())
    for line in ("kvalet_demand 0.0", f'kvalet_model_slots{{model="{MODEL}"}} 4.0'):
        wait_until(lambda line=line: line in client.get("/metrics").text)
    text = client.get("/metrics").text
    assert 'kvalet_http_requests_total{method="POST",route="/v1/responses",status="200"}' in text
    assert 'kvalet_worker_heartbeat_age_seconds{model="tiny",worker="w1"}' in text
    assert 'kvalet_worker_steps_total{model="tiny",worker="w1"} 3.0' in text


def test_http_instructions_lead_their_own_turn(client: httpx.Client, worker: FakeWorker) -> None:
    client.post("/v1/responses", json=response_body(instructions="be brief"))
    assert worker.seen[-1].messages[0] == {"role": "system", "content": "be brief", "instructions": True}


def test_http_add_items_to_conversation_are_listed_and_taken_up(client: httpx.Client, worker: FakeWorker) -> None:
    conversation = client.post("/v1/conversations").json()["id"]
    items = [{"type": "message", "role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    added = client.post(f"/v1/conversations/{conversation}/items", json={"items": items}).json()["data"]
    shown = client.get(f"/v1/conversations/{conversation}/items/{added[0]['id']}").json()
    assert (shown, len(added)) == (added[0], 2)
    client.post("/v1/responses", json=response_body("z", conversation={"id": conversation}))
    assert [m["content"] for m in worker.seen[-1].messages] == ["x", "y", "z"]


def test_http_damaged_stream_is_told_and_leaves_others_alone(client: httpx.Client, shared: SharedStack) -> None:
    shared.worker.script = lambda _: Script(("x ",) * 40, pause_s=0.05)
    other = client.post("/v1/responses", json=response_body(background=True)).json()["id"]
    with client.stream("POST", "/v1/responses", json=response_body(stream=True)) as answer:
        lines: list[str] = []
        ours = ""
        for line in answer.iter_lines():
            if not ours and line.startswith("data:"):
                # The first event tells the turn, which the worker may not have claimed yet.
                ours = json.loads(line.removeprefix("data:"))["response"]["id"]
                with shared.server.client() as control:
                    control.xadd(f"kvalet:-:stream:{ours}", {"n": "0", "e": b"\xc1"}, id="900-0")
            lines.append(line)
    damaged = frames_of("\n".join(lines) + "\n\n")
    assert (damaged[-1].event, damaged[-1].json["code"]) == ("error", "turn_damaged")
    whole = frames_of(client.get(f"/v1/responses/{other}?stream=true").text)
    assert whole[-1].event == "response.completed"
    assert client.get(f"/v1/responses/{ours}").status_code == 500


@pytest.mark.parametrize("parent", ["resp_a\nb", "resp_" + "x" * 100, "resp_{}", "../x", "", "conv_1"])
def test_http_parent_that_can_be_no_id_is_not_found(client: httpx.Client, parent: str) -> None:
    answer = client.post("/v1/responses", json=response_body(previous_response_id=parent))
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")


def test_http_conversation_that_can_be_no_id_is_not_found(client: httpx.Client) -> None:
    answer = client.post("/v1/responses", json=response_body(conversation="conv_a:b"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "conversation")


def test_http_host_durability_is_refused_where_control_does_not_sync_every_write(client: httpx.Client) -> None:
    answer = client.post("/v1/responses", json=response_body(kvalet={"durability": "host"}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kvalet.durability")


def test_http_host_durability_is_taken_where_control_syncs_every_write(
    start_server: Callable[..., ValkeyServer],
) -> None:
    server = start_server("control", appendfsync="always")
    with stack(server, FakeWorker(server), durability="host") as url:
        body = response_body(kvalet={"durability": "host"})
        assert httpx.post(f"{url}/v1/responses", json=body).json()["status"] == "completed"


def test_http_host_durability_as_a_setting_is_not_ready_without_it(control_server: ValkeyServer) -> None:
    with gateway(control_server, durability="host") as url:
        wait_until(lambda: httpx.get(f"{url}/ready").json().get("reason") == "durability_unsupported")


def test_http_cancelled_turn_adds_nothing_to_its_conversation(client: httpx.Client, worker: FakeWorker) -> None:
    conversation = client.post("/v1/conversations").json()["id"]
    worker.script = lambda _: Script(("x ",) * 1000, pause_s=0.02)
    body = response_body("first", conversation=conversation, background=True)
    turn = client.post("/v1/responses", json=body).json()["id"]
    wait_until(lambda: client.get(f"/v1/responses/{turn}").json()["status"] == "in_progress")
    assert client.post(f"/v1/responses/{turn}/cancel").json()["status"] == "cancelled"
    worker.script = echo
    assert client.post("/v1/responses", json=response_body("second", conversation=conversation)).status_code == 200
    items = client.get(f"/v1/conversations/{conversation}/items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["second", "second"]


def test_http_choices_beyond_the_queue_are_refused_together(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server, script=lambda _: Script(("x ",) * 1000, pause_s=0.02))
    with stack(control_server, worker, max_queued=2) as url:
        refused = httpx.post(f"{url}/v1/chat/completions", json=chat_body(n=3), timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        worker.script = echo
        body = chat_body(n=2)
        wait_until(lambda: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).status_code == 200)
