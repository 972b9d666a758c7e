"""Device memory of the simulated backend: an arena of its own, and mirror stores that land with the step's event."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from gpu.device_memory import CellRange
from gpu.layout import KVLayout
from gpu.proof import Poison, equal_cells, page_parts


class SimulatedMemory:
    """Implements `gpu.device_memory.DeviceMemory`. arena: (num_slots * page_bytes,) u8, what kernels get as `device`.

    Kernels store a step's mirror cells into `in_flight`, an array as large as the mirror with the same offsets. Until
    the event the mirror shows what it held before; an address that was never stored lands as it was.
    """

    def __init__(self, layout: KVLayout, num_slots: int, mirror_bytes: int) -> None:
        self.num_slots = num_slots
        self.arena: NDArray[np.uint8] = np.zeros(num_slots * layout.page_bytes, np.uint8)
        self.in_flight: NDArray[np.uint8] = np.zeros(mirror_bytes, np.uint8)
        self._layout = layout
        self._page_bytes = layout.page_bytes
        self._strays: list[CellRange] = []
        self._poison = Poison(layout)

    def poison(self, slot: int) -> None:
        """See `DeviceMemory.poison`."""
        self._poison.set(self._slot(slot))

    def copy_in(self, slot: int, page: NDArray[np.uint8]) -> None:
        """See `DeviceMemory.copy_in`."""
        self._slot(slot)[:] = page

    def equal(self, slot: int, page: NDArray[np.uint8], num_cells: int) -> bool:
        """See `DeviceMemory.equal`."""
        return equal_cells(self._layout, self._slot(slot), page, num_cells)

    def stage(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> NDArray[np.uint8]:
        """See `DeviceMemory.stage`: the step's cells start as the mirror has them."""
        self._copy_cells(mirror, self.in_flight, cells)
        return self.in_flight

    def land(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> None:
        """See `DeviceMemory.land`."""
        self._copy_cells(self.in_flight, mirror, (*cells, *self._strays))
        self._strays.clear()

    def add_stray(self, cells: CellRange) -> None:
        """A kernel stored outside its plan's cells: a real device would land that too."""
        self._strays.append(cells)

    def _copy_cells(self, source: NDArray[np.uint8], target: NDArray[np.uint8], cells: Items[CellRange]) -> None:
        size = self._page_bytes
        for item in cells:
            offset = item.mirror_offset
            parts = (page_parts(self._layout, arena[offset : offset + size]) for arena in (source, target))
            for source_part, target_part in zip(*parts, strict=True):
                target_part[:, :, item.first : item.end] = source_part[:, :, item.first : item.end]

    def _slot(self, slot: int) -> NDArray[np.uint8]:
        return self.arena[slot * self._page_bytes : (slot + 1) * self._page_bytes]
