"""Matrix products with packed weights: which kernel and variant serves a shape, and the launches.

`product.cu` serves every architecture, 64 rows of activations a CTA, in FRAGMENT order. `product_wide.cu` needs the
warpgroup products of sm_90a and TILE order; it takes many rows, and 17 to 64 rows of matrices with many outputs. Both
give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.weight_packing import PackedStorage, num_tiles, num_units
from gpu.errors import PlanError

SEGMENTS: Final = 8
MAX_SKINNY_ROWS: Final = 64
_MIN_WIDE_ROWS: Final = 17
_MIN_WIDE_OUTPUTS: Final = 16384
"""From how many outputs on few rows fill the processors with blocks of the wide form."""

_SKINNY_THREADS: Final = 32 * SEGMENTS
_ROW_GROUPS: Final = (1, 2, 3, 4, 6, 8)
_MAX_WIDE_STAGES: Final = 10
_SHARED_KIB: Final = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory that a CTA may have, by architecture; others are taken for the least."""

_PROCESSOR_BYTES: Final = 228 << 10
_RESERVED_BYTES: Final = 1 << 10
_ALIGNMENT: Final = 1 << 10
"""Of sm_90a: shared memory of a processor, what the system takes of it for each CTA; what product_wide.cu aligns to."""

_PACK_WARPS: Final = 8
_ARGUMENTS: Final = (Arg.POINTER,) * 4 + (Arg.I32,) * 3


class Epilogue(IntEnum):
    """What becomes of the sums; the value is the kernels' EPILOGUE."""

    STORE = 0
    ADD = 1
    SWIGLU = 2


class SourceType(IntEnum):
    """Type of row-major weights before packing; the value is the kernels' SOURCE."""

    F32 = 0
    BF16 = 1


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A packed matrix in device memory; 16-byte aligned. num_outputs, width: rows and columns."""

    address: int
    storage: PackedStorage
    num_outputs: int
    width: int


@dataclass(frozen=True, slots=True)
class ProductCase:
    """What a product computes. output_layout: of SWIGLU's activations."""

    storage: PackedStorage
    epilogue: Epilogue
    num_rows: int
    num_outputs: int
    width: int
    output_layout: ActivationLayout = ActivationLayout.FRAGMENT


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
    ) -> None:
        """Queue the product. output, bias: as `Products` says for the plan's epilogue."""
        kernel = library.get(self.source, self.source.kernels[0].name, self.parameters)
        arguments = (weights.address, activations, output, bias, num_rows, weights.num_outputs, weights.width)
        kernel.launch(stream, self.grid, self.block, arguments, self.shared_bytes)


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
    """About how long a processor takes for a unit of its block, or of its two blocks."""

    @property
    def ctas(self) -> int:
        """CTAs on a processor."""
        return 2 if self.warpgroups == 1 else 1

    @property
    def tiles(self) -> int:
        """Weight tiles of a block."""
        return 4 * self.warpgroups


WIDE_SHAPES: Final = (
    WideShape(192, 2, 640),
    WideShape(96, 2, 400),
    WideShape(64, 2, 350),
    WideShape(64, 1, 350),
    WideShape(32, 1, 260),
)
_MAX_SCALED_ROWS: Final = 96
_BLOCK_NS: Final = 2500
"""About what a block costs beside its units."""


class Products:
    """Launches products on one device.

    without: levels that are taken away, such as KVALET_NO_WGMMA; the bits stay the same.
    """

    def __init__(self, library: KernelLibrary, num_processors: int, without: tuple[str, ...] = ()) -> None:
        self._library = library
        self._num_processors = num_processors
        self._without = without
        self._plans: dict[ProductCase, ProductPlan] = {}

    def input_layout(self, num_rows: int, num_outputs: int) -> ActivationLayout:
        """What a product with this many rows and outputs reads."""
        arch = "" if self._without else self._library.arch
        return activation_layout(arch, num_rows, num_outputs)

    def store(
        self, stream: Any, weights: PackedWeights, activations: int, output: int, num_rows: int, bias: int = 0
    ) -> None:
        """output (num_rows, num_outputs) f32 = product, + bias (num_outputs,) f32 unless 0."""
        self._launch(stream, weights, Epilogue.STORE, activations, output, num_rows, bias=bias)

    def add(self, stream: Any, weights: PackedWeights, activations: int, residual: int, num_rows: int) -> None:
        """residual (num_rows, num_outputs) f32 += product."""
        self._launch(stream, weights, Epilogue.ADD, activations, residual, num_rows)

    def swiglu(
        self,
        stream: Any,
        weights: PackedWeights,
        activations: int,
        output: int,
        num_rows: int,
        output_layout: ActivationLayout,
    ) -> None:
        """output (num_rows, num_outputs / 2) bf16 in output_layout = SwiGLU of gate and up tiles in turn."""
        self._launch(stream, weights, Epilogue.SWIGLU, activations, output, num_rows, output_layout=output_layout)

    def plan(self, case: ProductCase) -> ProductPlan:
        """The variant for a case. Raises PlanError for sizes that no kernel takes, LayoutError for the width."""
        if case not in self._plans:
            arch, processors = self._library.arch, self._num_processors
            if self.input_layout(case.num_rows, case.num_outputs) is ActivationLayout.TILE:
                plan = wide_plan(case, choose_wide_shape(case, processors), processors)
            else:
                plan = skinny_plan(case, choose_skinny_shape(case, arch, processors))
            levels = dict.fromkeys(self._without, 1)
            self._plans[case] = replace(plan, parameters={**plan.parameters, **levels})
        return self._plans[case]

    def _launch(
        self,
        stream: Any,
        weights: PackedWeights,
        epilogue: Epilogue,
        activations: int,
        output: int,
        num_rows: int,
        bias: int = 0,
        output_layout: ActivationLayout = ActivationLayout.FRAGMENT,
    ) -> None:
        case = ProductCase(weights.storage, epilogue, num_rows, weights.num_outputs, weights.width, output_layout)
        self.plan(case).launch(self._library, stream, weights, activations, output, num_rows, bias)


