"""Packed weights and activations in NumPy, and the choice of product variants; no device."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.cuda.activations import ActivationLayout, pack_activations, unpack_activations
from gpu.cuda.architectures import shared_bytes
from gpu.cuda.product_plans import (
    MAX_SKINNY_ROWS,
    WIDE_SHAPES,
    Epilogue,
    ProductCase,
    choose_skinny_shape,
    choose_wide_shape,
    skinny_plan,
    wide_plan,
)
from gpu.cuda.products import activation_layout
from gpu.cuda.weight_packing import (
    PackedStorage,
    bf16_bits,
    interleave_tiles,
    pack,
    packed_bytes,
    quantize,
    unpack,
)
from gpu.errors import LayoutError, PlanError

ALL = list(PackedStorage)
ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


def random_weights(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * cols).normal(0, 0.02, (rows, cols)).astype(np.float32)


@pytest.mark.parametrize("storage", ALL)
def test_packed_weights_unpack_to_what_was_quantized(storage: PackedStorage) -> None:
    values = random_weights(40, 192)
    packed = pack(storage, values)
    assert packed.nbytes == packed_bytes(storage, 40, 192) == 3 * 3 * storage.unit_bytes
    if storage is PackedStorage.BF16:
        expected = (bf16_bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        codes, scales = quantize(storage, values)
        offset = np.float32(8 if storage is PackedStorage.INT4 else 0)
        expected = (codes.astype(np.float32) - offset) * np.repeat(scales, storage.group_width, 1).astype(np.float32)
        assert np.abs(expected - values).max() < 0.1 * (1 if storage is PackedStorage.INT4 else 0.01)
    assert np.array_equal(unpack(storage, packed, 40, 192), expected)
    assert not unpack(storage, packed, 48, 192)[40:].any()


def fragment_place(register: int, g: int, t: int, half: int) -> tuple[int, int]:
    """Row and column inside 16 x 16 of one half of a left fragment's register (PTX ISA, m16n8k16)."""
    return g + 8 * (register & 1), 2 * t + half + 8 * (register >> 1)


