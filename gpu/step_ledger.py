"""Launched steps: what they own and hold, and the proof that each has stored what it was to store."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from gpu.cell_kernels import CellKernels
from gpu.errors import HoldViolation, NonFiniteInput, PlanError, UnprovenAppend, WriteOutOfBounds, invariant
from gpu.page_memory import PageMemory
from gpu.pages import PageState
from gpu.plan import PlanEntry, RowKind, StepPlan
from gpu.step_cells import (
    EntryCells,
    LayerAppend,
    StepCells,
    cell_ranges,
    entry_cells,
    page_tables,
    row_table,
)


class StepLedger:
    """Steps between launch and event, oldest first."""

    def __init__(self, memory: PageMemory, kernels: CellKernels) -> None:
        self.streamed_bytes = 0
        self._memory = memory
        self._kernels = kernels
        self._launched: deque[StepCells] = deque()

    def begin(self, plan: StepPlan) -> StepCells:
        """Grow the plan's sequences by their rows and hold all pages that the step touches.

        Raises PlanError or WriteOutOfBounds before anything is changed.
        """
        if not plan.entries:
            raise PlanError("entries", 0, "at least one")
        if len({entry.sequence.sequence_id for entry in plan.entries}) < len(plan.entries):
            raise PlanError("entries", len(plan.entries), "a sequence occurs at most once")
        for entry in plan.entries:
            self._check_entry(entry)
        entries = entry_cells(plan, self._memory.layout.page_size)
        cells = self._own(plan, entries)
        for cell_entry in entries:
            cell_entry.sequence.length = cell_entry.end
            cell_entry.sequence.num_launched += 1
            cell_entry.sequence.has_attended = True
            for page, _ in cell_entry.written:
                page.unproven += 1
        self._launched.append(cells)
        return cells

    def owned(self, append: LayerAppend) -> StepCells:
        """The step of an append. Raises WriteOutOfBounds unless it is launched and has that layer."""
        launched = any(append.cells is cells for cells in self._launched)
        num_layers = self._memory.layout.num_layers
        invariant(
            launched and 0 <= append.layer < num_layers,
            WriteOutOfBounds,
            f"layer {append.layer} of {num_layers} of a step that is {'' if launched else 'not '}launched",
        )
        return append.cells

    def finish(self, cells: StepCells) -> tuple[NonFiniteInput | None, ...]:
        """The step's event. See `KVCache.finish_step`."""
        oldest = bool(self._launched) and self._launched[0] is cells
        invariant(oldest, HoldViolation, "a step ended out of launch order, or twice")
        self._launched.popleft()
        self._memory.device.land(self._memory.mirror.array, cells.ranges)
        expected = cells.expected_counts(self._kernels.stores_per_row)
        missing = (cells.counts != expected).any(axis=(0, 2))
        errors = tuple(
            NonFiniteInput(f"positions {entry.first} to {entry.end - 1}: K or V is NaN or Inf") if count else None
            for entry, count in zip(cells.entries, cells.nonfinite.tolist(), strict=True)
        )
        for entry, error, unproven in zip(cells.entries, errors, missing.tolist(), strict=True):
            self._settle(entry, proven=error is None and not unproven)
        self._memory.pool.release_step(cells.held, cells.generations)
        if missing.any():
            raise _unproven(cells, expected, int(np.argmax(missing)))
        self._memory.check_tails(entry.sequence for entry in cells.entries)
        self._memory.residency.trim(self._memory.pool)
        return errors

    def abandon(self, cells: StepCells) -> None:
        """Give up the newest step, which failed before its event; its sequences take no more steps."""
        newest = bool(self._launched) and self._launched[-1] is cells
        invariant(newest, HoldViolation, "a step was abandoned behind a newer one, or twice")
        self._launched.pop()
        self._memory.device.land(self._memory.mirror.array, cells.ranges)
        for entry in cells.entries:
            self._settle(entry, proven=False)
        self._memory.pool.release_step(cells.held, cells.generations)

    def _check_entry(self, entry: PlanEntry) -> None:
        sequence, page_size = entry.sequence, self._memory.layout.page_size
        end = sequence.length + entry.num_rows
        if sequence.closed or sequence.failed:
            raise PlanError("sequence", sequence, "is closed" if sequence.closed else "has an unproven step")
        if end > self._kernels.max_position:
            raise PlanError("position", end - 1, f"below {self._kernels.max_position}")
        reserved = len(sequence.pages) * page_size
        invariant(end <= reserved, WriteOutOfBounds, f"{sequence}: {entry.num_rows} rows, {reserved} cells reserved")
        for page in sequence.pages[sequence.length // page_size : (end - 1) // page_size + 1]:
            is_open = page.state is PageState.OPEN
            invariant(is_open, WriteOutOfBounds, f"{sequence}: page {page.index} is {page.state.value}, not open")

    def _own(self, plan: StepPlan, entries: tuple[EntryCells, ...]) -> StepCells:
        memory, layout = self._memory, self._memory.layout
        offsets = memory.residency.device_offset
        num_read = [-(-entry.end // layout.page_size) for entry in entries]
        held = np.concatenate([e.sequence.page_index[:n] for e, n in zip(entries, num_read, strict=True)])
        memory.note_absent(held)
        memory.residency.before_step(held, memory.mirror.array, memory.pool)
        memory.residency.check_readable(held)
        if memory.residency.enabled:
            self.streamed_bytes += int(np.count_nonzero(offsets[held] < 0)) * memory.page_bytes
        ranges = cell_ranges(entries, layout.page_size, memory.page_bytes)
        return StepCells(
            plan=plan,
            entries=entries,
            rows=row_table(entries, layout.page_size, memory.page_bytes, offsets),
            tables=page_tables(entries, layout.page_size, memory.page_bytes, offsets),
            ranges=ranges,
            held=held,
            generations=memory.pool.hold_step(held),
            counts=np.zeros((layout.num_layers, len(entries), 2), np.int64),
            nonfinite=np.zeros(len(entries), np.int64),
            store_target=memory.device.stage(memory.mirror.array, ranges),
        )

    def _settle(self, entry: EntryCells, proven: bool) -> None:
        sequence = entry.sequence
        sequence.num_launched -= 1
        for page in entry.written_now():
            page.unproven -= 1
            page.tainted = page.tainted or not proven
        sequence.failed = sequence.failed or not proven
        if entry.stale:
            sequence.num_stale -= 1
            if not sequence.closed:
                self._memory.poison_tail(sequence)
        elif proven:
            final = entry.first + 1 if entry.kind is RowKind.VERIFY else entry.end
            sequence.accepted = max(sequence.accepted, final)


def _unproven(cells: StepCells, expected: NDArray[np.int64], index: int) -> UnprovenAppend:
    entry = cells.entries[index]
    return UnprovenAppend(
        f"{entry.kind.value} rows {entry.first} to {entry.end - 1} of {entry.sequence}: mirror stores "
        f"{np.unique(cells.counts[:, index]).tolist()} per layer and plane, planned {int(expected[0, index, 0])}"
    )
