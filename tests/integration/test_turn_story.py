"""One turn's way through a worker: once, with frozen prompts, cancelled, taken over, drained, among tenants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from snapshot_store.salts import tenant_salt
from tests.fleet import Fleet, TurnClient
from tests.fleet_fixtures import MakeFleet
from workers.registry import list_workers
from workers.turns.calls import append_events, cancel, claim, commit, sweep
from workers.turns.errors import StaleLease, TurnControlError
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.leasing import Claimant

STORY = "The salt ships of the north came in at dawn, one after another, and their crews sang. " * 4
HOT = {"temperature": 2.0, "seed": 99}


def _wait_for_tokens(client: TurnClient, turn_id: str, num_events: int) -> None:
    deadline = time.monotonic() + 30
    while client.view(turn_id).next_number < num_events:
        assert time.monotonic() < deadline, "the turn says nothing"
        time.sleep(0.002)


def test_message_delivered_three_times_runs_once(local_fleet: Fleet) -> None:
    turn_id = local_fleet.accept(STORY)
    threads = [local_fleet.start(worker, turn_id) for worker in ("a", "a", "b")]
    for thread in threads:
        thread.join(30)
    view = local_fleet.view(turn_id)
    assert (view.state, view.epoch) == (TurnState.INCOMPLETE, 1)
    assert local_fleet.streamed_ids(turn_id) == local_fleet.path(turn_id)[-1].output_ids


def test_message_never_delivered_is_sent_again_and_runs_once(local_fleet: Fleet) -> None:
    local_fleet.worker("a")
    turn_id = local_fleet.accept(STORY)
    due = ()
    deadline = time.monotonic() + 15
    while not due and time.monotonic() < deadline:
        due = local_fleet.control.run(sweep())
        time.sleep(0.2)
    assert [message.turn_id for message in due] == [turn_id]
    assert local_fleet.run("a", turn_id).epoch == 1


def test_worker_says_what_it_computes_with(local_fleet: Fleet) -> None:
    local_fleet.worker("a")
    [worker] = local_fleet.control.run(list_workers())
    assert (worker.backend, worker.device) == ("cpu", "1 threads")


@pytest.mark.parametrize("sampling", [{"temperature": 0.0, "seed": 1}, HOT])
def test_follow_up_prompt_on_hot_restored_and_fresh_workers_has_the_same_ids(
    make_fleet: MakeFleet, sampling: dict[str, Any]
) -> None:
    fleet = make_fleet()
    prompts = []
    for worker, restore in (("hot", "always"), ("restored", "always"), ("fresh", "never")):
        conversation = fleet.conversation()
        asked = {"conversation_id": conversation, "scope": "conversation", "sampling": sampling}
        first = fleet.say("hot", STORY, **asked)
        fleet.settle()
        fleet.worker(worker, restore=restore)
        second = fleet.say(worker, "And then, what did they sing?", **asked)
        reused = second.usage["cached"]
        assert (reused["mirror"] > 0, reused["store"] > 0) == (worker == "hot", worker == "restored")
        entry = fleet.path(second.turn_id)[-1]
        before = fleet.token_ids(first.turn_id)
        assert entry.shared_length == len(before), "the reply's own ids are not the prompt's"
        prompts.append((before + entry.input_ids, entry.output_ids))
    assert prompts[0] == prompts[1] == prompts[2]


def test_cancel_in_mid_reply_ends_the_turn_and_frees_its_pages(local_fleet: Fleet) -> None:
    worker = local_fleet.worker("a")
    turn_id = local_fleet.accept(STORY, max_tokens=4000)
    thread = local_fleet.start("a", turn_id)
    _wait_for_tokens(local_fleet, turn_id, 5)
    local_fleet.control.run(cancel(local_fleet.tenant, turn_id))
    thread.join(2)
    assert not thread.is_alive(), "still running two seconds after the cancel"
    view = local_fleet.view(turn_id)
    assert view.state is TurnState.CANCELLED
    assert view.transcript is None
    local_fleet.settle()
    cache = worker.engine.cache
    assert cache.free_pages + cache.evictable_pages == cache.num_pages


def test_cancel_during_prefill_is_seen_within_a_step(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(step_rows=8)
    fleet.worker("a")
    turn_id = fleet.accept("salt " * 1200, max_tokens=8)
    thread = fleet.start("a", turn_id)
    _wait_for_tokens(fleet, turn_id, 1)
    fleet.control.run(cancel(fleet.tenant, turn_id))
    thread.join(2)
    assert not thread.is_alive()
    assert fleet.view(turn_id).state is TurnState.CANCELLED


def test_drained_worker_hands_its_turn_over_in_mid_reply(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    alone = fleet.say("solo", STORY, max_tokens=300, sampling=HOT, scope="key")
    turn_id = fleet.accept(STORY, max_tokens=300, sampling=HOT)
    thread = fleet.start("a", turn_id)
    _wait_for_tokens(fleet, turn_id, 10)
    fleet.worker("a").drain(0.0)
    thread.join(5)
    half = fleet.view(turn_id)
    assert (half.state, half.crashes) == (TurnState.IN_PROGRESS, 0)
    assert 10 <= half.next_number < 300, "not exercised: the turn was over"
    done = fleet.run("b", turn_id)
    assert (done.state, done.epoch, done.crashes) == (TurnState.INCOMPLETE, 2, 0)
    assert fleet.path(turn_id)[-1].output_ids == fleet.path(alone.turn_id)[-1].output_ids
    assert fleet.streamed_ids(turn_id) == fleet.path(turn_id)[-1].output_ids


def test_commit_and_event_of_an_older_epoch_are_refused(local_fleet: Fleet) -> None:
    turn_id = local_fleet.accept(STORY)
    old = local_fleet.control.run(claim(turn_id, Claimant("ghost", "ghost-boot", ("test",), lease_s=0.2)))
    assert old is not None
    time.sleep(0.3)
    local_fleet.control.run(sweep())
    view = local_fleet.run("a", turn_id)
    assert (view.state, view.epoch) == (TurnState.INCOMPLETE, 2)
    entry = local_fleet.path(turn_id)[-1]
    events = [TurnEvent(view.next_number, EventKind.DELTA, (1,), "x")]
    end = [TurnEvent(view.next_number, EventKind.TERMINAL, state=TurnState.COMPLETED, finish_reason="stop")]
    with pytest.raises(TurnControlError) as refused:
        local_fleet.control.run(append_events(old.lease, events))
    assert type(refused.value).__name__ in ("StaleLease", "TurnEnded")
    with pytest.raises(TurnControlError) as refused:
        local_fleet.control.run(commit(old.lease, entry, end))
    assert type(refused.value).__name__ in ("StaleLease", "TurnEnded")
    assert local_fleet.view(turn_id).output_text == view.output_text


def test_event_of_a_lost_lease_while_the_turn_is_open_is_stale(local_fleet: Fleet) -> None:
    turn_id = local_fleet.accept(STORY)
    old = local_fleet.control.run(claim(turn_id, Claimant("ghost", "boot-1", ("test",), lease_s=0.2)))
    time.sleep(0.3)
    local_fleet.control.run(sweep())
    new = local_fleet.control.run(claim(turn_id, Claimant("other", "boot-2", ("test",))))
    assert old is not None
    assert new is not None
    with pytest.raises(StaleLease):
        local_fleet.control.run(append_events(old.lease, [TurnEvent(0, EventKind.STARTED)]))


def test_same_prompt_of_two_tenants_shares_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    ours = fleet.say("a", STORY)
    assert fleet.say("a", STORY).usage["cached_tokens"] > 0, "not exercised"
    fleet.settle()
    other = TurnClient(fleet.control_url, tenant="other")
    theirs = other.accept(STORY)
    fleet.worker("a").run_turn(theirs)
    view = other.view(theirs)
    assert view.usage["cached_tokens"] == 0
    assert other.token_ids(theirs) == fleet.token_ids(ours.turn_id)
    assert tenant_salt(fleet.control.client, "other") != tenant_salt(fleet.control.client, "local")


def test_turn_of_another_tenant_is_not_found(local_fleet: Fleet) -> None:
    turn_id = local_fleet.say("a", STORY).turn_id
    other = TurnClient(local_fleet.control_url, tenant="other")
    with pytest.raises(AssertionError):
        other.view(turn_id)


def test_sixteen_turns_of_one_conversation_run_in_order(local_fleet: Fleet) -> None:
    conversation = local_fleet.conversation()
    turn_ids = [local_fleet.accept(f"number {i}", conversation_id=conversation, max_tokens=4) for i in range(6)]
    for turn_id in turn_ids:
        threads = [local_fleet.start(worker, turn_id) for worker in ("a", "b")]
        for thread in threads:
            thread.join(20)
    entries = local_fleet.path(turn_ids[-1])
    assert [entry.turn_id for entry in entries] == turn_ids


def test_stop_string_across_tokens_ends_the_reply_before_it(local_fleet: Fleet) -> None:
    whole = local_fleet.say("a", STORY, max_tokens=40)
    text = whole.output_text
    stop = text[10:14]
    assert len(stop) == 4
    view = local_fleet.say("b", STORY, max_tokens=40, stop=(stop,))
    assert (view.state, view.finish_reason) == (TurnState.COMPLETED, "stop")
    assert view.output_text == text[: text.index(stop)]
    events_text = "".join(event.text for event in local_fleet.events(view.turn_id))
    assert events_text == view.output_text


def test_threads_of_a_stopped_worker_are_gone(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    before = {thread.name for thread in threading.enumerate()}
    fleet.say("a", STORY, max_tokens=4)
    fleet.stop()
    after = {thread.name for thread in threading.enumerate() if thread.is_alive()}
    assert after - before <= {"pymain"}


def test_first_token_waits_for_claim_and_frozen_prompt_alone(
    local_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = local_fleet.worker("a")
    heard: list[str] = []

    def hear(owner: object, method: str, name_of: Callable[..., str]) -> None:
        original = getattr(owner, method)

        def heard_first(*arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                heard.append(name_of(*arguments))
            return original(*arguments)

        monkeypatch.setattr(owner, method, heard_first)

    hear(worker.control, "run", lambda call: call.script.name)
    hear(worker.engine, "start", lambda running: "start")
    hear(worker.presence, "nudge", lambda: "nudge")
    worker.run_turn(local_fleet.accept(STORY, stateless=True))
    assert heard[:4] == ["claim", "freeze_prompt", "start", "append_events"]
    assert heard[-1] == "nudge"
    assert "find_history" not in heard
