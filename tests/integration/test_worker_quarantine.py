"""A broken rule of the cache ends the worker, not the turn: nothing it wrote is trusted, the turn goes on elsewhere."""

from __future__ import annotations

import time

import pytest

from gpu.errors import UnprovenAppend
from gpu.simulated.backend import SimulatedBackend
from gpu.simulated.faults import Fault, StoreFault
from tests.fleet import Fleet
from tests.fleet_fixtures import MakeFleet
from workers.registry import quarantined
from workers.turns.calls import sweep
from workers.turns.events import TurnState

STORY = "The salt ships of the north came in at dawn, one after another, and their crews sang. " * 4


def _quarantine(fleet: Fleet, name: str, turn_id: str) -> None:
    backend = fleet.worker(name).runtime.backend
    assert isinstance(backend, SimulatedBackend)
    backend.plant(StoreFault(Fault.STORE_WITHOUT_COUNT, layer=1))
    fleet.worker(name).run_turn(turn_id)
    deadline = time.monotonic() + 10
    while name not in fleet.fatal:
        assert time.monotonic() < deadline, "the process was not asked to end"
        time.sleep(0.02)


@pytest.mark.timeout(60)
def test_unproven_step_quarantines_the_worker_and_the_turn_goes_on_elsewhere(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(backend="simulated", lease_s=1.0, heartbeat_s=0.1)
    alone = fleet.say("solo", STORY, scope="key")
    turn_id = fleet.accept(STORY)
    _quarantine(fleet, "bad", turn_id)
    bad = fleet.worker("bad")
    assert isinstance(bad.engine.quarantine, UnprovenAppend)
    assert bad.boot_id.hex() in fleet.control.run(quarantined())
    assert fleet.view(turn_id).state is TurnState.IN_PROGRESS
    time.sleep(1.2)
    fleet.control.run(sweep())
    view = fleet.run("good", turn_id)
    assert (view.state, view.crashes) == (TurnState.INCOMPLETE, 1)
    assert fleet.path(turn_id)[-1].output_ids == fleet.path(alone.turn_id)[-1].output_ids
    fleet.fatal.clear()


@pytest.mark.timeout(60)
def test_engine_thread_that_raises_ends_the_process_without_quarantine(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(lease_s=1.0, heartbeat_s=0.1)
    worker = fleet.worker("bad")

    def broken(*_: object) -> object:
        raise ZeroDivisionError

    worker.engine._take_result = broken  # type: ignore[method-assign]
    turn_id = fleet.accept(STORY)
    worker.run_turn(turn_id)
    deadline = time.monotonic() + 10
    while "bad" not in fleet.fatal:
        assert time.monotonic() < deadline, "the process was not asked to end"
        time.sleep(0.02)
    assert fleet.control.run(quarantined()) == frozenset()
    assert fleet.view(turn_id).state is TurnState.IN_PROGRESS
    fleet.fatal.clear()
