"""Launches of decode attention: rows of decode and verify over paged KV, and the fold that completes them.

Scratch between the two kernels: partial results f32 [row][head][max_splits][head_dim], then (maximum, sum) f32 pairs
[row][head][max_splits].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import capability, shared_bytes
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.errors import LayoutError, PlanError
from gpu.formats import F16, PlaneFormat
from gpu.layout import KVLayout

BLOCK_CELLS: Final = 64
GROUP_BLOCKS: Final = 64
PRODUCT_ROWS: Final = 16
"""Rows of the kernel's products: query rows of a tile times query heads of a KV head."""

_WARP: Final = 32
_PIECE: Final = 16
_QUERY_TILE: Final = 8
"""Columns of the products of the kernel for quantized planes."""

_VALUE_PADDING: Final = 32
"""Bytes after 16 cells of V that keep a warp's reads in different banks. Not with bulk copies: they take several short
ones then, to targets that split the lines of memory, which costs more than the banks (a tenth of the bus to a mirror).
"""

_BULK_CAPABILITY: Final = 90
_SPARE_REGISTERS: Final = range(80, 91)
"""Architectures whose code for two query tiles leaves registers for a fold."""

_STAGES: Final = ((2, 2), (2, 1), (1, 1))
"""Blocks of K and of V that a CTA has in shared memory, the preferred ones first."""

_HALF_WARPS: Final = 4
_HALF_STAGES: Final = 3
_HALF_RESIDENT: Final = 4
_EXCHANGE_BYTES: Final = _HALF_WARPS * _WARP * (16 + 8) + PRODUCT_ROWS * (_HALF_WARPS * 4 + 8)
"""Shared memory through which the warps of a block of f16 cells meet."""

_RESERVED_BYTES: Final = 1 << 10
"""Shared memory that the system takes for each CTA."""

_FOLD_ROOM: Final = 8 << 10
"""Shared memory of a processor that decode attention leaves to the fold's CTAs, where its ring allows it."""

_BARRIER_BYTES: Final = 8
_MAX_FOLD_WARPS: Final = 16
_START_BLOCKS: Final = 1.5
"""What a CTA costs before its first block, in times of a block."""

_P, _I32 = Arg.POINTER, Arg.I32


_DECODE_ARGUMENTS: Final = (_P, _P, _P, _P, _P, _I32, _I32, _I32, _I32, _I32)
_SHAPE: Final = ("HEAD_DIM", "NUM_HEADS", "NUM_KV_HEADS", "PAGE_SIZE", "K_PLANE", "V_PLANE")


def _decode_sample(
    head_dim: int, heads: int, kv_heads: int, k: int, v: int, page_size: int = 64, query_tiles: int = 1
) -> dict[str, int]:
    shape = dict(zip(_SHAPE, (head_dim, heads, kv_heads, page_size, k, v), strict=True))
    if k == F16.kernel_id:
        return {**shape, "STAGES": 3, "SHARED_BYTES": 102 << 10, "RESIDENT": 2}
    ring = {"K_STAGES": 2, "V_STAGES": 1, "VALUE_PADDING": 0, "SHARED_BYTES": 57 << 10, "RESIDENT": 4}
    return {**shape, "QUERY_TILES": query_tiles, "REGISTER_FOLDS": 2 - query_tiles, **ring}


DECODE: Final = KernelSource(
    "attention_decode.cu",
    (KernelEntry("attention_decode", _DECODE_ARGUMENTS),),
    parameters=(
        *_SHAPE, "QUERY_TILES", "K_STAGES", "V_STAGES", "VALUE_PADDING", "REGISTER_FOLDS", "SHARED_BYTES", "RESIDENT",
    ),
    samples=(
        _decode_sample(128, 32, 8, 1, 2),
        _decode_sample(64, 9, 3, 1, 1, 16),
        _decode_sample(64, 9, 3, 2, 2, 16),
        _decode_sample(64, 15, 3, 2, 1, 32, query_tiles=2),
        _decode_sample(128, 32, 8, 1, 2, query_tiles=2),
    ),
)  # fmt: skip
DECODE_HALF: Final = KernelSource(
    "attention_decode_half.cu",
    (KernelEntry("attention_decode_half", _DECODE_ARGUMENTS),),
    parameters=(*_SHAPE, "STAGES", "SHARED_BYTES", "RESIDENT"),
    samples=(_decode_sample(128, 32, 8, 0, 0), _decode_sample(64, 9, 3, 0, 0, 16), _decode_sample(64, 8, 1, 0, 0, 128)),
)
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


class BlockRing(Protocol):
    """Free parameters of a decode kernel: the blocks of cells that a CTA has in shared memory, and its CTAs."""

    @property
    def source(self) -> KernelSource:
        """The kernel's source; its only kernel has the name of the file."""

    @property
    def threads(self) -> int:
        """Of a CTA."""

    @property
    def resident(self) -> int:
        """CTAs on a processor."""

    def shared_bytes(self, layout: KVLayout, query_tiles: int) -> int:
        """Shared memory that a CTA needs."""

    def parameters(self, query_tiles: int) -> dict[str, int]:
        """Parameters of the kernel beside those of the shape."""


