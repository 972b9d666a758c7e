"""Products of rows with packed weights: right values, and the same bits for every storage, tile and panel."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.errors import ModelFileError
from gpu.model.tensors import WeightMatrix, WeightStorage
from tests.kernel_lab import matrix_of, product, same_bits

STORAGES = list(WeightStorage)


def rows_of(count: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width), np.float32)


def chain(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The contract in NumPy: one chain of fused multiply-adds over the inputs, each rounded once.

    A product of two f32 is exact in f64, and rounding its f64 sum to f32 differs from a fused step only when the f64
    sum itself falls on a tie of f32; whole numbers as inputs keep every sum exact in f64.
    """
    total = np.zeros((len(x), len(weights)), np.float32)
    for k in range(x.shape[1]):
        total = (x[:, k, None].astype(np.float64) * weights[None, :, k] + total).astype(np.float32)
    return total


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_product_of_any_storage_agrees_with_f64(storage: WeightStorage, count: int) -> None:
    matrix, x = matrix_of(storage, 100, 288), rows_of(count, 288)
    exact = x.astype(np.float64) @ matrix.to_f32().astype(np.float64).T
    np.testing.assert_allclose(product(x, matrix), exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("count", [1, 4, 11])
def test_product_sums_inputs_in_order_without_splitting(count: int) -> None:
    """Sums far beyond 24 bits: any other order or split of the chain rounds elsewhere and shows."""
    random = np.random.default_rng(3)
    weights = random.integers(-4095, 4096, (64, 320)).astype(np.float32)
    x = random.integers(-4095, 4096, (count, 320)).astype(np.float32)
    got = product(x, WeightMatrix.from_f32(weights, WeightStorage.F32))
    assert same_bits(got, chain(x, weights))
    reversed_order = chain(x[:, ::-1], weights[:, ::-1])
    assert not same_bits(got, reversed_order)


@pytest.mark.parametrize("storage", [WeightStorage.BF16, WeightStorage.Q8, WeightStorage.Q4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13])
def test_product_of_packed_weights_has_the_bits_of_the_unpacked_matrix(storage: WeightStorage, count: int) -> None:
    matrix, x = matrix_of(storage, 130, 160), rows_of(count, 160)
    dense = WeightMatrix.from_f32(matrix.to_f32(), WeightStorage.F32)
    assert same_bits(product(x, matrix), product(x, dense))


@pytest.mark.parametrize("storage", STORAGES)
def test_product_of_a_row_ignores_how_many_rows_come_with_it(storage: WeightStorage) -> None:
    matrix, x = matrix_of(storage, 192, 416), rows_of(17, 416)
    together = product(x, matrix)
    for count in range(1, 17):
        assert same_bits(product(x[:count], matrix), together[:count])


def test_product_with_bias_adds_it_once_after_the_sum() -> None:
    matrix, x = matrix_of(WeightStorage.F32, 70, 32), rows_of(3, 32)
    bias = rows_of(1, 70)[0]
    assert same_bits(product(x, matrix, bias=bias), product(x, matrix) + bias)


@pytest.mark.parametrize("storage", STORAGES)
def test_matrix_unpacked_again_equals_its_source(storage: WeightStorage) -> None:
    matrix = matrix_of(storage, 67, 64, seed=5)
    random = np.random.default_rng(5)
    if storage in (WeightStorage.F32, WeightStorage.BF16):
        source = random.standard_normal((67, 64), np.float32)
        if storage is WeightStorage.BF16:
            assert np.abs(matrix.to_f32() / source - 1).max() <= 2**-8
            source = WeightMatrix.from_f32(matrix.to_f32(), WeightStorage.BF16).to_f32()
    else:
        codes = random.integers(0, 16 if storage is WeightStorage.Q4 else 256, (67, 64)).astype(np.float32)
        codes.flat[0] = 15 if storage is WeightStorage.Q4 else 255
        scales, minimums = random.standard_normal((2, 67, 2)).astype(np.float16).astype(np.float32)
        source = np.repeat(scales, 32, 1) * codes + np.repeat(minimums, 32, 1)
    assert matrix.storage is storage
    assert same_bits(matrix.to_f32(), source)


def test_matrix_with_unfitting_scales_names_the_field() -> None:
    codes, scales = np.zeros((4, 64), np.uint8), np.zeros((4, 1), np.float32)
    with pytest.raises(ModelFileError) as caught:
        WeightMatrix.from_groups(codes, scales, scales)
    assert caught.value.field == "matrix.scales"


def test_matrix_of_a_width_without_whole_groups_is_refused() -> None:
    with pytest.raises(ModelFileError) as caught:
        WeightMatrix.from_groups(
            np.zeros((4, 40), np.uint8), np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32)
        )
    assert caught.value.field == "matrix.num_cols"
