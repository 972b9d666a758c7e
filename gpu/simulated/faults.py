"""Faults that tests plant in the simulated backend. Each must raise its own alarm and no other.

    SKIP_STORE            a mirror store is left out, and not counted      UnprovenAppend at the step's event
    STORE_WITHOUT_COUNT   a mirror store is made, and not counted          UnprovenAppend at the step's event
    COUNT_WITHOUT_STORE   a mirror store is counted, and not made          PoisonedPage at seal
    WRONG_BYTES           the mirror gets other bytes than the device      MirrorDivergence at seal (attest)
    WRITE_PAST_LENGTH     the cell behind a sequence's rows is written     WriteOutOfBounds at the event (attest)
    NO_POISON             a page is handed out as its last user left it    PoisonedPage at reserve or poison_ahead
    FREE_EARLY            step holds go before the step's event            HoldViolation at the event
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from gpu.device_memory import CellRange
from gpu.kv_kernels import KVKernels, PageTables, RopeTable, RowTable
from gpu.layout import KVLayout
from gpu.plan import RowKind
from gpu.proof import Poison, page_parts


class Fault(Enum):
    """What goes wrong."""

    SKIP_STORE = "skip_store"
    STORE_WITHOUT_COUNT = "store_without_count"
    COUNT_WITHOUT_STORE = "count_without_store"
    WRONG_BYTES = "wrong_bytes"
    WRITE_PAST_LENGTH = "write_past_length"
    NO_POISON = "no_poison"
    FREE_EARLY = "free_early"


@dataclass(frozen=True, slots=True)
class StoreFault:
    """A fault of the store kernel. None: every layer, both planes (0 K, 1 V), every row kind."""

    fault: Fault
    layer: int | None = None
    plane: int | None = None
    kind: RowKind | None = None


class FaultyKernels:
    """KV kernels with planted faults; without any they are the inner kernels.

    step_kinds: row kind of each sequence of the step, set by the backend. on_stray: told what was written outside the
    plan's cells, so that a device that lands stores late lands it too.
    """

    def __init__(self, inner: KVKernels, on_stray: Callable[[CellRange], None]) -> None:
        self.faults: list[StoreFault] = []
        self.step_kinds: tuple[RowKind, ...] = ()
        self._inner = inner
        self._on_stray = on_stray

    def store_rows(
        self,
        layout: KVLayout,
        layer: int,
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        rope: RopeTable,
        rows: RowTable,
        mirror: NDArray[np.uint8],
        device: NDArray[np.uint8],
        counts: NDArray[np.int64],
        nonfinite: NDArray[np.int64],
    ) -> None:
        """See `KVKernels.store_rows`."""
        planted = [fault for fault in self.faults if fault.layer in (None, layer)]
        before = [mirror[start : start + layout.page_bytes].copy() for start in rows.mirror_offset] if planted else []
        self._inner.store_rows(layout, layer, k, v, rope, rows, mirror, device, counts, nonfinite)
        for fault in planted:
            for row in range(rows.num_rows):
                if fault.kind in (None, self._kind(rows, row)):
                    self._spoil(fault, layout, layer, rows, row, before[row], mirror, counts)

    def attend(
        self,
        layout: KVLayout,
        layer: int,
        q: NDArray[np.float32],
        rope: RopeTable,
        rows: RowTable,
        tables: PageTables,
        mirror: NDArray[np.uint8],
        device: NDArray[np.uint8],
        out: NDArray[np.float32],
    ) -> None:
        """See `KVKernels.attend`."""
        self._inner.attend(layout, layer, q, rope, rows, tables, mirror, device, out)

    def _kind(self, rows: RowTable, row: int) -> RowKind | None:
        index = int(rows.sequence_index[row])
        return self.step_kinds[index] if index < len(self.step_kinds) else None

    def _spoil(
        self,
        fault: StoreFault,
        layout: KVLayout,
        layer: int,
        rows: RowTable,
        row: int,
        before: NDArray[np.uint8],
        mirror: NDArray[np.uint8],
        counts: NDArray[np.int64],
    ) -> None:
        start, cell = int(rows.mirror_offset[row]), int(rows.cell[row])
        page = mirror[start : start + layout.page_bytes]
        for plane in (0, 1) if fault.plane is None else (fault.plane,):
            if fault.fault in (Fault.SKIP_STORE, Fault.STORE_WITHOUT_COUNT):
                counts[layer, rows.sequence_index[row], plane] -= 1
            for part, old in zip(*(_plane_parts(layout, layer, plane, p) for p in (page, before)), strict=True):
                if fault.fault in (Fault.SKIP_STORE, Fault.COUNT_WITHOUT_STORE):
                    part[:, cell] = old[:, cell]
                elif fault.fault is Fault.WRONG_BYTES:
                    part[:, cell, -1] ^= 1
                elif fault.fault is Fault.WRITE_PAST_LENGTH and cell + 1 < layout.page_size:
                    part[:, cell + 1] = part[:, cell]
                    self._on_stray(CellRange(start, cell + 1, cell + 2))


class FaultyPoison(Poison):
    """Poison that can be switched off for new pages."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.skip = False

    def set(self, page: NDArray[np.uint8], first_cell: int = 0) -> None:
        """See `Poison.set`."""
        if not self.skip:
            super().set(page, first_cell)


def _plane_parts(layout: KVLayout, layer: int, plane: int, page: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    parts = page_parts(layout, page)
    num_k = 2 if layout.k_format.group_size else 1
    return [part[layer] for part in (parts[num_k:] if plane else parts[:num_k])]
