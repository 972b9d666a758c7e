"""Pages that admission promised to a turn are there when it takes them, whatever the others do."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu.cache import HoldKind
from gpu.errors import CapacityError
from gpu.plan import SamplingParams
from tests.kv_lab import make_lab
from workers.engine.engine import Engine
from workers.engine.promises import PagePromises
from workers.engine.requests import EngineRequest, EngineTurn, Finished, Preempted, Token
from workers.engine.running import RunningTurn

PAGE = 16
NUM_PAGES = 12


class _Digests:
    """Stands for TurnPages: every page of every turn has a digest of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def seal(self, page_index: int, token_ids: tuple[int, ...], own_numerics: bool) -> bytes:
        return hashlib.blake2b(f"{self.name} {page_index}".encode(), digest_size=16).digest()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(make_lab(num_pages=NUM_PAGES).backend, step_rows=8)
    engine.launch_thread()
    yield engine
    engine.stop()


def _turn(engine: Engine, name: str, order: int, num_prompt: int, max_tokens: int) -> EngineTurn:
    sampling = SamplingParams(temperature=0.0)
    request = EngineRequest(name, tuple(range(1, num_prompt + 1)), (), sampling, max_tokens, frozenset(), 0, order)
    pages: Any = _Digests(name)
    return EngineTurn(request, pages, lambda event: engine.cache.release(event.page, HoldKind.UPLOAD))


def _supply(engine: Engine) -> int:
    return engine.call(lambda: engine.cache.free_pages + engine.cache.evictable_pages)


def test_turn_that_outgrows_its_promise_leaves_the_pages_of_an_older_turn(engine: Engine) -> None:
    older = _turn(engine, "older", 0, num_prompt=6 * PAGE, max_tokens=2)
    greedy = _turn(engine, "greedy", 1, num_prompt=3, max_tokens=NUM_PAGES * PAGE - 3)
    running = [engine.admit(turn) for turn in (older, greedy)]
    for turn in (older, greedy):
        assert turn.admitted.wait(5)
    promised, lowest = 6 + 1, NUM_PAGES
    engine.start(running[1])
    end = None
    while end is None or isinstance(end, Token):
        lowest = min(lowest, _supply(engine))
        end = greedy.outputs.get(timeout=10)
    assert isinstance(end, Preempted), "the turn that needs what is promised to an older one gives way"
    assert lowest >= promised
    engine.start(running[0])
    assert isinstance(older.outputs.get(timeout=10), Token)
    assert isinstance(older.outputs.get(timeout=10), Token)
    assert isinstance(older.outputs.get(timeout=10), Finished)
    assert engine.counters.preemptions == 1


def test_idle_engine_poisons_the_new_pages_of_a_step_ahead(engine: Engine) -> None:
    pool, wanted = engine.cache.memory.pool, engine._pages_ahead
    assert 0 < wanted <= NUM_PAGES // 4
    deadline = time.monotonic() + 5
    while pool.num_clean < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.num_clean == wanted


def test_turns_are_admitted_again_once_promises_have_ended(engine: Engine) -> None:
    first = engine.admit(_turn(engine, "first", 0, num_prompt=9 * PAGE, max_tokens=2))
    second = engine.admit(_turn(engine, "second", 1, num_prompt=2 * PAGE, max_tokens=2))
    time.sleep(0.05)
    assert (first.turn.admitted.is_set(), second.turn.admitted.is_set()) == (True, False)
    engine.discard(first)
    assert second.turn.admitted.wait(5)


@pytest.fixture
def promises() -> PagePromises:
    return PagePromises(make_lab(num_pages=NUM_PAGES).cache)


def _admitted(promises: PagePromises, name: str, num_prompt: int) -> RunningTurn:
    request = EngineRequest(name, (1,) * num_prompt, (), SamplingParams(temperature=0.0), 1, frozenset(), 0, 0)
    pages: Any = _Digests(name)
    running = RunningTurn.of(EngineTurn(request, pages, lambda _: None))
    assert promises.make(running)
    running.sequence = promises._cache.open()
    return running


def test_restore_gets_its_own_pages_and_spare_ones_and_no_promised_ones(promises: PagePromises) -> None:
    _admitted(promises, "other", 5 * PAGE)
    restoring = _admitted(promises, "restoring", PAGE)
    assert len(promises.begin_fill(restoring, 100)) == NUM_PAGES - (5 + 2)


def test_pages_of_a_restore_under_way_count_once(promises: PagePromises) -> None:
    restoring = _admitted(promises, "restoring", 4 * PAGE)
    assert len(promises.begin_fill(restoring, 4)) == 4
    other = _admitted(promises, "other", 4 * PAGE)
    with pytest.raises(CapacityError) as refused:
        promises.reserve(other, 7 * PAGE)
    assert (refused.value.needed, refused.value.free) == (7, 6)
    promises.reserve(other, 6 * PAGE)


def test_restore_of_a_turn_that_has_ended_takes_nothing(promises: PagePromises) -> None:
    ended = _admitted(promises, "ended", PAGE)
    promises.end(ended)
    assert promises.begin_fill(ended, 1) == []
    promises.end_fill(ended)


def test_promise_to_the_only_turn_is_made_whatever_is_there(promises: PagePromises) -> None:
    _admitted(promises, "large", 2 * NUM_PAGES * PAGE)
    request = EngineRequest("next", (1,), (), SamplingParams(temperature=0.0), 1, frozenset(), 0, 1)
    pages: Any = _Digests("next")
    assert not promises.make(RunningTurn.of(EngineTurn(request, pages, lambda _: None)))