@pytest.mark.parametrize("tile, unit, k16, lane", [(0, 0, 0, 0), (1, 2, 3, 31), (2, 1, 2, 13)])
def test_packed_units_hold_fragments_of_the_warp_product(tile: int, unit: int, k16: int, lane: int) -> None:
    values = random_weights(48, 192)
    g, t = lane // 4, lane % 4
    int8, _ = quantize(PackedStorage.INT8, values)
    int4, _ = quantize(PackedStorage.INT4, values)
    bf16_unit, int8_unit, int4_unit = (pack(storage, values)[tile, unit] for storage in ALL)
    for register in range(4):
        for half in range(2):
            row, column = fragment_place(register, g, t, half)
            row, column = row + tile * 16, column + unit * 64 + k16 * 16
            bf16 = bf16_unit.view(np.uint16)[(k16 * 32 + lane) * 8 + register * 2 + half]
            assert bf16 == bf16_bits(values)[row, column]
            word = int8_unit[:1024].reshape(2, 32, 4, 4)[k16 // 2, lane, k16 % 2 * 2 + register // 2]
            assert word.view(np.int8)[half * 2 + register % 2] == int8[row, column]
            halfword = int4_unit[:512].view(np.uint16).reshape(32, 4, 2)[lane, k16, half]
            assert (int(halfword) >> (4 * register)) & 15 == int4[row, column]


def test_packed_scales_are_pairs_of_rows_g_and_g_plus_8() -> None:
    values = random_weights(32, 128)
    for storage, groups in ((PackedStorage.INT8, 1), (PackedStorage.INT4, 2)):
        _, scales = quantize(storage, values)
        stored = pack(storage, values)[1, 1, -32 * groups :].view(np.float16).reshape(groups, 8, 2)
        for g in range(8):
            for half in range(2):
                assert np.array_equal(stored[:, g, half], scales[16 + g + 8 * half, groups:])


def test_quantized_codes_follow_their_rules_at_edges() -> None:
    values = np.zeros((4, 64), np.float32)
    values[1, :4] = (127.0, -127.0, 0.5, 1.5)
    values[2, :3] = (-8.0, 8.0, 0.5)
    values[3, 0] = 1e-12
    codes, scales = quantize(PackedStorage.INT8, values)
    assert scales[:2, 0].tolist() == [0.0, 1.0]
    assert codes[1, :4].tolist() == [127, -127, 0, 2]
    assert scales[3, 0] == 0 and not codes[3].any()
    codes, scales = quantize(PackedStorage.INT4, values)
    assert scales[2].tolist() == [-1.0, 0.0]
    assert codes[2, :4].tolist() == [15, 0, 8, 8]
    assert (codes[0] == 8).all() and not np.signbit(scales).any(where=scales == 0)


def test_merged_gate_and_up_tiles_take_turns() -> None:
    gate, up = (pack(PackedStorage.INT8, random_weights(rows, 64)) for rows in (32, 31))
    merged = interleave_tiles(gate, up)
    assert np.array_equal(merged[0], gate[0]) and np.array_equal(merged[3], up[1])


@pytest.mark.parametrize("width", [0, 32, 100])
def test_widths_without_whole_units_are_refused(width: int) -> None:
    with pytest.raises(LayoutError, match=f"width={width}: must be a positive multiple of 64"):
        packed_bytes(PackedStorage.BF16, 16, width)


@pytest.mark.parametrize("layout", list(ActivationLayout))
@pytest.mark.parametrize("rows", [1, 9, 193])
def test_packed_activations_come_back_and_fill_groups_with_nan(layout: ActivationLayout, rows: int) -> None:
    bits = np.random.default_rng(rows).integers(0, 0x7F00, (rows, 128)).astype(np.uint16)
    packed = pack_activations(layout, bits)
    assert packed.nbytes == layout.num_bytes(rows, 128)
    assert np.array_equal(unpack_activations(layout, packed, rows, 128), bits)
    assert np.count_nonzero(packed == 0x7FC0) == packed.size - bits.size


def test_fragment_activations_hold_right_fragments_of_two_warp_products() -> None:
    bits = np.arange(16 * 64).astype(np.uint16).reshape(16, 64)
    packed = pack_activations(ActivationLayout.FRAGMENT, bits).reshape(2, 2, 32, 8)
    group, chunk, g, t = 1, 1, 5, 2
    row, first = group * 8 + g, chunk * 32 + 2 * t
    columns = [first, first + 1, first + 8, first + 9, first + 16, first + 17, first + 24, first + 25]
    assert packed[group, chunk, 4 * g + t].tolist() == bits[row, columns].tolist()


def test_tile_activations_are_swizzled_rows_of_128_bytes() -> None:
    bits = np.arange(200 * 128).astype(np.uint16).reshape(200, 128)
    packed = pack_activations(ActivationLayout.TILE, bits).reshape(2, 2, 192, 8, 8)
    assert packed[1, 1, 5, 3 ^ 5].tolist() == bits[197, 64 + 24 : 64 + 32].tolist()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("storage", ALL)
def test_skinny_variants_fit_every_architecture(arch: str, storage: PackedStorage) -> None:
    for rows in range(1, 130):
        for epilogue, outputs, width in (
            (Epilogue.STORE, 49152, 576),
            (Epilogue.ADD, 4096, 14336),
            (Epilogue.SWIGLU, 3072, 576),
        ):
            case = ProductCase(storage, epilogue, rows, outputs, width)
            shape = choose_skinny_shape(case, arch, 132)
            plan = skinny_plan(case, shape)
            assert plan.shared_bytes <= shared_bytes(arch)
            assert 2 * shape.units % shape.prefetch == 0
            assert plan.grid[0] * shape.tiles * 16 >= outputs
            assert plan.grid[1] * shape.row_groups * 8 >= rows
            assert epilogue is not Epilogue.SWIGLU or shape.tiles % 2 == 0


@pytest.mark.parametrize("storage", ALL)
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_wide_variants_fit_the_processor(storage: PackedStorage, epilogue: Epilogue) -> None:
    for shape in WIDE_SHAPES:
        if storage is not PackedStorage.BF16 and shape.rows > 96:
            continue
        plan = wide_plan(ProductCase(storage, epilogue, 500, 28672, 4096), shape, 132)
        assert plan.shared_bytes + 1024 <= (228 << 10) // shape.ctas
        assert plan.parameters["STAGES"] >= 4
        assert plan.grid[0] <= 132 * shape.ctas


def test_wide_shape_grows_with_the_rows() -> None:
    cases = [ProductCase(PackedStorage.BF16, Epilogue.STORE, rows, 28672, 4096) for rows in (20, 64, 4096)]
    assert [choose_wide_shape(case, 132).rows for case in cases] == [32, 64, 192]


def test_activation_layout_depends_on_architecture_rows_and_outputs() -> None:
    tile, fragment = ActivationLayout.TILE, ActivationLayout.FRAGMENT
    assert activation_layout("sm_90a", MAX_SKINNY_ROWS + 1, 576) is tile
    assert activation_layout("sm_90a", 33, 28672) is tile
    assert activation_layout("sm_90a", 32, 28672) is fragment
    assert activation_layout("sm_90a", 64, 4096) is fragment
    assert activation_layout("sm_100", 4096, 28672) is fragment


@pytest.mark.parametrize(
    "rows, outputs, epilogue, message",
    [
        (0, 64, Epilogue.STORE, "product.num_rows=0"),
        (1, 0, Epilogue.STORE, "product.num_outputs=0"),
        (1, 96, Epilogue.SWIGLU, "product.num_outputs=96"),
    ],
)
def test_impossible_sizes_are_refused_by_name(rows: int, outputs: int, epilogue: Epilogue, message: str) -> None:
    case = ProductCase(PackedStorage.BF16, epilogue, rows, outputs, 64)
    with pytest.raises(PlanError, match=message):
        skinny_plan(case, choose_skinny_shape(ProductCase(case.storage, epilogue, 1, 128, 64), "sm_80", 100))
