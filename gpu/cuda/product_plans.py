"""Variants and launches of the product kernels: what serves a shape of weights and rows, on which architecture."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import capability, shared_bytes
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.weight_packing import PackedStorage, PackedWeights, num_tiles, num_units
from gpu.errors import PlanError

SEGMENTS: Final = 8
MAX_SKINNY_ROWS: Final = 64
_SKINNY_THREADS: Final = 32 * SEGMENTS
_ROW_GROUPS: Final = (1, 2, 3, 4, 6, 8)
_MAX_WIDE_STAGES: Final = 10
_EXCHANGED: Final = 24
_PARTS_BYTES: Final = 2 * 16 * 272
"""Sums that a lane of a SwiGLU block sends at a time; shared memory through which a warpgroup's other outputs go."""
_PROCESSOR_BYTES: Final = 228 << 10
_RESERVED_BYTES: Final = 1 << 10
_ALIGNMENT: Final = 1 << 10
"""Of sm_90a: shared memory of a processor, what the system takes of it for each CTA; what product_wide.cu aligns to."""

_ARGUMENTS: Final = (Arg.POINTER,) * 4 + (Arg.I32,) * 3
MAX_NORMED_WIDTH: Final = 8192
"""A row that a product norms lies in registers."""


class Epilogue(IntEnum):
    """What becomes of the sums; the value is the kernels' EPILOGUE."""

    STORE = 0
    ADD = 1
    SWIGLU = 2


@dataclass(frozen=True, slots=True)
class ProductCase:
    """What a product computes. output_layout: of SWIGLU's activations. normed: of a row that it norms itself."""

    storage: PackedStorage
    epilogue: Epilogue
    num_rows: int
    num_outputs: int
    width: int
    output_layout: ActivationLayout = ActivationLayout.FRAGMENT
    normed: bool = False

    @property
    def normed_bytes(self) -> int:
        """Shared memory of the normed row."""
        return 2 * self.width if self.normed else 0


@dataclass(frozen=True, slots=True)
class RowNorm:
    """RMSNorm of a row. weight: address of (width,) f32."""

    weight: int
    eps: float


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """A variant and how it is launched. input_layout: what it reads."""

    source: KernelSource
    parameters: dict[str, int]
    grid: tuple[int, ...]
    block: int
    shared_bytes: int
    input_layout: ActivationLayout

    def launch(
        self,
        library: KernelLibrary,
        stream: Any,
        weights: PackedWeights,
        activations: int,
        output: int,
        num_rows: int,
        bias: int = 0,
        norm: RowNorm | None = None,
    ) -> None:
        """Queue the product. output, bias: as `Products` says for the plan's epilogue. norm: of a normed case."""
        kernel = library.get(self.source, self.source.kernels[0].name, self.parameters)
        operands = (weights.address, activations, output, bias, num_rows, weights.num_outputs, weights.width)
        row_norm = () if self.source is PRODUCT_WIDE else (0, 0.0) if norm is None else (norm.weight, norm.eps)
        kernel.launch(stream, self.grid, self.block, (*operands, *row_norm), self.shared_bytes)


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """Free parameters of `product.cu`.

    row_groups: of 8 rows, in a CTA. tiles: of a CTA. units, stages: of a warp's ring. prefetch: chunks of activations
    in registers. ctas: on a processor.
    """

    row_groups: int
    tiles: int
    units: int
    stages: int
    prefetch: int
    ctas: int

    def ring_bytes(self, storage: PackedStorage) -> int:
        """Shared memory of the rings with their barriers."""
        return SEGMENTS * self.stages * (self.tiles * self.units * storage.unit_bytes + 8)


@dataclass(frozen=True, slots=True)
class WideShape:
    """Free parameters of `product_wide.cu`. rows: of a block. warpgroups: that multiply. ctas: on a processor."""

    rows: int
    warpgroups: int
    unit_ns: int = field(compare=False)
    scaled_unit_ns: int = field(default=0, compare=False)
    """About how long a processor takes for a unit of its block or two blocks: bf16, and weights with scales if any."""

    @property
    def ctas(self) -> int:
        """CTAs on a processor."""
        return 2 if self.warpgroups == 1 else 1

    @property
    def tiles(self) -> int:
        """Weight tiles of a block."""
        return 4 * self.warpgroups


WIDE_SHAPES: Final = (
    WideShape(192, 2, 560),
    WideShape(96, 2, 400, 660),
    WideShape(64, 2, 370, 630),
    WideShape(64, 1, 330, 530),
    WideShape(32, 1, 290, 465),
)
_MAX_SCALED_ROWS: Final = 96
_BLOCK_NS: Final = 2500
"""About what a block costs beside its units."""


