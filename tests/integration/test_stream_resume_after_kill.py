"""`starting_after` while the worker of the reply is killed: the rest of the events come, none twice, none other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway_fleet import SseFrame, frames_of, gateway, wait_until
from tests.services import ValkeyServer
from tests.worker_process import CeleryWorker, real_worker_settings
from workers.turns.calls import get_turn
from workers.turns.control import TurnControl, connect

NUM_TOKENS = 3000
SEEN = 40
BODY = {
    "model": "test", "input": "Which ships came in?", "stream": True, "background": True, "temperature": 1,
    "seed": 77, "max_output_tokens": NUM_TOKENS, "kvalet": {"ignore_eos": True},
}  # fmt: skip


def read_some(client: httpx.Client, count: int) -> list[SseFrame]:
    """The first events of a new response; then the client is gone."""
    with client.stream("POST", "/v1/responses", json=BODY) as answer:
        read = ""
        for chunk in answer.iter_text():
            read += chunk
            frames = frames_of(read[: read.rindex("\n\n") + 2])
            if len(frames) >= count:
                return frames
    raise AssertionError(f"the stream ended before event {count}")


def resume(url: str, turn_id: str, after: int) -> list[SseFrame]:
    path = f"{url}/v1/responses/{turn_id}?stream=true&starting_after={after}"
    return frames_of(httpx.get(path, timeout=60).text)


def numbers(frames: list[SseFrame]) -> list[int]:
    return [frame.json["sequence_number"] for frame in frames]


def text(frames: list[SseFrame]) -> str:
    return "".join(frame.json["delta"] for frame in frames if frame.event == "response.output_text.delta")


@pytest.mark.timeout(240)
def test_stream_resumed_after_its_worker_was_killed_has_every_event_once(
    control_server: ValkeyServer,
    pages_server: ValkeyServer,
    tiny_gguf: Path,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    settings: dict[str, Any] = real_worker_settings(pages_server, tiny_gguf, lease_s=1)
    workers = {name: start_worker(name, app="workers.celery_app", **settings) for name in ("w1", "w2")}
    for worker in workers.values():
        worker.wait_ready(100)
    control = TurnControl(connect(control_server.url))
    with gateway(control_server) as url, httpx.Client(base_url=url, timeout=60) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        first = read_some(client, SEEN)
        turn_id, last = first[0].json["response"]["id"], first[-1].json["sequence_number"]
        view = control.run(get_turn("local", turn_id))
        assert view is not None and view.worker_id is not None
        workers[view.worker_id].kill()
        assert view.ended_at is None, "not exercised: the turn was over"
        rest = resume(url, turn_id, last)
        assert numbers(first + rest) == list(range(len(first + rest)))
        assert rest[-1].event == "response.incomplete"
        assert rest[-1].json["response"]["kvalet"]["runs"] == 2
        assert resume(url, turn_id, last) == rest
        alone = frames_of(client.post("/v1/responses", json=BODY).text)
        assert text(first + rest) == text(alone)
        assert numbers(alone) == numbers(first + rest)
