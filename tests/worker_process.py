"""Celery worker processes as children of a test, and what a gateway does towards them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services import ValkeyServer, _die_with_parent
from tests.turn_factory import LIMITS, request
from workers.dispatch import Dispatcher
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.events import TurnState

ROOT = Path(__file__).resolve().parent.parent


class CeleryWorker:
    """One `celery worker` child of tests.fake_worker_app (or another app)."""

    def __init__(self, server: ValkeyServer, worker_id: str, log: Path, app: str, **settings: object) -> None:
        self.worker_id = worker_id
        self.output = log.with_name(f"{worker_id}.out")
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "KVALET_CONTROL_URL": server.url,
            "KVALET_WORKER_ID": worker_id, "KVALET_SLOTS": "2", "KVALET_LEASE_S": "1", "FAKE_WORKER_LOG": str(log),
            "KVALET_DRAIN_GRACE_S": "5", **{f"KVALET_{name.upper()}": str(value) for name, value in settings.items()},
        }  # fmt: skip
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", f"{worker_id}@test", "-l", "INFO"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.output.open("ab"), stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )  # fmt: skip

    def wait_ready(self, timeout_s: float = 30) -> CeleryWorker:
        wait_until(lambda: b" ready." in self.output.read_bytes(), timeout_s, self.text)
        return self

    def text(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def terminate(self, timeout_s: float = 20) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def real_worker_settings(pages: ValkeyServer, model: Path, **settings: object) -> dict[str, object]:
    """Settings that make a CeleryWorker of `workers.celery_app` serve a model file as `test`."""
    return {
        "pages_url": pages.url, "model": model, "model_name": "test", "threads": 1, "mirror_mib": 64,
        "restore": "always", **settings,
    }  # fmt: skip


class Fleet:
    """What a gateway does: accept, send, ask for the state."""

    def __init__(self, server: ValkeyServer, runs: Path) -> None:
        self.control = TurnControl(connect(server.url))
        self.dispatcher = Dispatcher(server.url)
        self._runs = runs

    def submit(self, turn_id: str, *, send: int = 1, **changes: object) -> None:
        outcome = self.control.run(calls.accept(request(turn_id, **changes), LIMITS))
        for _ in range(send if outcome.dispatch else 0):
            assert outcome.dispatch is not None
            self.dispatcher.send(outcome.dispatch)

    def state(self, turn_id: str) -> TurnState | None:
        return self.control.run(calls.get_turn_state("local", turn_id))

    def wait_end(self, *turn_ids: str, timeout_s: float = 20) -> list[TurnState | None]:
        wait_until(
            lambda: all((state := self.state(t)) is not None and state.is_terminal for t in turn_ids),
            timeout_s,
            lambda: [(t, self.state(t)) for t in turn_ids],
        )
        return [self.state(t) for t in turn_ids]

    def runs(self) -> list[str]:
        return self._runs.read_text().splitlines() if self._runs.exists() else []

    def text(self, turn_id: str) -> str:
        view = self.control.run(calls.get_turn("local", turn_id))
        assert view is not None
        return view.output_text


@pytest.fixture
def fleet(control_server: ValkeyServer, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(control_server, tmp_path / "runs")
    yield fleet
    fleet.dispatcher.close()


@pytest.fixture
def start_worker(control_server: ValkeyServer, tmp_path: Path) -> Iterator[Callable[..., CeleryWorker]]:
    """Factory: start_worker("w1", slots=1). The runs of all workers are logged in tmp_path / "runs"."""
    workers: list[CeleryWorker] = []

    def start(worker_id: str = "w1", *, app: str = "tests.fake_worker_app", **settings: object) -> CeleryWorker:
        workers.append(CeleryWorker(control_server, worker_id, tmp_path / "runs", app, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        if worker.process.poll() is None:
            worker.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], object] = str) -> None:
    """Poll until `condition` holds; fails with what `explain` says."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {explain()}"
        time.sleep(0.02)
