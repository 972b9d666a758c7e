"""C29: a worker is killed in mid-task: its task is lost, or comes back for ever and kills every worker.

Reported of Celery (celery/celery#1628, #10462, OasisLMF/OasisPlatform PR#975): an acknowledged message dies with its
worker; with reject-on-lost a poison task loops without end; a MemoryError can block the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import MODEL
from tests.worker_process import CeleryWorker, Fleet, wait_until
from workers.turns import calls
from workers.turns.events import TurnState

StartWorker = Callable[..., CeleryWorker]
MAX_RUNS_OF_A_POISON_TURN = 5


def test_turn_of_a_killed_worker_runs_again_once_and_completes(fleet: Fleet, start_worker: StartWorker) -> None:
    start_worker("w1").wait_ready()
    fleet.submit("j1", display={"die": "once"})
    wait_until(lambda: len(fleet.runs()) == 1, 10)
    start_worker("w2")
    assert fleet.wait_end("j1") == [TurnState.COMPLETED]
    assert fleet.runs() == ["w1 j1 1", "w2 j1 2"]


def test_poison_turn_fails_after_bounded_runs_and_others_proceed(fleet: Fleet, start_worker: StartWorker) -> None:
    fleet.submit("poison", display={"die": "always"})
    fleet.submit("harmless")
    workers = 0
    deadline = time.monotonic() + 40
    worker = start_worker(f"w{workers}")
    while fleet.state("poison") is not TurnState.FAILED and time.monotonic() < deadline:
        if worker.process.poll() is not None:
            for message in fleet.control.run(calls.end_worker_leases(worker.worker_id)):
                fleet.dispatcher.send(message)
            workers += 1
            worker = start_worker(f"w{workers}")
        time.sleep(0.05)
    assert fleet.wait_end("poison", "harmless") == [TurnState.FAILED, TurnState.COMPLETED]
    view = fleet.control.run(calls.get_turn("local", "poison"))
    assert view is not None and view.error is not None
    assert (view.error["code"], sum("poison" in run for run in fleet.runs())) == (
        "worker_crashed",
        MAX_RUNS_OF_A_POISON_TURN,
    )


@pytest.mark.timeout(240)
def test_prompt_that_needs_more_memory_than_there_is_fails_alone(
    fleet: Fleet, start_worker: StartWorker, pages_server: ValkeyServer, tiny_gguf: Path
) -> None:
    """RLIMIT_AS makes an allocation of the prefill fail in a real worker: that turn fails, the process serves on."""
    settings = {"model": tiny_gguf, "model_name": MODEL, "pages_url": pages_server.url, "step_rows": 4096, "threads": 1}
    worker = start_worker("w1", app="tests.limited_worker_app", mirror_mib=64, **settings).wait_ready(100)
    asked = {"sampling": {"temperature": 0.0, "seed": 1}, "max_tokens": 8, "ignore_eos": True}
    huge = ({"role": "user", "content": "salt " * 1000},)
    fleet.submit("before", **asked)
    assert fleet.wait_end("before") == [TurnState.INCOMPLETE]
    fleet.submit("huge", messages=huge, **asked)
    assert fleet.wait_end("huge", timeout_s=30) == [TurnState.FAILED]
    begun = time.monotonic()
    fleet.submit("next", **asked)
    assert fleet.wait_end("next") == [TurnState.INCOMPLETE]
    assert time.monotonic() - begun < 5
    assert "MemoryError" in worker.output.read_text(), "not exercised: no allocation failed"
    view = fleet.control.run(calls.get_turn("local", "huge"))
    assert view is not None and view.error is not None
    assert (view.error["code"], view.crashes, worker.process.poll()) == ("engine_error", 0, None)
    assert "MemoryError" not in view.error["message"]


def test_turn_after_a_memory_error_runs_within_five_seconds(fleet: Fleet, start_worker: StartWorker) -> None:
    start_worker("w1", slots=1).wait_ready()
    fleet.submit("huge", display={"error": "memory"})
    fleet.submit("next")
    assert fleet.wait_end("huge", "next", timeout_s=5) == [TurnState.FAILED, TurnState.COMPLETED]
