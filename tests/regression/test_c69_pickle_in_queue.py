"""C69: pickle read from Redis runs code on every worker, for whoever can write a key.

Reported of LazyAGI/LazyLLM#1154, ekzhu/datasketch#320, featureform/enrichmcp#169. A pickle that would create a file is
put where turn control and the queue read bytes. Nothing may be created; the message becomes a dead letter; the worker
goes on; readers raise their typed error.
"""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshot_store.errors import TranscriptError
from tests.services import ValkeyServer
from tests.turn_factory import accepted, claimed, complete, worker
from tests.worker_process import CeleryWorker, Fleet, wait_until
from workers.dead_letters import list_dead_letters
from workers.registry import list_models, list_workers
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.errors import BadTurnData
from workers.turns.events import TurnState
from workers.turns.script import ScriptCall


class Probe:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    return tmp_path / f"probe_{uuid.uuid4().hex}"


def test_pickle_probe_works_when_it_is_unpickled(probe: Path) -> None:
    pickle.loads(pickle.dumps(Probe(probe))).close()
    assert probe.exists()


def test_pickled_message_becomes_a_dead_letter_and_the_worker_goes_on(
    fleet: Fleet, start_worker: Callable[..., CeleryWorker], probe: Path
) -> None:
    start_worker("w1").wait_ready()
    body = base64.b64encode(pickle.dumps(((Probe(probe),), {}, {}))).decode()
    properties = {
        "correlation_id": "x", "reply_to": "x", "delivery_mode": 2, "priority": 0, "body_encoding": "base64",
        "delivery_info": {"exchange": "", "routing_key": "kvalet.model.tiny"}, "delivery_tag": "x",
    }  # fmt: skip
    message = {
        "body": body, "content-encoding": "binary", "content-type": "application/x-python-serialize",
        "headers": {"task": "kvalet.run_turn", "id": "x", "lang": "py"}, "properties": properties,
    }  # fmt: skip
    fleet.control.client.lpush("kvalet.model.tiny", json.dumps(message))
    fleet.submit("sentinel")
    assert fleet.wait_end("sentinel") == [TurnState.COMPLETED]
    wait_until(lambda: len(fleet.control.run(list_dead_letters())) == 1, 5)
    (letter,) = fleet.control.run(list_dead_letters())
    assert (letter.content_type, probe.exists()) == ("application/x-python-serialize", False)
    assert not fleet.control.client.exists("unacked")


@pytest.mark.parametrize(
    ("field", "call", "error"),
    [
        ("turn:a request", calls.claim("a", worker()), BadTurnData),
        ("turn:a request", calls.get_turn("local", "a"), BadTurnData),
        ("turn:a pending", calls.claim("a", worker()), BadTurnData),
        ("turn:done terminal", calls.get_turn("local", "done"), BadTurnData),
        ("conversation:conv metadata", calls.get_conversation("local", "conv"), BadTurnData),
        ("conversation:conv pending", calls.get_conversation("local", "conv"), BadTurnData),
        ("models tiny", list_models(), BadTurnData),
        ("worker:w record", list_workers(), BadTurnData),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pickle_in_a_hash_raises_typed_error(
    control_server: ValkeyServer, probe: Path, field: str, call: ScriptCall[Any], error: type[Exception]
) -> None:
    control = TurnControl(connect(control_server.url))
    accepted(control, "done")
    complete(control, claimed(control, "done"))
    accepted(control, "a")
    control.run(calls.create_conversation("local", "conv"))
    control.client.sadd("kvalet:-:workers", "w")
    control.client.hset("kvalet:-:worker:w", mapping={"free": 1, "seen_ms": 1})
    key, name = field.split()
    control.client.hset(f"kvalet:-:{key}", name, pickle.dumps(Probe(probe)))
    with pytest.raises(error):
        control.run(call)
    assert not probe.exists()


def test_pickle_as_transcript_raises_typed_error(control_server: ValkeyServer, probe: Path) -> None:
    control = TurnControl(connect(control_server.url))
    accepted(control, "a")
    complete(control, claimed(control, "a"))
    control.client.set("kvalet:local:transcript:a", pickle.dumps(Probe(probe)))
    with pytest.raises(TranscriptError):
        control.run(calls.get_turn("local", "a"))
    assert not probe.exists()


def test_pickle_as_stream_entry_raises_typed_error(control_server: ValkeyServer, probe: Path) -> None:
    control = TurnControl(connect(control_server.url))
    accepted(control, "a")
    control.client.xadd("kvalet:-:stream:a", {"n": "0", "e": pickle.dumps(Probe(probe))}, id="1-0")
    with pytest.raises(BadTurnData):
        control.run(calls.get_turn("local", "a"))
    assert not probe.exists()


NO_MESSAGES = (
    "garbage", "{}", "null", "[1]", '["a", "b", "c"]', '{"body":1,"properties":{}}', b"\xff\xfe", "[" * 100_000,
    '{"body":"!","properties":{"delivery_tag":"t","delivery_info":{},"body_encoding":"rot13"}}',
    '{"body":"e30=","headers":3,"properties":{"delivery_tag":"t","delivery_info":{},"body_encoding":"base64"}}',
)  # fmt: skip


def test_entries_that_are_no_messages_become_dead_letters_and_the_worker_goes_on(
    fleet: Fleet, start_worker: Callable[..., CeleryWorker]
) -> None:
    worker = start_worker("w1")
    worker.wait_ready()
    for queue in ("kvalet.model.tiny", "kvalet.worker.w1"):
        for entry in NO_MESSAGES:
            fleet.control.client.lpush(queue, entry)
    fleet.submit("after")
    fleet.wait_end("after")
    wait_until(lambda: len(fleet.control.run(list_dead_letters())) == 2 * len(NO_MESSAGES), 10)
    assert worker.process.poll() is None
