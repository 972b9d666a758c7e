"""C32: tasks that wait or run vanish, or wait an hour, when Redis, the workers or everything is restarted.

Reported of Celery (celery/celery#1307, #1789, #4984). Two turns run and twenty wait; then something is killed. All
must end. Without persistence the status call must say that a turn is gone, never that it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import accepted
from tests.worker_process import CeleryWorker, Fleet, wait_until
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.events import TurnState


@pytest.mark.parametrize("casualties", ["control", "workers", "control and workers"])
def test_turns_queued_and_running_at_a_kill_all_complete(
    fleet: Fleet, start_worker: Callable[..., CeleryWorker], control_server: ValkeyServer, casualties: str
) -> None:
    worker = start_worker("w1", slots=2).wait_ready()
    turns = [f"t{n}" for n in range(22)]
    for turn_id in turns:
        fleet.submit(turn_id, display={"tokens": 4, "pause_s": 0.05})
    wait_until(lambda: len(fleet.runs()) >= 4, 10)
    if "control" in casualties:
        control_server.kill()
    if "workers" in casualties:
        worker.kill()
    time.sleep(0.3)
    control_server.start()
    if "workers" in casualties:
        start_worker("w1", slots=2)
    assert fleet.wait_end(*turns, timeout_s=40) == [TurnState.COMPLETED] * 22
    for turn_id in turns:
        assert fleet.text(turn_id) == "t1 t2 "


def test_turn_lost_with_a_server_without_persistence_is_not_found(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control", appendonly="no")
    control = TurnControl(connect(server.url))
    accepted(control, "a")
    server.restart()
    assert control.run(calls.get_turn("local", "a")) is None
