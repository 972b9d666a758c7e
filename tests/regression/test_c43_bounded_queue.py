"""C43: a waiting queue without limit, or an instant refusal instead of queueing.

Reported for vLLM (PR#49330) and llama.cpp (#3821). Here turns wait up to a limit; beyond it the answer is 429 with
Retry-After at once, and everything that was accepted is served, low priority included.
"""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.gateway_fleet import MODEL, FakeWorker, Script, stack
from tests.services import ValkeyServer

NUM_REQUESTS = 200
MAX_QUEUED = 40


def test_c43_overflow_is_refused_at_once_and_the_rest_is_served(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server, script=lambda _: Script(("x",), pause_s=0.1), slots=4)
    with stack(control_server, worker, max_queued=MAX_QUEUED) as url:
        answers = asyncio.run(post_all(url))
    served = [status for status, _, _ in answers if status == 200]
    refused = [(seconds, retry) for status, seconds, retry in answers if status == 429]
    assert len(served) + len(refused) == NUM_REQUESTS
    assert MAX_QUEUED <= len(served) < NUM_REQUESTS
    assert all(int(retry or 0) >= 1 for _, retry in refused)
    assert len(worker.seen) == len(served)


def test_c43_refusal_takes_less_than_a_second(control_server: ValkeyServer) -> None:
    worker = FakeWorker(control_server, script=lambda _: Script(("x ",) * 100, pause_s=0.05), slots=1)
    with stack(control_server, worker, max_queued=2) as url:
        for _ in range(2):
            httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "x", "background": True})
        began = time.monotonic()
        refused = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "x"})
        assert (refused.status_code, time.monotonic() - began < 1.0) == (429, True)
        assert refused.json()["error"]["code"] == "queue_full"


async def post_all(url: str) -> list[tuple[int, float, str | None]]:
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(post(client, number) for number in range(NUM_REQUESTS)))


async def post(client: httpx.AsyncClient, number: int) -> tuple[int, float, str | None]:
    began = time.monotonic()
    body = {"model": MODEL, "input": "x", "kvalet": {"priority": number % 3 - 1}}
    answer = await client.post("/v1/responses", json=body)
    return answer.status_code, time.monotonic() - began, answer.headers.get("retry-after")
