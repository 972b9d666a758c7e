"""Pages of the mirror arena, who holds them, and which sealed page has which digest.

    FREE -> OPEN (handed to a sequence) ---seal--> SEALED -> FREE (evicted)
    FREE -> FILLING (a restore writes it) --fill-> SEALED
    SEALED -> DROPPED (never looked up again) -> FREE

A page leaves its state for FREE only when it has no hold of any kind. A sealed page without holds is *cached*: it
stays in the index until its memory is needed, least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from gpu.errors import CapacityError, HoldViolation, invariant


class HoldKind(IntEnum):
    """Why a page may not be freed."""

    SEQUENCE = 0
    STEP = 1
    UPLOAD = 2
    FILL = 3
    PROMOTION = 4


class PageState(Enum):
    """Life of a page."""

    FREE = "free"
    OPEN = "open"
    FILLING = "filling"
    SEALED = "sealed"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Page:
    """One page of the arena.

    generation: grows when the page is freed, so that a stale reference is noticed. poisoned: since it was freed;
    filled: what a restore has received into it holds no poison. depth: its place in its sequence.
    unproven: launched steps that write to it and whose event is still to come. tainted: such a step failed its proof;
    the page can never be sealed. own_numerics: its bytes are the ones that this process would compute.
    """

    index: int
    state: PageState = PageState.FREE
    generation: int = 0
    poisoned: bool = False
    filled: bool = False
    digest: bytes | None = None
    depth: int = 0
    unproven: int = 0
    tainted: bool = False
    own_numerics: bool = True


@dataclass(frozen=True, slots=True)
class SealedPage:
    """A proven, full, read-only page: all that may be uploaded, shared or read in place from the mirror.

    buffer: its page_bytes, read-only; valid while the caller or a sequence holds the page.
    """

    digest: bytes
    page: Page
    generation: int
    buffer: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class FillPage:
    """A page that a restore writes. buffer: page_bytes, writable from `prepare_fill` to `fill` or `abandon_fill`."""

    page: Page
    generation: int
    buffer: memoryview = field(repr=False)


class PagePool:
    """Free list, holds and digest index. Safe to call from any thread; `on_free` is called under `lock`."""

    def __init__(self, num_pages: int, on_free: Callable[[Page], None]) -> None:
        self.pages = [Page(index) for index in range(num_pages)]
        self.holds: NDArray[np.int32] = np.zeros((len(HoldKind), num_pages), np.int32)
        self.generations: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self.num_evictions = 0
        self._free = list(reversed(self.pages))
        self._clean: list[Page] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, Page] = {}
        self._on_free = on_free
        self.lock = RLock()

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free) + len(self._clean)

    @property
    def num_clean(self) -> int:
        """Free pages that were poisoned ahead."""
        return len(self._clean)

    @property
    def num_cached(self) -> int:
        """Sealed pages without holds: evictable."""
        return len(self._cached)

    @property
    def num_sealed(self) -> int:
        """Pages in the digest index."""
        return len(self._index)

    def take(self, num_pages: int, kind: HoldKind, state: PageState) -> list[Page]:
        """Hand out pages with one hold each, evicting cached ones if needed.

        Raises CapacityError, with nothing changed, when fewer are free or cached.
        """
        with self.lock:
            available = self.num_free + len(self._cached)
            if num_pages > available:
                raise CapacityError("pages", num_pages, available)
            return [self._take_one(kind, state) for _ in range(num_pages)]

    def take_to_clean(self) -> Page | None:
        """A free page to be poisoned and given to `put_clean`; until then nobody has it. None when there is none."""
        with self.lock:
            return self._free.pop() if self._free else None

    def put_clean(self, page: Page) -> None:
        """Give back a page of `take_to_clean`, poisoned."""
        with self.lock:
            page.poisoned = True
            self._clean.append(page)

    def hold(self, page: Page, generation: int, kind: HoldKind) -> None:
        """Add a hold. Raises HoldViolation if the page was freed since `generation`."""
        with self.lock:
            invariant(
                page.generation == generation and page.state is not PageState.FREE,
                HoldViolation,
                f"page {page.index}: {kind.name} hold on generation {generation}, now {page.generation}",
            )
            self.holds[kind, page.index] += 1
            self._cached.pop(page.index, None)

    def release(self, page: Page, kind: HoldKind) -> None:
        """Drop a hold; the last one frees the page, or caches it if it is sealed. Raises HoldViolation without one."""
        with self.lock:
            count = int(self.holds[kind, page.index])
            invariant(count > 0, HoldViolation, f"page {page.index}: {kind.name} hold released but not held")
            self.holds[kind, page.index] -= 1
            self._settle(page)

    def hold_step(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add a step hold per occurrence in `indices`; returns the pages' generations for `release_step`."""
        with self.lock:
            np.add.at(self.holds[HoldKind.STEP], indices, 1)
            return self.generations[indices]

    def release_step(self, indices: NDArray[np.int64], generations: NDArray[np.int64]) -> None:
        """Drop the step holds of `hold_step`. Raises HoldViolation if a page lost its hold or was freed meanwhile."""
        with self.lock:
            step_holds = self.holds[HoldKind.STEP]
            reused = self.generations[indices] != generations
            np.subtract.at(step_holds, indices, 1)
            lost = reused | (step_holds[indices] < 0)
            np.maximum(step_holds, 0, out=step_holds)
            invariant(
                not lost.any(), HoldViolation, f"pages {indices[lost].tolist()} were freed before their step's event"
            )
            for index in np.unique(indices[self.holds[:, indices].sum(axis=0) == 0]):
                self._settle(self.pages[index])

    def publish(self, page: Page, digest: bytes) -> None:
        """Make a page findable by digest. The caller has proven it and checked that the digest is not taken."""
        with self.lock:
            page.state = PageState.SEALED
            page.digest = digest
            self._index[digest] = page

    def lookup(self, digest: bytes) -> Page | None:
        """The sealed page with this digest; becomes the most recently used one."""
        with self.lock:
            page = self._index.get(digest)
            if page is not None and page.index in self._cached:
                self._cached.move_to_end(page.index)
            return page

    def drop(self, page: Page) -> None:
        """Take a sealed page out of the index for good; it is freed with its last hold."""
        with self.lock:
            if page.state is not PageState.SEALED:
                return
            self._forget(page)
            page.state = PageState.DROPPED
            self._settle(page)

    def num_held(self, kind: HoldKind) -> int:
        """Pages with at least one hold of this kind."""
        with self.lock:
            return int(np.count_nonzero(self.holds[kind]))

    def _take_one(self, kind: HoldKind, state: PageState) -> Page:
        if not self.num_free:
            index, _ = self._cached.popitem(last=False)
            self._forget(self.pages[index])
            self._to_free(self.pages[index])
            self.num_evictions += 1
        # A restore poisons its pages beside the engine: those that were poisoned ahead are for new rows.
        first, second = (self._clean, self._free) if state is PageState.OPEN else (self._free, self._clean)
        page = (first or second).pop()
        invariant(not self.holds[:, page.index].any(), HoldViolation, f"page {page.index}: free but held")
        page.state = state
        self.holds[kind, page.index] = 1
        return page

    def _settle(self, page: Page) -> None:
        if self.holds[:, page.index].any() or page.state is PageState.FREE:
            return
        if page.state is PageState.SEALED:
            self._cached[page.index] = None
        else:
            self._to_free(page)

    def _forget(self, page: Page) -> None:
        self._cached.pop(page.index, None)
        if page.digest is not None:
            self._index.pop(page.digest, None)

    def _to_free(self, page: Page) -> None:
        page.state = PageState.FREE
        page.generation += 1
        self.generations[page.index] = page.generation
        page.digest, page.unproven, page.tainted, page.own_numerics = None, 0, False, True
        page.poisoned = page.filled = False
        self._on_free(page)
        self._free.append(page)
