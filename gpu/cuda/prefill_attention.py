"""Launches of prefill attention: many rows of a sequence over paged KV, with the bits of decode attention.

By warpgroups, a launch has two kernels: one converts every block of the sequences to f16 tiles in device memory, once
for all their rows; the other attends those tiles. What does not fit into that memory at once goes in rounds, over KV
heads and over sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import WARPGROUP_ARCH, shared_bytes
from gpu.cuda.attention import AttentionTables
from gpu.cuda.attention_rings import BLOCK_CELLS
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.errors import LayoutError, PlanError
from gpu.layout import KVLayout

PAGE_SIZES: Final = (16, 32, 64, 128)

_WALKERS: Final = 2
_WARPGROUP_ROWS: Final = 64
_WARPGROUP_THREADS: Final = 384
_WARP_ROWS: Final = 16
_MOST_WARPS: Final = 4
_ALIGNMENT: Final = 1024
_STEP_DIMS: Final = 16
_BLOCK_LIMIT: Final = 512 << 20
"""Bytes of converted blocks, unless one KV head of the longest sequence needs more."""

_CONVERTING_THREADS: Final = 128

_ROW_BYTES: Final = 16
"""Of the tables of tiles and of sequences."""

_P, _I32 = Arg.POINTER, Arg.I32


def _sample(
    head_dim: int, heads: int, kv_heads: int, k: int, v: int, page_size: int = 64, layout: int = 1
) -> dict[str, int]:
    shape = {"HEAD_DIM": head_dim, "NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "PAGE_SIZE": page_size}
    sizes = {"WARPS": 2, "STAGES": 3, "SHARED_QUERY_STEPS": head_dim // 16 // 2 // 4 * 4, "ALTERNATE": 1}
    return {**shape, "K_PLANE": k, "V_PLANE": v, "ACTIVATION_LAYOUT": layout, **sizes, "SHARED_BYTES": 227 << 10}


PREFILL: Final = KernelSource(
    "attention_prefill.cu",
    (KernelEntry("attention_prefill", (_P, _P, _P, _P, _P, _P, _I32, _I32, _I32, _I32, _I32, _I32)),),
    parameters=(
        "HEAD_DIM", "NUM_HEADS", "NUM_KV_HEADS", "PAGE_SIZE", "K_PLANE", "V_PLANE", "ACTIVATION_LAYOUT", "WARPS",
        "STAGES", "SHARED_QUERY_STEPS", "ALTERNATE", "SHARED_BYTES",
    ),
    samples=(
        _sample(128, 32, 8, 1, 2),
        _sample(128, 8, 8, 0, 0, 32),
        _sample(128, 7, 1, 2, 2, 128),
        _sample(64, 9, 3, 1, 2, 16, 0),
        _sample(64, 14, 2, 1, 1, 128),
    ),
)  # fmt: skip
TILES: Final = KernelSource(
    "attention_tiles.cu",
    (KernelEntry("attention_tiles", (_P, _P, _P, _I32, _I32, _I32, _I32)),),
    parameters=("HEAD_DIM", "NUM_KV_HEADS", "PAGE_SIZE", "K_PLANE", "V_PLANE"),
    samples=tuple(
        {"HEAD_DIM": head_dim, "NUM_KV_HEADS": heads, "PAGE_SIZE": page_size, "K_PLANE": k, "V_PLANE": v}
        for head_dim, heads, page_size, k, v in (
            (128, 8, 64, 1, 2), (128, 8, 32, 0, 0), (128, 1, 128, 2, 2), (64, 3, 16, 1, 2), (64, 2, 128, 1, 1),
        )
    ),
)  # fmt: skip
SOURCES: Final = (PREFILL, TILES)

TileRow = tuple[int, int, int, int]
"""(slot, first row of the step, rows, position of the first): rows of a sequence that attention takes together."""


@dataclass(frozen=True, slots=True)
class PrefillRing:
    """What the warpgroup form keeps in shared memory.

    stages: blocks as tiles. shared_query_steps: k16 steps of the queries (a multiple of 4) that stay there instead of
    in registers. alternate: the two warpgroups start their products in turn.
    """

    stages: int
    shared_query_steps: int
    alternate: bool = True


@dataclass(frozen=True, slots=True)
class PrefillRound:
    """Tiles, sequences (by their places in the tables) and KV heads that are attended together.

    num_blocks: of the sequences.
    """

    first_tile: int
    num_tiles: int
    first_sequence: int
    num_sequences: int
    num_blocks: int
    first_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A launch. tiles: (n, 4) i32 `TileRow`. sequences: (m, 4) i32 slot, cells, first block of its round, 0."""

    tiles: NDArray[np.int32]
    sequences: NDArray[np.int32]
    rounds: tuple[PrefillRound, ...]


