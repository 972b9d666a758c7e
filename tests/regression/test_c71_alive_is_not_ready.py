"""C71: process, port and ping are fine while no task is taken for days.

Reported for open-wearables (#1543) and jevmlx (PR#67): traffic is sent before the model is loaded, or to a service
whose workers are gone. Here /health says that the process lives, /ready that an accepted turn would run, with the
reason when not, and back by itself. The age of each worker's heartbeat is a metric.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx

from tests.gateway_fleet import MODEL, FakeWorker, Script, gateway, stack, wait_until
from tests.services import ValkeyServer

LIMIT_S = 15.0


def becomes(url: str, reason: str | None) -> None:
    """Wait until /ready gives this reason (None: ready); /health stays 200 all the time."""

    def reached() -> bool:
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.get(f"{url}/ready")
        assert answer.status_code == (200 if answer.json()["status"] == "ready" else 503)
        return bool(answer.json().get("reason") == reason)

    wait_until(reached, deadline_s=LIMIT_S)


def test_c71_without_a_worker_then_with_one(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server)
    with gateway(control_server) as url:
        becomes(url, "no_worker")
        worker.start()
        becomes(url, None)
        worker.join()


def test_c71_control_down_at_the_start_and_later(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    server.stop()
    with gateway(server) as url:
        becomes(url, "control_unavailable")
        server.start()
        becomes(url, "no_worker")


def test_c71_control_that_hangs(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    with stack(server, FakeWorker(server), control_timeout_s=2.0) as url:
        server.pause()
        becomes(url, "control_unavailable")
        server.resume()
        becomes(url, None)


def test_c71_control_read_only(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    with stack(server, FakeWorker(server)) as url, server.client() as client:
        client.config_set("min-replicas-to-write", 1)
        becomes(url, "control_read_only")
        client.config_set("min-replicas-to-write", 0)
        becomes(url, None)


def test_c71_control_out_of_memory(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    with stack(server, FakeWorker(server)) as url, server.client() as client:
        client.config_set("maxmemory", 1)
        becomes(url, "control_full")
        refused = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        client.config_set("maxmemory", 0)
        becomes(url, None)


def test_c71_stalled_worker_shows_by_its_heartbeat_age(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server)
    with stack(control_server, worker, worker_stale_s=2.0) as url:
        worker.stall()
        becomes(url, "worker_stale")
        ages = [
            float(line.split()[-1])
            for line in httpx.get(f"{url}/metrics").text.splitlines()
            if line.startswith("kvalet_worker_heartbeat_age_seconds{")
        ]
        assert ages[0] > 2.0
        worker._beating.set()
        becomes(url, None)


def test_c71_queue_full(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server, script=lambda _: Script(("x ",) * 50, pause_s=0.05), slots=1)
    with stack(control_server, worker, max_queued=2) as url:
        for _ in range(2):
            httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "x", "background": True})
        becomes(url, "queue_full")
        becomes(url, None)
