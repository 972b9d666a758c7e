"""Which pages have a device copy.

Open pages always do: a tail is never read from the mirror. Full sealed pages do while the bound allows: they are
promoted before a step while room is left, or in place of pages that no sequence holds; when over the bound, the least
recently used ones lose their slot, deepest first. Nothing is ever written back. On `cpu` all of this is empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu.device_memory import DeviceMemory
from gpu.errors import CapacityError, UnprovenAppend, invariant
from gpu.pages import HoldKind, Page, PagePool


class Residency:
    """Device slots. The pool calls `free` under its lock, on any thread; so everything else takes that lock too.

    device_offset: (num_pages,) int64, byte offset of each page's device copy, -1 without one.
    """

    def __init__(self, device: DeviceMemory, num_pages: int, page_bytes: int, max_sealed_pages: int | None) -> None:
        self.device_offset: NDArray[np.int64] = np.full(num_pages, -1, np.int64)
        self.num_promotions = 0
        self.num_device_evictions = 0
        self._device = device
        self._page_bytes = page_bytes
        self._max_sealed = device.num_slots if max_sealed_pages is None else max_sealed_pages
        self._sealed = np.zeros(num_pages, np.bool_)
        self._depth = np.zeros(num_pages, np.int64)
        self._last_used = np.zeros(num_pages, np.int64)
        self._clock = 0
        self._free_slots = list(range(device.num_slots - 1, -1, -1))

    @property
    def enabled(self) -> bool:
        """Whether the device has memory of its own."""
        return self._device.num_slots > 0

    @property
    def num_resident(self) -> int:
        """Pages with a device copy."""
        return int(np.count_nonzero(self.device_offset >= 0))

    def slot(self, page: Page) -> int:
        """The page's slot, -1 without one."""
        offset = int(self.device_offset[page.index])
        return -1 if offset < 0 else offset // self._page_bytes

    def check_room(self, num_pages: int, pool: PagePool) -> None:
        """Raise CapacityError unless slots for `num_pages` open pages are free or can be had by eviction."""
        if not self.enabled:
            return
        with pool.lock:
            available = len(self._free_slots) + int(np.count_nonzero(self._evictable(pool)))
        if num_pages > available:
            raise CapacityError("device slots", num_pages, available)

    def open(self, page: Page, pool: PagePool) -> None:
        """Give an open page a poisoned slot. Raises CapacityError if none can be had."""
        if not self.enabled:
            return
        with pool.lock:
            if not self._free_slots and not self._evict_one(self._evictable(pool)):
                raise CapacityError("device slots", 1, 0)
            slot = self._free_slots.pop()
            self._place(page.index, slot)
        self._device.poison(slot)

    def note_sealed(self, page: Page) -> None:
        """A page became full and sealed: from now on it may lose its slot."""
        self._sealed[page.index] = True
        self._depth[page.index] = page.depth

    def free(self, page: Page) -> None:
        """A page was freed: its slot is too."""
        self._sealed[page.index] = False
        if self.device_offset[page.index] >= 0:
            self._vacate(page.index)

    def before_step(self, indices: NDArray[np.int64], mirror: NDArray[np.uint8], pool: PagePool) -> None:
        """Mark pages as used and promote those without a device copy while there is room."""
        if not self.enabled:
            return
        self._clock += 1
        self._last_used[indices] = self._clock
        absent = (self.device_offset[indices] < 0) & self._sealed[indices]
        for index in dict.fromkeys(indices[absent].tolist()):
            with pool.lock:
                if not self._make_room(pool):
                    return
                slot = self._free_slots.pop()
                self._place(index, slot)
            self._copy_in(index, slot, mirror)

    def promote(self, page: Page, mirror: NDArray[np.uint8], pool: PagePool) -> None:
        """Give a sealed page a device copy if that costs no other page its own."""
        if not self.enabled or self.device_offset[page.index] >= 0:
            return
        with pool.lock:
            if not self._free_slots or self._num_sealed_resident() >= self._max_sealed:
                return
            slot = self._free_slots.pop()
            self._place(page.index, slot)
        self._copy_in(page.index, slot, mirror)

    def check_readable(self, indices: NDArray[np.int64]) -> None:
        """Raise UnprovenAppend if a step would read a page from the mirror that is not sealed."""
        if self.enabled:
            unproven = indices[(self.device_offset[indices] < 0) & ~self._sealed[indices]]
            invariant(not len(unproven), UnprovenAppend, f"open pages {unproven.tolist()} have no device copy")

    def trim(self, pool: PagePool) -> None:
        """Drop slots of sealed pages until the bound holds, as far as launched steps allow."""
        if not self.enabled:
            return
        with pool.lock:
            for _ in range(self._num_sealed_resident() - self._max_sealed):
                if not self._evict_one(self._evictable(pool)):
                    return

    def _copy_in(self, index: int, slot: int, mirror: NDArray[np.uint8]) -> None:
        self._device.copy_in(slot, mirror[index * self._page_bytes : (index + 1) * self._page_bytes])
        self.num_promotions += 1

    def _make_room(self, pool: PagePool) -> bool:
        idle = self._evictable(pool) & (pool.holds[HoldKind.SEQUENCE] == 0)
        if self._num_sealed_resident() >= self._max_sealed or not self._free_slots:
            return self._max_sealed > 0 and self._evict_one(idle)
        return True

    def _num_sealed_resident(self) -> int:
        return int(np.count_nonzero(self._sealed & (self.device_offset >= 0)))

    def _evictable(self, pool: PagePool) -> NDArray[np.bool_]:
        launched = (pool.holds[HoldKind.STEP] > 0) | (pool.holds[HoldKind.PROMOTION] > 0)
        evictable: NDArray[np.bool_] = self._sealed & (self.device_offset >= 0) & ~launched
        return evictable

    def _evict_one(self, candidates: NDArray[np.bool_]) -> bool:
        indices = np.flatnonzero(candidates)
        if not len(indices):
            return False
        order = np.lexsort((-self._depth[indices], self._last_used[indices]))
        self._vacate(int(indices[order[0]]))
        self.num_device_evictions += 1
        return True

    def _place(self, index: int, slot: int) -> None:
        self.device_offset[index] = slot * self._page_bytes

    def _vacate(self, index: int) -> None:
        self._free_slots.append(int(self.device_offset[index]) // self._page_bytes)
        self.device_offset[index] = -1
