"""C36: a client's retry makes a second job, or gets another request's answer.

Reported of several services (lykinsbd/naas#280, nensii21/devlink#1195, langgenius/dify#39685): the key is checked and
set in two steps, is not tied to the body, or is ignored. Here one script does all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.turn_factory import LIMITS, request
from tests.worker_process import CeleryWorker, Fleet
from workers.turns import calls
from workers.turns.events import TurnState
from workers.turns.outcomes import AcceptKind


def test_twenty_retries_at_once_make_one_execution(fleet: Fleet, start_worker: Callable[..., CeleryWorker]) -> None:
    start_worker("w1").wait_ready()

    def post(number: int) -> str:
        call = calls.accept(request(f"try{number}"), LIMITS, idempotency_key="k1", body_digest=b"same")
        outcome = fleet.control.run(call)
        if outcome.dispatch is not None:
            fleet.dispatcher.send(outcome.dispatch)
        return outcome.turn_id

    with ThreadPoolExecutor(10) as pool:
        turn_ids = set(pool.map(post, range(20)))
    (turn_id,) = turn_ids
    assert fleet.wait_end(turn_id) == [TurnState.COMPLETED]
    assert len(fleet.runs()) == 1


def test_same_key_other_prompt_is_refused_and_other_api_key_is_independent(fleet: Fleet) -> None:
    kinds = [
        fleet.control.run(calls.accept(request(**owner), LIMITS, idempotency_key="k1", body_digest=body)).kind
        for owner, body in (({}, b"one"), ({}, b"two"), ({"key_id": "other"}, b"two"))
    ]
    assert kinds == [AcceptKind.ACCEPTED, AcceptKind.KEY_CONFLICT, AcceptKind.ACCEPTED]


def test_two_requests_without_key_are_two_turns(fleet: Fleet) -> None:
    kinds = [fleet.control.run(calls.accept(request(), LIMITS, body_digest=b"same")).kind for _ in range(2)]
    assert kinds == [AcceptKind.ACCEPTED] * 2
