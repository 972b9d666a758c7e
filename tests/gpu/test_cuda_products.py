"""Products on the device: one set of bits for every kernel form, exact epilogues, packing byte for byte as NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gpu.cuda.activations import ActivationLayout, pack_activations, unpack_activations
from gpu.cuda.device import DeviceBuffer
from gpu.cuda.product_plans import (
    WIDE_SHAPES,
    Epilogue,
    ProductCase,
    ProductPlan,
    RowNorm,
    choose_skinny_shape,
    skinny_plan,
    wide_plan,
)
from gpu.cuda.products import Products, SourceType, activation_layout, pack_matrix
from gpu.cuda.rows import rms_norm
from gpu.cuda.weight_packing import (
    PackedStorage,
    PackedWeights,
    bf16_bits,
    interleave_tiles,
    pack,
    packed_bytes,
    unpack,
)
from tests.gpu.lab import Lab

pytestmark = pytest.mark.gpu

ALL = list(PackedStorage)
FRAGMENT, TILE = ActivationLayout.FRAGMENT, ActivationLayout.TILE
GUARD = 256

# Outputs and width: units that don't divide by 8, a half-filled block of tiles, outputs that don't fill a tile, empty
# segments and outputs that are no multiple of 4, a real matrix.
SHAPES = ((960, 576), (1000, 4864), (206, 192), (4096, 4096))


@cache
def weight_values(outputs: int, width: int) -> np.ndarray:
    return np.random.default_rng(outputs + width).normal(0, 0.02, (outputs, width)).astype(np.float32)


@cache
def activation_bits(rows: int, width: int) -> np.ndarray:
    return bf16_bits(np.random.default_rng(rows + width).normal(0, 1, (rows, width)).astype(np.float32))


def to_float64(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    unsigned = {2: np.uint16, 4: np.uint32}[got.itemsize]
    differing = np.count_nonzero(got.view(unsigned) != expected.view(unsigned))
    assert differing == 0, f"{differing} of {got.size} values differ"


class Bench:
    """One matrix on the device; runs plans on rows of activations and checks that nothing else is written."""

    def __init__(self, lab: Lab, storage: PackedStorage, outputs: int, width: int, *, merged: bool = False) -> None:
        self.lab = lab
        values = weight_values(outputs, width)
        packed = pack(storage, values)
        if merged:
            packed = interleave_tiles(pack(storage, values[: outputs // 2]), pack(storage, values[outputs // 2 :]))
        self.dense = unpack(storage, pack(storage, values), outputs, width).astype(np.float64)
        self.buffers = [lab.array(packed)]
        self.weights = PackedWeights(self.buffers[0].address, storage, outputs, width)
        self._inputs: dict[tuple[bytes, ActivationLayout], DeviceBuffer] = {}

    def skinny(self, rows: int, epilogue: Epilogue = Epilogue.STORE, *without: str) -> ProductPlan:
        case = self.case(rows, epilogue)
        arch = "sm_75" if "KVALET_NO_MMA" in without else self.lab.device.arch
        plan = skinny_plan(case, choose_skinny_shape(case, arch, self.lab.device.num_processors))
        return replace(plan, parameters={**plan.parameters, **dict.fromkeys(without, 1)})

    def case(self, rows: int, epilogue: Epilogue, layout: ActivationLayout = FRAGMENT) -> ProductCase:
        weights = self.weights
        return ProductCase(weights.storage, epilogue, rows, weights.num_outputs, weights.width, layout)

    def input(self, bits: np.ndarray, layout: ActivationLayout) -> int:
        key = (bits.tobytes(), layout)
        if key not in self._inputs:
            self._inputs[key] = self.lab.array(pack_activations(layout, bits))
            self.buffers.append(self._inputs[key])
        return self._inputs[key].address

    def run(self, plan: ProductPlan, bits: np.ndarray, *, start: np.ndarray | None = None, bias: int = 0) -> np.ndarray:
        """f32 outputs (rows, outputs); start: what the output holds before."""
        rows, outputs = len(bits), self.weights.num_outputs
        held = np.full((rows, outputs), np.nan, np.float32) if start is None else start
        output = self.lab.array(np.concatenate((held.ravel().view(np.uint8), np.full(GUARD, 0xA5, np.uint8))))
        self._launch(plan, bits, output.address, rows, bias)
        raw = self.lab.get(output, np.uint8)
        self.lab.device.free(output)
        assert (raw[-GUARD:] == 0xA5).all()
        return raw[:-GUARD].view(np.float32).reshape(rows, outputs)

    def run_swiglu(self, plan: ProductPlan, bits: np.ndarray, layout: ActivationLayout) -> np.ndarray:
        """bf16 bits (rows, outputs / 2); rows that fill the last group must stay untouched."""
        rows, width = len(bits), self.weights.num_outputs // 2
        untouched = np.full((rows, width), 0xA5A5, np.uint16)
        before = pack_activations(layout, untouched)
        output = self.lab.array(before)
        self._launch(plan, bits, output.address, rows, 0)
        after = self.lab.get(output, np.uint16)
        self.lab.device.free(output)
        assert np.array_equal(after[before == 0x7FC0], before[before == 0x7FC0])
        return unpack_activations(layout, after, rows, width)

    def _launch(self, plan: ProductPlan, bits: np.ndarray, output: int, rows: int, bias: int) -> None:
        source = self.input(bits, plan.input_layout)
        plan.launch(self.lab.device.kernels, self.lab.stream, self.weights, source, output, rows, bias)

    def close(self) -> None:
        for buffer in self.buffers:
            self.lab.device.free(buffer)


@pytest.fixture(scope="module")
def benches(lab: Lab) -> Iterator[dict[tuple[PackedStorage, int, int], Bench]]:
    made = {(storage, *shape): Bench(lab, storage, *shape) for storage in ALL for shape in SHAPES}
    yield made
    for bench in made.values():
        bench.close()


def needs_wgmma(lab: Lab) -> None:
    if lab.device.arch != "sm_90a":
        pytest.skip("warpgroup products need sm_90a")


@pytest.mark.parametrize("storage", ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_close_to_float64(benches: dict, storage: PackedStorage, shape: tuple[int, int]) -> None:
    bench = benches[storage, *shape]
    bits = activation_bits(64, shape[1])
    expected = to_float64(bits) @ bench.dense.T
    got = bench.run(bench.skinny(64), bits)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 5e-6


@pytest.mark.parametrize("storage", ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_same_bits_in_every_batch(benches: dict, storage: PackedStorage, shape: tuple[int, int]) -> None:
    bench = benches[storage, *shape]
    bits = activation_bits(200, shape[1])
    expected = bench.run(bench.skinny(200), bits)
    order = np.random.default_rng(5).permutation(200)
    sizes = (1, 2, 3, 5, 8, 9, 16, 17, 24, 31, 33, 48, 64) if shape == SHAPES[0] else (1, 7, 20, 63)
    for rows in sizes:
        picked = order[:rows]
        assert_same_bits(bench.run(bench.skinny(rows), bits[picked]), expected[picked])


@pytest.mark.parametrize("storage", ALL)
def test_products_without_bulk_copies_have_the_same_bits(benches: dict, storage: PackedStorage) -> None:
    for shape in SHAPES:
        bench = benches[storage, *shape]
        for rows in (1, 40):
            bits = activation_bits(rows, shape[1])
            expected = bench.run(bench.skinny(rows), bits)
            assert_same_bits(bench.run(bench.skinny(rows, Epilogue.STORE, "KVALET_NO_BULK"), bits), expected)


@pytest.mark.parametrize("storage", ALL)
def test_products_without_tensor_cores_are_close_to_float64(benches: dict, storage: PackedStorage) -> None:
    bench = benches[storage, 960, 576]
    bits = activation_bits(20, 576)
    expected = to_float64(bits) @ bench.dense.T
    got = bench.run(bench.skinny(20, Epilogue.STORE, "KVALET_NO_MMA"), bits)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 5e-6


@pytest.mark.parametrize("storage", ALL)
@pytest.mark.parametrize("wide", WIDE_SHAPES)
def test_wide_products_have_the_bits_of_skinny_ones(
    lab: Lab, benches: dict, storage: PackedStorage, wide: object
) -> None:
    needs_wgmma(lab)
    if storage is not PackedStorage.BF16 and wide.rows > 96:
        pytest.skip("scaled weights take blocks of at most 96 rows")
    for shape in SHAPES:
        bench = benches[storage, *shape]
        # 410 rows: 13 blocks of 32, in two panels of unlike size.
        for rows, processors in ((1, 132), (64, 132), (200, 2), (410, 5), (576, 132)):
            bits = activation_bits(rows, shape[1])
            plan = wide_plan(bench.case(rows, Epilogue.STORE), wide, processors)
            assert_same_bits(bench.run(plan, bits), bench.run(bench.skinny(rows), bits))


@pytest.mark.parametrize("storage", ALL)
def test_adding_and_bias_are_one_rounded_sum(lab: Lab, benches: dict, storage: PackedStorage) -> None:
    bench = benches[storage, 1000, 4864]
    bias_values = np.random.default_rng(6).normal(0, 1, 1000).astype(np.float32)
    bias = lab.array(bias_values)
    for rows in (5, 250):
        bits = activation_bits(rows, 4864)
        residual = np.random.default_rng(7).normal(0, 1, (rows, 1000)).astype(np.float32)
        product = bench.run(bench.skinny(rows), bits)
        forms = [[bench.skinny(rows, epilogue) for epilogue in (Epilogue.STORE, Epilogue.ADD)]]
        if lab.device.arch == "sm_90a":
            cases = [bench.case(rows, epilogue) for epilogue in (Epilogue.STORE, Epilogue.ADD)]
            for wide in WIDE_SHAPES:
                if storage is PackedStorage.BF16 or wide.rows <= 96:
                    forms.append([wide_plan(case, wide, 132) for case in cases])
        for stored, added in forms:
            assert_same_bits(bench.run(stored, bits, bias=bias.address), product + bias_values)
            assert_same_bits(bench.run(added, bits, start=residual), residual + product)
    lab.device.free(bias)


@pytest.mark.parametrize("storage", ALL)
def test_swiglu_is_the_same_in_every_form_and_layout(lab: Lab, storage: PackedStorage) -> None:
    outputs, width = 1152, 576
    bench = Bench(lab, storage, outputs, width, merged=True)
    for rows in (3, 64, 250):
        bits = activation_bits(rows, width)
        sums = to_float64(bits) @ bench.dense.T
        gate, up = sums[:, : outputs // 2], sums[:, outputs // 2 :]
        expected = gate / (1 + np.exp(-gate)) * up
        got = bench.run_swiglu(bench.skinny(rows, Epilogue.SWIGLU), bits, FRAGMENT)
        assert np.abs(to_float64(got) - expected).max() <= np.abs(expected).max() * 2**-7
        assert np.linalg.norm(to_float64(got) - expected) / np.linalg.norm(expected) < 2**-8
        if lab.device.arch != "sm_90a":
            continue
        for wide, layout in zip(WIDE_SHAPES, (TILE, FRAGMENT, FRAGMENT, TILE, FRAGMENT), strict=True):
            if storage is PackedStorage.BF16 or wide.rows <= 96:
                plan = wide_plan(bench.case(rows, Epilogue.SWIGLU, layout), wide, 132)
                assert_same_bits(bench.run_swiglu(plan, bits, layout), got)
    bench.close()


def test_launches_read_the_layout_that_they_announce(lab: Lab, benches: dict) -> None:
    bench = benches[PackedStorage.BF16, 4096, 4096]
    for without in ((), ("KVALET_NO_WGMMA",), ("KVALET_NO_BULK",)):
        products = Products(lab.device.kernels, lab.device.num_processors, without)
        for rows in (1, 100):
            bits = activation_bits(rows, 4096)
            layout = products.input_layout(rows, 4096)
            assert layout is activation_layout("" if without else lab.device.arch, rows, 4096)
            output = lab.filled(rows * 4096 * 4)
            products.store(lab.stream, bench.weights, bench.input(bits, layout), output.address, rows)
            got = lab.get(output, np.float32, (rows, 4096))
            assert_same_bits(got, bench.run(bench.skinny(rows), bits))
            lab.device.free(output)


def adversarial_weights(rows: int, width: int) -> np.ndarray:
    """Groups of zeros, of one value, of both extremes, of ties, of tiny and of large values, beside random ones."""
    values = np.random.default_rng(8).normal(0, 0.02, (rows, width)).astype(np.float32)
    values[0] = 0.0
    values[1, ::2], values[1, 1::2] = 3.0, -3.0
    values[2] = np.arange(width) % 255 - 127
    values[3] = (np.arange(width) % 255 - 127) * 0.5
    values[4] = np.random.default_rng(9).normal(0, 1e-6, width)
    values[5] = np.random.default_rng(10).normal(0, 1e-9, width)
    values[6] = np.random.default_rng(11).normal(0, 1e4, width)
    values[7] = -0.0
    values[8] = 1e-41
    values[9, :32] = np.linspace(-8, 7, 32)
    return values


@pytest.mark.parametrize("storage", ALL)
@pytest.mark.parametrize("kind", list(SourceType))
def test_device_packs_the_bytes_of_numpy(lab: Lab, storage: PackedStorage, kind: SourceType) -> None:
    for rows, width in ((40, 576), (23, 64), (256, 1536)):
        values = adversarial_weights(rows, width)
        if kind is SourceType.BF16:
            bits = bf16_bits(values)
            values = to_float64(bits).astype(np.float32)
        source = lab.array(values if kind is SourceType.F32 else bits)
        packed = lab.filled(packed_bytes(storage, rows, width))
        target = PackedWeights(packed.address, storage, rows, width)
        pack_matrix(lab.device.kernels, lab.stream, source.address, kind, rows, target)
        assert np.array_equal(lab.get(packed, np.uint8), pack(storage, values).ravel())
        lab.device.free(source)
        lab.device.free(packed)


@pytest.mark.parametrize("storage", ALL)
def test_device_packs_parts_of_merged_matrices(lab: Lab, storage: PackedStorage) -> None:
    gate, up = weight_values(128, 192), weight_values(128, 192)[::-1].copy()
    packed = lab.filled(packed_bytes(storage, 256, 192))
    target = PackedWeights(packed.address, storage, 256, 192)
    for index, part in enumerate((gate, up)):
        source = lab.array(part)
        pack_matrix(
            lab.device.kernels, lab.stream, source.address, SourceType.F32, 128, target,
            first_tile=index, tile_stride=2,
        )  # fmt: skip
        lab.sync()
        lab.device.free(source)
    expected = interleave_tiles(pack(storage, gate), pack(storage, up))
    assert np.array_equal(lab.get(packed, np.uint8), expected.ravel())
    lab.device.free(packed)


# Widths: fewer threads than a CTA has, more, two units a thread.
NORMED_SHAPES = ((206, 192), (960, 576), (4096, 4096), (1000, 8192))


@pytest.mark.parametrize("storage", ALL)
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.SWIGLU])
@pytest.mark.parametrize("shape", NORMED_SHAPES)
def test_product_that_norms_its_row_has_the_bits_of_norm_and_product(
    lab: Lab, storage: PackedStorage, epilogue: Epilogue, shape: tuple[int, int]
) -> None:
    outputs, width = shape if epilogue is Epilogue.STORE else (-(-shape[0] // 128) * 128, shape[1])
    random = np.random.default_rng(width)
    residual = random.normal(0, 3, width).astype(np.float32)
    gain = random.normal(1, 0.3, width).astype(np.float32)
    buffers = [lab.array(residual), lab.array(gain), lab.device.allocate(FRAGMENT.num_bytes(1, width))]
    row, weight, normed = (buffer.address for buffer in buffers)
    bench = Bench(lab, storage, outputs, width, merged=epilogue is Epilogue.SWIGLU)
    rms_norm(
        lab.device.kernels, lab.stream, width, 1, residual=row, weight=weight, eps=1e-5, activations=normed,
        activation_layout=FRAGMENT,
    )  # fmt: skip
    products = Products(lab.device.kernels, lab.device.num_processors)
    results = []
    for source, norm in ((normed, None), (row, RowNorm(weight, 1e-5))):
        output = lab.array(np.full(4 * outputs + GUARD, 0xA5, np.uint8))
        buffers.append(output)
        if epilogue is Epilogue.STORE:
            products.store(lab.stream, bench.weights, source, output.address, 1, norm=norm)
        else:
            products.swiglu(lab.stream, bench.weights, source, output.address, 1, FRAGMENT, norm=norm)
        results.append(lab.get(output, np.uint8))
    assert np.any(results[0] != 0xA5)
    assert_same_bits(results[1].view(np.uint16), results[0].view(np.uint16))
    bench.close()
    for buffer in buffers:
        lab.device.free(buffer)


def test_one_row_is_normed_by_products_whose_ctas_run_at_once(lab: Lab) -> None:
    products = Products(lab.device.kernels, 132)
    few, many, wide = ((6144, 4096), (128256, 4096), (6144, 16384))
    for shape, rows, expected in ((few, 1, True), (few, 2, False), (many, 1, False), (wide, 1, False)):
        assert products.norms(PackedWeights(0, PackedStorage.INT8, *shape), Epilogue.STORE, rows) is expected
