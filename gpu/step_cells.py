"""The cells that one step owns: where its rows go, what its rows may read, and the counts that prove it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpu.device_memory import CellRange
from gpu.kv_kernels import PageTables, RowTable
from gpu.pages import Page
from gpu.plan import RowKind, StepPlan
from gpu.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EntryCells:
    """Cells first .. end - 1 of one sequence.

    written: the pages they lie in, each with its generation at launch. truncations: those of the sequence at launch.
    """

    sequence: Sequence
    kind: RowKind
    first: int
    end: int
    written: tuple[tuple[Page, int], ...]
    truncations: int

    @property
    def stale(self) -> bool:
        """Whether the sequence was truncated after the launch."""
        return self.truncations != self.sequence.truncations

    def written_now(self) -> list[Page]:
        """The written pages that were not freed since."""
        return [page for page, generation in self.written if page.generation == generation]


@dataclass(slots=True, eq=False)
class StepCells:
    """A launched step as the cache sees it, from `KVCache.begin_step` to `finish_step` or `abandon_step`.

    held: (n,) int64 page indices with a step hold each; generations: (n,) int64 at that time. counts, nonfinite: see
    `KVKernels.store_rows`; S is the number of entries. store_target: what the kernel gets as mirror.
    """

    plan: StepPlan
    entries: tuple[EntryCells, ...]
    rows: RowTable
    tables: PageTables
    ranges: tuple[CellRange, ...]
    held: NDArray[np.int64]
    generations: NDArray[np.int64]
    counts: NDArray[np.int64]
    nonfinite: NDArray[np.int64]
    store_target: NDArray[np.uint8] = field(repr=False)

    def at(self, layer: int) -> LayerAppend:
        """The part of one layer, for `KVCache.append` and `KVCache.attend`."""
        return LayerAppend(self, layer)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.rows.num_rows

    def expected_counts(self, stores_per_row: int) -> NDArray[np.int64]:
        """Mirror stores that prove the step: (num_layers, S, 2), the entry's rows in every layer and plane."""
        per_entry = stores_per_row * np.array([entry.end - entry.first for entry in self.entries], np.int64)
        return np.broadcast_to(per_entry[None, :, None], self.counts.shape)


@dataclass(frozen=True, slots=True)
class LayerAppend:
    """One layer of a step."""

    cells: StepCells
    layer: int


def entry_cells(plan: StepPlan, page_size: int) -> tuple[EntryCells, ...]:
    """The cells that each entry of a checked plan will write."""
    entries = []
    for entry in plan.entries:
        sequence = entry.sequence
        end = sequence.length + entry.num_rows
        pages = sequence.pages[sequence.length // page_size : (end - 1) // page_size + 1]
        written = tuple((page, page.generation) for page in pages)
        entries.append(EntryCells(sequence, entry.kind, sequence.length, end, written, sequence.truncations))
    return tuple(entries)


def row_table(
    entries: Items[EntryCells], page_size: int, page_bytes: int, device_offset: NDArray[np.int64]
) -> RowTable:
    """Addresses of every row. device_offset: (num_pages,) int64 by page index, -1 without a device copy."""
    positions = np.concatenate([np.arange(entry.first, entry.end, dtype=np.int64) for entry in entries])
    sequence_index = np.repeat(np.arange(len(entries)), [entry.end - entry.first for entry in entries]).astype(np.int64)
    pages = np.concatenate([e.sequence.page_index[np.arange(e.first, e.end) // page_size] for e in entries])
    return RowTable(positions, sequence_index, pages * page_bytes, device_offset[pages], positions % page_size)


def page_tables(
    entries: Items[EntryCells], page_size: int, page_bytes: int, device_offset: NDArray[np.int64]
) -> PageTables:
    """Pages that each sequence's rows may read: those of cells 0 .. end - 1."""
    num_pages = [-(-entry.end // page_size) for entry in entries]
    mirror = np.full((len(entries), max(num_pages)), -1, np.int64)
    device = mirror.copy()
    for row, (entry, count) in enumerate(zip(entries, num_pages, strict=True)):
        indices = entry.sequence.page_index[:count]
        mirror[row, :count] = indices * page_bytes
        device[row, :count] = device_offset[indices]
    row_start = np.zeros(len(entries) + 1, np.int64)
    row_start[1:] = np.cumsum([entry.end - entry.first for entry in entries])
    return PageTables(mirror, device, row_start)


def cell_ranges(entries: Items[EntryCells], page_size: int, page_bytes: int) -> tuple[CellRange, ...]:
    """What the entries write, page by page."""
    ranges = []
    for entry in entries:
        for depth, (page, _) in enumerate(entry.written, entry.first // page_size):
            first = max(entry.first - depth * page_size, 0)
            end = min(entry.end - depth * page_size, page_size)
            ranges.append(CellRange(page.index * page_bytes, first, end))
    return tuple(ranges)