def activation_layout(arch: str, num_rows: int, num_outputs: int) -> ActivationLayout:
    """Order in which a product of num_rows rows with num_outputs outputs reads its activations."""
    many_outputs = num_rows >= _MIN_WIDE_ROWS and num_outputs >= _MIN_WIDE_OUTPUTS
    if arch == "sm_90a" and (num_rows > MAX_SKINNY_ROWS or many_outputs):
        return ActivationLayout.TILE
    return ActivationLayout.FRAGMENT


def choose_skinny_shape(case: ProductCase, arch: str, num_processors: int) -> SkinnyShape:
    """Two tiles a CTA where that leaves a CTA for nearly each processor; stages of about 4 KB a warp."""
    has_mma = _capability(arch) >= 80
    # Without tensor cores the kernel is bound by its arithmetic: rows in groups of 8 read the weights again.
    needed = -(-min(case.num_rows, MAX_SKINNY_ROWS) // 8) if has_mma else 1
    groups = next(groups for groups in _ROW_GROUPS if groups >= needed)
    pairs = num_tiles(case.num_outputs) // 2
    enough = num_processors if groups == 1 else num_processors * 9 // 10
    tiles = 2 if case.epilogue is Epilogue.SWIGLU or pairs >= enough else 1
    prefetch = (4 if groups == 1 else 2 if groups <= 4 else 1) if has_mma else 1
    units = 2 // tiles
    if case.storage is PackedStorage.INT8:
        units = 2 if groups > 4 else 4 // tiles
    elif case.storage is PackedStorage.INT4:
        units = 2 if groups > 4 else 4
        if groups > 6:
            groups, tiles = (4, 2) if case.epilogue is Epilogue.SWIGLU else (8, 1)
    ctas = 2 if groups < 4 or (groups == 4 and case.storage is not PackedStorage.INT4) else 1
    tight = case.storage is PackedStorage.INT4 or (case.storage is PackedStorage.INT8 and arch != "sm_90a")
    if groups == 4 and tight:
        prefetch = 1  # dequantized fragments need registers too
    return _fit_ring(case.storage, SkinnyShape(groups, tiles, units, 3, prefetch, ctas), arch)


def _fit_ring(storage: PackedStorage, shape: SkinnyShape, arch: str) -> SkinnyShape:
    """The shape with smaller stages, then fewer, then a processor for itself, until its rings fit the architecture."""
    units, stages, ctas = shape.units, shape.stages, shape.ctas
    while True:
        fitted = replace(shape, units=units, stages=stages, ctas=ctas, prefetch=min(shape.prefetch, 2 * units))
        if fitted.ring_bytes(storage) <= shared_bytes(arch) // ctas - _RESERVED_BYTES:
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
        return waves * (case.width // 64 * shape.unit_ns + _BLOCK_NS)

    scaled = case.storage is not PackedStorage.BF16
    return min((shape for shape in WIDE_SHAPES if not scaled or shape.rows <= _MAX_SCALED_ROWS), key=estimate)


def wide_plan(case: ProductCase, shape: WideShape, num_processors: int) -> ProductPlan:
    """A launch of `product_wide.cu`. Raises PlanError for sizes that it does not take, LayoutError for the width."""
    _check(case)
    stages, shared = _wide_stages(case, shape)
    grid = (min(_wide_blocks(case, shape), num_processors * shape.ctas),)
    parameters = _wide_parameters(case, shape, stages)
    return ProductPlan(PRODUCT_WIDE, parameters, grid, 128 * (1 + shape.warpgroups), shared, ActivationLayout.TILE)


def pack_matrix(
    library: KernelLibrary,
    stream: Any,
    source: int,
    source_type: SourceType,
    num_rows: int,
    packed: PackedWeights,
    *,
    first_tile: int = 0,
    tile_stride: int = 1,
) -> None:
    """Queue packing of row-major weights, (num_rows, packed.width), into tiles of `packed`.

    Source tile i becomes tile first_tile + i * tile_stride: merged matrices are packed part by part. Rows that fill the
    last tile are zero. Products read weights before they wait for the kernel before them, so synchronize once after
    packing. Raises PlanError when the tiles don't fit, LayoutError for the width.
    """
    tiles, units = num_tiles(num_rows), num_units(packed.width)
    last = first_tile + (tiles - 1) * tile_stride
    if num_rows <= 0 or last >= num_tiles(packed.num_outputs):
        raise PlanError("pack.num_rows", num_rows, f"last tile {last} of {num_tiles(packed.num_outputs)}")
    parameters = {"STORAGE": packed.storage, "SOURCE": source_type}
    kernel = library.get(PACK, "pack_weights", parameters)
    arguments = (source, packed.address, num_rows, packed.width, first_tile, tile_stride)
    kernel.launch(stream, (tiles, -(-units // _PACK_WARPS)), 32 * _PACK_WARPS, arguments)


def shared_bytes(arch: str) -> int:
    """Shared memory that a CTA may have on an architecture such as "sm_90a"."""
    return _SHARED_KIB.get(_capability(arch), min(_SHARED_KIB.values())) << 10


def _capability(arch: str) -> int:
    """90 of "sm_90a"."""
    return int("".join(digit for digit in arch if digit.isdigit()))


def _check(case: ProductCase) -> None:
    num_units(case.width)
    if case.num_rows <= 0:
        raise PlanError("product.num_rows", case.num_rows, "must be positive")
    if case.num_outputs <= 0:
        raise PlanError("product.num_outputs", case.num_outputs, "must be positive")
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
    }


def _wide_blocks(case: ProductCase, shape: WideShape) -> int:
    return -(-case.num_rows // shape.rows) * -(-num_tiles(case.num_outputs) // shape.tiles)


def _wide_stages(case: ProductCase, shape: WideShape) -> tuple[int, int]:
    """Stages that fit, and the shared memory with them: alignment, stages with barriers, the exchange of SwiGLU."""
    exchange = shape.tiles * shape.rows * 32 if case.epilogue is Epilogue.SWIGLU else 0
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
    """Each storage with few, some and many rows, in the shapes of two architectures."""
    cases = [
        ProductCase(storage, epilogue, rows, outputs, width)
        for storage in PackedStorage
        for epilogue, rows, outputs, width in (
            (Epilogue.STORE, 1, 960, 576),
            (Epilogue.SWIGLU, 32, 28672, 4096),
            (Epilogue.ADD, 64, 4096, 14336),
        )
    ]
    return tuple(
        _skinny_parameters(case, choose_skinny_shape(case, arch, 132)) for arch in ("sm_75", "sm_90a") for case in cases
    )


def _wide_samples() -> tuple[dict[str, int], ...]:
    """Each shape, with each epilogue where registers are scarce."""
    picks = [(PackedStorage.BF16, epilogue, shape) for shape in WIDE_SHAPES[:1] for epilogue in Epilogue]
    picks += [(PackedStorage.BF16, Epilogue.SWIGLU, shape) for shape in WIDE_SHAPES[1:]]
    picks += [
        (storage, epilogue, shape)
        for storage in (PackedStorage.INT8, PackedStorage.INT4)
        for epilogue, shape in ((Epilogue.ADD, WIDE_SHAPES[1]), (Epilogue.SWIGLU, WIDE_SHAPES[3]))
    ]
    cases = [(ProductCase(storage, epilogue, 4096, 28672, 4096), shape) for storage, epilogue, shape in picks]
    return tuple(_wide_parameters(case, shape, _wide_stages(case, shape)[0]) for case, shape in cases)


PRODUCT: Final = KernelSource(
    "product.cu",
    (KernelEntry("product", _ARGUMENTS),),
    parameters=(
        "STORAGE", "ROW_GROUPS", "TILES", "UNITS_PER_STAGE", "STAGES", "PREFETCH", "WHOLE_STAGES", "EPILOGUE",
        "ACTIVATION_LAYOUT", "CTAS_PER_PROCESSOR",
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
PACK: Final = KernelSource(
    "pack.cu",
    (KernelEntry("pack_weights", (Arg.POINTER, Arg.POINTER, Arg.I32, Arg.I32, Arg.I32, Arg.I32)),),
    parameters=("STORAGE", "SOURCE"),
    samples=tuple({"STORAGE": int(storage), "SOURCE": int(kind)} for storage in PackedStorage for kind in SourceType),
)
SOURCES: Final = (PRODUCT, PRODUCT_WIDE, PACK)
