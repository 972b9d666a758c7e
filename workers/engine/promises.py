"""Pages that admission has promised to turns. Every page that a turn takes is taken here, so a promise holds.

    pages of the arena = held | promised, not yet taken | spare

A turn may take what it was promised, and spare pages beyond that. Touched by the engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.cache import FillPage, KVCache
from gpu.errors import CapacityError
from workers.engine.running import RunningTurn


@dataclass(slots=True)
class _Promise:
    """num_pages: promised at admission. num_filling: taken by a restore and not attached yet."""

    num_pages: int
    num_filling: int = 0


class PagePromises:
    """What is promised to whom. Free and cached pages are one supply: cached ones are evicted when they are taken."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._promises: dict[RunningTurn, _Promise] = {}

    def make(self, running: RunningTurn) -> bool:
        """Promise pages for prompt and first output page; False, with nothing changed, when too few are spare.

        While nobody else has a promise, one is always made.
        """
        num_pages = -(-(len(running.ids) + 1) // self._cache.layout.page_size) + 1
        if self._promises and num_pages > self._num_spare():
            return False
        self._promises[running] = _Promise(num_pages)
        return True

    def end(self, running: RunningTurn) -> None:
        """Take a promise back. Idempotent."""
        self._promises.pop(running, None)

    def reserve(self, running: RunningTurn, num_cells: int) -> None:
        """Add pages to the turn's sequence until cells 0 .. num_cells - 1 exist. Raises CapacityError."""
        sequence = running.loaded
        missing = -(-num_cells // self._cache.layout.page_size) - len(sequence.pages)
        allowed = self._num_allowed(running)
        if missing > allowed:
            raise CapacityError("pages", missing, allowed)
        self._cache.reserve(sequence, num_cells)

    def begin_fill(self, running: RunningTurn, num_pages: int) -> list[FillPage]:
        """Pages for a restore of this turn: `num_pages`, or as many as it may take. None for a turn that has ended.

        `end_fill` follows once they are attached or abandoned.
        """
        promise = self._promises.get(running)
        if promise is None:
            return []
        fills = self._cache.begin_fill(min(num_pages, self._num_allowed(running)))
        promise.num_filling += len(fills)
        return fills

    def end_fill(self, running: RunningTurn) -> None:
        """The restore is over: what it has attached counts as pages of the sequence."""
        promise = self._promises.get(running)
        if promise is not None:
            promise.num_filling = 0

    def _num_allowed(self, running: RunningTurn) -> int:
        supply = self._cache.free_pages + self._cache.evictable_pages
        return min(supply, self._num_outstanding(running) + self._num_spare())

    def _num_spare(self) -> int:
        """Pages that may be taken without touching anybody's promise."""
        outstanding = sum(map(self._num_outstanding, self._promises))
        return max(0, self._cache.free_pages + self._cache.evictable_pages - outstanding)

    def _num_outstanding(self, running: RunningTurn) -> int:
        """Pages that are promised to a turn and that it has not taken."""
        promise = self._promises.get(running)
        if promise is None:
            return 0
        held = 0 if running.sequence is None else len(running.sequence.pages)
        return max(0, promise.num_pages - held - promise.num_filling)
