"""Leases on a real server: claim, renew, release, expiry, crashes, and who goes first."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import (
    LIMITS,
    accept_turn,
    accepted,
    claimed,
    complete,
    delta,
    entry,
    free,
    request,
    started,
    terminal,
    worker,
)
from workers.registry import WorkerRecord, beat, retire
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.errors import StaleLease, TurnEnded
from workers.turns.events import TurnState
from workers.turns.outcomes import CancelKind, Dispatch
from workers.turns.records import ClaimedTurn

QUICK = worker("quick", lease_s=0.05)


@pytest.fixture
def control(control_server: ValkeyServer) -> Iterator[TurnControl]:
    yield TurnControl(connect(control_server.url))


def crash(control: TurnControl, turn_id: str) -> ClaimedTurn:
    """Claim a turn and let the supervisor report the worker's death."""
    turn = claimed(control, turn_id)
    control.run(calls.end_worker_leases("w1"))
    return turn


def test_claim_new_turn_gives_first_epoch_and_the_request(control: TurnControl) -> None:
    sent = request("a", stop=("x",), tools=({"type": "function"},))
    control.run(calls.accept(sent, LIMITS))
    turn = claimed(control, "a")
    assert (turn.lease.epoch, turn.request, turn.prompt_ids, turn.next_number) == (1, sent, None, 0)


def test_claim_with_reply_lost_gives_the_same_turn_again(control: TurnControl) -> None:
    accepted(control, "a")
    accepted(control, "b")
    call = calls.claim("a", worker())
    assert control.run(call) == control.run(call)


def test_claim_tells_the_numerics_of_earlier_runs_and_which_of_them_have_emitted_tokens(control: TurnControl) -> None:
    accepted(control, "a")
    told = []
    runs = (("a1", []), ("b2", [started()]), ("b2", [delta(1)]), ("c3", []), ("a1", [delta(2)]), ("d4", []))
    for numerics, events in runs:
        call = calls.claim("a", worker(numerics=numerics))
        turn = control.run(call)
        assert turn is not None
        assert control.run(call) == turn, "with the reply lost"
        told.append((turn.earlier_numerics, turn.emitted_numerics))
        if events:
            control.run(calls.append_events(turn.lease, events))
        control.run(calls.release(turn.lease))
    assert told == [
        ((), ()), (("a1",), ()), (("a1",), ()), (("a1", "b2"), ("b2",)), (("a1", "b2", "c3"), ("b2",)),
        (("a1", "b2", "c3"), ("b2", "a1")),
    ]  # fmt: skip


def test_claim_of_leased_turn_gives_nothing(control: TurnControl) -> None:
    accepted(control, "a")
    claimed(control, "a")
    assert control.run(calls.claim("a", worker("w2"))) is None


def test_claim_of_unknown_turn_gives_nothing(control: TurnControl) -> None:
    assert control.run(calls.claim("../x", worker())) is None


def test_claim_by_worker_of_other_model_gives_nothing(control: TurnControl) -> None:
    accepted(control, "a")
    assert control.run(calls.claim("a", worker(models=("other",)))) is None


def test_claim_of_forced_turn_by_other_worker_gives_nothing(control: TurnControl) -> None:
    free(control, "w2", 1)
    accepted(control, "a", worker="w2")
    assert control.run(calls.claim("a", worker("w1"))) is None
    assert claimed(control, "a", worker("w2")).request.turn_id == "a"


