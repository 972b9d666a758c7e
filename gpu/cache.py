"""The KV cache: sequences, the one append path, proof and seal, and the way in for restored pages.

Only `append` writes generated cells and only `fill` makes restored cells readable; both always write the mirror. All
methods are called on the engine thread, except `hold`, `release`, `abandon_fill` and `stats`.

    open -> attach, reserve -> [begin_step -> append, attend per layer -> finish_step -> truncate]* -> seal -> close
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from gpu.cache_stats import CacheStats
from gpu.cell_kernels import CellKernels
from gpu.device_memory import DeviceMemory
from gpu.errors import HoldViolation, NonFiniteInput, PlanError, PoisonedPage, UnprovenAppend, invariant
from gpu.layout import KVLayout
from gpu.mirror import MirrorArena
from gpu.page_memory import PageMemory
from gpu.pages import FillPage, HoldKind, Page, SealedPage
from gpu.plan import StepPlan
from gpu.proof import Attest, Poison
from gpu.sequence import Sequence
from gpu.step_cells import LayerAppend, StepCells
from gpu.step_ledger import StepLedger

__all__ = [
    "CacheStats",
    "FillPage",
    "HoldKind",
    "KVCache",
    "LayerAppend",
    "MirrorArena",
    "SealedPage",
    "Sequence",
    "StepCells",
]


class KVCache:
    """Cells of all sequences of one engine.

    attest: "always", "sampled" or "off": how often device copies and unwritten tails are checked. resident_cells:
    bound on device cells of full pages, None for all that fit; tails come on top.
    """

    def __init__(
        self,
        layout: KVLayout,
        mirror: MirrorArena,
        device: DeviceMemory,
        kernels: CellKernels,
        *,
        attest: str = "sampled",
        resident_cells: int | None = None,
        poison: Poison | None = None,
    ) -> None:
        self.layout = layout
        self._kernels = kernels
        self.memory = PageMemory(layout, mirror, device, poison or Poison(layout), Attest.parse(attest), resident_cells)
        self._steps = StepLedger(self.memory, kernels)
        self._next_sequence_id = 0

    def open(self) -> Sequence:
        """An empty sequence."""
        self._next_sequence_id += 1
        return Sequence(self._next_sequence_id)

    def attach(self, sequence: Sequence, pages: Items[SealedPage]) -> None:
        """Append sealed pages, in order, to a sequence that ends at a page end; takes a sequence hold on each.

        Raises HoldViolation if a page was evicted since it was looked up, PlanError if the sequence can't take pages.
        """
        full = len(sequence.pages) * self.layout.page_size
        if sequence.closed or sequence.num_launched or not sequence.length == sequence.accepted == full:
            raise PlanError("sequence", sequence, "attach needs an idle one that ends at the end of its last page")
        taken: list[Page] = []
        try:
            for sealed in pages:
                self.memory.pool.hold(sealed.page, sealed.generation, HoldKind.SEQUENCE)
                taken.append(sealed.page)
        except HoldViolation:
            self.memory.release(taken)
            raise
        sequence.own_numerics = sequence.own_numerics and all(page.own_numerics for page in taken)
        sequence.set_pages(sequence.pages + taken)
        sequence.num_sealed = len(sequence.pages)
        sequence.length = sequence.accepted = len(sequence.pages) * self.layout.page_size

    def reserve(self, sequence: Sequence, num_cells: int) -> None:
        """Add poisoned pages until cells 0 .. num_cells - 1 exist; evicts cached pages for it.

        Raises CapacityError with what is needed and free, having changed nothing; PoisonedPage if a page is not
        wholly poisoned.
        """
        if sequence.closed:
            raise PlanError("sequence", sequence, "reserve needs an open one")
        missing = -(-num_cells // self.layout.page_size) - len(sequence.pages)
        if missing > 0:
            sequence.set_pages(sequence.pages + self.memory.take_open(missing, len(sequence.pages)))

    def poison_ahead(self, num_pages: int) -> bool:
        """Poison a free page now instead of in `reserve`, unless `num_pages` wait poisoned; whether one was.

        For the time in which a device computes or nothing is to be done. Raises PoisonedPage if it is not wholly
        poisoned then; `reserve` looks again where attest asks for it.
        """
        return self.memory.poison_ahead(num_pages)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep cells 0 .. length - 1 and make them final: drops rejected verify rows, or accepts all of them.

        Whole pages beyond are released; what is left of the last page is poisoned again, so that junk can neither be
        taken for cells nor be sealed. Raises PlanError outside 0 .. sequence.length, and inside a sealed page.
        """
        page_size = self.layout.page_size
        in_sealed = length < sequence.num_sealed * page_size and length % page_size
        if sequence.closed or not 0 <= length <= sequence.length or in_sealed:
            raise PlanError("length", length, f"within {sequence} and not inside a sealed page")
        sequence.accepted = length
        if length == sequence.length:
            return
        kept = -(-length // page_size)
        self.memory.release(sequence.pages[kept:])
        sequence.set_pages(sequence.pages[:kept])
        sequence.num_sealed = min(sequence.num_sealed, kept)
        sequence.length = length
        sequence.truncations += 1
        sequence.num_stale = sequence.num_launched
        self.memory.poison_tail(sequence)

    def close(self, sequence: Sequence) -> None:
        """Drop the sequence's holds. Sealed pages stay cached, others are free once no launched step holds them."""
        invariant(not sequence.closed, HoldViolation, f"{sequence} closed twice")
        sequence.closed = True
        self.memory.release(sequence.pages)
        sequence.set_pages([])

    def begin_step(self, plan: StepPlan) -> StepCells:
        """Grow the plan's sequences by their rows and hold their pages until `finish_step`.

        Raises PlanError (also for a failed sequence) or WriteOutOfBounds (rows without reserved, open pages) before
        anything is changed.
        """
        return self._steps.begin(plan)

    def append(self, plan: LayerAppend, k: Any, v: Any) -> None:
        """Write one layer of a launched step's cells: the mirror always, the device where the page is resident.

        k, v: (num_rows, num_kv_heads, head_dim) f32, K before RoPE, in the memory that the kernels work on. The only
        writer of generated cells.
        """
        self._kernels.store(self._steps.owned(plan), plan.layer, k, v)

    def attend(self, plan: LayerAppend, q: Any, out: Any) -> None:
        """Attend each row of a step to its own and all earlier cells of its sequence, in one layer.

        q, out: (num_rows, num_heads, head_dim), q before RoPE; out is overwritten.
        """
        self._kernels.attend(self._steps.owned(plan), plan.layer, q, out)

    def finish_step(self, cells: StepCells) -> tuple[NonFiniteInput | None, ...]:
        """The step's event: lands its mirror stores, proves it and drops its holds. Steps finish in launch order.

        Final from now on: all rows of PREFILL and DECODE, the first of VERIFY (`truncate` accepts more). Returns per
        entry the error that fails that sequence alone. Raises UnprovenAppend if counts differ from the plan,
        HoldViolation if a page was freed under the step, WriteOutOfBounds if cells beyond a length were written.
        """
        return self._steps.finish(cells)

    def abandon_step(self, cells: StepCells) -> None:
        """Give up a step that failed between `begin_step` and its event: drops its holds, fails its sequences."""
        self._steps.abandon(cells)

    def sealable(self, sequence: Sequence) -> range:
        """Indices of the sequence's next pages that can be sealed: full of final, proven cells."""
        end = sequence.num_sealed
        for page in sequence.pages[end : sequence.accepted // self.layout.page_size]:
            if page.unproven or page.tainted:
                break
            end += 1
        return range(sequence.num_sealed, end)

    def seal(self, sequence: Sequence, page_index: int, digest: bytes) -> SealedPage:
        """Prove the next page of a sequence and make it findable, shareable, uploadable and evictable.

        If the digest is known already the sequence goes on with that page and its own is freed. Raises UnprovenAppend
        for a page that is not the next sealable one, PoisonedPage if a cell was never stored, MirrorDivergence if the
        device copy or the known page has other bytes; such a page can never be sealed.
        """
        if page_index != sequence.num_sealed or page_index not in self.sealable(sequence):
            raise UnprovenAppend(f"page {page_index} of {sequence}: sealable now are {self.sealable(sequence)}")
        memory, page = self.memory, sequence.pages[page_index]
        memory.prove_stored(page)
        memory.prove_mirror(page)
        known = memory.pool.lookup(digest)
        if known is None:
            memory.publish(page, digest, sequence.own_numerics)
        else:
            memory.compare_known(page, known, sequence.own_numerics)
            memory.pool.hold(known, known.generation, HoldKind.SEQUENCE)
            sequence.own_numerics = sequence.own_numerics and known.own_numerics
            sequence.set_pages([*sequence.pages[:page_index], known, *sequence.pages[page_index + 1 :]])
            memory.release([page])
        sequence.num_sealed += 1
        memory.residency.trim(memory.pool)
        return memory.sealed(sequence.pages[page_index])

    def lookup(self, digest: bytes) -> SealedPage | None:
        """The local page with this digest. Attach or hold it before anything else may evict it."""
        page = self.memory.pool.lookup(digest)
        return None if page is None else self.memory.sealed(page)

    def hold(self, sealed: SealedPage, kind: HoldKind) -> None:
        """Keep a sealed page's bytes until `release`. Any thread. Raises HoldViolation if it was evicted already."""
        self.memory.pool.hold(sealed.page, sealed.generation, kind)

    def release(self, sealed: SealedPage, kind: HoldKind) -> None:
        """Undo one `hold`. Any thread. Raises HoldViolation without one."""
        self.memory.pool.release(sealed.page, kind)

    def drop(self, sealed: SealedPage) -> None:
        """Never hand this page out again (damage, divergence, quarantine); sequences that hold it keep it."""
        if sealed.page.generation == sealed.generation:
            self.memory.pool.drop(sealed.page)

    def attest(self, sequence: Sequence) -> int:
        """Compare all written cells of an idle sequence with their device copies: K, V and scales, byte for byte.

        Returns the number of pages compared; 0 where the mirror is the resident copy. Raises MirrorDivergence.
        """
        if sequence.num_launched:
            raise PlanError("sequence", sequence, "attest needs one without launched steps")
        page_size = self.layout.page_size
        resident = [
            (page, min(sequence.length - depth * page_size, page_size))
            for depth, page in enumerate(sequence.pages[: -(-sequence.length // page_size)])
            if self.memory.residency.slot(page) >= 0
        ]
        for page, num_cells in resident:
            self.memory.compare_device(page, num_cells)
        return len(resident)

    def begin_fill(self, num_pages: int) -> list[FillPage]:
        """Pages with a fill hold, for `prepare_fill`. Raises CapacityError, having changed nothing."""
        return self.memory.take_filling(num_pages)

    def prepare_fill(self, filled: FillPage) -> None:
        """Poison a page that something will be received into. Any thread: it takes as long as a row's pages of a step.

        Raises PoisonedPage if it is not wholly poisoned then.
        """
        self.memory.poison_filling(filled)

    def prove_fill(self, filled: FillPage) -> None:
        """Look for poison in a received page, which takes a while too. Any thread; `fill` needs it.

        Raises UnfilledPage if a cell holds poison: the page stays a fill, to be abandoned.
        """
        self.memory.prove_filled(filled)

    def fill(self, filled: FillPage, digest: bytes, *, own_numerics: bool = True) -> SealedPage:
        """Publish a received, verified and proven page; drops its fill hold. The only way in for restored cells.

        Its way to the device begins at once where a slot is free; until then, or else, it is read from the mirror.
        A page whose digest is known is freed and the known one returned. Attach the result before anything else may
        evict it. Raises HoldViolation for a page that is no fill any more, PoisonedPage for one without its proof.
        """
        memory, page = self.memory, filled.page
        memory.check_filling(filled)
        invariant(page.filled, PoisonedPage, f"page {page.index} was to be published without its proof")
        known = memory.pool.lookup(digest)
        if known is None:
            memory.publish(page, digest, own_numerics)
            memory.residency.promote(page, memory.mirror.array, memory.pool)
        else:
            memory.compare_known(page, known, own_numerics)
        memory.pool.release(page, HoldKind.FILL)
        return memory.sealed(known or page)

    def abandon_fill(self, filled: FillPage) -> None:
        """Free a page whose restore failed, after its reader has returned. Any thread."""
        self.memory.pool.release(filled.page, HoldKind.FILL)

    @property
    def num_pages(self) -> int:
        """Pages of the mirror arena."""
        return self.memory.num_pages

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.memory.pool.num_free

    @property
    def cached_pages(self) -> int:
        """Sealed pages that nothing holds."""
        return self.memory.pool.num_cached

    @property
    def evictable_pages(self) -> int:
        """Pages that `reserve` and `begin_fill` can have beyond the free ones: the cached ones."""
        return self.memory.pool.num_cached

    def stats(self) -> CacheStats:
        """Counts for metrics. Any thread."""
        pool, residency = self.memory.pool, self.memory.residency
        return CacheStats(
            num_pages=self.num_pages,
            free=pool.num_free,
            cached=pool.num_cached,
            sealed=pool.num_sealed,
            held={kind: pool.num_held(kind) for kind in HoldKind},
            resident=residency.num_resident,
            poisoned=self.memory.num_poisoned,
            evictions=pool.num_evictions,
            device_evictions=residency.num_device_evictions,
            promotions=residency.num_promotions,
            streamed_bytes=self._steps.streamed_bytes,
        )
