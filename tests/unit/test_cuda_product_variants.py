"""Variants that products choose compile on every architecture, without spills and without warnings."""

from __future__ import annotations

import re

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROCESSORS = 132
CASES = (
    (Epilogue.STORE, 1, 960, 576),
    (Epilogue.SWIGLU, 1, 28672, 4096),
    (Epilogue.ADD, 1, 4096, 4096),
    (Epilogue.SWIGLU, 32, 28672, 4096),
    (Epilogue.ADD, 32, 4096, 14336),
    (Epilogue.ADD, 64, 4096, 14336),
)


def assert_compiles_cleanly(plan: ProductPlan, arch: str) -> None:
    _, notes = ProgramCompiler(arch).compile_verbose(plan.source, plan.parameters)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", notes)
    assert frames and all(frame == ("0", "0", "0") for frame in frames), plan.parameters
    assert "warning" not in notes.lower() and "C75" not in notes, notes


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("storage", list(PackedStorage))
def test_skinny_variants_compile_without_spills(arch: str, storage: PackedStorage) -> None:
    for epilogue, rows, outputs, width in CASES:
        case = ProductCase(storage, epilogue, rows, outputs, width)
        assert_compiles_cleanly(skinny_plan(case, choose_skinny_shape(case, arch, PROCESSORS)), arch)


@pytest.mark.parametrize("storage", list(PackedStorage))
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_wide_variants_compile_without_spills(storage: PackedStorage, epilogue: Epilogue) -> None:
    for shape in WIDE_SHAPES:
        if storage is PackedStorage.BF16 or shape.rows <= 96:
            case = ProductCase(storage, epilogue, 4096, 28672, 4096, ActivationLayout.TILE)
            assert_compiles_cleanly(wide_plan(case, shape, PROCESSORS), "sm_90a")
