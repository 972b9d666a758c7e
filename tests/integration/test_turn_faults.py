"""What a run does when something around it fails: leases, outages, drains, waits. Each was found by review."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from gpu.cache import HoldKind
from gpu.plan import SamplingParams
from snapshot_store.errors import StoreUnreachable
from tests.fleet import Fleet
from tests.fleet_fixtures import MakeFleet
from workers.engine import engine as engine_module
from workers.engine.requests import EngineRequest, EngineTurn, SealedEvent
from workers.live_turns import LiveTurns
from workers.parking.rates import Rates
from workers.parking.turn_pages import TurnPages
from workers.prompt.errors import SandboxFailure
from workers.turns.calls import claim, end_worker_leases
from workers.turns.errors import DurabilityLost
from workers.turns.events import TurnState
from workers.turns.keys import control_stream_key
from workers.turns.leasing import Claimant
from workers.turns.records import Lease

STORY = "The salt ships of the north came in at dawn, one after another, and their crews sang. " * 4


def _in_background(action: Any, *args: object) -> threading.Thread:
    thread = threading.Thread(target=action, args=args, daemon=True)
    thread.start()
    return thread


def test_run_that_ends_leaves_the_lease_of_its_successor_alive(local_fleet: Fleet) -> None:
    live: LiveTurns = local_fleet.worker("a").live
    old, new = Lease("t", "b", 1, "n1", "a"), Lease("t", "b", 2, "n2", "a")
    with ExitStack() as first:
        first.enter_context(live.holding(old))
        with live.holding(new) as successor:
            first.close()
            assert live.all() == [successor]
    assert live.all() == []


@pytest.mark.parametrize("error", [StoreUnreachable("control: gone"), SandboxFailure("does not answer")])
def test_outage_while_the_prompt_is_read_leaves_the_turn_to_another_run(local_fleet: Fleet, error: Exception) -> None:
    worker = local_fleet.worker("a")

    def fails(claimed: object) -> object:
        raise error

    worker.runner._parts.conversations.freeze = fails  # type: ignore[method-assign,assignment]
    turn_id = local_fleet.accept(STORY)
    worker.run_turn(turn_id)
    assert local_fleet.view(turn_id).state is TurnState.IN_PROGRESS
    local_fleet.control.run(end_worker_leases("a"))
    assert local_fleet.run("b", turn_id).state is TurnState.INCOMPLETE


def test_commit_that_is_not_on_disk_yet_is_repeated_until_it_is(local_fleet: Fleet) -> None:
    control = local_fleet.worker("a").control
    run, lost = control.run, []

    def run_losing_two_confirmations(call: Any) -> Any:
        reply = run(call)
        if call.script.name == "finish" and len(lost) < 2:
            lost.append(call)
            raise DurabilityLost("not on disk in time")
        return reply

    control.run = run_losing_two_confirmations  # type: ignore[method-assign]
    conversation = local_fleet.conversation()
    turn_ids = [local_fleet.accept(text, conversation_id=conversation) for text in (STORY, "And then?")]
    sent: list[str] = []
    dispatcher: Any = local_fleet.worker("a").dispatcher
    dispatcher.send = lambda message: sent.append(message.turn_id)
    view = local_fleet.run("a", turn_ids[0])
    assert (len(lost), view.state, view.transcript is not None) == (2, TurnState.INCOMPLETE, True)
    assert sent == [turn_ids[1]]


def test_drain_waits_for_a_claim_under_way_and_hands_its_turn_over(local_fleet: Fleet) -> None:
    worker = local_fleet.worker("a")
    let_claim, run = threading.Event(), worker.runner.run

    def claims_late(turn_id: str) -> None:
        let_claim.wait(10)
        run(turn_id)

    worker.runner.run = claims_late  # type: ignore[method-assign]
    turn_id = local_fleet.accept(STORY, max_tokens=4000)
    running = local_fleet.start("a", turn_id)
    time.sleep(0.05)
    draining = _in_background(worker.drain, 0.0)
    draining.join(0.3)
    assert draining.is_alive(), "drained while a claim was under way"
    let_claim.set()
    draining.join(10)
    running.join(10)
    assert not draining.is_alive()
    assert not running.is_alive()
    view = local_fleet.view(turn_id)
    assert view.state in (TurnState.QUEUED, TurnState.IN_PROGRESS)
    assert view.crashes == 0
    assert local_fleet.control.run(claim(turn_id, Claimant("b", "boot", ("test",)))) is not None


def test_call_whose_result_comes_as_the_wait_ends_returns_it(
    local_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateFuture(engine_module.Future):  # type: ignore[type-arg]
        timeouts = 0

        def result(self, timeout: float | None = None) -> Any:
            value = super().result(10)
            if timeout is not None and not self.timeouts:
                self.timeouts += 1
                raise TimeoutError
            return value

    engine = local_fleet.worker("a").engine
    monkeypatch.setattr(engine_module, "Future", LateFuture)
    assert engine.call(lambda: 42) == 42


def _engine_turn(fleet: Fleet, name: str, order: int, solo: bool) -> EngineTurn:
    worker = fleet.worker("a")
    request = EngineRequest(name, (1, 2, 3), (), SamplingParams(0.0), 4, frozenset(), 0, order, solo)
    chain: Any = None
    return EngineTurn(request, TurnPages("local", chain, True, 1), lambda event: _release(worker, event))


def _release(worker: Any, event: SealedEvent) -> None:
    worker.engine.cache.release(event.page, HoldKind.UPLOAD)


def test_engine_with_a_turn_that_must_wait_does_not_spin(local_fleet: Fleet) -> None:
    engine = local_fleet.worker("a").engine
    passes: list[float] = []
    launch_next = engine._launch_next

    def counted() -> bool:
        passes.append(time.monotonic())
        return launch_next()

    engine._launch_next = counted  # type: ignore[method-assign]
    resolving = engine.admit(_engine_turn(local_fleet, "resolves", 0, solo=False))
    waiting = engine.admit(_engine_turn(local_fleet, "waits", 1, solo=True))
    time.sleep(0.1)
    begun, before = time.monotonic(), len(passes)
    time.sleep(0.5)
    rate = (len(passes) - before) / (time.monotonic() - begun)
    engine.discard(waiting)
    engine.discard(resolving)
    assert rate < 500


def test_engine_that_stops_wakes_the_turns_that_wait_for_admission(local_fleet: Fleet) -> None:
    engine = local_fleet.worker("a").engine
    engine.admit(_engine_turn(local_fleet, "resolves", 0, solo=False))
    waits = _engine_turn(local_fleet, "waits", 1, solo=True)
    engine.admit(waits)
    assert not waits.admitted.is_set()
    engine._stopping.set()
    engine.wake()
    assert waits.admitted.wait(5)


def test_slow_restore_is_forgotten_after_a_minute() -> None:
    rates = Rates()
    rates.observe_store(1, 10.0)
    assert rates.store_bytes_per_s == pytest.approx(0.1)
    rates.forget_old(time.monotonic() + 30)
    assert rates.store_bytes_per_s > 0
    rates.forget_old(time.monotonic() + 61)
    assert rates.store_bytes_per_s == 0


def test_flush_of_parking_does_not_wait_for_later_pages(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    parking = fleet.worker("a").parking
    with parking._settled:
        parking._open.update({7})
    flushed = _in_background(parking.flush)
    flushed.join(0.2)
    assert flushed.is_alive(), "an earlier page is still on its way"
    with parking._settled:
        parking._open.add(9)
        parking._open.discard(7)
        parking._settled.notify_all()
    flushed.join(5)
    assert not flushed.is_alive()
    parking._open.clear()


def test_note_written_between_two_reads_is_delivered(local_fleet: Fleet) -> None:
    live = local_fleet.worker("a").live
    xread, reads, may_read = live._notes.xread, threading.Semaphore(0), threading.Event()
    delivered: list[dict[bytes, bytes]] = []

    def late(*args: Any, **kwargs: Any) -> Any:
        reads.release()
        may_read.wait(20)
        return xread(*args, **kwargs)

    live._notes.xread = late  # type: ignore[method-assign]
    live._deliver = delivered.append  # type: ignore[method-assign]
    assert reads.acquire(timeout=5)
    local_fleet.control.client.xadd(control_stream_key("a"), {"turn": "t", "stop": "cancelled"})
    may_read.set()
    deadline = time.monotonic() + 5
    while not delivered and time.monotonic() < deadline:
        time.sleep(0.01)
    assert delivered == [{b"turn": b"t", b"stop": b"cancelled"}]


def test_bias_on_an_id_beyond_the_vocabulary_fails_that_turn_alone(local_fleet: Fleet) -> None:
    worker = local_fleet.worker("a")
    vocab_size = worker.runtime.source.config.vocab_size
    neighbour = local_fleet.accept(STORY, max_tokens=400)
    running = local_fleet.start("a", neighbour)
    biased = {"temperature": 0.0, "seed": 1, "logit_bias": [[vocab_size, 100.0]]}
    view = local_fleet.say("a", STORY, sampling=biased)
    running.join(30)
    assert view.error is not None
    assert (view.state, view.error["code"]) == (TurnState.FAILED, "invalid_logit_bias")
    assert str(vocab_size - 1) in view.error["message"]
    assert local_fleet.view(neighbour).usage["attempts"] == 1


def test_turns_of_a_step_that_failed_run_alone_only_until_they_survived_one(local_fleet: Fleet) -> None:
    worker = local_fleet.worker("a")
    backend: Any = worker.runtime.backend
    launch, failed, sizes = backend.launch, [], []

    def fails_once(plan: Any) -> Any:
        if len(plan.entries) == 2 and not failed:
            failed.append(plan)
            raise ArithmeticError("a step of two")
        if failed:
            sizes.append(len(plan.entries))
        return launch(plan)

    backend.launch = fails_once
    turn_ids = [local_fleet.accept(f"{name} {STORY}", max_tokens=200) for name in ("one", "two")]
    for thread in [local_fleet.start("a", turn_id) for turn_id in turn_ids]:
        thread.join(30)
    assert failed, "not exercised: the turns never met"
    assert [local_fleet.view(turn_id).state for turn_id in turn_ids] == [TurnState.INCOMPLETE] * 2
    assert [local_fleet.view(turn_id).usage["attempts"] for turn_id in turn_ids] == [2, 2]
    assert sizes[0] == 1
    assert sizes.count(2) > 100
