"""Control refuses writes for lack of memory: new turns are refused at once, those that were accepted all end well."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import gateway, wait_until
from tests.services import ValkeyServer
from tests.worker_process import CeleryWorker, real_worker_settings
from workers.turns.calls import get_turn
from workers.turns.control import TurnControl, connect

ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture
def server(start_server: Callable[..., ValkeyServer]) -> ValkeyServer:
    return start_server("control")


@pytest.fixture
def worker(server: ValkeyServer, pages_server: ValkeyServer, tiny_gguf: Path, tmp_path: Path) -> Iterator[CeleryWorker]:
    settings = real_worker_settings(pages_server, tiny_gguf, slots=1, lease_s=2)
    started = CeleryWorker(server, "w1", tmp_path / "runs", "workers.celery_app", **settings)
    yield started.wait_ready(100)
    started.kill()


def body(num_tokens: int) -> dict[str, Any]:
    return {
        "model": "test", "input": "Which ships came in?", "background": True, "max_output_tokens": num_tokens,
        "temperature": 0, "kvalet": {"ignore_eos": True},
    }  # fmt: skip


def num_events(server: ValkeyServer, turn_id: str) -> int:
    view = TurnControl(connect(server.url)).run(get_turn("local", turn_id))
    return 0 if view is None else view.next_number


@pytest.mark.timeout(240)
def test_control_without_memory_refuses_turns_and_loses_none(server: ValkeyServer, worker: CeleryWorker) -> None:
    with gateway(server) as url, httpx.Client(base_url=url, timeout=20) as client, server.client() as control:

        def state(turn_id: str) -> dict[str, Any]:
            answer: dict[str, Any] = client.get(f"/v1/responses/{turn_id}").json()
            return answer

        def text(turn_id: str) -> str:
            return "".join(part["text"] for item in state(turn_id)["output"] for part in item["content"])

        wait_until(lambda: client.get("/ready").status_code == 200)
        running, queued = (client.post("/v1/responses", json=body(n)).json()["id"] for n in (4000, 8))
        wait_until(lambda: num_events(server, running) > 10)
        control.config_set("maxmemory", control.info("memory")["used_memory"] // 2)
        begun = time.monotonic()
        refused = client.post("/v1/responses", json=body(8))
        assert time.monotonic() - begun < 1
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "control_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.post("/v1/conversations", json={}).status_code == 503
        assert state(running)["status"] == "in_progress", "not exercised: the turn was over"
        wait_until(lambda: all(state(turn_id)["status"] in ENDED for turn_id in (running, queued)), 60)
        assert [state(turn_id)["status"] for turn_id in (running, queued)] == ["incomplete"] * 2
        assert [state(turn_id)["kvalet"]["runs"] for turn_id in (running, queued)] == [1, 1]
        assert worker.process.poll() is None
        control.config_set("maxmemory", 0)
        again = client.post("/v1/responses", json={**body(4000), "background": False}, timeout=60).json()
        assert text(again["id"]) == text(running)


@pytest.mark.timeout(240)
def test_turn_of_a_worker_that_dies_while_control_is_full_goes_on_elsewhere(
    server: ValkeyServer, pages_server: ValkeyServer, tiny_gguf: Path, worker: CeleryWorker, tmp_path: Path
) -> None:
    with gateway(server) as url, httpx.Client(base_url=url, timeout=20) as client, server.client() as control:
        wait_until(lambda: client.get("/ready").status_code == 200)
        running = client.post("/v1/responses", json=body(4000)).json()["id"]
        wait_until(lambda: num_events(server, running) > 10)
        settings = real_worker_settings(pages_server, tiny_gguf, slots=1, lease_s=2)
        other = CeleryWorker(server, "w2", tmp_path / "runs", "workers.celery_app", **settings)
        try:
            other.wait_ready(100)
            control.config_set("maxmemory", control.info("memory")["used_memory"] // 2)
            assert client.get(f"/v1/responses/{running}").json()["status"] == "in_progress", "not exercised"
            worker.kill()
            wait_until(lambda: client.get(f"/v1/responses/{running}").json()["status"] in ENDED, 60)
        finally:
            other.kill()
        answer = client.get(f"/v1/responses/{running}").json()
        assert (answer["status"], answer["kvalet"]["runs"]) == ("incomplete", 2), other.text()
