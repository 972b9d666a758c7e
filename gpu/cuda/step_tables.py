"""The tables of a step in device memory: what each row is, where its cell goes, what it may read.

They are written into a pinned staging block and copied by one command, in stream order; see docs/cuda-kernels.md. Page
tables belong to sequence slots and are rewritten, whole, when a sequence's pages or their homes have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice, DeviceBuffer, PinnedBuffer
from gpu.errors import CapacityError
from gpu.sequence import Sequence
from gpu.step_cells import StepCells

_ALIGNMENT: Final = 256
TILE_FIELDS: Final = 4
NO_ROW: Final = -1


@dataclass(frozen=True, slots=True)
class TableField:
    """One table. count: elements for a whole block."""

    name: str
    dtype: Any
    count: int


class TableBlock:
    """Named arrays packed into one range: NumPy views of pinned staging, addresses of the device copy.

    Staging is a ring: a block may be written again once the step that used it has ended, which holds as long as
    fewer than `depth` steps are launched and unread.
    """

    def __init__(self, device: CudaDevice, fields: tuple[TableField, ...], depth: int) -> None:
        offsets, end = {}, 0
        for item in fields:
            offsets[item.name] = end
            end += -(-item.count * np.dtype(item.dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._num_bytes = end
        self._device = device
        self._target = device.allocate(end)
        self._staging = device.pin(end * depth)
        self._views = [_views(self._staging, fields, offsets, end * index) for index in range(depth)]
        self._offsets = offsets
        self._turn = 0

    def address(self, name: str) -> int:
        """Device address of a table."""
        return self._target.address + self._offsets[name]

    def next_views(self) -> dict[str, NDArray[Any]]:
        """The staging arrays of the next upload, with what an earlier step left in them."""
        self._turn = (self._turn + 1) % len(self._views)
        return self._views[self._turn]

    def upload(self, stream: Any) -> None:
        """Queue the copy of the arrays that `next_views` gave last."""
        source = self._staging.address + self._turn * self._num_bytes
        self._device.copy_async(self._target.address, source, self._num_bytes, stream)


class SequenceSlots:
    """Slots of sequences on the device: the row of the page table, the last sampled token.

    A slot stays with its sequence until that is closed.
    """

    def __init__(self, device: CudaDevice, num_slots: int, max_pages: int, depth: int) -> None:
        self.num_slots = num_slots
        self.max_pages = max_pages
        self.last_tokens = device.allocate(4 * num_slots)
        self.page_table = device.allocate(8 * num_slots * max_pages)
        device.clear_async(self.last_tokens.address, 4 * num_slots, device.compute)
        device.clear_async(self.page_table.address, 8 * num_slots * max_pages, device.compute)
        self._device = device
        self._slots: dict[int, tuple[int, Sequence]] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._written: NDArray[np.uint64] = np.zeros((num_slots, max_pages), np.uint64)
        self._staging = device.pin(8 * num_slots * max_pages * depth)
        self._rows = self._staging.array.view(np.uint64).reshape(depth, num_slots, max_pages)
        self._turn = 0

    def slot(self, sequence: Sequence) -> int:
        """The sequence's slot, given to it now if it has none.

        Raises CapacityError when more sequences are open than there are slots.
        """
        known = self._slots.get(sequence.sequence_id)
        if known is not None:
            return known[0]
        if not self._free:
            self._reclaim()
        if not self._free:
            raise CapacityError("sequence slots", len(self._slots) + 1, 0)
        slot = self._free.pop()
        self._slots[sequence.sequence_id] = (slot, sequence)
        return slot

    def begin_step(self) -> None:
        """Take the next staging rows; see `TableBlock`."""
        self._turn = (self._turn + 1) % len(self._rows)

    def write_pages(self, slot: int, addresses: NDArray[np.uint64], stream: Any) -> None:
        """Queue a slot's page addresses, if they differ from what the device has."""
        count = len(addresses)
        if np.array_equal(self._written[slot, :count], addresses):
            return
        self._written[slot, :count] = addresses
        self._rows[self._turn, slot, :count] = addresses
        source = self._rows[self._turn, slot].ctypes.data
        target = self.page_table.address + 8 * slot * self.max_pages
        self._device.copy_async(target, source, 8 * count, stream)

    def _reclaim(self) -> None:
        for sequence_id, (slot, sequence) in list(self._slots.items()):
            if sequence.closed and sequence.num_launched == 0:
                del self._slots[sequence_id]
                self._free.append(slot)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows of one sequence that attention takes together: first_row .. first_row + num_rows - 1 of the step."""

    entry: int
    first_row: int
    num_rows: int
    first_position: int


def cut_tiles(cells: StepCells, entries: list[int], max_rows: int) -> list[AttentionTile]:
    """Tiles of at most `max_rows` rows over some entries of a step."""
    starts = cells.tables.row_start
    tiles = []
    for index in entries:
        first, end = int(starts[index]), int(starts[index + 1])
        for row in range(first, end, max_rows):
            position = int(cells.rows.positions[row])
            tiles.append(AttentionTile(index, row, min(max_rows, end - row), position))
    return tiles


def _views(
    staging: PinnedBuffer, fields: tuple[TableField, ...], offsets: dict[str, int], base: int
) -> dict[str, NDArray[Any]]:
    views = {}
    for item in fields:
        start = base + offsets[item.name]
        end = start + item.count * np.dtype(item.dtype).itemsize
        views[item.name] = staging.array[start:end].view(item.dtype)
    return views


__all__ = ["AttentionTile", "DeviceBuffer", "SequenceSlots", "TableBlock", "TableField", "cut_tiles"]
