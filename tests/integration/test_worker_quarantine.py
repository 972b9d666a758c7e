"""A broken rule of the cache ends the worker, not the turn: nothing it wrote is trusted, the turn goes on elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from gpu.errors import MirrorDivergence, PoisonedPage, UnprovenAppend
from gpu.pages import Page
from gpu.simulated.backend import SimulatedBackend
from gpu.simulated.faults import Fault, StoreFault
from tests.fleet import Fleet
from tests.fleet_fixtures import MakeFleet
from workers.engine.requests import Preempted
from workers.registry import quarantined
from workers.turns.calls import sweep
from workers.turns.events import TurnState

STORY = "The salt ships of the north came in at dawn, one after another, and their crews sang. " * 4


def _quarantine(fleet: Fleet, name: str, turn_id: str, fault: Fault = Fault.STORE_WITHOUT_COUNT) -> None:
    backend = fleet.worker(name).runtime.backend
    assert isinstance(backend, SimulatedBackend)
    backend.plant(StoreFault(fault, layer=1))
    fleet.worker(name).run_turn(turn_id)
    _wait_fatal(fleet, name)


def _wait_fatal(fleet: Fleet, name: str) -> None:
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


def _take_over(fleet: Fleet, turn_id: str) -> Any:
    """Let the lease end and run the turn on another worker."""
    time.sleep(1.2)
    fleet.control.run(sweep())
    return fleet.run("good", turn_id)


def _meet_before_the_first_step(worker: Any, num_turns: int) -> None:
    """Make turns resolve before any of them computes."""
    resolve, barrier = worker.restorer.resolve, threading.Barrier(num_turns)

    def resolve_together(*args: Any) -> Any:
        resolution = resolve(*args)
        barrier.wait(20)
        return resolution

    worker.restorer.resolve = resolve_together


def _damage_pages_that_two_turns_compute(worker: Any) -> None:
    """One bit of a sealed page changes in the mirror before it is compared with another turn's."""
    memory = worker.engine.cache.memory
    compare = memory.compare_known

    def damage_and_compare(page: Page, known: Page, own_numerics: bool) -> None:
        memory.view(known)[3] ^= 1
        compare(page, known, own_numerics)

    memory.compare_known = damage_and_compare


@pytest.mark.timeout(60)
def test_divergence_ends_the_turns_that_read_the_page_with_integrity_and_others_go_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(lease_s=1.0, heartbeat_s=0.1)
    alone = fleet.say("solo", f"bystander {STORY}", scope="key")
    bad = fleet.worker("bad")
    _meet_before_the_first_step(bad, 3)
    _damage_pages_that_two_turns_compute(bad)
    readers = [fleet.accept(STORY) for _ in range(2)]
    bystander = fleet.accept(f"bystander {STORY}")
    for thread in [fleet.start("bad", turn_id) for turn_id in (*readers, bystander)]:
        thread.join(20)
    _wait_fatal(fleet, "bad")
    assert isinstance(bad.engine.quarantine, MirrorDivergence)
    for turn_id in readers:
        view = fleet.view(turn_id)
        assert view.error is not None
        assert (view.state, view.error["code"]) == (TurnState.FAILED, "integrity")
    assert fleet.view(bystander).state is TurnState.IN_PROGRESS
    view = _take_over(fleet, bystander)
    assert (view.state, view.crashes) == (TurnState.INCOMPLETE, 1)
    assert fleet.path(bystander)[-1].output_ids == fleet.path(alone.turn_id)[-1].output_ids
    fleet.fatal.clear()


@pytest.mark.timeout(60)
def test_divergence_of_a_page_that_was_read_on_the_device_only_ends_no_turn(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(backend="simulated", lease_s=1.0, heartbeat_s=0.1)
    alone = fleet.say("solo", STORY, scope="key")
    turn_id = fleet.accept(STORY)
    _quarantine(fleet, "bad", turn_id, Fault.WRONG_BYTES)
    assert isinstance(fleet.worker("bad").engine.quarantine, MirrorDivergence)
    view = _take_over(fleet, turn_id)
    assert (view.state, view.crashes) == (TurnState.INCOMPLETE, 1)
    assert fleet.path(turn_id)[-1].output_ids == fleet.path(alone.turn_id)[-1].output_ids
    fleet.fatal.clear()


@pytest.mark.timeout(60)
def test_divergence_ends_a_turn_whose_earlier_attempt_may_have_read_the_page(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(lease_s=1.0, heartbeat_s=0.1)
    worker: Any = fleet.worker("bad")
    engine, resolve, runs = worker.engine, worker.restorer.resolve, []

    def resolve_then_diverge(running: Any, *args: Any) -> Any:
        runs.append(running)
        if len(runs) == 2:
            engine.call(diverge)
        return resolve(running, *args)

    def diverge() -> None:
        raise MirrorDivergence("page 0: found out between two attempts", (0,))

    def preempt() -> None:
        engine._end(runs[0])
        runs[0].turn.outputs.put(Preempted())

    worker.restorer.resolve = resolve_then_diverge
    turn_id = fleet.accept(STORY, max_tokens=2000)
    thread = fleet.start("bad", turn_id)
    while fleet.view(turn_id).next_number < 5:
        time.sleep(0.01)
    engine.call(preempt)
    thread.join(20)
    view = fleet.view(turn_id)
    assert view.error is not None
    assert (view.state, view.error["code"], len(runs)) == (TurnState.FAILED, "integrity", 2)
    _wait_fatal(fleet, "bad")
    fleet.fatal.clear()


@pytest.mark.timeout(60)
def test_page_that_a_restore_cannot_poison_quarantines_the_worker(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(lease_s=1.0, heartbeat_s=0.1)
    first = fleet.say("good", STORY, scope="key")
    worker = fleet.worker("bad")
    monkeypatch.setattr(worker.engine.cache.memory._poison, "set", lambda *_: None)
    turn_id = fleet.accept(STORY, scope="key")
    worker.run_turn(turn_id)
    _wait_fatal(fleet, "bad")
    assert isinstance(worker.engine.quarantine, PoisonedPage)
    assert "was to be handed out without poison" in str(worker.engine.quarantine)
    assert _take_over(fleet, turn_id).state is TurnState.INCOMPLETE
    assert fleet.path(turn_id)[-1].output_ids == fleet.path(first.turn_id)[-1].output_ids
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
