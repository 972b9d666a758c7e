"""Launches of decode attention: rows of decode and verify over paged KV, and the fold that completes them.

Scratch between the two kernels: partial results f32 [row][head][max_splits][head_dim], then (maximum, sum) f32 pairs
[row][head][max_splits].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import shared_bytes
from gpu.cuda.attention_rings import (
    BLOCK_CELLS,
    DECODE,
    DECODE_HALF,
    PRODUCT_ROWS,
    QUERY_TILE,
    BlockRing,
    choose_ring,
    share_beside_fold,
)
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.errors import LayoutError, PlanError
from gpu.layout import KVLayout

GROUP_BLOCKS: Final = 64
_MAX_FOLD_WARPS: Final = 16
_START_BLOCKS: Final = 1.5
"""What a CTA costs before its first block, in times of a block."""

_P, _I32 = Arg.POINTER, Arg.I32

FOLD: Final = KernelSource(
    "attention_fold.cu",
    (KernelEntry("attention_fold", (_P, _P, _P, _P, _I32, _I32, _I32)),),
    parameters=("HEAD_DIM", "NUM_HEADS", "V_PLANE", "ACTIVATION_LAYOUT", "FOLD_WARPS"),
    samples=tuple(
        {"HEAD_DIM": head_dim, "NUM_HEADS": 32, "V_PLANE": v, "ACTIVATION_LAYOUT": layout, "FOLD_WARPS": warps}
        for head_dim, v, layout, warps in ((128, 2, 0, 1), (128, 0, 1, 16), (64, 2, 1, 4), (64, 1, 0, 16))
    ),
)
SOURCES: Final = (DECODE, DECODE_HALF, FOLD)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A launch of decode attention, fixed when a step is captured; it serves every step with at most its sizes.

    query_tiles: tiles of 8 queries (rows times query heads of a KV head) for tile_rows rows. chunks: CTAs that share a
    tile and KV head. max_splits: sub-splits of max_length cells. unsettled: rows that one
    sequence may have in the step beside a tile's. scratch_rows: of the step, or tile_stride for each tile if not 0.
    """

    num_tiles: int
    tile_rows: int
    query_tiles: int
    chunks: int
    max_splits: int
    fold_warps: int
    unsettled: int
    scratch_rows: int
    tile_stride: int


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Addresses of what attention reads of a step (docs/cuda-kernels.md, section 1).

    tiles: (num_tiles, 4) i32. page_table: (slots, max_pages) u64. sequences: (num_sequences, 4) i32, for prefill.
    """

    tiles: int
    page_table: int
    max_pages: int
    sequences: int = 0


class DecodeAttention:
    """Decode attention for one page layout and number of query heads, on one device.

    A CTA takes its share of a processor's shared memory, even if its ring is smaller: so no processor takes more than
    `resident` CTAs, and those of the next layer cannot crowd on the processors that are done first (q4 at 131k cells:
    47 us instead of 61). Some of it is left for the fold, whose CTAs could not begin on a full processor (32 sequences
    of 4k cells, int8: 112 us for both kernels instead of 76).

    ring: instead of what suits the device. without: levels that are taken away, such as KVALET_NO_BULK; the bits stay
    the same. Raises LayoutError for shapes that the kernels are not made for.
    """

    def __init__(
        self,
        library: KernelLibrary,
        layout: KVLayout,
        num_heads: int,
        num_processors: int,
        ring: BlockRing | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        if layout.head_dim not in (64, 128):
            raise LayoutError("head_dim", layout.head_dim, "must be 64 or 128 on CUDA")
        group, rest = divmod(num_heads, layout.num_kv_heads)
        if rest or not 1 <= group <= 8:
            raise LayoutError("num_heads", num_heads, f"must be 1 to 8 times {layout.num_kv_heads} KV heads on CUDA")
        self.layout = layout
        self.num_heads = num_heads
        self.tile_rows = PRODUCT_ROWS // group
        self._library = library
        self._num_processors = num_processors
        self._levels = dict.fromkeys(without, 1)
        self._limit = shared_bytes(library.arch)
        self._rings: dict[int, BlockRing] = {
            tiles: ring or choose_ring(layout, library.arch, tiles)
            for tiles in range(1, PRODUCT_ROWS // QUERY_TILE + 1)
        }

    def plan(self, num_rows: int, num_tiles: int, max_length: int, tile_rows: int = 0) -> DecodePlan:
        """The launch for steps of up to num_rows rows in num_tiles tiles over up to max_length cells.

        tile_rows: the most rows of a tile, 0 for what a tile can hold. Raises PlanError for sizes below 1.
        """
        for name, value in (("num_rows", num_rows), ("num_tiles", num_tiles), ("max_length", max_length)):
            if value < 1:
                raise PlanError(f"attention.{name}", value, "must be positive")
        blocks = _ceil_div(max_length, BLOCK_CELLS)
        pairs = num_tiles * self.layout.num_kv_heads
        most_rows = min(tile_rows or self.tile_rows, num_rows)
        query_tiles = _ceil_div(most_rows * (self.num_heads // self.layout.num_kv_heads), QUERY_TILE)
        if num_rows * self.num_heads * num_sub_splits(max_length) >= 1 << 31:
            raise PlanError("attention.max_length", max_length, f"too many sub-splits for {num_rows} rows")
        by_tile = num_tiles * most_rows < num_rows
        return DecodePlan(
            num_tiles=num_tiles,
            tile_rows=most_rows,
            query_tiles=query_tiles,
            chunks=choose_chunks(pairs, blocks, self._num_processors, resident=self._rings[query_tiles].resident),
            max_splits=num_sub_splits(max_length),
            fold_warps=min(_MAX_FOLD_WARPS, _ceil_div(blocks, GROUP_BLOCKS)),
            unsettled=num_rows - 1,
            scratch_rows=num_tiles * most_rows if by_tile else num_rows,
            tile_stride=most_rows if by_tile else 0,
        )

    def scratch_bytes(self, plan: DecodePlan) -> int:
        """Scratch memory of a plan."""
        return self._partials_bytes(plan) + plan.scratch_rows * self.num_heads * plan.max_splits * 8

    def launch(
        self,
        stream: Any,
        layer: int,
        plan: DecodePlan,
        tables: AttentionTables,
        *,
        queries: int,
        scratch: int,
        activations: int,
        activation_layout: ActivationLayout,
    ) -> None:
        """Queue attention of one layer for the rows of the tiles.

        queries: (rows, num_heads, head_dim) f16 as append leaves them. activations: bf16 of width num_heads * head_dim
        in `activation_layout`; the tiles' rows are written.
        """
        self.attend(stream, layer, plan, tables, queries=queries, scratch=scratch)
        self.fold(stream, plan, tables, scratch=scratch, activations=activations, activation_layout=activation_layout)

    def attend(
        self, stream: Any, layer: int, plan: DecodePlan, tables: AttentionTables, *, queries: int, scratch: int
    ) -> None:
        """Queue the first half of `launch`: partial results of sub-splits into scratch."""
        arguments = (
            queries, tables.page_table, tables.tiles, scratch, scratch + self._partials_bytes(plan), layer,
            tables.max_pages, plan.max_splits, plan.tile_stride, plan.unsettled,
        )  # fmt: skip
        grid = (plan.chunks, self.layout.num_kv_heads, plan.num_tiles)
        ring, variant = self._rings[plan.query_tiles], self.decode_variant(plan.query_tiles)
        kernel = self._library.get(ring.source, ring.source.kernels[0].name, variant)
        kernel.launch(stream, grid, ring.threads, arguments, variant["SHARED_BYTES"])

    def fold(
        self,
        stream: Any,
        plan: DecodePlan,
        tables: AttentionTables,
        *,
        scratch: int,
        activations: int,
        activation_layout: ActivationLayout,
    ) -> None:
        """Queue the second half of `launch`: partial results to activations."""
        arguments = (
            tables.tiles, scratch, scratch + self._partials_bytes(plan), activations, plan.chunks, plan.max_splits,
            plan.tile_stride,
        )  # fmt: skip
        grid = (plan.tile_rows, self.num_heads, plan.num_tiles)
        kernel = self._library.get(FOLD, "attention_fold", self._fold_variant(plan, activation_layout))
        kernel.launch(stream, grid, 32 * plan.fold_warps, arguments)

    def _partials_bytes(self, plan: DecodePlan) -> int:
        return plan.scratch_rows * self.num_heads * plan.max_splits * self.layout.head_dim * 4

    def decode_source(self) -> KernelSource:
        """Source of the decode kernel."""
        return self._rings[1].source

    def decode_variant(self, query_tiles: int) -> dict[str, int]:
        """Parameters of the decode kernel."""
        ring = self._rings[query_tiles]
        needed = ring.shared_bytes(self.layout, query_tiles)
        return {
            "HEAD_DIM": self.layout.head_dim,
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.layout.num_kv_heads,
            "PAGE_SIZE": self.layout.page_size,
            "K_PLANE": self.layout.k_format.kernel_id,
            "V_PLANE": self.layout.v_format.kernel_id,
            "SHARED_BYTES": max(needed, share_beside_fold(self._limit, ring.resident)),
            "RESIDENT": ring.resident,
            **ring.parameters(query_tiles),
            **self._levels,
        }

    def _fold_variant(self, plan: DecodePlan, activation_layout: ActivationLayout) -> dict[str, int]:
        return {
            "HEAD_DIM": self.layout.head_dim,
            "NUM_HEADS": self.num_heads,
            "V_PLANE": self.layout.v_format.kernel_id,
            "ACTIVATION_LAYOUT": activation_layout,
            "FOLD_WARPS": plan.fold_warps,
            **self._levels,
        }


def num_sub_splits(length: int) -> int:
    """Sub-splits of `length` cells: blocks 0-15 one each, 16-63 two each, then four each."""
    last = _ceil_div(length, BLOCK_CELLS) - 1
    if last < 16:
        return last + 1
    return (16 + (last - 16) // 2 if last < 64 else 40 + (last - 64) // 4) + 1


def choose_chunks(pairs: int, blocks: int, num_processors: int, *, resident: int) -> int:
    """CTAs for each of `pairs` tiles and KV heads of `blocks` blocks: the least estimated time, then the fewest.

    resident: CTAs on a processor, which share its bandwidth.
    """
    largest = 1 if blocks <= 16 else 2 if blocks <= 64 else 4

    def estimate(chunks: int) -> float:
        waves = _ceil_div(pairs * chunks, num_processors * resident)
        longest = blocks if chunks == 1 else _ceil_div(_ceil_div(blocks, chunks), largest) * largest
        return max(waves * (longest + _START_BLOCKS) * resident, pairs * blocks / num_processors)

    most = min(num_sub_splits(blocks * BLOCK_CELLS), max(1, 4 * num_processors * resident // pairs))
    return min(range(1, most + 1), key=estimate)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
