"""Variants that products choose compile on every architecture, without spills and without warnings."""

from __future__ import annotations

import pytest

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.product_plans import (
    WIDE_SHAPES,
    Epilogue,
    ProductCase,
    ProductPlan,
    choose_skinny_shape,
    skinny_plan,
    wide_plan,
)
from gpu.cuda.programs import ProgramCompiler
from gpu.cuda.weight_packing import PackedStorage
from tests.kernel_sweep import ptxas_complaints, side_by_side

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROCESSORS = 132
NORMED_CASES = ((Epilogue.STORE, 6144, 4096), (Epilogue.STORE, 10240, 8192), (Epilogue.SWIGLU, 16384, 2048))
CASES = (
    (Epilogue.STORE, 1, 960, 576),
    (Epilogue.SWIGLU, 1, 28672, 4096),
    (Epilogue.ADD, 1, 4096, 4096),
    (Epilogue.SWIGLU, 32, 28672, 4096),
    (Epilogue.ADD, 32, 4096, 14336),
    (Epilogue.ADD, 64, 4096, 14336),
)


def complaints(plan: ProductPlan, arch: str) -> list[str]:
    _, notes = ProgramCompiler(arch).compile_verbose(plan.source, plan.parameters)
    found = [*ptxas_complaints(notes), *([notes] if "warning" in notes.lower() else [])]
    return [f"{plan.parameters}: {complaint}" for complaint in found]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("storage", list(PackedStorage))
def test_skinny_variants_compile_without_spills(arch: str, storage: PackedStorage) -> None:
    cases = [ProductCase(storage, epilogue, rows, outputs, width) for epilogue, rows, outputs, width in CASES]
    cases += [ProductCase(storage, epilogue, 1, *shape, normed=True) for epilogue, *shape in NORMED_CASES]
    plans = [skinny_plan(case, choose_skinny_shape(case, arch, PROCESSORS)) for case in cases]
    assert side_by_side(lambda plan: complaints(plan, arch), plans) == []


@pytest.mark.parametrize("storage", list(PackedStorage))
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_wide_variants_compile_without_spills(storage: PackedStorage, epilogue: Epilogue) -> None:
    case = ProductCase(storage, epilogue, 4096, 28672, 4096, ActivationLayout.TILE)
    shapes = [shape for shape in WIDE_SHAPES if storage is PackedStorage.BF16 or shape.rows <= 96]
    plans = [wide_plan(case, shape, PROCESSORS) for shape in shapes]
    assert side_by_side(lambda plan: complaints(plan, "sm_90a"), plans) == []
