"""Which rows a step gets: windows of drafting turns, and what bounds them."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.plan import RowKind, SamplingParams
from tests.kv_lab import make_lab
from workers.engine.drafting import DraftCosts, Drafter, DraftSettings
from workers.engine.requests import EngineRequest, EngineTurn
from workers.engine.running import Phase, RunningTurn
from workers.engine.scheduler import MAX_SAMPLED_ROWS, schedule, without_draft

TEXT = (1, 2, 3, 4, 5, 1, 2, 3)


def decoding_turn(order: int, *, max_tokens: int = 100, rows: int = 8, drafts: bool = True) -> RunningTurn:
    """A turn whose next step is a row, and whose text has been said before."""
    request = EngineRequest(f"t{order}", TEXT[:-1], (), SamplingParams(), max_tokens, frozenset(), 0, order)
    pages: Any = None
    drafter = Drafter(DraftSettings(rows, 2), DraftCosts()) if drafts else None
    running = RunningTurn.of(EngineTurn(request, pages, lambda _: None), drafter)
    running.ids.append(TEXT[-1])
    running.phase = Phase.RUNNING
    running.sequence = make_lab(num_pages=2).cache.open()
    running.sequence.length = len(TEXT) - 1
    return running


def test_turn_that_has_said_it_before_gets_a_window() -> None:
    ((_, entry),) = schedule([decoding_turn(0, rows=2)], max_rows=64, max_unread=0)
    assert (entry.kind, entry.tokens, entry.output_index) == (RowKind.VERIFY, (3, 4, 5), 1)
    assert without_draft(entry).tokens == (3,)


def test_window_ends_with_the_reply() -> None:
    for max_tokens, rows in ((2, 1), (3, 2), (5, 4), (100, 9)):
        ((_, entry),) = schedule([decoding_turn(0, max_tokens=max_tokens)], max_rows=64, max_unread=0)
        assert entry.num_rows == rows
        assert entry.kind is (RowKind.VERIFY if rows > 1 else RowKind.DECODE)


@pytest.mark.parametrize(("num_turns", "max_rows"), [(3, 8), (40, 4096), (300, 4096), (5, 3)])
def test_rows_of_all_windows_stay_within_the_step(num_turns: int, max_rows: int) -> None:
    chosen = schedule([decoding_turn(order) for order in range(num_turns)], max_rows, max_unread=0)
    num_rows = sum(entry.num_rows for _, entry in chosen)
    assert len(chosen) == min(num_turns, max_rows)
    assert num_rows <= max_rows
    assert num_rows <= max(num_turns, MAX_SAMPLED_ROWS)


def test_nothing_is_launched_ahead_of_a_draft() -> None:
    drafting, plain = decoding_turn(0), decoding_turn(1, drafts=False)
    drafting.unread = plain.unread = 1
    for turn in (drafting, plain):
        assert turn.sequence is not None
        turn.sequence.length = len(TEXT)
    assert schedule([drafting, plain], max_rows=64, max_unread=1) == []
    ((turn, entry),) = schedule([plain], max_rows=64, max_unread=1)
    assert (turn, entry.tokens) == (plain, ())
