"""Device slots of the page cache and the pinned mirror: implements `gpu.device_memory.DeviceMemory`."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from cuda.core import Event
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice
from gpu.cuda.rows import PageKernels
from gpu.device_memory import CellRange
from gpu.layout import KVLayout
from gpu.mirror import MirrorArena


class CudaMemory:
    """Slots in device memory over a pinned mirror.

    Poison and promotions run on the copy stream in the order of the calls; `order_before_step` makes the compute stream
    wait for those queued so far. A slot that changes hands has no queued reader, since a page keeps its slot while a
    launched step holds it; so the copy stream waits for nothing.
    """

    def __init__(
        self, device: CudaDevice, layout: KVLayout, kernels: PageKernels, mirror_bytes: int, num_slots: int
    ) -> None:
        self.num_slots = num_slots
        self.pinned = device.pin(mirror_bytes)
        self.mirror = MirrorArena(self.pinned.region)
        self.slots = device.allocate(num_slots * layout.page_bytes)
        self._device = device
        self._kernels = kernels
        self._page_bytes = layout.page_bytes
        self._attest = device.create_stream()
        self._slot_table = _addresses(device, self.slots.address, num_slots, layout.page_bytes)
        num_pages = mirror_bytes // layout.page_bytes
        self._mirror_table = _addresses(device, self.pinned.address, num_pages, layout.page_bytes)
        self._cell_numbers = device.upload(np.arange(layout.page_size + 1, dtype=np.int32)).address
        self._differing = device.allocate(16)
        self._verdict = device.pin(16)
        self._queued: Event | None = None
        self._is_ordered = True

    def poison(self, slot: int) -> None:
        """See `DeviceMemory.poison`."""
        self._kernels.poison(self._device.copies, self._slot_table + 8 * slot, 1)
        self._note_queued()

    def copy_in(self, slot: int, page: NDArray[np.uint8]) -> None:
        """See `DeviceMemory.copy_in`."""
        target = self.slots.address + slot * self._page_bytes
        self._device.copy_async(target, page.ctypes.data, self._page_bytes, self._device.copies)
        self._note_queued()

    def order_before_step(self) -> None:
        """Make what the compute stream is given from now on wait for queued poison and promotions."""
        if self._queued is not None and not self._is_ordered:
            self._device.compute.wait(self._queued)
            self._is_ordered = True

    def equal(self, slot: int, page: NDArray[np.uint8], num_cells: int) -> bool:
        """See `DeviceMemory.equal`. Blocks until the bus was read; the page's steps must have ended."""
        index = (page.ctypes.data - self.pinned.address) // self._page_bytes
        stream = self._attest
        if self._queued is not None:
            stream.wait(self._queued)
        self._device.clear_async(self._differing.address, 4, stream)
        self._kernels.compare(
            stream, self._slot_table + 8 * slot, self._mirror_table + 8 * index, self._cell_numbers + 4 * num_cells,
            1, self._differing.address,
        )  # fmt: skip
        self._device.copy_async(self._verdict.address, self._differing.address, 4, stream)
        stream.sync()
        return not self._verdict.array[:4].any()

    def stage(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> NDArray[np.uint8]:
        """Kernels store to the mirror itself."""
        return mirror

    def land(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> None:
        """The step's event has made its stores visible."""

    def _note_queued(self) -> None:
        self._queued = self._device.copies.record(self._queued)
        self._is_ordered = False


def _addresses(device: CudaDevice, first: int, count: int, step: int) -> int:
    table = np.uint64(first) + np.uint64(step) * np.arange(count, dtype=np.uint64)
    return device.upload(table).address
