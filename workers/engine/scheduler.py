"""Which rows the next step computes. Pure: state in, plan out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from gpu.plan import PlanEntry, RowKind
from workers.engine.running import Phase, RunningTurn

MIN_CHUNK_ROWS = 16
MAX_SAMPLED_ROWS = 256
"""Rows of a step that may be sampled, drafted ones among them: what every backend takes for any number of turns."""


def schedule(turns: Seq[RunningTurn], max_rows: int, max_unread: int) -> list[tuple[RunningTurn, PlanEntry]]:
    """Rows of the next step: every decoding turn one row and its drafted ones, then prompt chunks share the rest.

    turns: in order of arrival. max_unread: draws that may be launched ahead of the host; nothing is while a turn's
    draft depends on a draw that the host has not read. A solo turn runs alone.
    """
    runnable = [t for t in turns if t.phase is Phase.RUNNING]
    solo = next((t for t in runnable if t.solo), None)
    if solo is not None:
        runnable = [solo]
    if any(t.unread and t.waits_for_host for t in runnable):
        # Others could be launched ahead, but then two halves of a batch would take turns for good.
        return []
    decoding = [t for t in runnable if _decodes(t, max_unread)][:max_rows]
    chosen: list[tuple[RunningTurn, PlanEntry]] = []
    budget = max_rows - len(decoding)
    draftable = max(0, min(budget, MAX_SAMPLED_ROWS - len(decoding)))
    for turn in decoding:
        entry = _decode_entry(turn, draftable)
        chosen.append((turn, entry))
        budget -= entry.num_rows - 1
        draftable -= entry.num_rows - 1
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


def _decode_entry(turn: RunningTurn, spare_rows: int) -> PlanEntry:
    """One row, or a window to verify. spare_rows: most that may be drafted."""
    tokens = () if turn.unread else (turn.ids[-1],)
    drafted: tuple[int, ...] = ()
    if turn.drafter is not None and not turn.unread:
        # The last token of the reply gets no row: nothing follows it.
        drafted = turn.drafter.draft(turn.ids, min(spare_rows, turn.turn.request.max_tokens - turn.num_output - 1))
    kind = RowKind.VERIFY if drafted else RowKind.DECODE
    sampling = turn.turn.request.sampling
    return PlanEntry(turn.loaded, kind, tokens + drafted, sampling, turn.num_launched_output, turn.history)


def without_draft(entry: PlanEntry) -> PlanEntry:
    """The same step of a turn as one row."""
    return replace(entry, kind=RowKind.DECODE, tokens=entry.tokens[:1])


def _prefill_entry(turn: RunningTurn, num_rows: int) -> PlanEntry:
    start = turn.loaded.length
    tokens = tuple(turn.ids[start : start + num_rows])
    if start + num_rows < len(turn.ids) or not turn.wants_more:
        return PlanEntry(turn.loaded, RowKind.PREFILL, tokens)
    sampling = turn.turn.request.sampling
    return PlanEntry(turn.loaded, RowKind.PREFILL, tokens, sampling, turn.num_output, turn.history)