@dataclass(frozen=True, slots=True)
class DecodeRing:
    """A ring of the kernel for quantized planes.

    k_stages, v_stages: blocks of a plane that are loaded or in use. resident: CTAs on a processor. value_padding: bytes
    after each 16 cells of V in shared memory. register_folds: query tiles whose fold under way is in registers, 0 or 1.
    """

    k_stages: int
    v_stages: int
    resident: int
    value_padding: int = 0
    register_folds: int = 1

    source = DECODE
    threads = _WARP

    def shared_bytes(self, layout: KVLayout, query_tiles: int) -> int:
        """Shared memory that a CTA needs."""
        k_slot = BLOCK_CELLS * _cell_bytes(layout.k_format, layout.head_dim)
        v_slot = BLOCK_CELLS * _cell_bytes(layout.v_format, layout.head_dim)
        v_slot += BLOCK_CELLS // _PIECE * self.value_padding
        fold = (query_tiles - self.register_folds) * _QUERY_TILE * layout.head_dim * 4
        return self.k_stages * (k_slot + _BARRIER_BYTES) + self.v_stages * (v_slot + _BARRIER_BYTES) + fold

    def parameters(self, query_tiles: int) -> dict[str, int]:
        """Parameters of the kernel beside those of the shape."""
        return {
            "QUERY_TILES": query_tiles,
            "K_STAGES": self.k_stages,
            "V_STAGES": self.v_stages,
            "VALUE_PADDING": self.value_padding,
            "REGISTER_FOLDS": self.register_folds,
        }


@dataclass(frozen=True, slots=True)
class HalfRing:
    """A ring of the kernel for f16 planes. stages: blocks that are loaded or in use. resident: CTAs on a processor."""

    stages: int
    resident: int

    source = DECODE_HALF
    threads = _HALF_WARPS * _WARP

    def shared_bytes(self, layout: KVLayout, query_tiles: int) -> int:
        """Shared memory that a CTA needs, for any number of queries."""
        return self.stages * BLOCK_CELLS * 4 * layout.head_dim + _EXCHANGE_BYTES

    def parameters(self, query_tiles: int) -> dict[str, int]:
        """Parameters of the kernel beside those of the shape."""
        return {"STAGES": self.stages}


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
            for tiles in range(1, PRODUCT_ROWS // _QUERY_TILE + 1)
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
        query_tiles = _ceil_div(most_rows * (self.num_heads // self.layout.num_kv_heads), _QUERY_TILE)
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

    def _share(self, resident: int) -> int:
        """Shared memory of each of `resident` CTAs beside the fold's."""
        return _share(self._limit - _FOLD_ROOM, resident)

    def _partials_bytes(self, plan: DecodePlan) -> int:
        return plan.scratch_rows * self.num_heads * plan.max_splits * self.layout.head_dim * 4

    def decode_source(self) -> KernelSource:
        """Source of the decode kernel."""
        return self._rings[1].source

    def decode_variant(self, query_tiles: int) -> dict[str, int]:
        """Parameters of the decode kernel."""
        ring = self._rings[query_tiles]
        return {
            "HEAD_DIM": self.layout.head_dim,
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.layout.num_kv_heads,
            "PAGE_SIZE": self.layout.page_size,
            "K_PLANE": self.layout.k_format.kernel_id,
            "V_PLANE": self.layout.v_format.kernel_id,
            "SHARED_BYTES": max(ring.shared_bytes(self.layout, query_tiles), self._share(ring.resident)),
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


def choose_ring(layout: KVLayout, arch: str, query_tiles: int) -> BlockRing:
    """The ring that suits a page layout on an architecture such as "sm_90a"."""
    limit, padding = shared_bytes(arch), 0 if capability(arch) >= _BULK_CAPABILITY else _VALUE_PADDING
    if layout.k_format.group_size == 0:
        return _choose_half_ring(layout, limit)
    folds = 1 if query_tiles == 1 or capability(arch) in _SPARE_REGISTERS else 0
    # Most stages that leave room for 8 CTAs, else for 4, 2 or 1: CTAs are warps, and multiples of 4 keep all four
    # schedulers of a processor equally busy.
    for least in (8, 4, 2, 1):
        for k_stages, v_stages in _STAGES:
            ring = DecodeRing(k_stages, v_stages, least, padding, folds)
            if ring.shared_bytes(layout, query_tiles) <= _share(limit, least):
                return ring
    raise LayoutError("head_dim", layout.head_dim, f"a block of cells does not fit into {limit} bytes of shared memory")


def _choose_half_ring(layout: KVLayout, limit: int) -> HalfRing:
    """The most stages that fit, then the most CTAs."""
    for stages in range(_HALF_STAGES, 0, -1):
        for resident in range(_HALF_RESIDENT, 0, -1):
            ring = HalfRing(stages, resident)
            if ring.shared_bytes(layout, 1) <= _share(limit, resident):
                return ring
    raise LayoutError("head_dim", layout.head_dim, f"a block of cells does not fit into {limit} bytes of shared memory")


def _share(limit: int, resident: int) -> int:
    """Shared memory of each of `resident` CTAs on a processor; limit: of the only one."""
    return ((limit + _RESERVED_BYTES) // resident - _RESERVED_BYTES) // 128 * 128


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _cell_bytes(plane: PlaneFormat, head_dim: int) -> int:
    return plane.code_bytes(head_dim) + plane.scale_bytes(head_dim)