def choose_skinny_shape(case: ProductCase, arch: str, num_processors: int) -> SkinnyShape:
    """Two tiles a CTA where that leaves a CTA for nearly each processor; rings of about 64 KB a CTA."""
    has_mma = capability(arch) >= 80
    # Without tensor cores the kernel is bound by its arithmetic: rows in groups of 8 read the weights again.
    needed = -(-min(case.num_rows, MAX_SKINNY_ROWS) // 8) if has_mma else 1
    groups = next(groups for groups in _ROW_GROUPS if groups >= needed)
    pairs = num_tiles(case.num_outputs) // 2
    # Where a warp is busy with its weights, one tile in each of twice as many CTAs is better than an idle processor.
    busy = groups == 1 or (case.storage is PackedStorage.INT8 and groups <= 4)
    enough = num_processors if busy else num_processors * 9 // 10
    tiles = 2 if case.epilogue is Epilogue.SWIGLU or pairs >= enough else 1
    prefetch = (4 if groups == 1 else 2 if groups <= 4 else 1) if has_mma else 1
    # Two long stages rather than three short ones: what they leave of shared memory takes the next kernel's CTAs.
    units, stages = 2 // tiles, 3 if groups <= 2 else 2
    if case.storage is PackedStorage.INT8:
        # Products of a row that is normed first begin later: by then more of the weights can have come.
        units, stages = (1, 3) if groups > 4 else (4 // tiles, 3 if case.normed else 2)
    elif case.storage is PackedStorage.INT4:
        whole = num_units(case.width) % (8 * SEGMENTS) == 0
        units, stages = 4, 2
        if groups > 4 and (groups <= 6 or arch != "sm_90a" or case.epilogue is Epilogue.SWIGLU):
            units, stages = 2, 3
            if groups > 6:
                groups, tiles = (4, 2) if case.epilogue is Epilogue.SWIGLU else (8, 1)
        elif tiles == 1:
            units, stages = (8, 2) if whole else (4, 3)
    ctas = 2 if groups < 4 or (groups == 4 and case.storage is not PackedStorage.INT4) else 1
    tight = case.storage is PackedStorage.INT4 or (case.storage is PackedStorage.INT8 and arch != "sm_90a")
    if groups == 4 and tight:
        prefetch = 1  # dequantized fragments need registers too
        if case.storage is PackedStorage.INT8 and tiles == 2:
            units, stages = 1, 3
    return _fit_ring(case, SkinnyShape(groups, tiles, units, stages, prefetch, ctas), arch)


def _fit_ring(case: ProductCase, shape: SkinnyShape, arch: str) -> SkinnyShape:
    """The shape with smaller stages, then fewer, then a processor for itself, until its rings fit the architecture."""
    units, stages, ctas = shape.units, shape.stages, shape.ctas
    while True:
        fitted = replace(shape, units=units, stages=stages, ctas=ctas, prefetch=min(shape.prefetch, 2 * units))
        needed = fitted.ring_bytes(case.storage) + case.normed_bytes + _RESERVED_BYTES
        if needed <= shared_bytes(arch) // ctas:
            return fitted
        if units > 1:
            units //= 2
        elif stages > 2:
            stages -= 1
        elif ctas > 1:
            ctas, stages = 1, shape.stages
        else:
            stages -= 1


def skinny_plan(case: ProductCase, shape: SkinnyShape) -> ProductPlan:
    """A launch of `product.cu`. Raises PlanError for sizes that it does not take, LayoutError for the width."""
    _check(case)
    partials = SEGMENTS * shape.tiles * shape.row_groups * 512
    grid = (-(-num_tiles(case.num_outputs) // shape.tiles), -(-case.num_rows // (8 * shape.row_groups)))
    shared = max(shape.ring_bytes(case.storage), partials)
    parameters = _skinny_parameters(case, shape)
    return ProductPlan(PRODUCT, parameters, grid, _SKINNY_THREADS, shared, ActivationLayout.FRAGMENT)


def choose_wide_shape(case: ProductCase, num_processors: int) -> WideShape:
    """The shape whose waves of blocks should take the least time."""

    def estimate(shape: WideShape) -> int:
        waves = -(-_wide_blocks(case, shape) // (num_processors * shape.ctas))
        return waves * (case.width // 64 * (shape.scaled_unit_ns if scaled else shape.unit_ns) + _BLOCK_NS)

    scaled = case.storage is not PackedStorage.BF16
    return min((shape for shape in WIDE_SHAPES if not scaled or shape.rows <= _MAX_SCALED_ROWS), key=estimate)


def wide_plan(case: ProductCase, shape: WideShape, num_processors: int) -> ProductPlan:
    """A launch of `product_wide.cu`. Raises PlanError for sizes that it does not take, LayoutError for the width."""
    _check(case)
    stages, shared = _wide_stages(case, shape)
    grid = (min(_wide_blocks(case, shape), num_processors * shape.ctas),)
    parameters = _wide_parameters(case, shape, stages)
    return ProductPlan(PRODUCT_WIDE, parameters, grid, 128 * (1 + shape.warpgroups), shared, ActivationLayout.TILE)


def _check(case: ProductCase) -> None:
    num_units(case.width)
    if case.num_rows <= 0:
        raise PlanError("product.num_rows", case.num_rows, "must be positive")
    if case.num_outputs <= 0:
        raise PlanError("product.num_outputs", case.num_outputs, "must be positive")
    if case.normed and (case.num_rows > 1 or case.width > MAX_NORMED_WIDTH):
        limit = f"one row up to {MAX_NORMED_WIDTH} wide can be normed"
        raise PlanError("product.normed", (case.num_rows, case.width), limit)
    if case.epilogue is Epilogue.SWIGLU and case.num_outputs % 128:
        raise PlanError("product.num_outputs", case.num_outputs, "of gate and up must be a multiple of 128")


def _skinny_parameters(case: ProductCase, shape: SkinnyShape) -> dict[str, int]:
    return {
        "STORAGE": int(case.storage),
        "ROW_GROUPS": shape.row_groups,
        "TILES": shape.tiles,
        "UNITS_PER_STAGE": shape.units,
        "STAGES": shape.stages,
        "PREFETCH": shape.prefetch,
        "WHOLE_STAGES": int(num_units(case.width) % (SEGMENTS * shape.units) == 0),
        "EPILOGUE": int(case.epilogue),
        "ACTIVATION_LAYOUT": int(case.output_layout),
        "CTAS_PER_PROCESSOR": shape.ctas,
        "NORM_WIDTH": case.width if case.normed else 0,
    }


def _wide_blocks(case: ProductCase, shape: WideShape) -> int:
    return -(-case.num_rows // shape.rows) * -(-num_tiles(case.num_outputs) // shape.tiles)


def _wide_stages(case: ProductCase, shape: WideShape) -> tuple[int, int]:
    """Stages that fit, and the shared memory with them: alignment, stages with barriers, the epilogue's exchange."""
    swiglu = case.epilogue is Epilogue.SWIGLU
    exchange = shape.tiles * min(shape.rows // 4, _EXCHANGED) * 128 if swiglu else shape.warpgroups * _PARTS_BYTES
    stage = -(-(shape.rows * 128 + shape.tiles * case.storage.unit_bytes) // 1024) * 1024 + 16
    budget = _PROCESSOR_BYTES // shape.ctas - _RESERVED_BYTES - _ALIGNMENT - exchange
    stages = min(budget // stage, _MAX_WIDE_STAGES)
    return stages, _ALIGNMENT + stages * stage + exchange


def _wide_parameters(case: ProductCase, shape: WideShape, stages: int) -> dict[str, int]:
    return {
        "STORAGE": int(case.storage),
        "BLOCK_ROWS": shape.rows,
        "WARPGROUPS": shape.warpgroups,
        "STAGES": stages,
        "EPILOGUE": int(case.epilogue),
        "ACTIVATION_LAYOUT": int(case.output_layout),
    }


def _skinny_samples() -> tuple[dict[str, int], ...]:
    """Each storage with few rows, in shapes that every architecture compiles without spills."""
    cases = [
        ProductCase(storage, epilogue, 1, outputs, width, normed=epilogue is Epilogue.STORE)
        for storage in PackedStorage
        for epilogue, outputs, width in ((Epilogue.STORE, 960, 576), (Epilogue.SWIGLU, 28672, 4096))
    ]
    return tuple(_skinny_parameters(case, choose_skinny_shape(case, "sm_75", 132)) for case in cases)


def _wide_samples() -> tuple[dict[str, int], ...]:
    """Each shape, with each epilogue where registers are scarce."""
    picks = [(PackedStorage.BF16, epilogue, shape) for shape in WIDE_SHAPES[:2] for epilogue in Epilogue]
    picks += [(PackedStorage.BF16, Epilogue.SWIGLU, shape) for shape in WIDE_SHAPES[2:]]
    picks += [
        (storage, epilogue, shape)
        for storage in (PackedStorage.INT8, PackedStorage.INT4)
        for epilogue, shape in ((Epilogue.ADD, WIDE_SHAPES[2]), (Epilogue.SWIGLU, WIDE_SHAPES[4]))
    ]
    cases = [(ProductCase(storage, epilogue, 4096, 28672, 4096), shape) for storage, epilogue, shape in picks]
    return tuple(_wide_parameters(case, shape, _wide_stages(case, shape)[0]) for case, shape in cases)


PRODUCT: Final = KernelSource(
    "product.cu",
    (KernelEntry("product", (*_ARGUMENTS, Arg.POINTER, Arg.F32)),),
    parameters=(
        "STORAGE", "ROW_GROUPS", "TILES", "UNITS_PER_STAGE", "STAGES", "PREFETCH", "WHOLE_STAGES", "EPILOGUE",
        "ACTIVATION_LAYOUT", "CTAS_PER_PROCESSOR", "NORM_WIDTH",
    ),
    samples=_skinny_samples(),
)  # fmt: skip
PRODUCT_WIDE: Final = KernelSource(
    "product_wide.cu",
    (KernelEntry("product_wide", _ARGUMENTS),),
    parameters=("STORAGE", "BLOCK_ROWS", "WARPGROUPS", "STAGES", "EPILOGUE", "ACTIVATION_LAYOUT"),
    features="wgmma",
    samples=_wide_samples(),
)
