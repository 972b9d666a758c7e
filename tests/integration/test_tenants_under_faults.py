"""Several tenants at once while workers are killed and pages vanish: nobody gets another's tokens, nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.auth import hash_key
from tests.gateway_fleet import gateway, wait_until
from tests.services import ValkeyServer
from tests.worker_process import CeleryWorker, real_worker_settings

TENANTS = ("acme", "beta", "calm")
TOPICS = ("Every tenant asks this, word for word, about the salt ships. " * 4, "Only {tenant} knows of {tenant}. " * 8)
NUM_TURNS = 4
NUM_TOKENS = 150


def ask(client: httpx.Client, topic: str, after_turn: Callable[[int], None]) -> list[tuple[str, str]]:
    """Hold one conversation; ids and texts of its replies."""
    conversation = client.post("/v1/conversations", json={}).json()["id"]
    replies = []
    for turn in range(NUM_TURNS):
        body = {
            "model": "test", "input": f"{topic} Turn {turn}.", "conversation": conversation, "temperature": 1,
            "seed": 5, "max_output_tokens": NUM_TOKENS, "kvalet": {"ignore_eos": True},
        }  # fmt: skip
        answer = client.post("/v1/responses", json=body).json()
        assert answer.get("status") == "incomplete", answer
        replies.append((answer["id"], answer["output"][0]["content"][0]["text"]))
        after_turn(turn)
    return replies


@contextmanager
def clients_of(url: str, keys: dict[str, str]) -> Iterator[dict[str, httpx.Client]]:
    clients = {
        tenant: httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=90)
        for tenant, key in keys.items()
    }
    yield clients
    for client in clients.values():
        client.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tenants_get_their_own_tokens_while_workers_and_pages_die(
    control_server: ValkeyServer,
    pages_server: ValkeyServer,
    tiny_gguf: Path,
    tmp_path: Path,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    keys = {tenant: f"sk-{tenant}" for tenant in TENANTS}
    (tmp_path / "keys").write_text("\n".join(f"{hash_key(key)} {tenant}" for tenant, key in keys.items()))
    settings: dict[str, Any] = real_worker_settings(pages_server, tiny_gguf, slots=2, lease_s=1)
    workers = {name: start_worker(name, app="workers.celery_app", **settings) for name in ("w1", "w2")}
    for worker in workers.values():
        worker.wait_ready(100)
    reached = [threading.Event() for _ in range(NUM_TURNS)]

    with gateway(control_server, keys_file=tmp_path / "keys") as url, clients_of(url, keys) as clients:
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        held = [(tenant, topic) for tenant in TENANTS[:2] for topic in TOPICS]
        with ThreadPoolExecutor(len(held)) as pool:
            talks = [
                pool.submit(ask, clients[tenant], topic.format(tenant=tenant), lambda turn: reached[turn].set())
                for tenant, topic in held
            ]
            reached[0].wait(60)
            workers["w1"].kill()
            workers["w1"] = start_worker("w1", app="workers.celery_app", **settings)
            reached[1].wait(60)
            pages_server.kill()
            pages_server.start()
            reached[2].wait(60)
            workers["w1"].wait_ready(100)
            workers["w2"].kill()
            disturbed = {key: talk.result(120) for key, talk in zip(held, talks, strict=True)}

        for (tenant, topic), replies in disturbed.items():
            calm = ask(clients["calm"], topic.format(tenant=tenant), lambda _: None)
            assert [text for _, text in replies] == [text for _, text in calm], (tenant, topic)
            others = [client for name, client in clients.items() if name != tenant]
            found = [client.get(f"/v1/responses/{turn_id}").status_code for client in others for turn_id, _ in replies]
            assert set(found) == {404}
