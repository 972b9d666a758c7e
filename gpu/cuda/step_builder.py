"""From a plan to the tables of a step: the host's part of a launch."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice
from gpu.cuda.draw_tables import Draws
from gpu.cuda.memory import CudaMemory
from gpu.cuda.prefill_attention import PrefillAttention, PrefillPlan, TileRow
from gpu.cuda.sampling import DeviceSampler
from gpu.cuda.step_shape import MAX_SKINNY_ROWS, StepShape
from gpu.cuda.step_tables import AttentionTile, SequenceSlots, TableBlock, TableField, cut_tiles
from gpu.plan import PlanEntry
from gpu.sampling import SampleRequest
from gpu.step_cells import StepCells

ON_DEVICE: Final = -1
"""Instead of a token id: the sequence's last sampled token, which the host need not know."""
_PADDING: Final = -1
_TILE_FIELDS: Final = 4
_WIDE_ENTRY_ROWS: Final = 16
"""From how many rows of one sequence on a large step attends them, and all behind them, with the kernel for many."""


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step whose tables are queued. shape: what its kernels are launched with. tables: where they read.

    prefill: attention of the sequences with many rows, None without any.
    """

    shape: StepShape
    tables: TableBlock
    prefill: PrefillPlan | None
    draws: Draws


class StepBuilder:
    """Writes tables. Small steps and large ones have blocks of their own, since a captured step keeps addresses.

    mirror_address: where rows are mirrored; benchmarks aim it at device memory to see what the bus costs.
    tile_rows: rows that one tile of decode attention holds. prefill: plans attention of many rows. depth: steps that
    may be launched and unread, and one more.
    """

    def __init__(
        self,
        device: CudaDevice,
        memory: CudaMemory,
        slots: SequenceSlots,
        sampler: DeviceSampler,
        *,
        tile_rows: int,
        prefill: PrefillAttention,
        max_rows: int,
        max_sampled: int,
        depth: int,
    ) -> None:
        self.slots = slots
        self._stream = device.compute
        self.mirror_address = memory.pinned.address
        self._memory = memory
        self._sampler = sampler
        self._tile_rows = tile_rows
        self._prefill = prefill
        self._small = TableBlock(device, self._fields(MAX_SKINNY_ROWS, MAX_SKINNY_ROWS), depth)
        self._large = TableBlock(device, self._fields(max(max_rows, MAX_SKINNY_ROWS), max_sampled), depth)

    def build(
        self,
        cells: StepCells,
        token_ids: NDArray[np.int64],
        requests: Items[Items[SampleRequest]],
        publish_target: int,
    ) -> BuiltStep:
        """Write a step's tables and queue their copies.

        token_ids: (rows,), ON_DEVICE where the device knows the id. requests: of each entry's sampled rows.
        publish_target: address of the pinned buffer that gets the step's results.
        """
        entries = cells.plan.entries
        few, many = self._cut(cells)
        sampled = [request for rows in requests for request in rows]
        shape = StepShape(
            rows=cells.num_rows,
            entries=len(entries),
            few_rows=sum(tile.num_rows for tile in few),
            tiles=len(few),
            tile_rows=self._tile_rows if any(tile.num_rows > 1 for tile in few) else 1,
            wide_tiles=len(many),
            sampled=len(sampled),
            max_length=max(entry.end for entry in cells.entries),
            general_sampling=self._sampler.needs_general(sampled),
        )
        shape = shape.padded() if shape.skinny else shape
        block = self._small if shape.skinny else self._large
        views = block.next_views()
        self.slots.begin_step()
        entry_slots = np.array([self.slots.slot(entry.sequence) for entry in entries], np.int32)
        self._write_rows(views, cells, shape.rows, token_ids, entry_slots)
        _write_tiles(views["tiles"], few, entry_slots, shape.tiles)
        prefill = self._prefill.plan(_rows(many, entry_slots)) if many else None
        if prefill is not None:
            views["wide_tiles"][: prefill.tiles.size] = prefill.tiles.ravel()
            views["wide_sequences"][: prefill.sequences.size] = prefill.sequences.ravel()
        self._write_pages(cells, entry_slots)
        draws = self._write_samples(views, cells, shape, sampled, [len(rows) for rows in requests], entry_slots)
        views["publish_target"][0] = publish_target
        block.upload(self._stream)
        return BuiltStep(shape, block, prefill, draws)

    def _fields(self, rows: int, sampled: int) -> tuple[TableField, ...]:
        return (
            TableField("token_ids", np.int32, rows),
            TableField("slots", np.int32, rows),
            TableField("positions", np.int32, rows),
            TableField("entries", np.int32, rows),
            TableField("mirror_pages", np.uint64, rows),
            TableField("device_pages", np.uint64, rows),
            TableField("tiles", np.int32, rows * _TILE_FIELDS),
            TableField("wide_tiles", np.int32, rows * _TILE_FIELDS),
            TableField("wide_sequences", np.int32, rows * _TILE_FIELDS),
            TableField("sampled_rows", np.int32, sampled),
            TableField("publish_target", np.uint64, 1),
            *self._sampler.fields(sampled),
        )

    def _cut(self, cells: StepCells) -> tuple[list[AttentionTile], list[AttentionTile]]:
        """Tiles of leading sequences with few rows; of all others, the longest first."""
        lengths = [entry.end - entry.first for entry in cells.entries]
        num_few = len(lengths)
        if cells.num_rows > MAX_SKINNY_ROWS:
            num_few = next(index for index, rows in enumerate([*lengths, _WIDE_ENTRY_ROWS]) if rows >= _WIDE_ENTRY_ROWS)
        wide = cut_tiles(cells, list(range(num_few, len(lengths))), self._prefill.tile_rows)
        few = cut_tiles(cells, list(range(num_few)), self._tile_rows)
        return few, sorted(wide, key=lambda tile: -tile.first_position)

    def _write_rows(
        self,
        views: dict[str, NDArray[Any]],
        cells: StepCells,
        padded_rows: int,
        token_ids: NDArray[np.int64],
        entry_slots: NDArray[np.int32],
    ) -> None:
        rows, count = cells.rows, cells.num_rows
        views["token_ids"][:count] = token_ids
        views["slots"][:count] = entry_slots[rows.sequence_index]
        views["positions"][:count] = rows.positions
        views["entries"][:count] = rows.sequence_index
        views["mirror_pages"][:count] = self.mirror_address + rows.mirror_offset
        views["device_pages"][:count] = np.where(
            rows.device_offset < 0, 0, self._memory.slots.address + rows.device_offset
        )
        views["token_ids"][count:padded_rows] = 0
        views["slots"][count:padded_rows] = _PADDING
        views["positions"][count:padded_rows] = _PADDING

    def _write_pages(self, cells: StepCells, entry_slots: NDArray[np.int32]) -> None:
        tables = cells.tables
        mirror, device = self._memory.pinned.address, self._memory.slots.address
        addresses = np.where(tables.device < 0, mirror + tables.mirror, device + tables.device)
        for index, slot in enumerate(entry_slots.tolist()):
            count = int(np.count_nonzero(tables.mirror[index] >= 0))
            self.slots.write_pages(slot, addresses[index, :count].astype(np.uint64), self._stream)

    def _write_samples(
        self,
        views: dict[str, NDArray[Any]],
        cells: StepCells,
        shape: StepShape,
        sampled: list[SampleRequest],
        counts: list[int],
        entry_slots: NDArray[np.int32],
    ) -> Draws:
        ends = cells.tables.row_start[1:].tolist()
        rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        views["sampled_rows"][: len(rows)] = rows
        views["sampled_rows"][len(rows) : shape.sampled] = _PADDING
        kinds = [entry.kind for entry, count in zip(cells.plan.entries, counts, strict=True) for _ in range(count)]
        slots = np.repeat(entry_slots, counts)
        return self._sampler.write(views, sampled, slots, kinds, shape.sampled, general=shape.general_sampling)


def known_token_ids(entries: Items[PlanEntry]) -> NDArray[np.int64]:
    """(rows,) ids of a plan's rows; ON_DEVICE for the last sampled token of a sequence."""
    return np.array([token for entry in entries for token in (entry.tokens or (ON_DEVICE,))], np.int64)


def _rows(tiles: list[AttentionTile], entry_slots: NDArray[np.int32]) -> list[TileRow]:
    """(slot, first row, rows, first position) of each tile."""
    return [(int(entry_slots[tile.entry]), tile.first_row, tile.num_rows, tile.first_position) for tile in tiles]


def _write_tiles(
    view: NDArray[np.int32], tiles: list[AttentionTile], entry_slots: NDArray[np.int32], padded: int
) -> None:
    """The rows of tiles; 0 rows are padding."""
    table = view.reshape(-1, _TILE_FIELDS)
    if tiles:
        table[: len(tiles)] = _rows(tiles, entry_slots)
    table[len(tiles) : padded] = 0
