"""Which rows the next step computes. Pure: state in, plan out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from gpu.plan import PlanEntry, RowKind
from workers.engine.running import Phase, RunningTurn

MIN_CHUNK_ROWS = 16


def schedule(turns: Seq[RunningTurn], max_rows: int, max_unread: int) -> list[tuple[RunningTurn, PlanEntry]]:
    """Rows of the next step: every decoding turn one row, then prompt chunks share the rest of the budget.

    turns: in order of arrival. max_unread: draws that may be launched ahead of the host. A solo turn runs alone.
    """
    runnable = [t for t in turns if t.phase is Phase.RUNNING]
    solo = next((t for t in runnable if t.solo), None)
    if solo is not None:
        runnable = [solo]
    chosen = [(t, _decode_entry(t)) for t in runnable if _decodes(t, max_unread)][:max_rows]
    budget = max_rows - len(chosen)
    prefilling = [t for t in runnable if _prefills(t)]
    for position, turn in enumerate(prefilling):
        if budget <= 0:
            break
        share = max(MIN_CHUNK_ROWS, budget // (len(prefilling) - position))
        entry = _prefill_entry(turn, min(turn.num_pending, share, budget))
        chosen.append((turn, entry))
        budget -= entry.num_rows
    return chosen


def _decodes(turn: RunningTurn, max_unread: int) -> bool:
    """Exactly one id is ahead of the cells: the last drawn one, read by the host or still on the device."""
    if not turn.wants_more or turn.num_launched_output == 0:
        return False
    if turn.unread:
        return turn.unread <= max_unread and turn.num_pending == 0
    return turn.num_pending == 1


def _prefills(turn: RunningTurn) -> bool:
    if turn.unread or turn.num_pending == 0:
        return False
    return turn.num_pending > 1 or turn.num_launched_output == 0


def _decode_entry(turn: RunningTurn) -> PlanEntry:
    tokens = () if turn.unread else (turn.ids[-1],)
    return PlanEntry(
        turn.loaded, RowKind.DECODE, tokens, turn.turn.request.sampling, turn.num_launched_output, turn.history
    )


def _prefill_entry(turn: RunningTurn, num_rows: int) -> PlanEntry:
    start = turn.loaded.length
    tokens = tuple(turn.ids[start : start + num_rows])
    if start + num_rows < len(turn.ids) or not turn.wants_more:
        return PlanEntry(turn.loaded, RowKind.PREFILL, tokens)
    sampling = turn.turn.request.sampling
    return PlanEntry(turn.loaded, RowKind.PREFILL, tokens, sampling, turn.num_output, turn.history)