def test_claim_of_second_turn_of_conversation_gives_nothing_until_commit(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    accepted(control, "b", conversation_id="conv")
    turn = claimed(control, "b")
    assert turn.request.turn_id == "a"
    assert control.run(calls.claim("b", worker())) is None
    assert complete(control, turn).dispatches == (Dispatch("b", "tiny", None),)
    assert claimed(control, "b").parent_id == "a"


def test_claim_takes_higher_priority_first(control: TurnControl) -> None:
    accepted(control, "low", priority=0)
    accepted(control, "high", priority=2)
    assert claimed(control, "low").request.turn_id == "high"


def test_claim_takes_near_deadline_first(control: TurnControl) -> None:
    accepted(control, "a")
    accepted(control, "b", deadline=time.time() + 5)
    assert claimed(control, "a").request.turn_id == "b"


def test_claim_takes_the_tenant_served_least(control: TurnControl) -> None:
    for n in range(3):
        accepted(control, f"greedy{n}", tenant="greedy")
    accepted(control, "modest", tenant="modest")
    complete(control, claimed(control, "greedy0"), served_tokens=500)
    assert claimed(control, "greedy1").request.turn_id == "modest"


def test_claim_low_priority_after_a_minute_counts_as_the_highest(control: TurnControl) -> None:
    accepted(control, "old")
    aged = int(control.client.hget("kvalet:-:turn:old", "ready_ms")) - 61_000
    control.client.hset("kvalet:-:turn:old", "ready_ms", aged)
    control.client.zadd("kvalet:-:queued:tiny:local", {"old": aged})
    accepted(control, "urgent", tenant="other", priority=5)
    accepted(control, "urgent2", tenant="other", priority=5)
    complete(control, claimed(control, "urgent"), served_tokens=10)
    assert claimed(control, "urgent2").request.turn_id == "old"


def test_follow_up_goes_to_the_hot_worker_while_it_has_a_free_slot(control: TurnControl) -> None:
    free(control, "w1", 2)
    accepted(control, "a")
    complete(control, claimed(control, "a"))
    assert accept_turn(control, "b", parent_id="a").dispatch == Dispatch("b", "tiny", "w1")


def test_follow_up_goes_to_the_model_queue_when_the_hot_worker_is_full(control: TurnControl) -> None:
    free(control, "w1", 1)
    accepted(control, "a")
    complete(control, claimed(control, "a"))
    accepted(control, "x")
    claimed(control, "x")
    assert accept_turn(control, "b", parent_id="a").dispatch == Dispatch("b", "tiny", None)


def test_other_worker_takes_a_hot_turn_only_after_the_bounded_wait(control: TurnControl) -> None:
    free(control, "w1", 2)
    accepted(control, "a")
    complete(control, claimed(control, "a"))
    accepted(control, "b", parent_id="a")
    other = worker("w2", affinity_wait_s=0.2)
    assert control.run(calls.claim("another", other)) is None
    time.sleep(0.25)
    assert claimed(control, "another", other).request.turn_id == "b"


def test_renew_keeps_a_lease_beyond_its_first_life(control: TurnControl) -> None:
    accepted(control, "a")
    turn = claimed(control, "a", worker(lease_s=0.3))
    for _ in range(4):
        time.sleep(0.1)
        assert control.run(calls.renew([turn.lease])).kept == {"a"}
    assert control.run(calls.sweep()) == ()


def test_renew_of_lost_lease_names_it(control: TurnControl) -> None:
    accepted(control, "a")
    turn = crash(control, "a")
    assert control.run(calls.renew([turn.lease])).lost == {"a"}


def test_expired_lease_is_taken_over_with_the_next_epoch(control: TurnControl) -> None:
    accepted(control, "a")
    first = claimed(control, "a", QUICK)
    control.run(calls.append_events(first.lease, [started(), delta(1, 7)]))
    time.sleep(0.06)
    second = claimed(control, "a", worker("w2"))
    assert (second.lease.epoch, second.crashes, second.emitted_ids, second.next_number, second.started) == (
        2, 1, (7,), 2, True,
    )  # fmt: skip


def test_stale_writer_changes_neither_stream_nor_record(control: TurnControl) -> None:
    accepted(control, "a")
    stale = claimed(control, "a", QUICK)
    time.sleep(0.06)
    fresh = claimed(control, "a", worker("w2"))
    before = control.client.dump("kvalet:-:turn:a"), control.client.dump("kvalet:-:stream:a")
    for call in (
        calls.append_events(stale.lease, [started()]),
        calls.commit(stale.lease, entry(stale), [terminal(0)]),
        calls.finish(stale.lease, [terminal(0, TurnState.FAILED)]),
        calls.freeze_prompt(stale.lease, [1], parent_id=None, root_id="a", template_time=1),
        calls.release(stale.lease),
    ):
        with pytest.raises(StaleLease):
            control.run(call)
    assert (control.client.dump("kvalet:-:turn:a"), control.client.dump("kvalet:-:stream:a")) == before
    complete(control, fresh)


def test_release_makes_the_turn_claimable_and_counts_no_crash(control: TurnControl) -> None:
    accepted(control, "a")
    call = calls.release(claimed(control, "a").lease)
    assert control.run(call).dispatches == (Dispatch("a", "tiny", None),)
    assert control.run(call).dispatches == (Dispatch("a", "tiny", None),)
    assert claimed(control, "a", worker("w2")).crashes == 0


def test_turn_after_two_crashes_runs_solo(control: TurnControl) -> None:
    accepted(control, "a")
    assert [crash(control, "a").solo for _ in range(3)] == [False, False, True]


def test_turn_after_three_solo_crashes_fails(control: TurnControl) -> None:
    accepted(control, "a")
    for _ in range(5):
        crash(control, "a")
    view = control.run(calls.get_turn("local", "a"))
    assert view is not None
    assert (view.state, (view.error or {})["code"], view.crashes) == (TurnState.FAILED, "worker_crashed", 5)


def test_end_worker_leases_of_older_boots_spares_the_new_process(control: TurnControl) -> None:
    accepted(control, "a")
    accepted(control, "b")
    old = claimed(control, "a", worker(boot_id="old"))
    new = claimed(control, "b", worker(boot_id="new"))
    assert [d.turn_id for d in control.run(calls.end_worker_leases("w1", except_boot_id="new"))] == ["a"]
    assert control.run(calls.renew([old.lease, new.lease])).kept == {"b"}


def test_sweep_returns_an_expired_turn_at_once_and_only_once(control: TurnControl) -> None:
    accepted(control, "a")
    claimed(control, "a", QUICK)
    time.sleep(0.06)
    assert [control.run(calls.sweep()), control.run(calls.sweep())] == [(Dispatch("a", "tiny", None),), ()]


def test_sweep_sends_a_runnable_turn_again_with_doubling_delay(control: TurnControl) -> None:
    accepted(control, "a")
    delays = []
    for _ in range(5):
        due = control.client.zscore("kvalet:-:due", "a")
        control.client.zadd("kvalet:-:due", {"a": 0})
        assert control.run(calls.sweep()) == (Dispatch("a", "tiny", None),)
        delays.append(round((control.client.zscore("kvalet:-:due", "a") - time.time() * 1000) / 1000))
        assert due is not None
    assert delays == [10, 20, 40, 60, 60]


def test_sweep_sends_a_turn_that_waits_beside_an_idle_slot_after_two_seconds(control: TurnControl) -> None:
    free(control, "w1", 1)
    for turn_id in ("a", "b"):
        accepted(control, turn_id)
    assert control.run(calls.sweep()) == ()
    for turn_id in ("a", "b"):
        control.client.hincrby(f"kvalet:-:turn:{turn_id}", "sent_ms", -2000)
    assert len(control.run(calls.sweep())) == 1


def test_sweep_sends_nothing_to_a_queue_that_holds_a_message_for_every_turn(control: TurnControl) -> None:
    for turn_id in ("a", "b"):
        accepted(control, turn_id)
    sent = []
    for num_messages in range(4):
        control.client.zadd("kvalet:-:due", {"a": 0, "b": 0})
        sent.append(len(control.run(calls.sweep())))
        control.client.delete("kvalet.model.tiny")
        control.client.rpush("kvalet.model.tiny", *["message"] * (num_messages + 1))
    assert sent == [2, 1, 0, 0]


def test_sweep_fails_a_turn_whose_named_worker_has_stayed_away(control: TurnControl) -> None:
    free(control, "w2", 1)
    accepted(control, "a", worker="w2")
    control.run(calls.end_worker_leases("w2"))
    control.run(retire("w2", "w2-boot"))
    control.run(calls.sweep(named_worker_wait_s=0.2))
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.QUEUED
    time.sleep(0.25)
    control.run(calls.sweep(named_worker_wait_s=0.2))
    view = control.run(calls.get_turn("local", "a"))
    assert view is not None and view.error is not None
    assert (view.state, view.error["code"]) == (TurnState.FAILED, "worker_gone")


def test_sweep_keeps_a_turn_whose_named_worker_comes_back_in_time(control: TurnControl) -> None:
    free(control, "w2", 1)
    accepted(control, "a", worker="w2")
    control.run(retire("w2", "w2-boot"))
    control.run(calls.sweep(named_worker_wait_s=0.2))
    free(control, "w2", 1)
    control.run(calls.sweep(named_worker_wait_s=0.2))
    time.sleep(0.25)
    control.run(retire("w2", "w2-boot"))
    control.run(calls.sweep(named_worker_wait_s=0.2))
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.QUEUED
    free(control, "w2", 1)
    assert claimed(control, "a", worker("w2")).request.turn_id == "a"


def test_sweep_fails_the_turn_of_a_named_worker_that_died_while_it_ran(control: TurnControl) -> None:
    free(control, "w2", 1)
    accepted(control, "a", worker="w2")
    turn = claimed(control, "a", worker("w2", lease_s=0.05))
    control.run(calls.append_events(turn.lease, [started(), delta(1)]))
    control.run(retire("w2", "w2-boot"))
    time.sleep(0.06)
    for _ in range(2):
        control.run(calls.sweep(named_worker_wait_s=0))
    view = control.run(calls.get_turn("local", "a"))
    assert view is not None and view.error is not None
    assert (view.error["code"], view.crashes, view.output_text) == ("worker_gone", 1, "t1 ")


def test_sweep_ends_a_turn_whose_deadline_has_passed(control: TurnControl) -> None:
    accepted(control, "a", deadline=time.time() - 1)
    control.run(calls.sweep())
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.EXPIRED


def test_sweep_tells_the_holder_of_a_turn_whose_deadline_has_passed(control: TurnControl) -> None:
    accepted(control, "a", deadline=time.time() + 0.05)
    turn = claimed(control, "a")
    time.sleep(0.06)
    control.run(calls.sweep())
    assert control.run(calls.append_events(turn.lease, [started()])).stop is TurnState.EXPIRED


def test_cancelled_turn_whose_worker_died_ends_cancelled(control: TurnControl) -> None:
    accepted(control, "a")
    turn = claimed(control, "a")
    control.run(calls.cancel("local", "a"))
    control.run(calls.end_worker_leases("w1"))
    with pytest.raises(TurnEnded):
        control.run(calls.append_events(turn.lease, [started()]))
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.CANCELLED


def test_end_of_a_waiting_turn_does_not_offer_the_running_one_again(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    accepted(control, "b", conversation_id="conv")
    claimed(control, "a")
    assert control.run(calls.cancel("local", "b")).dispatches == ()
    assert control.client.zcard("kvalet:-:queued:tiny:local") == 0


def test_follow_up_avoids_a_draining_worker(control: TurnControl) -> None:
    control.run(beat(WorkerRecord("w1", "b", "tiny", slots=4, free=0, draining=True)))
    accepted(control, "a")
    complete(control, claimed(control, "a"))
    assert accept_turn(control, "b", parent_id="a").dispatch == Dispatch("b", "tiny", None)


def test_conversation_goes_back_to_its_worker(control: TurnControl) -> None:
    free(control, "w1", 2)
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    complete(control, claimed(control, "a"))
    assert accept_turn(control, "b", conversation_id="conv").dispatch == Dispatch("b", "tiny", "w1")


def test_other_worker_that_got_the_hot_turns_own_message_takes_it_at_once(control: TurnControl) -> None:
    free(control, "w1", 2)
    accepted(control, "a")
    complete(control, claimed(control, "a"))
    accepted(control, "b", parent_id="a")
    assert claimed(control, "b", worker("w2")).request.turn_id == "b"


def test_forced_turn_of_a_model_its_worker_lacks_is_not_given(control: TurnControl) -> None:
    free(control, "w1", 1, model="other")
    accepted(control, "a", worker="w1", model="other")
    assert control.run(calls.claim("a", worker("w1"))) is None


def test_message_of_a_forced_turn_used_for_another_is_sent_again_soon(control: TurnControl) -> None:
    free(control, "w1", 1)
    accepted(control, "first", worker="w1")
    accepted(control, "forced", worker="w1")
    assert claimed(control, "forced").request.turn_id == "first"
    assert control.client.zscore("kvalet:-:due", "forced") - time.time() * 1000 < 2000


def test_turn_freed_by_a_claim_that_cannot_take_it_is_sent_by_the_next_sweep(control: TurnControl) -> None:
    free(control, "quick", 1)
    accepted(control, "a", worker="quick")
    claimed(control, "a", QUICK)
    time.sleep(0.06)
    assert control.run(calls.claim("a", worker("w2"))) is None
    assert control.run(calls.sweep()) == (Dispatch("a", "tiny", "quick"),)


def test_cancel_after_the_first_life_of_a_renewed_lease_tells_its_worker(control: TurnControl) -> None:
    accepted(control, "a")
    turn = claimed(control, "a", worker(lease_s=0.2))
    time.sleep(0.12)
    control.run(calls.renew([turn.lease]))
    time.sleep(0.12)
    assert control.run(calls.cancel("local", "a")).kind is CancelKind.REQUESTED
