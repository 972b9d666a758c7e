"""Matrix products with packed weights: the launches, and packing.

`product.cu` serves every architecture, 64 rows of activations a CTA, in FRAGMENT order. `product_wide.cu` needs the
warpgroup products of sm_90a and TILE order; it takes many rows, and 33 to 64 rows of matrices with many outputs. Both
give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any, Final

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.product_plans import (
    MAX_NORMED_WIDTH,
    MAX_SKINNY_ROWS,
    PRODUCT,
    PRODUCT_WIDE,
    Epilogue,
    ProductCase,
    ProductPlan,
    RowNorm,
    choose_skinny_shape,
    choose_wide_shape,
    skinny_plan,
    wide_plan,
)
from gpu.cuda.weight_packing import PackedStorage, PackedWeights, num_tiles, num_units
from gpu.errors import PlanError

_MIN_WIDE_ROWS: Final = 33
_MIN_WIDE_OUTPUTS: Final = 16384
"""From how many outputs on few rows fill the processors with blocks of the wide form."""
_PACK_WARPS: Final = 8


class SourceType(IntEnum):
    """Type of row-major weights before packing; the value is the kernels' SOURCE."""

    F32 = 0
    BF16 = 1


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

    def norms(self, weights: PackedWeights, epilogue: Epilogue, num_rows: int) -> bool:
        """Whether a product norms its rows itself, with `norm`: one row, where all CTAs, which repeat it, run at once.

        It then reads f32 rows of the residual stream instead of activations; the bits are the same.
        """
        if num_rows > 1 or weights.width > MAX_NORMED_WIDTH:
            return False
        plan = self.plan(ProductCase(weights.storage, epilogue, 1, weights.num_outputs, weights.width, normed=True))
        return plan.grid[0] <= self._num_processors * plan.parameters["CTAS_PER_PROCESSOR"]

    def store(
        self,
        stream: Any,
        weights: PackedWeights,
        activations: int,
        output: int,
        num_rows: int,
        bias: int = 0,
        norm: RowNorm | None = None,
    ) -> None:
        """output (num_rows, num_outputs) f32 = product, + bias (num_outputs,) f32 unless 0."""
        self._launch(stream, weights, Epilogue.STORE, activations, output, num_rows, bias=bias, norm=norm)

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
        norm: RowNorm | None = None,
    ) -> None:
        """output (num_rows, num_outputs / 2) bf16 in output_layout = SwiGLU of gate and up tiles in turn."""
        self._launch(
            stream, weights, Epilogue.SWIGLU, activations, output, num_rows, output_layout=output_layout, norm=norm
        )

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
        norm: RowNorm | None = None,
    ) -> None:
        shape = (num_rows, weights.num_outputs, weights.width)
        case = ProductCase(weights.storage, epilogue, *shape, output_layout, normed=norm is not None)
        self.plan(case).launch(self._library, stream, weights, activations, output, num_rows, bias, norm)


def activation_layout(arch: str, num_rows: int, num_outputs: int) -> ActivationLayout:
    """Order in which a product of num_rows rows with num_outputs outputs reads its activations."""
    many_outputs = num_rows >= _MIN_WIDE_ROWS and num_outputs >= _MIN_WIDE_OUTPUTS
    if arch == "sm_90a" and (num_rows > MAX_SKINNY_ROWS or many_outputs):
        return ActivationLayout.TILE
    return ActivationLayout.FRAGMENT


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


PACK: Final = KernelSource(
    "pack.cu",
    (KernelEntry("pack_weights", (Arg.POINTER, Arg.POINTER, Arg.I32, Arg.I32, Arg.I32, Arg.I32)),),
    parameters=("STORAGE", "SOURCE"),
    samples=tuple({"STORAGE": int(storage), "SOURCE": int(kind)} for storage in PackedStorage for kind in SourceType),
)
SOURCES: Final = (PRODUCT, PRODUCT_WIDE, PACK)
