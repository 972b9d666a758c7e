"""Launches of prefill attention: many rows of a sequence over paged KV, with the bits of decode attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import WARPGROUP_ARCH, shared_bytes
from gpu.cuda.attention import BLOCK_CELLS, AttentionTables
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
_CODE_STAGES: Final = 2
_STEP_DIMS: Final = 16

_P, _I32 = Arg.POINTER, Arg.I32


def _sample(
    head_dim: int, heads: int, kv_heads: int, k: int, v: int, page_size: int = 64, layout: int = 1
) -> dict[str, int]:
    shape = {"HEAD_DIM": head_dim, "NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "PAGE_SIZE": page_size}
    sizes = {"WARPS": 2, "STAGES": 3, "CODE_STAGES": 2, "SHARED_QUERY_STEPS": head_dim // 16 // 2 // 4 * 4}
    return {**shape, "K_PLANE": k, "V_PLANE": v, "ACTIVATION_LAYOUT": layout, **sizes, "SHARED_BYTES": 227 << 10}


PREFILL: Final = KernelSource(
    "attention_prefill.cu",
    (KernelEntry("attention_prefill", (_P, _P, _P, _P, _I32, _I32, _I32)),),
    parameters=(
        "HEAD_DIM", "NUM_HEADS", "NUM_KV_HEADS", "PAGE_SIZE", "K_PLANE", "V_PLANE", "ACTIVATION_LAYOUT", "WARPS",
        "STAGES", "CODE_STAGES", "SHARED_QUERY_STEPS", "SHARED_BYTES",
    ),
    samples=(
        _sample(128, 32, 8, 1, 2),
        _sample(128, 8, 8, 0, 0, 32),
        _sample(128, 7, 1, 2, 2, 128),
        _sample(64, 9, 3, 1, 2, 16, 0),
        _sample(64, 14, 2, 1, 1, 128),
    ),
)  # fmt: skip
SOURCES: Final = (PREFILL,)


@dataclass(frozen=True, slots=True)
class PrefillRing:
    """What the warpgroup form keeps in shared memory.

    stages: blocks as tiles. code_stages: blocks as codes, where a plane is quantized. shared_query_steps: k16 steps of
    the queries (a multiple of 4) that stay there instead of in registers.
    """

    stages: int
    code_stages: int
    shared_query_steps: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A launch of prefill attention: num_tiles entries of the table of tiles."""

    num_tiles: int


class PrefillAttention:
    """Prefill attention for one page layout and number of query heads, on one device.

    without: levels that are taken away, such as KVALET_NO_WGMMA; the bits stay the same. ring: of the warpgroup form,
    if not the usual one. Raises LayoutError for shapes that the kernel is not made for.
    """

    def __init__(
        self,
        library: KernelLibrary,
        layout: KVLayout,
        num_heads: int,
        num_processors: int,
        without: tuple[str, ...] = (),
        ring: PrefillRing | None = None,
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
        limit = shared_bytes(library.arch)
        self._warps = _MOST_WARPS if _warp_bytes(layout.head_dim, _MOST_WARPS) <= limit else _MOST_WARPS // 2
        if self.by_warpgroups:
            self.tile_rows = _WALKERS * (_WARPGROUP_ROWS // group)
            self._shared = _warpgroup_bytes(layout, self._ring)
        else:
            self.tile_rows = self._warps * (_WARP_ROWS // group)
            self._shared = _warp_bytes(layout.head_dim, self._warps)
        if self._shared > limit:
            raise LayoutError("ring", self._ring, f"needs {self._shared} bytes of shared memory, {limit} exist")

    def plan(self, num_tiles: int) -> PrefillPlan:
        """The launch for a table of this many tiles. Raises PlanError for sizes below 1."""
        if num_tiles < 1:
            raise PlanError("attention.num_tiles", num_tiles, "must be positive")
        return PrefillPlan(num_tiles)

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
        scratch: int = 0,
    ) -> None:
        """Queue attention of one layer for the rows of the tiles, which hold up to `tile_rows` rows each.

        Tiles should come longest first. queries: (rows, num_heads, head_dim) f16 as append leaves them. activations:
        bf16 of width num_heads * head_dim in `activation_layout`; the tiles' rows are written. scratch: not needed;
        here because decode attention is launched alike.
        """
        items = plan.num_tiles * self.layout.num_kv_heads
        kernel = self._library.get(PREFILL, "attention_prefill", self.variant(activation_layout))
        kernel.launch(
            stream,
            min(items, self._num_processors) if self.by_warpgroups else items,
            _WARPGROUP_THREADS if self.by_warpgroups else 32 * self._warps,
            (queries, tables.page_table, tables.tiles, activations, layer, tables.max_pages, plan.num_tiles),
            self._shared,
        )

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
            "CODE_STAGES": self._ring.code_stages,
            "SHARED_QUERY_STEPS": self._ring.shared_query_steps,
            "SHARED_BYTES": self._shared,
            **self._levels,
        }


def usual_ring(layout: KVLayout) -> PrefillRing:
    """As many stages as fit, up to 4; half of the queries in shared memory where registers are short."""
    quantized = _block_code_bytes(layout) > 0
    shared_steps = 4 if layout.head_dim == 128 else 0
    return PrefillRing(3 if quantized else 4, _CODE_STAGES, shared_steps)


def _block_code_bytes(layout: KVLayout) -> int:
    """Codes and scales of a block, for one head, of the planes that are quantized."""
    planes = [plane for plane in (layout.k_format, layout.v_format) if plane.group_size]
    cell = sum(plane.code_bytes(layout.head_dim) + plane.scale_bytes(layout.head_dim) for plane in planes)
    return BLOCK_CELLS * cell


def _warpgroup_bytes(layout: KVLayout, ring: PrefillRing) -> int:
    """Shared memory of the warpgroup form: `SharedLayout` of prefill_warpgroup.cuh, and its alignment."""
    tile = BLOCK_CELLS * layout.head_dim * 2
    queries = _WALKERS * ring.shared_query_steps * _WARPGROUP_ROWS * _STEP_DIMS * 2
    codes = ring.code_stages * _block_code_bytes(layout)
    fold = _fold_bytes(layout.head_dim, _WALKERS * _WARPGROUP_ROWS)
    barriers = 8 * (2 * ring.stages + ring.code_stages)
    return ring.stages * 2 * tile + queries + codes + fold + barriers + _ALIGNMENT


def _warp_bytes(head_dim: int, warps: int) -> int:
    """Shared memory of the warp form: `SharedLayout` of prefill_warps.cuh."""
    tile = BLOCK_CELLS * head_dim * 2
    rows = warps * _WARP_ROWS
    return 2 * tile + rows * head_dim * 2 + _fold_bytes(head_dim, rows)


def _fold_bytes(head_dim: int, rows: int) -> int:
    """`Folds` of prefill_work.cuh: values of the groups before; maxima and sums of the group and of those."""
    return rows * (head_dim * 4 + 2 * 8)
