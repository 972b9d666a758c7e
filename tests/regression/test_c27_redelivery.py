"""C27: a message is delivered again while its task still runs.

Reported of Celery with Redis (celery/celery#5935, #5306, celery/kombu#337): after the visibility timeout a running
task's message goes to a second worker, again and again. Here messages are acknowledged early, so copies are sent by
hand, to every queue and all the time. A message names a turn and nothing else; the record decides, so exactly one
execution may be visible.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.worker_process import CeleryWorker, Fleet, wait_until
from workers.turns.events import TurnState
from workers.turns.outcomes import Dispatch


def test_turn_whose_message_is_redelivered_all_the_time_runs_once(
    fleet: Fleet, start_worker: Callable[..., CeleryWorker]
) -> None:
    for name in ("w1", "w2"):
        start_worker(name).wait_ready()
    fleet.submit("long", display={"tokens": 25, "pause_s": 0.1})
    wait_until(lambda: len(fleet.runs()) == 1, 10)
    while fleet.state("long") is TurnState.IN_PROGRESS:
        for queue in (None, "w1", "w2"):
            fleet.dispatcher.send(Dispatch("long", "tiny", queue))
        time.sleep(0.1)
    fleet.dispatcher.send(Dispatch("long", "tiny", None))
    fleet.submit("sentinel")
    fleet.wait_end("sentinel")
    assert [run.split()[1] for run in fleet.runs()] == ["long", "sentinel"]
    assert fleet.control.client.xlen("kvalet:-:stream:long") == 27
