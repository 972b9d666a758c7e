"""The decode kernels' free parameters: how many blocks of cells a CTA has in shared memory, how many CTAs fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from gpu.cuda.architectures import capability, shared_bytes
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.errors import LayoutError
from gpu.formats import F16, PlaneFormat
from gpu.layout import KVLayout

BLOCK_CELLS: Final = 64
PRODUCT_ROWS: Final = 16
"""Rows of the kernel's products: query rows of a tile times query heads of a KV head."""

_WARP: Final = 32
_PIECE: Final = 16
QUERY_TILE: Final = 8
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
        fold = (query_tiles - self.register_folds) * QUERY_TILE * layout.head_dim * 4
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


def share_beside_fold(limit: int, resident: int) -> int:
    """Shared memory of each of `resident` CTAs that leave room for the fold's; limit: of the only CTA."""
    return _share(limit - _FOLD_ROOM, resident)


def _share(limit: int, resident: int) -> int:
    """Shared memory of each of `resident` CTAs on a processor; limit: of the only one."""
    return ((limit + _RESERVED_BYTES) // resident - _RESERVED_BYTES) // 128 * 128


def _cell_bytes(plane: PlaneFormat, head_dim: int) -> int:
    return plane.code_bytes(head_dim) + plane.scale_bytes(head_dim)
