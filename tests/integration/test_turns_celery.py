"""Turns through real Celery workers and a real server. The service is a fake: no model, the same control."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable

import pytest
from celery import Celery

from tests.services import ValkeyServer
from tests.worker_process import CeleryWorker, Fleet, wait_until
from workers.dispatch import TASK_NAME, Dispatcher, celery_options, dispatch_app
from workers.errors import CANNOT_START
from workers.turns import calls
from workers.turns.control import connect
from workers.turns.errors import ControlUnavailable
from workers.turns.events import TurnState
from workers.turns.outcomes import Dispatch

StartWorker = Callable[..., CeleryWorker]


def test_worker_runs_a_submitted_turn_once(fleet: Fleet, start_worker: StartWorker) -> None:
    start_worker("w1").wait_ready()
    fleet.submit("a")
    assert (fleet.wait_end("a"), fleet.runs()) == ([TurnState.COMPLETED], ["w1 a 1"])


def test_message_delivered_three_times_runs_once(fleet: Fleet, start_worker: StartWorker) -> None:
    for name in ("w1", "w2"):
        start_worker(name)
    fleet.submit("a", send=3, display={"tokens": 10, "pause_s": 0.05})
    fleet.wait_end("a")
    time.sleep(0.3)
    assert len(fleet.runs()) == 1


def test_message_never_delivered_runs_once_by_the_sweeper(fleet: Fleet, start_worker: StartWorker) -> None:
    start_worker("w1").wait_ready()
    fleet.submit("a", send=0)
    fleet.control.client.zadd("kvalet:-:due", {"a": 0})
    assert (fleet.wait_end("a"), fleet.runs()) == ([TurnState.COMPLETED], ["w1 a 1"])


def test_worker_killed_in_mid_turn_is_taken_over_without_gap(fleet: Fleet, start_worker: StartWorker) -> None:
    workers = {name: start_worker(name).wait_ready() for name in ("w1", "w2")}
    fleet.submit("a", display={"tokens": 20, "pause_s": 0.1})
    wait_until(lambda: len(fleet.runs()) == 1, 10)
    time.sleep(0.5)
    workers[fleet.runs()[0].split()[0]].kill()
    fleet.wait_end("a")
    stream = fleet.control.client.xrange("kvalet:-:stream:a")
    assert [entry[1][b"n"] for entry in stream] == [str(n).encode() for n in range(22)]
    assert len(fleet.runs()) == 2


def test_terminated_worker_finishes_its_turn_within_grace(fleet: Fleet, start_worker: StartWorker) -> None:
    worker = start_worker("w1").wait_ready()
    fleet.submit("a", display={"tokens": 10, "pause_s": 0.1})
    wait_until(lambda: len(fleet.runs()) == 1, 10)
    assert worker.terminate() == 0
    assert fleet.state("a") is TurnState.COMPLETED


def test_terminated_worker_hands_over_what_does_not_end_within_grace(fleet: Fleet, start_worker: StartWorker) -> None:
    first = start_worker("w1", drain_grace_s=0.2).wait_ready()
    fleet.submit("a", display={"tokens": 30, "pause_s": 0.1})
    wait_until(lambda: len(fleet.runs()) == 1, 10)
    assert first.terminate() == 0
    start_worker("w2")
    fleet.wait_end("a")
    view = fleet.control.run(calls.get_turn("local", "a"))
    assert view is not None
    assert (view.state, view.crashes, view.worker_id) == (TurnState.COMPLETED, 0, "w2")


def test_conversation_turns_run_in_order(fleet: Fleet, start_worker: StartWorker) -> None:
    for name in ("w1", "w2"):
        start_worker(name).wait_ready()
    fleet.control.run(calls.create_conversation("local", "conv"))
    turns = [f"t{n}" for n in range(6)]
    for turn_id in turns:
        fleet.submit(turn_id, conversation_id="conv")
    fleet.wait_end(*turns)
    assert [run.split()[1] for run in fleet.runs()] == turns


def test_forced_worker_runs_the_turn(fleet: Fleet, start_worker: StartWorker) -> None:
    for name in ("w1", "w2"):
        start_worker(name).wait_ready()
    for n in range(6):
        fleet.submit(f"t{n}", worker="w1" if n % 2 else "w2")
    fleet.wait_end(*(f"t{n}" for n in range(6)))
    assert {run.split()[1]: run.split()[0] for run in fleet.runs()} == {
        f"t{n}": "w1" if n % 2 else "w2" for n in range(6)
    }


def test_worker_survives_the_control_servers_kill(
    fleet: Fleet, start_worker: StartWorker, control_server: ValkeyServer
) -> None:
    worker = start_worker("w1").wait_ready()
    fleet.submit("before", display={"tokens": 20, "pause_s": 0.1})
    wait_until(lambda: len(fleet.runs()) == 1, 10)
    fleet.control.client.execute_command("WAITAOF", 1, 0, 2000)
    control_server.kill()
    time.sleep(1)
    control_server.start()
    fleet.submit("after")
    assert fleet.wait_end("before", "after", timeout_s=40) == [TurnState.COMPLETED] * 2
    assert worker.process.poll() is None


def test_worker_with_full_slots_takes_the_next_message_as_soon_as_one_is_free(
    fleet: Fleet, start_worker: StartWorker
) -> None:
    start_worker("w1", slots=1).wait_ready()
    turns = [f"t{n}" for n in range(8)]
    for turn_id in turns:
        fleet.submit(turn_id)
    # Without the pool's wake-up each of them waits up to a second for the event loop to look again.
    fleet.wait_end(*turns, timeout_s=5)


def test_worker_whose_service_cannot_start_exits_non_zero_with_the_reason(start_worker: StartWorker) -> None:
    worker = start_worker("w1", app="tests.failing_worker_app")
    assert worker.process.wait(20) == os.EX_CONFIG
    assert f"{CANNOT_START}model='x.gguf': is damaged\n" in worker.text()
    assert "Traceback" not in worker.text()


def test_worker_with_a_malformed_setting_exits_with_its_name(start_worker: StartWorker) -> None:
    worker = start_worker("w1", slots="many")
    assert worker.process.wait(20) == os.EX_CONFIG
    assert f"{CANNOT_START}KVALET_SLOTS='many': must be a whole number\n" in worker.text()
    assert "Traceback" not in worker.text()


def test_worker_told_to_stop_while_idle_leaves_within_seconds(start_worker: StartWorker) -> None:
    worker = start_worker("w1").wait_ready()
    assert worker.terminate(timeout_s=8) == 0


def test_worker_answers_celery_inspect_with_its_queues(start_worker: StartWorker, control_server: ValkeyServer) -> None:
    start_worker("w1").wait_ready()
    app = Celery(set_as_current=False)
    app.conf.update(celery_options(control_server.url))
    active = app.control.inspect(timeout=5, limit=1).active_queues()
    assert {queue["name"] for queue in active["w1@test"]} == {"kvalet.model.tiny", "kvalet.worker.w1"}


def test_dispatch_on_a_dead_server_raises_and_works_again_after_its_start(
    start_server: Callable[..., ValkeyServer],
) -> None:
    server = start_server("control")
    dispatcher = Dispatcher(server.url)
    message = Dispatch("a", "tiny", None)
    dispatcher.send(message)
    server.kill()
    with pytest.raises(ControlUnavailable):
        dispatcher.send(message)
    server.start()
    dispatcher.send(message)
    dispatcher.close()


def test_dispatched_message_is_what_celery_itself_would_have_sent(control_server: ValkeyServer) -> None:
    app = dispatch_app(control_server.url)
    app.send_task(TASK_NAME, args=("a",), queue="kvalet.model.tiny", declare=[], ignore_result=True)
    dispatcher = Dispatcher(control_server.url)
    dispatcher.send(Dispatch("a", "tiny", None))
    ours, celerys = map(json.loads, connect(control_server.url).lrange("kvalet.model.tiny", 0, -1))
    ids = [ours["headers"].pop("id"), celerys["headers"].pop("id")]
    assert ids == [m["headers"].pop("root_id") for m in (ours, celerys)]
    assert ids == [m["properties"].pop("correlation_id") for m in (ours, celerys)]
    assert len({*ids, *(m["properties"].pop("delivery_tag") for m in (ours, celerys))}) == 4
    # The address for results, of which there are none, is the sending app's own.
    assert [bool(m["properties"].pop("reply_to")) for m in (ours, celerys)] == [True, True]
    assert ours == celerys
    dispatcher.close()


def test_delivery_of_a_message_leaves_no_copy_to_acknowledge(
    fleet: Fleet, start_worker: StartWorker, control_server: ValkeyServer
) -> None:
    start_worker("w1").wait_ready()
    with connect(control_server.url).monitor() as monitor:
        fleet.submit("a")
        fleet.wait_end("a")
        fleet.control.client.echo("enough")
        commands = (entry["command"] for entry in monitor.listen())
        heard = list(itertools.takewhile(lambda command: "enough" not in command, commands))
    assert any(command.startswith("BRPOP") for command in heard)
    assert not [command for command in heard if "unacked" in command]


def test_dead_workers_queue_is_deleted(fleet: Fleet, start_worker: StartWorker, control_server: ValkeyServer) -> None:
    fleet.control.client.sadd("kvalet:-:workers", "gone")
    fleet.dispatcher.send(Dispatch("x", "tiny", "gone"))
    assert fleet.control.client.exists("kvalet.worker.gone")
    start_worker("w1")
    wait_until(lambda: not fleet.control.client.exists("kvalet.worker.gone"), 20)
