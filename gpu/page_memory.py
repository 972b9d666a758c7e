"""Pages with their bytes: handing out, proving and comparing. Shared by sequences, steps and restores of one cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gpu.device_memory import DeviceMemory
from gpu.errors import (
    HoldViolation,
    LayoutError,
    MirrorDivergence,
    PoisonedPage,
    UnfilledPage,
    WriteOutOfBounds,
    invariant,
)
from gpu.layout import KVLayout
from gpu.mirror import MirrorArena
from gpu.pages import FillPage, HoldKind, Page, PagePool, PageState, SealedPage
from gpu.proof import Attest, AttestSchedule, Poison, equal_cells
from gpu.residency import Residency
from gpu.sequence import Sequence


class PageMemory:
    """The mirror cut into pages, their device copies, and the checks on both."""

    def __init__(
        self,
        layout: KVLayout,
        mirror: MirrorArena,
        device: DeviceMemory,
        poison: Poison,
        attest: Attest,
        resident_cells: int | None,
    ) -> None:
        self.layout = layout
        self.mirror = mirror
        self.device = device
        self.page_bytes = layout.page_bytes
        self.num_pages = mirror.num_bytes // self.page_bytes
        if self.num_pages == 0:
            raise LayoutError("mirror_bytes", mirror.num_bytes, f"must hold a page of {self.page_bytes} bytes")
        if resident_cells is not None and resident_cells < 0:
            raise LayoutError("resident_cells", resident_cells, "must not be negative")
        max_sealed = None if resident_cells is None else resident_cells // layout.page_size
        self.residency = Residency(device, self.num_pages, self.page_bytes, max_sealed)
        self.pool = PagePool(self.num_pages, self.residency.free)
        self.num_poisoned = 0
        # What attention reads of these pages, in place or in a device copy, are bytes of the mirror.
        self._from_mirror = np.zeros(self.num_pages, np.bool_)
        self._poison = poison
        self._tail_checks = AttestSchedule(attest)
        self._clean_checks = AttestSchedule(attest)
        self._device_checks = AttestSchedule(attest)
        self._attest = attest

    def view(self, page: Page) -> NDArray[np.uint8]:
        """The page's bytes in the mirror: (page_bytes,) u8."""
        start = page.index * self.page_bytes
        return self.mirror.array[start : start + self.page_bytes]

    def sealed(self, page: Page) -> SealedPage:
        """The capability of a sealed page."""
        invariant(page.digest is not None, PoisonedPage, f"page {page.index} is {page.state.value}, not sealed")
        return SealedPage(page.digest or b"", page, page.generation, self._buffer(page).toreadonly())

    def take_open(self, num_pages: int, first_depth: int) -> list[Page]:
        """Poisoned pages with a sequence hold and, on a device, a poisoned slot.

        Raises CapacityError with nothing changed, PoisonedPage if a page is not wholly poisoned.
        """
        self.residency.check_room(num_pages, self.pool)
        fresh = self.pool.take(num_pages, HoldKind.SEQUENCE, PageState.OPEN)
        try:
            for depth, page in enumerate(fresh, first_depth):
                page.depth = depth
                self._from_mirror[page.index] = not self.residency.enabled
                self._hand_out(page)
                self.residency.open(page, self.pool)
        except PoisonedPage:
            self.release(fresh)
            raise
        return fresh

    def poison_ahead(self, num_pages: int) -> bool:
        """Poison a free page unless `num_pages` of them are poisoned; whether one was. Raises PoisonedPage."""
        page = self.pool.take_to_clean() if self.pool.num_clean < num_pages else None
        if page is not None:
            self._poison_page(page)
            self.pool.put_clean(page)
        return page is not None

    def take_filling(self, num_pages: int) -> list[FillPage]:
        """Pages with a fill hold, not poisoned yet. Raises CapacityError with nothing changed."""
        fresh = self.pool.take(num_pages, HoldKind.FILL, PageState.FILLING)
        for page in fresh:
            self._from_mirror[page.index] = True
        return [FillPage(page, page.generation, self._buffer(page)) for page in fresh]

    def poison_filling(self, filled: FillPage) -> None:
        """Poison a page that `take_filling` gave. Any thread. Raises PoisonedPage if it is not wholly poisoned."""
        self.check_filling(filled)
        self._hand_out(filled.page)

    def prove_filled(self, filled: FillPage) -> None:
        """Raise UnfilledPage if a cell of a received page holds poison. Any thread."""
        self.check_filling(filled)
        page = filled.page
        invariant(page.poisoned, PoisonedPage, f"page {page.index} was received into without poison")
        if self._poison.present(self.view(page)):
            raise UnfilledPage(f"page {page.index}: a restored page with poison in it")
        page.filled = True

    def check_filling(self, filled: FillPage) -> None:
        """Raise HoldViolation unless the page is still the fill that it was taken for."""
        page = filled.page
        ours = page.state is PageState.FILLING and page.generation == filled.generation
        invariant(ours, HoldViolation, f"page {page.index} is no longer a fill")

    def note_absent(self, indices: NDArray[np.int64]) -> None:
        """A step is about to read these pages: those without a device copy are read, or promoted, from the mirror."""
        if self.residency.enabled:
            self._from_mirror[indices[self.residency.device_offset[indices] < 0]] = True

    def is_from_mirror(self, page_indices: tuple[int, ...]) -> bool:
        """Whether steps that attend one of these pages read the mirror's bytes; true of unnamed pages."""
        return not page_indices or bool(self._from_mirror[list(page_indices)].any())

    def may_have_read(self, sequence: Sequence, page_indices: tuple[int, ...]) -> bool:
        """Whether a step of an open sequence may have attended bytes that one of these pages has in the mirror.

        page_indices: pages of the arena; none stands for all.
        """
        num_attended = -(-sequence.length // self.layout.page_size) if sequence.has_attended else 0
        indices = sequence.page_index[:num_attended]
        suspect = self._from_mirror[indices] & (np.isin(indices, page_indices) if page_indices else True)
        return bool(suspect.any())

    def release(self, pages: Iterable[Page]) -> None:
        """Drop sequence holds, last page first, so that the deep end of a chain is evicted first."""
        for page in reversed(list(pages)):
            self.pool.release(page, HoldKind.SEQUENCE)

    def publish(self, page: Page, digest: bytes, own_numerics: bool) -> None:
        """Make a proven page the one with this digest."""
        page.own_numerics = own_numerics
        self.pool.publish(page, digest)
        self.residency.note_sealed(page)

    def prove_stored(self, page: Page) -> None:
        """Raise PoisonedPage if a cell of a full page was never stored."""
        if self._poison.present(self.view(page)):
            page.tainted = True
            raise PoisonedPage(f"page {page.index} at depth {page.depth}: a cell was counted but never stored")

    def prove_mirror(self, page: Page) -> None:
        """Where attest asks for it, compare a full page with its device copy. Raises MirrorDivergence."""
        if self.residency.slot(page) >= 0 and self._device_checks.due():
            self.compare_device(page, self.layout.page_size)

    def compare_device(self, page: Page, num_cells: int) -> None:
        """Raise MirrorDivergence unless cells 0 .. num_cells - 1 of mirror and device are equal."""
        if not self.device.equal(self.residency.slot(page), self.view(page), num_cells):
            page.tainted = True
            what = f"page {page.index} at depth {page.depth}: mirror and device bytes differ"
            raise MirrorDivergence(what, (page.index,))

    def compare_known(self, page: Page, known: Page, own_numerics: bool) -> None:
        """Under attest `always`, raise MirrorDivergence if two pages of one digest and our numerics differ."""
        if self._attest is not Attest.ALWAYS or not (own_numerics and known.own_numerics):
            return
        if not equal_cells(self.layout, self.view(page), self.view(known), self.layout.page_size):
            page.tainted = True
            what = f"pages {page.index} and {known.index} have one digest and different bytes"
            raise MirrorDivergence(what, (page.index, known.index))

    def poison_tail(self, sequence: Sequence) -> None:
        """Poison the last page's cells beyond the sequence's length in the mirror."""
        depth, cell = divmod(sequence.length, self.layout.page_size)
        if cell:
            self._poison.set(self.view(sequence.pages[depth]), cell)

    def check_tails(self, sequences: Iterable[Sequence]) -> None:
        """Where attest asks for it, raise WriteOutOfBounds if cells beyond a sequence's length were written.

        Looks at the page that the length ends in and at the one behind it.
        """
        if not self._tail_checks.due():
            return
        for sequence in sequences:
            if sequence.closed or sequence.failed or sequence.num_stale:
                continue
            depth, cell = divmod(sequence.length, self.layout.page_size)
            for page, first in zip(sequence.pages[depth : depth + 2], (cell, 0), strict=False):
                intact = self._poison.intact(self.view(page), first)
                invariant(intact, WriteOutOfBounds, f"{sequence}: cells beyond its length were written")

    def _hand_out(self, page: Page) -> None:
        if not page.poisoned:
            self._poison_page(page)
            page.poisoned = True
        elif self._clean_checks.due():
            self._check_poisoned(page)

    def _poison_page(self, page: Page) -> None:
        self._poison.set(self.view(page))
        self._check_poisoned(page)
        with self.pool.lock:
            self.num_poisoned += 1

    def _check_poisoned(self, page: Page) -> None:
        intact = self._poison.intact(self.view(page))
        invariant(intact, PoisonedPage, f"page {page.index} was to be handed out without poison")

    def _buffer(self, page: Page) -> memoryview:
        return self.mirror.view(page.index * self.page_bytes, self.page_bytes)
