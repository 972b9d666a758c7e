"""The fleet as control knows it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import accepted, claimed, complete
from workers.registry import (
    MAX_BUNDLE_BYTES,
    ModelDemand,
    ModelRecord,
    WorkerRecord,
    beat,
    demand,
    get_bundle,
    list_models,
    list_workers,
    publish_model,
    quarantine,
    quarantined,
    retire,
    take_dead_workers,
)
from workers.turns.codec import pack, unpack
from workers.turns.control import TurnControl, connect
from workers.turns.errors import BadTurnData
from workers.turns.keys import LUA_KEYS

RECORD = WorkerRecord("w1", "boot", "tiny", slots=4, free=0, hot_branches=("b1",), info={"pages": 3})
MODEL_RECORD = ModelRecord("tiny", "d1", 256, 1.5, {"kv": "k8v4"})


@pytest.fixture
def control(control_server: ValkeyServer) -> TurnControl:
    return TurnControl(connect(control_server.url))


def test_workers_lists_what_was_beaten_with_the_servers_time(control: TurnControl) -> None:
    control.run(beat(RECORD))
    (seen,) = control.run(list_workers())
    assert (seen.hot_branches, seen.info, abs(seen.seen_at - time.time()) < 5) == (("b1",), {"pages": 3}, True)


def _rewrite_worker(control: TurnControl, change: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    """Beat, then change the packed record as a process of another version would have written it."""
    control.run(beat(RECORD))
    key = LUA_KEYS["worker"] + RECORD.worker_id
    body = {**unpack("worker", control.client.hget(key, "record")), **change}
    control.client.hset(key, "record", pack({name: body[name] for name in body if name not in without}))


def _rewrite_model(control: TurnControl, change: dict[str, Any]) -> None:
    control.run(publish_model(MODEL_RECORD, b"bundle"))
    control.client.hset(LUA_KEYS["models"], MODEL_RECORD.name, pack({**asdict(MODEL_RECORD), **change}))


def test_workers_of_a_newer_version_are_listed_without_the_fields_that_nobody_knows(control: TurnControl) -> None:
    _rewrite_worker(control, {"numa_node": 1})
    (seen,) = control.run(list_workers())
    assert (seen.worker_id, seen.hot_branches) == ("w1", ("b1",))


def test_workers_of_an_older_version_are_listed_with_defaults(control: TurnControl) -> None:
    _rewrite_worker(control, {}, without=("urls", "hot_branches", "context_length"))
    (seen,) = control.run(list_workers())
    assert (seen.worker_id, seen.hot_branches, seen.context_length) == ("w1", (), 0)


def test_models_of_a_newer_version_are_listed_without_the_fields_that_nobody_knows(control: TurnControl) -> None:
    _rewrite_model(control, {"modalities": ["text"]})
    assert control.run(list_models()) == (MODEL_RECORD,)


@pytest.mark.parametrize(
    ("field", "value"),
    [("slots", "4"), ("slots", True), ("slots", 4.5), ("pid", None), ("draining", 1), ("host", b"h"),
     ("started_at", "now"), ("hot_branches", "b1"), ("hot_branches", [1]), ("info", [1])],
)  # fmt: skip
def test_worker_record_with_a_field_of_a_wrong_type_is_refused_by_name(
    control: TurnControl, field: str, value: object
) -> None:
    _rewrite_worker(control, {field: value})
    with pytest.raises(BadTurnData, match=rf"worker\.{field}="):
        control.run(list_workers())


def test_worker_record_that_lacks_its_id_is_refused(control: TurnControl) -> None:
    _rewrite_worker(control, {}, without=("worker_id",))
    with pytest.raises(BadTurnData, match="worker_id"):
        control.run(list_workers())


def test_free_slots_follow_claim_and_commit_between_heartbeats(control: TurnControl) -> None:
    control.run(beat(RECORD))
    accepted(control, "a")
    free = [control.run(list_workers())[0].free]
    turn = claimed(control, "a")
    free.append(control.run(list_workers())[0].free)
    control.run(beat(RECORD))
    free.append(control.run(list_workers())[0].free)
    complete(control, turn)
    free.append(control.run(list_workers())[0].free)
    assert free == [4, 3, 3, 4]


def test_worker_without_heartbeat_is_gone_and_taken_as_dead_once(control: TurnControl) -> None:
    control.run(beat(RECORD, ttl_s=0.05))
    time.sleep(0.1)
    assert control.run(list_workers()) == ()
    assert [control.run(take_dead_workers()) for _ in range(2)] == [("w1",), ()]


def test_retire_of_an_older_process_leaves_the_new_one(control: TurnControl) -> None:
    control.run(beat(RECORD))
    control.run(retire("w1", "older"))
    assert len(control.run(list_workers())) == 1
    control.run(retire("w1", "boot"))
    assert control.run(list_workers()) == ()


def test_demand_counts_open_turns_leases_and_live_slots(control: TurnControl) -> None:
    control.run(beat(RECORD))
    accepted(control, "a")
    accepted(control, "b")
    accepted(control, "c", model="unserved")
    claimed(control, "a")
    assert control.run(demand()) == (
        ModelDemand("tiny", open_turns=2, in_progress=1, slots=4, free=3, num_workers=1, service_s=0.0),
        ModelDemand("unserved", open_turns=1, in_progress=0, slots=0, free=0, num_workers=0, service_s=0.0),
    )


def test_demand_leaves_out_the_slots_of_a_draining_worker(control: TurnControl) -> None:
    control.run(beat(WorkerRecord("w1", "boot", "tiny", slots=4, free=4, draining=True)))
    assert control.run(demand()) == ()


def test_published_model_and_bundle_are_read_back(control: TurnControl) -> None:
    control.run(publish_model(MODEL_RECORD, b"bundle"))
    assert (control.run(list_models()), control.run(get_bundle("d1")), control.run(get_bundle("d2"))) == (
        (MODEL_RECORD,),
        b"bundle",
        None,
    )


def test_publish_of_too_large_a_bundle_raises() -> None:
    with pytest.raises(BadTurnData, match="bundle"):
        publish_model(ModelRecord("tiny", "d1", 256, 1.5), bytes(MAX_BUNDLE_BYTES + 1))


def test_quarantined_lists_each_boot_once(control: TurnControl) -> None:
    for _ in range(2):
        control.run(quarantine("boot", "mirror divergence"))
    assert control.run(quarantined()) == {"boot"}
