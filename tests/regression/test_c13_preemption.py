"""C13: a request that is preempted under KV pressure and recomputed gives incomplete or different output.

Reported for vLLM (#16832) and vllm-oxide (#40): after preemption the output differed or tokens were missing or doubled
in the stream. Right: every output equals its solo run, the stream has no gap and no repeat, nothing locks up.
"""

from __future__ import annotations

import threading
import time

import pytest

from tests.fleet import Fleet
from tests.fleet_fixtures import MakeFleet
from workers.turns.events import TurnState

LONG = "In the harbour of {0} lie nine ships with salt. " * 14
PAGE = 16


def _solo(fleet: Fleet, texts: list[str], **asked: object) -> list[tuple[int, ...]]:
    outputs = []
    for text in texts:
        turn_id = fleet.accept(text, **asked)
        assert fleet.run("solo", turn_id).state is TurnState.INCOMPLETE
        outputs.append(fleet.path(turn_id)[-1].output_ids)
    return outputs


def _start_together(fleet: Fleet, worker: str, turn_ids: list[str]) -> list[threading.Thread]:
    """Start turns whose admissions the engine sees at once, however slowly their threads come along."""
    engine, gate = fleet.worker(worker).engine, threading.Event()
    holder = threading.Thread(target=engine.call, args=(gate.wait,))
    holder.start()
    threads = [fleet.start(worker, turn_id) for turn_id in turn_ids]
    deadline = time.monotonic() + 30
    while engine._commands.qsize() < len(threads):
        assert time.monotonic() < deadline, "a turn does not come to the engine"
        time.sleep(0.01)
    gate.set()
    holder.join(10)
    return threads


@pytest.mark.timeout(120)
def test_four_turns_that_cannot_all_fit_equal_their_solo_runs(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(kv_format="f16", page_size=PAGE, mirror_mib=1, step_rows=64, restore="never")
    texts = [LONG.format(name) for name in ("Oslo", "Bergen", "Tromso", "Bodo")]
    asked = {"max_tokens": 12 * PAGE, "sampling": {"temperature": 1.0, "seed": 5}}
    expected = _solo(fleet, texts, **asked)
    worker = fleet.worker("crowded")
    turn_ids = [fleet.accept(text, **asked) for text in texts]
    num_pages = worker.engine.cache.num_pages
    threads = _start_together(fleet, "crowded", turn_ids)
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    needed = sum(-(-len(fleet.token_ids(turn_id)) // PAGE) for turn_id in turn_ids)
    assert needed > num_pages, "not exercised: all four fit"
    assert worker.engine.counters.preemptions > 0, "not exercised: nobody was preempted"
    for turn_id, output_ids in zip(turn_ids, expected, strict=True):
        assert fleet.view(turn_id).state is TurnState.INCOMPLETE
        assert fleet.path(turn_id)[-1].output_ids == output_ids
        assert fleet.streamed_ids(turn_id) == output_ids
    assert worker.engine.cache.free_pages + worker.engine.cache.evictable_pages == num_pages


@pytest.mark.timeout(120)
def test_prompt_that_cannot_fit_an_empty_arena_is_refused_with_both_numbers(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(kv_format="f16", page_size=PAGE, mirror_mib=1, restore="never")
    cells = fleet.worker("small").runtime.arena_cells
    view = fleet.say("small", "salt " * 600)
    assert view.state is TurnState.FAILED
    assert view.error is not None
    assert view.error["code"] == "context_length_exceeded"
    assert str(cells) in view.error["message"]
    assert fleet.say("small", "hello").state is TurnState.INCOMPLETE
