"""Scalar arithmetic with a fixed order: no libm, no contraction. Loops over these vectorise without changing a bit."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from gpu.cpu.intrinsics import bits_float, float_bits, fma
from gpu.cpu.vector_code import EXP_FLOOR, EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2E, ROUNDER

jit: Any = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")

_LOG2E, _ROUNDER = np.float32(LOG2E), np.float32(ROUNDER)
_HIGH, _LOW = np.float32(-LN2_HIGH), np.float32(-LN2_LOW)
_E0, _E1, _E2, _E3, _E4, _E5 = (np.float32(term) for term in EXP_TERMS)
_FLOOR, _ONE, _ZERO, _HALF = np.float32(EXP_FLOOR), np.float32(1), np.float32(0), np.float32(0.5)
_TWO_112 = np.float32(2.0**112)
_MAX_HALF_BITS = np.int32(0x477FE000)
_SMALLEST_NORMAL_HALF = np.int32(0x38800000)
_HALF_OF_ONE_BITS = np.int32(0x3F000000)


@jit
def exp(x: Any) -> Any:
    """exp of x <= 0 in f32, the same steps as the softmax's; 0 below -86."""
    clamped = max(x, _FLOOR)
    shifted = fma(clamped, _LOG2E, _ROUNDER)
    k = np.float32(shifted - _ROUNDER)
    r = fma(k, _LOW, fma(k, _HIGH, clamped))
    p = fma(fma(fma(fma(fma(_E0, r, _E1), r, _E2), r, _E3), r, _E4), r, _E5)
    p = fma(p, np.float32(r * r), np.float32(r + _ONE))
    power = bits_float(np.int32(float_bits(p) + np.int32(float_bits(shifted) << np.int32(23))))
    return _ZERO if x < _FLOOR else power


@jit
def half_bits(x: Any) -> Any:
    """f32 to fp16 bits: nearest even, saturating at +-65504, every zero +0."""
    bits = float_bits(x)
    sign = (bits >> np.int32(16)) & np.int32(0x8000)
    size = min(bits & np.int32(0x7FFFFFFF), _MAX_HALF_BITS)
    small = float_bits(np.float32(bits_float(size) + _HALF)) - _HALF_OF_ONE_BITS
    odd = (size >> np.int32(13)) & np.int32(1)
    normal = (size + np.int32(0xFFF) + odd - np.int32(112 << 23)) >> np.int32(13)
    value = small if size < _SMALLEST_NORMAL_HALF else normal
    return np.int32(0) if value == 0 else np.int32(value | sign)


@jit
def half_value(bits: Any) -> Any:
    """fp16 bits (finite) to f32, exactly, subnormals included."""
    size = np.float32(bits_float(np.int32((bits & 0x7FFF) << 13)) * _TWO_112)
    return bits_float(np.int32(float_bits(size) | np.int32((bits & 0x8000) << 16)))


@jit
def inverse_root(x: Any) -> Any:
    """1 / sqrt(x) in f32; both operations are correctly rounded."""
    return np.float32(_ONE / np.float32(math.sqrt(x)))