class PrefillAttention:
    """Prefill attention for one page layout and number of query heads, on one device.

    max_cells: of a sequence. without: levels that are taken away, such as KVALET_NO_WGMMA; the bits stay the same.
    ring: of the warpgroup form, if not the usual one. block_limit: bytes of converted blocks. Raises LayoutError for
    shapes that the kernel is not made for.

    scratch_bytes: device memory that `launch` needs.
    """

    def __init__(
        self,
        library: KernelLibrary,
        layout: KVLayout,
        num_heads: int,
        num_processors: int,
        max_cells: int,
        without: tuple[str, ...] = (),
        ring: PrefillRing | None = None,
        block_limit: int = _BLOCK_LIMIT,
    ) -> None:
        if layout.head_dim not in (64, 128):
            raise LayoutError("head_dim", layout.head_dim, "must be 64 or 128 on CUDA")
        if layout.page_size not in PAGE_SIZES:
            raise LayoutError("page_size", layout.page_size, f"must be one of {PAGE_SIZES} on CUDA")
        group, rest = divmod(num_heads, layout.num_kv_heads)
        if rest or not 1 <= group <= 8:
            raise LayoutError("num_heads", num_heads, f"must be 1 to 8 times {layout.num_kv_heads} KV heads on CUDA")
        self.layout = layout
        self.num_heads = num_heads
        self.by_warpgroups = library.arch == WARPGROUP_ARCH and not without
        self._library = library
        self._num_processors = num_processors
        self._levels = dict.fromkeys(without, 1)
        self._ring = ring or usual_ring(layout)
        self._block_bytes = 2 * BLOCK_CELLS * layout.head_dim * 2
        limit = shared_bytes(library.arch)
        self._warps = _MOST_WARPS if _warp_bytes(layout.head_dim, _MOST_WARPS) <= limit else _MOST_WARPS // 2
        if self.by_warpgroups:
            self.tile_rows = _WALKERS * (_WARPGROUP_ROWS // group)
            self._shared = _warpgroup_bytes(layout, self._ring)
            head_bytes = _num_blocks(max_cells) * self._block_bytes
            self.scratch_bytes = max(head_bytes, min(block_limit, layout.num_kv_heads * head_bytes))
        else:
            self.tile_rows = self._warps * (_WARP_ROWS // group)
            self._shared = _warp_bytes(layout.head_dim, self._warps)
            self.scratch_bytes = 0
        if self._shared > limit:
            raise LayoutError("ring", self._ring, f"needs {self._shared} bytes of shared memory, {limit} exist")

    def plan(self, tiles: Iterable[TileRow]) -> PrefillPlan:
        """The launch for these tiles, which keep their order within a round; the longest should come first.

        Raises PlanError for no tile, or a sequence of more cells than max_cells.
        """
        rows = list(tiles)
        if not rows:
            raise PlanError("attention.tiles", 0, "at least one is needed")
        cells: dict[int, int] = {}
        for slot, _, num_rows, position in rows:
            cells[slot] = max(cells.get(slot, 1), position + num_rows)
        ordered: list[TileRow] = []
        sequences: list[tuple[int, int, int, int]] = []
        rounds: list[PrefillRound] = []
        for slots in self._groups(cells):
            first_tile, first_sequence, num_blocks = len(ordered), len(sequences), 0
            for slot in slots:
                sequences.append((slot, cells[slot], num_blocks, 0))
                num_blocks += _num_blocks(cells[slot])
            chosen = set(slots)
            ordered += [row for row in rows if row[0] in chosen]
            for first_head, num_heads in self._heads(num_blocks):
                rounds.append(
                    PrefillRound(
                        first_tile, len(ordered) - first_tile, first_sequence, len(slots), num_blocks, first_head,
                        num_heads,
                    )
                )  # fmt: skip
        return PrefillPlan(np.array(ordered, np.int32), np.array(sequences, np.int32), tuple(rounds))

    def launch(
        self,
        stream: Any,
        layer: int,
        plan: PrefillPlan,
        tables: AttentionTables,
        *,
        queries: int,
        activations: int,
        activation_layout: ActivationLayout,
        scratch: int,
    ) -> None:
        """Queue attention of one layer for the rows of the tiles, which hold up to `tile_rows` rows each.

        tables: with the plan's tiles and sequences. queries: (rows, num_heads, head_dim) f16 as append leaves them.
        activations: bf16 of width num_heads * head_dim in `activation_layout`; the tiles' rows are written. scratch:
        scratch_bytes of device memory that no other launch uses meanwhile.
        """
        kernel = self._library.get(PREFILL, "attention_prefill", self.variant(activation_layout))
        for part in plan.rounds:
            if self.by_warpgroups:
                self.convert(stream, layer, part, tables, scratch)
            items = part.num_tiles * part.num_heads
            arguments = (
                queries, tables.page_table, tables.tiles + part.first_tile * _ROW_BYTES, activations, scratch,
                _sequences(tables, part), layer, tables.max_pages, part.num_tiles, part.num_blocks, part.first_head,
                part.num_heads,
            )  # fmt: skip
            grid = min(items, self._num_processors) if self.by_warpgroups else items
            threads = _WARPGROUP_THREADS if self.by_warpgroups else 32 * self._warps
            kernel.launch(stream, grid, threads, arguments, self._shared)

    def convert(self, stream: Any, layer: int, part: PrefillRound, tables: AttentionTables, scratch: int) -> None:
        """Queue what comes first in a round by warpgroups: its blocks of one layer, from their pages to `scratch`."""
        shape = {name: value for name, value in self.variant(ActivationLayout.TILE).items() if name in TILES.parameters}
        kernel = self._library.get(TILES, "attention_tiles", shape)
        arguments = (
            tables.page_table, _sequences(tables, part), scratch, layer, tables.max_pages, part.num_sequences,
            part.first_head,
        )  # fmt: skip
        grid = (part.num_blocks, part.num_heads)
        kernel.launch(stream, grid, _CONVERTING_THREADS, arguments, self._block_bytes)

    def _groups(self, cells: dict[int, int]) -> list[list[int]]:
        """Slots whose blocks, of one KV head, fit into scratch memory together."""
        capacity = self.scratch_bytes // self._block_bytes if self.by_warpgroups else sum(cells.values())
        groups: list[list[int]] = []
        room = 0
        for slot, length in cells.items():
            blocks = _num_blocks(length)
            if blocks > capacity:
                raise PlanError("attention.cells", length, f"at most {capacity * BLOCK_CELLS} cells of a sequence")
            if blocks > room:
                groups.append([])
                room = capacity
            groups[-1].append(slot)
            room -= blocks
        return groups

    def _heads(self, num_blocks: int) -> list[tuple[int, int]]:
        """(first, number) of KV heads whose blocks fit into scratch memory together, as even as they can be."""
        kv_heads = self.layout.num_kv_heads
        if not self.by_warpgroups:
            return [(0, kv_heads)]
        rounds = -(-kv_heads // min(kv_heads, self.scratch_bytes // (num_blocks * self._block_bytes)))
        starts = [index * kv_heads // rounds for index in range(rounds + 1)]
        return [(start, end - start) for start, end in pairwise(starts)]

    def variant(self, activation_layout: ActivationLayout) -> dict[str, int]:
        """Values of the kernel's parameters."""
        return {
            "HEAD_DIM": self.layout.head_dim,
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.layout.num_kv_heads,
            "PAGE_SIZE": self.layout.page_size,
            "K_PLANE": self.layout.k_format.kernel_id,
            "V_PLANE": self.layout.v_format.kernel_id,
            "ACTIVATION_LAYOUT": activation_layout,
            "WARPS": self._warps,
            "STAGES": self._ring.stages,
            "SHARED_QUERY_STEPS": self._ring.shared_query_steps,
            "ALTERNATE": int(self._ring.alternate),
            "SHARED_BYTES": self._shared,
            **self._levels,
        }


def usual_ring(layout: KVLayout) -> PrefillRing:
    """Four blocks; half of the queries in shared memory where registers are short."""
    return PrefillRing(4, 4 if layout.head_dim == 128 else 0)


def _sequences(tables: AttentionTables, part: PrefillRound) -> int:
    """Address of the first of a round's sequences."""
    return tables.sequences + part.first_sequence * _ROW_BYTES


def _num_blocks(cells: int) -> int:
    return -(-cells // BLOCK_CELLS)


def _warpgroup_bytes(layout: KVLayout, ring: PrefillRing) -> int:
    """Shared memory of the warpgroup form: `SharedLayout` of prefill_warpgroup.cuh, and its alignment."""
    tile = BLOCK_CELLS * layout.head_dim * 2
    queries = _WALKERS * ring.shared_query_steps * _WARPGROUP_ROWS * _STEP_DIMS * 2
    fold = _fold_bytes(layout.head_dim, _WALKERS * _WARPGROUP_ROWS)
    return ring.stages * 2 * tile + queries + fold + 16 * ring.stages + _ALIGNMENT


def _warp_bytes(head_dim: int, warps: int) -> int:
    """Shared memory of the warp form: `SharedLayout` of prefill_warps.cuh."""
    tile = BLOCK_CELLS * head_dim * 2
    rows = warps * _WARP_ROWS
    return 2 * tile + rows * head_dim * 2 + _fold_bytes(head_dim, rows)


def _fold_bytes(head_dim: int, rows: int) -> int:
    """`Folds` of prefill_work.cuh: values of the groups before; maxima and sums of the group and of those."""
    return rows * (head_dim * 4 + 2 * 8)
