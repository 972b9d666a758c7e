"""What a lease holder writes, and what clients read: prompt, events, ends, views, conversations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from snapshot_store.transcript import CacheScope
from tests.services import ValkeyServer
from tests.turn_factory import LIMITS, accepted, claimed, complete, delta, entry, request, started, terminal, worker
from workers.turns import calls
from workers.turns.control import Patience, TurnControl, connect
from workers.turns.errors import ControlUnavailable, ParentMoved, StreamConflict, TurnEnded
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.history import history_digests
from workers.turns.outcomes import CancelKind, CancelOutcome
from workers.turns.records import ClaimedTurn


@pytest.fixture
def control(control_server: ValkeyServer) -> TurnControl:
    return TurnControl(connect(control_server.url))


@pytest.fixture
def turn(control: TurnControl) -> ClaimedTurn:
    accepted(control, "a")
    return claimed(control, "a")


def test_freeze_prompt_first_run_wins(control: TurnControl, turn: ClaimedTurn) -> None:
    control.run(calls.freeze_prompt(turn.lease, [1, 2], parent_id="p", root_id="r", template_time=5))
    frozen = control.run(calls.freeze_prompt(turn.lease, [9], parent_id=None, root_id="a", template_time=6))
    assert (frozen.prompt_ids, frozen.parent_id, frozen.root_id, frozen.template_time) == ((1, 2), "p", "r", 5)


def test_frozen_prompt_is_what_the_next_run_gets(control: TurnControl, turn: ClaimedTurn) -> None:
    control.run(calls.freeze_prompt(turn.lease, [1, 2**32 - 1], parent_id="p", root_id="r", template_time=5))
    control.run(calls.release(turn.lease))
    again = claimed(control, "a")
    assert (again.prompt_ids, again.parent_id, again.root_id, again.template_time) == ((1, 2**32 - 1), "p", "r", 5)


def test_append_with_reply_lost_is_answered_as_the_first_time(control: TurnControl, turn: ClaimedTurn) -> None:
    call = calls.append_events(turn.lease, [started(), delta(1)])
    assert control.run(call) == control.run(call)
    assert control.client.xlen("kvalet:-:stream:a") == 1


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([delta(2)], id="gap"),
        pytest.param([started(), TurnEvent(1, EventKind.DELTA, (9,), "other")], id="repeat-with-other-content"),
        pytest.param([delta(1)], id="repeat-cut-otherwise"),
    ],
)
def test_append_of_anything_but_the_next_events_raises(
    control: TurnControl, turn: ClaimedTurn, events: list[TurnEvent]
) -> None:
    control.run(calls.append_events(turn.lease, [started(), delta(1)] if events[0].number < 2 else [started()]))
    with pytest.raises(StreamConflict):
        control.run(calls.append_events(turn.lease, events))


def test_commit_with_reply_lost_is_answered_as_the_first_time(control: TurnControl, turn: ClaimedTurn) -> None:
    accepted(control, "b", parent_id="a")
    call = calls.commit(turn.lease, entry(turn), [started(), terminal(1)])
    assert control.run(call) == control.run(call)
    assert control.client.xlen("kvalet:-:stream:a") == 1


def test_commit_writes_transcript_terminal_event_and_expiries(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    ttl = control.client.ttl
    assert (ttl("kvalet:-:stream:a"), ttl("kvalet:-:turn:a"), ttl("kvalet:local:transcript:a")) == (
        LIMITS.stream_ttl_s, LIMITS.retention_s, LIMITS.retention_s,
    )  # fmt: skip


def test_commit_with_store_false_ends_with_its_stream(control: TurnControl) -> None:
    accepted(control, "a", store=False)
    complete(control, claimed(control, "a"))
    assert [control.client.ttl(f"kvalet:{key}:a") for key in ("local:transcript", "-:turn", "-:stream")] == [
        LIMITS.stream_ttl_s
    ] * 3


def test_commit_extends_the_life_of_ancestors(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    control.client.expire("kvalet:local:transcript:a", 60)
    accepted(control, "b", parent_id="a")
    complete(control, claimed(control, "b"), ancestors=["a"])
    assert control.client.ttl("kvalet:local:transcript:a") == LIMITS.retention_s


def test_commit_on_another_parent_than_the_head_raises(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    turn = claimed(control, "a")
    with pytest.raises(ParentMoved):
        control.run(calls.commit(turn.lease, entry(turn, parent_id="elsewhere"), [terminal(0)]))


def test_commit_after_cancel_has_ended_the_turn_raises(control: TurnControl) -> None:
    accepted(control, "a")
    turn = claimed(control, "a", worker(lease_s=0.05))
    time.sleep(0.06)
    control.run(calls.cancel("local", "a"))
    with pytest.raises(TurnEnded) as error:
        complete(control, turn)
    assert error.value.state == "cancelled"


def test_commit_leaves_no_trace_in_queues_and_counters(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    keys = {key.decode() for key in control.client.scan_iter()}
    assert {key for key in keys if ":claim:" not in key} == {
        "kvalet:-:turn:a", "kvalet:-:stream:a", "kvalet:local:transcript:a", "kvalet:-:open", "kvalet:-:service-ms",
    }  # fmt: skip
    assert control.client.hgetall("kvalet:-:open") == {b"tiny": b"0"}


def test_finish_failed_keeps_the_head(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    control.run(calls.finish(claimed(control, "a").lease, [terminal(0, TurnState.FAILED)]))
    view = control.run(calls.get_conversation("local", "conv"))
    assert view is not None and view.head is None


def test_cancel_of_queued_turn_ends_it_at_once_with_a_terminal_event(control: TurnControl) -> None:
    accepted(control, "a")
    assert control.run(calls.cancel("local", "a")) == CancelOutcome(CancelKind.ENDED, TurnState.CANCELLED)
    assert [fields[b"n"] for _, fields in control.client.xrange("kvalet:-:stream:a")] == [b"0"]
    assert control.run(calls.claim("a", worker())) is None


def test_cancel_of_running_turn_is_told_in_append_renew_and_control_stream(
    control: TurnControl, turn: ClaimedTurn
) -> None:
    assert control.run(calls.cancel("local", "a")).kind is CancelKind.REQUESTED
    control.run(calls.cancel("local", "a"))
    assert control.run(calls.append_events(turn.lease, [started()])).stop is TurnState.CANCELLED
    assert control.run(calls.renew([turn.lease])).stop == {"a": TurnState.CANCELLED}
    notes = control.client.xrange("kvalet:-:control:w1")
    assert [note for _, note in notes] == [{b"turn": b"a", b"stop": b"cancelled"}]


@pytest.mark.parametrize("turn_id", ["nowhere", "../x", "a"])
def test_cancel_of_unknown_or_foreign_turn_finds_nothing(control: TurnControl, turn_id: str) -> None:
    accepted(control, "a", tenant="owner")
    assert control.run(calls.cancel("stranger", turn_id)).kind is CancelKind.NOT_FOUND


def test_view_of_running_turn_shows_text_so_far(control: TurnControl, turn: ClaimedTurn) -> None:
    control.run(calls.append_events(turn.lease, [started(), delta(1)]))
    view = control.run(calls.get_turn("local", "a"))
    assert view is not None
    assert (view.state, view.output_text, view.next_number, view.worker_id) == (TurnState.IN_PROGRESS, "t1 ", 2, "w1")


def test_view_of_committed_turn_outlives_its_stream(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    control.client.delete("kvalet:-:stream:a")
    view = control.run(calls.get_turn("local", "a"))
    assert view is not None
    assert (view.state, view.output_text, view.usage, view.finish_reason) == (
        TurnState.COMPLETED, "t1 t2 ", {"output_tokens": 2}, "stop",
    )  # fmt: skip
    assert view.transcript == entry(turn)


def test_view_of_another_tenants_turn_is_none(control: TurnControl, turn: ClaimedTurn) -> None:
    assert control.run(calls.get_turn("stranger", "a")) is None


def test_delete_hides_a_turn_and_keeps_what_a_later_turn_needs(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    accepted(control, "b", parent_id="a")
    child = claimed(control, "b")
    control.run(calls.delete_response("local", "a"))
    assert control.run(calls.get_turn("local", "a")) is None
    assert control.client.exists("kvalet:local:transcript:a") == 1
    complete(control, child)


def test_delete_of_the_last_branch_deletes_hidden_ancestors(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    accepted(control, "b", parent_id="a")
    complete(control, claimed(control, "b"))
    for turn_id in ("a", "b"):
        assert control.run(calls.delete_response("local", turn_id)).kind is CancelKind.ENDED
    assert [key for key in control.client.scan_iter() if key.endswith((b":a", b":b"))] == []


def test_delete_of_deleted_turn_finds_nothing(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    control.run(calls.delete_response("local", "a"))
    assert control.run(calls.delete_response("local", "a")).kind is CancelKind.NOT_FOUND


def test_conversation_follows_its_commits(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv", metadata={"topic": "x"}))
    for turn_id in ("a", "b"):
        accepted(control, turn_id, conversation_id="conv", scope=CacheScope.CONVERSATION)
        complete(control, claimed(control, turn_id))
    view = control.run(calls.get_conversation("local", "conv"))
    entries = control.run(calls.conversation_entries("local", "conv"))
    assert view is not None and entries is not None
    assert (view.head, view.root_id, view.metadata, view.num_turns, view.open_turns, view.scope) == (
        "b", "a", {"topic": "x"}, 2, (), CacheScope.CONVERSATION,
    )  # fmt: skip
    assert [(e.turn_id, e.parent_id, e.root_id) for e in entries] == [("a", None, "a"), ("b", "a", "a")]


def test_conversation_scope_is_that_of_its_first_turn(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv", scope=CacheScope.CONVERSATION)
    complete(control, claimed(control, "a"))
    accepted(control, "b", conversation_id="conv", scope=CacheScope.TENANT)
    assert claimed(control, "b").request.scope is CacheScope.CONVERSATION


def test_added_messages_come_before_the_next_turns_own(control: TurnControl) -> None:
    first, second = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    control.run(calls.create_conversation("local", "conv", messages=[first]))
    call = calls.add_messages("local", "conv", [second], change_id="c1")
    control.run(call)
    control.run(call)
    accepted(control, "a", conversation_id="conv")
    assert claimed(control, "a").request.messages == (first, second, {"role": "user", "content": "hi"})


def test_added_messages_of_a_failed_turn_go_to_the_next(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv", messages=[{"role": "system", "content": "s"}]))
    accepted(control, "a", conversation_id="conv")
    control.run(calls.cancel("local", "a"))
    accepted(control, "b", conversation_id="conv")
    assert len(claimed(control, "b").request.messages) == 2


def test_deleted_conversation_is_not_brought_back_by_an_open_turn(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    turn = claimed(control, "a")
    assert control.run(calls.delete_conversation("local", "conv")) is True
    complete(control, turn)
    assert control.run(calls.get_conversation("local", "conv")) is None
    assert control.run(calls.create_conversation("local", "conv")) is None
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.COMPLETED


@pytest.mark.parametrize(
    "call",
    [
        calls.get_conversation("stranger", "conv"),
        calls.update_conversation("stranger", "conv", {}),
        calls.create_conversation("stranger", "conv"),
        calls.conversation_entries("stranger", "conv"),
        calls.add_messages("stranger", "conv", [{"role": "user", "content": "x"}], change_id="c"),
    ],
    ids=lambda call: call.script.name,
)
def test_conversation_of_another_tenant_is_none(control: TurnControl, call: object) -> None:
    control.run(calls.create_conversation("local", "conv"))
    before = control.client.dump("kvalet:-:conversation:conv")
    assert control.run(call) is None  # type: ignore[arg-type]
    assert control.client.dump("kvalet:-:conversation:conv") == before


def test_history_of_stateless_chat_finds_its_longest_reply(control: TurnControl, turn: ClaimedTurn) -> None:
    chat = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "ho"), ("user", "and?"))]
    owner = {"tenant": "local", "model": "tiny", "scope": CacheScope.TENANT, "key_id": "k"}
    complete(control, turn, history_digest=history_digests(chat[:2], **owner)[-1])
    assert control.run(calls.find_history("local", history_digests(chat, **owner))) == (2, "a")


@pytest.mark.parametrize(
    "change", [{"tenant": "other"}, {"model": "other"}, {"scope": CacheScope.KEY}], ids=lambda c: next(iter(c))
)
def test_history_of_another_owner_is_not_found(
    control: TurnControl, turn: ClaimedTurn, change: dict[str, object]
) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    owner = {"tenant": "local", "model": "tiny", "scope": CacheScope.TENANT, "key_id": "k"}
    complete(control, turn, history_digest=history_digests(chat, **owner)[-1])
    assert control.run(calls.find_history("local", history_digests(chat, **{**owner, **change}))) is None


def test_history_of_expired_transcript_is_not_found(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn, history_digest=b"h" * 16)
    control.client.delete("kvalet:local:transcript:a")
    assert control.run(calls.find_history("local", [b"h" * 16])) is None


def test_calls_survive_a_flushed_script_cache(control: TurnControl, turn: ClaimedTurn) -> None:
    control.client.script_flush()
    complete(control, turn)


def test_durable_call_on_a_server_with_aof_is_confirmed(control: TurnControl) -> None:
    control.run(calls.accept(replace(request("a"), durability="host"), LIMITS))
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.QUEUED


def test_call_on_a_dead_server_raises_within_its_patience(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    control = TurnControl(connect(server.url), Patience(outage_s=0.3))
    server.kill()
    begin = time.monotonic()
    with pytest.raises(ControlUnavailable):
        control.run(calls.get_turn("local", "a"))
    assert time.monotonic() - begin < 2


def test_call_outlives_a_restart_within_its_patience(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    control = TurnControl(connect(server.url), Patience(outage_s=5))
    accepted(control, "a")
    server.restart()
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.QUEUED


def test_commit_on_another_parent_than_the_named_one_raises(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn)
    accepted(control, "b", parent_id="a")
    child = claimed(control, "b")
    with pytest.raises(ParentMoved):
        control.run(calls.commit(child.lease, entry(child, parent_id=None), [terminal(0)]))


def test_commit_with_a_gap_before_its_events_raises(control: TurnControl, turn: ClaimedTurn) -> None:
    with pytest.raises(StreamConflict):
        control.run(calls.commit(turn.lease, entry(turn), [terminal(1)]))


def test_commit_in_a_conversation_is_kept_even_with_store_false(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv", store=False)
    complete(control, claimed(control, "a"))
    assert control.client.ttl("kvalet:local:transcript:a") == LIMITS.retention_s


def test_commit_in_a_deleted_conversation_writes_nothing_into_it(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    turn = claimed(control, "a")
    control.run(calls.delete_conversation("local", "conv"))
    before = control.client.hgetall("kvalet:-:conversation:conv")
    complete(control, turn)
    assert control.client.hgetall("kvalet:-:conversation:conv") == before


def test_end_drops_the_frozen_prompt_and_the_deadline(control: TurnControl) -> None:
    accepted(control, "a", deadline=time.time() + 60)
    turn = claimed(control, "a")
    control.run(calls.freeze_prompt(turn.lease, [1], parent_id=None, root_id="a", template_time=1))
    complete(control, turn)
    assert control.client.hget("kvalet:-:turn:a", "prompt_ids") is None
    assert control.client.exists("kvalet:-:deadlines") == 0


def test_turn_deleted_while_it_runs_ends_with_its_stream(control: TurnControl, turn: ClaimedTurn) -> None:
    assert control.run(calls.delete_response("local", "a")).kind is CancelKind.REQUESTED
    complete(control, turn)
    assert control.client.ttl("kvalet:-:turn:a") == LIMITS.stream_ttl_s


@pytest.mark.parametrize("order", ["delete-first", "fail-first"])
def test_deleted_turn_goes_with_its_last_failed_follow_up(control: TurnControl, turn: ClaimedTurn, order: str) -> None:
    complete(control, turn)
    accepted(control, "b", parent_id="a")
    steps = [calls.delete_response("local", "a"), calls.cancel("local", "b")]
    for call in steps if order == "delete-first" else reversed(steps):
        control.run(call)
    assert [key for key in control.client.scan_iter() if key.endswith(b":a")] == []


def test_history_prefers_the_longest_of_two_known_ones(control: TurnControl, turn: ClaimedTurn) -> None:
    complete(control, turn, history_digest=b"1" * 16)
    accepted(control, "b")
    complete(control, claimed(control, "b"), history_digest=b"2" * 16)
    assert control.run(calls.find_history("local", [b"1" * 16, b"2" * 16])) == (1, "b")
