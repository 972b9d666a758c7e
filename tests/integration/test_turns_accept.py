"""Accepting turns on a real server: limits, idempotency, branches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import LIMITS, accept_turn, accepted, claimed, complete, free, request, terminal, worker
from workers.registry import retire
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.errors import BadTurnData
from workers.turns.events import TurnState
from workers.turns.outcomes import AcceptKind, AcceptOutcome, Dispatch
from workers.turns.records import QueueMessage

MESSAGE = QueueMessage(b"to ", b"!")


@pytest.fixture
def control(control_server: ValkeyServer) -> TurnControl:
    return TurnControl(connect(control_server.url))


def test_accept_first_turn_of_branch_asks_for_model_queue(control: TurnControl) -> None:
    outcome = accept_turn(control, "a")
    assert outcome == AcceptOutcome(AcceptKind.ACCEPTED, "a", Dispatch("a", "tiny", None))


def test_accept_with_reply_lost_answers_the_same_again(control: TurnControl) -> None:
    call = calls.accept(request("a"), LIMITS)
    assert control.run(call) == control.run(call)
    assert control.client.hgetall("kvalet:-:open") == {b"tiny": b"1"}


def test_accept_with_forced_worker_asks_for_its_queue(control: TurnControl) -> None:
    free(control, "w7", 1)
    assert accept_turn(control, "a", worker="w7").dispatch == Dispatch("a", "tiny", "w7")


def test_accept_with_a_message_pushes_it_in_the_same_step_and_only_once(control: TurnControl) -> None:
    call = calls.accept(request("a"), LIMITS, message=MESSAGE)
    outcomes = [control.run(call) for _ in range(2)]
    assert [outcome.dispatch for outcome in outcomes] == [None, None]
    assert control.client.lrange("kvalet.model.tiny", 0, -1) == [b'to "kvalet.model.tiny"!']


def test_accept_pushes_the_message_of_a_forced_turn_to_its_worker(control: TurnControl) -> None:
    free(control, "w7", 1)
    control.run(calls.accept(request("a", worker="w7"), LIMITS, message=MESSAGE))
    assert control.client.lrange("kvalet.worker.w7", 0, -1) == [b'to "kvalet.worker.w7"!']


def test_accept_pushes_no_message_of_a_turn_that_waits_for_its_parent_or_is_refused(control: TurnControl) -> None:
    accepted(control, "parent")
    control.run(calls.accept(request("child", parent_id="parent"), LIMITS, message=MESSAGE))
    control.run(calls.accept(request("orphan", parent_id="nobody"), LIMITS, message=MESSAGE))
    assert not control.client.keys("kvalet.*")


@pytest.mark.parametrize("named", ["nobody", "elsewhere", "gone"])
def test_accept_for_a_worker_that_is_not_there_is_refused_and_writes_nothing(control: TurnControl, named: str) -> None:
    free(control, "elsewhere", 1, model="other")
    free(control, "gone", 1)
    control.run(retire("gone", "gone-boot"))
    before = control.client.dbsize()
    assert accept_turn(control, "a", worker=named).kind is AcceptKind.WORKER_NOT_FOUND
    assert control.client.dbsize() == before


def test_accept_again_under_a_key_answers_the_turn_of_a_worker_that_has_gone(control: TurnControl) -> None:
    free(control, "w7", 1)
    calls_of_one_key = [
        calls.accept(request(turn_id, worker="w7"), LIMITS, idempotency_key="k", body_digest=b"b") for turn_id in "ab"
    ]
    control.run(calls_of_one_key[0])
    control.run(retire("w7", "w7-boot"))
    outcome = control.run(calls_of_one_key[1])
    assert (outcome.kind, outcome.turn_id) == (AcceptKind.EXISTING, "a")


def test_accept_over_model_limit_answers_queue_full_with_retry_after(control: TurnControl) -> None:
    limits = replace(LIMITS, max_open_per_model=1)
    control.run(calls.accept(request(), limits))
    outcome = control.run(calls.accept(request(), limits))
    assert (outcome.kind, outcome.retry_after_s >= 1, outcome.dispatch) == (AcceptKind.QUEUE_FULL, True, None)


def test_accept_over_tenant_limit_leaves_other_tenants_alone(control: TurnControl) -> None:
    limits = replace(LIMITS, max_open_per_tenant=1)
    kinds = [control.run(calls.accept(request(tenant=t), limits)).kind for t in ("a", "a", "b")]
    assert kinds == [AcceptKind.ACCEPTED, AcceptKind.QUEUE_FULL, AcceptKind.ACCEPTED]


def test_accept_above_memory_fraction_answers_memory_full_and_writes_nothing(
    start_server: Callable[..., ValkeyServer],
) -> None:
    control = TurnControl(connect(start_server("control").url))
    control.client.config_set("maxmemory", int(control.client.info("memory")["used_memory"] * 1.1))
    assert accept_turn(control, "a").kind is AcceptKind.MEMORY_FULL
    assert control.client.exists("kvalet:-:turn:a") == 0


def test_commit_over_the_memory_limit_still_succeeds(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control", maxmemory="8mb")
    control = TurnControl(connect(server.url))
    accepted(control, "a")
    turn = claimed(control)
    control.client.config_set("maxmemory", "1mb")
    complete(control, turn)
    assert control.run(calls.get_turn_state("local", "a")) is TurnState.COMPLETED


def test_message_is_pushed_to_its_queue_on_a_server_without_memory(start_server: Callable[..., ValkeyServer]) -> None:
    control = TurnControl(connect(start_server("control", maxmemory="1").url))
    control.run(calls.push_message("kvalet.model.tiny", b"message"))
    assert control.client.lrange("kvalet.model.tiny", 0, -1) == [b"message"]


def test_idempotency_key_same_body_twenty_times_at_once_makes_one_turn(control: TurnControl) -> None:
    def post(n: int) -> AcceptOutcome:
        call = calls.accept(request(f"turn{n}"), LIMITS, idempotency_key="k1", body_digest=b"body")
        return control.run(call)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(post, range(20)))
    assert len({outcome.turn_id for outcome in outcomes}) == 1
    assert sorted(str(outcome.kind) for outcome in outcomes) == ["accepted"] + ["existing"] * 19


def test_idempotency_key_other_body_answers_conflict(control: TurnControl) -> None:
    control.run(calls.accept(request(), LIMITS, idempotency_key="k1", body_digest=b"one"))
    outcome = control.run(calls.accept(request(), LIMITS, idempotency_key="k1", body_digest=b"two"))
    assert outcome.kind is AcceptKind.KEY_CONFLICT


@pytest.mark.parametrize("other", [{"key_id": "other"}, {"tenant": "other"}])
def test_idempotency_key_of_other_owner_is_independent(control: TurnControl, other: dict[str, str]) -> None:
    control.run(calls.accept(request(), LIMITS, idempotency_key="k1", body_digest=b"one"))
    outcome = control.run(calls.accept(request(**other), LIMITS, idempotency_key="k1", body_digest=b"two"))
    assert outcome.kind is AcceptKind.ACCEPTED


def test_idempotency_key_after_completion_answers_the_same_turn(control: TurnControl) -> None:
    call = calls.accept(request("a"), LIMITS, idempotency_key="k1", body_digest=b"one")
    control.run(call)
    complete(control, claimed(control))
    again = control.run(calls.accept(request("b"), LIMITS, idempotency_key="k1", body_digest=b"one"))
    assert (again.kind, again.turn_id) == (AcceptKind.EXISTING, "a")


@pytest.mark.parametrize("state", [TurnState.FAILED, TurnState.CANCELLED, TurnState.EXPIRED])
def test_idempotency_key_after_failure_starts_a_new_turn(control: TurnControl, state: TurnState) -> None:
    control.run(calls.accept(request("a"), LIMITS, idempotency_key="k1", body_digest=b"one"))
    control.run(calls.finish(claimed(control).lease, [terminal(0, state)]))
    again = control.run(calls.accept(request("b"), LIMITS, idempotency_key="k1", body_digest=b"one"))
    assert (again.kind, again.turn_id) == (AcceptKind.ACCEPTED, "b")


def test_accept_with_open_parent_waits_and_runs_after_its_commit(control: TurnControl) -> None:
    accepted(control, "a")
    turn = claimed(control)
    assert accept_turn(control, "b", parent_id="a").dispatch is None
    assert control.run(calls.claim("b", worker())) is None
    assert complete(control, turn).dispatches == (Dispatch("b", "tiny", None),)
    child = claimed(control, "b")
    assert (child.parent_id, child.root_id, child.template_time) == ("a", "a", turn.template_time)


def test_accept_with_failed_parent_answers_parent_failed(control: TurnControl) -> None:
    accepted(control, "a")
    control.run(calls.cancel("local", "a"))
    assert accept_turn(control, parent_id="a").kind is AcceptKind.PARENT_FAILED


@pytest.mark.parametrize("owner", ["local", "other"])
def test_accept_with_unknown_or_foreign_parent_answers_not_found(control: TurnControl, owner: str) -> None:
    accepted(control, "a")
    complete(control, claimed(control))
    parent = "a" if owner == "other" else "nowhere"
    assert accept_turn(control, tenant=owner, parent_id=parent).kind is AcceptKind.PARENT_NOT_FOUND


@pytest.mark.parametrize("owner", ["local", "other"])
def test_accept_with_unknown_or_foreign_conversation_answers_not_found(control: TurnControl, owner: str) -> None:
    control.run(calls.create_conversation("local", "conv"))
    conversation = "conv" if owner == "other" else "nowhere"
    outcome = accept_turn(control, tenant=owner, conversation_id=conversation)
    assert outcome.kind is AcceptKind.CONVERSATION_NOT_FOUND


def test_waiting_child_of_failed_parent_ends_parent_failed(control: TurnControl) -> None:
    accepted(control, "a")
    accepted(control, "b", parent_id="a")
    accepted(control, "c", parent_id="b")
    control.run(calls.cancel("local", "a"))
    views = [control.run(calls.get_turn("local", turn_id)) for turn_id in ("b", "c")]
    assert [view and (view.state, (view.error or {})["code"]) for view in views] == [("failed", "parent_failed")] * 2


def test_conversation_turn_after_failed_one_continues_from_the_head(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    accepted(control, "a", conversation_id="conv")
    complete(control, claimed(control))
    accepted(control, "b", conversation_id="conv")
    accepted(control, "c", conversation_id="conv")
    control.run(calls.cancel("local", "b"))
    assert claimed(control, "c").parent_id == "a"


def test_accept_request_that_msgpack_cannot_hold_raises_naming_it(control: TurnControl) -> None:
    with pytest.raises(BadTurnData, match="value"):
        calls.accept(request(display={"x": object()}), LIMITS)


def test_accept_with_deleted_conversation_answers_not_found(control: TurnControl) -> None:
    control.run(calls.create_conversation("local", "conv"))
    control.run(calls.delete_conversation("local", "conv"))
    assert accept_turn(control, conversation_id="conv").kind is AcceptKind.CONVERSATION_NOT_FOUND


def test_accept_with_parent_whose_transcript_has_expired_answers_not_found(control: TurnControl) -> None:
    accepted(control, "a")
    complete(control, claimed(control))
    control.client.delete("kvalet:local:transcript:a")
    assert accept_turn(control, parent_id="a").kind is AcceptKind.PARENT_NOT_FOUND


def test_tenant_that_comes_back_starts_level_with_the_one_served_least(control: TurnControl) -> None:
    accepted(control, "a", tenant="busy")
    accepted(control, "b", tenant="busy")
    complete(control, claimed(control), served_tokens=500)
    accepted(control, "c", tenant="late")
    assert control.client.zscore("kvalet:-:tenants:tiny", "late") == 500
