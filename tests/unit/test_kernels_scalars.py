"""Scalar arithmetic of the CPU kernels: halves bit by bit, the exponential against f64."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from gpu.cpu.scalar_math import exp, half_bits, half_value

_half_bits: Any = numba.vectorize(["int32(float32)"])(lambda x: half_bits(x))
_half_value: Any = numba.vectorize(["float32(int32)"])(lambda x: half_value(x))
_exp: Any = numba.vectorize(["float32(float32)"])(lambda x: exp(x))

FINITE_HALVES = np.array([bits for bits in range(1 << 16) if bits & 0x7C00 != 0x7C00], np.uint16)


def numpy_half_bits(x: np.ndarray) -> np.ndarray:
    half = np.clip(x, -65504, 65504).astype(np.float16)
    half[half == 0] = 0
    return half.view(np.uint16).astype(np.int32)


def test_half_value_of_every_finite_half_is_exact() -> None:
    got = _half_value(FINITE_HALVES.astype(np.int32))
    assert got.tobytes() == FINITE_HALVES.view(np.float16).astype(np.float32).tobytes()


def test_half_bits_of_random_bit_patterns_round_like_numpy() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 400_000, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    assert np.array_equal(_half_bits(x), numpy_half_bits(x))


def test_half_bits_around_every_midpoint_round_to_even() -> None:
    halves = np.sort(FINITE_HALVES.view(np.float16).astype(np.float64))
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    for x in (middles, np.nextafter(middles, np.float32(-np.inf)), np.nextafter(middles, np.float32(np.inf))):
        assert np.array_equal(_half_bits(x), numpy_half_bits(x))


def test_half_bits_of_zeros_and_underflow_are_plus_zero() -> None:
    assert not _half_bits(np.array([0.0, -0.0, -1e-45, 1e-30, -(2.0**-26)], np.float32)).any()


def test_exp_of_negative_numbers_is_within_two_ulps() -> None:
    x = -np.linspace(0.0, 85.9, 200_001, dtype=np.float64).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(_exp(x) - exact) / exact).max() < 2 * 2.0**-23


def test_exp_at_its_ends_is_exactly_one_and_zero() -> None:
    assert _exp(np.float32(0)) == 1.0
    assert _exp(np.float32(-86.5)) == 0.0
    assert _exp(np.float32(-1e30)) == 0.0
