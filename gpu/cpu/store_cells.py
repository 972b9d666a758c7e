"""Quantize one vector and store its bytes: the CPU's half of the one append path.

The bytes equal `gpu.reference`'s for every f32 input: divisions, roundings and clamps happen in the same order and
nothing fuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.cpu.rotations import rotate_hadamard, rotate_position
from gpu.cpu.scalar_math import half_bits, half_value, jit

PLANE_FIELDS = 7
KIND, CODES, CODE_BYTES, SCALES, SCALE_BYTES, GROUP, ROTATED = range(PLANE_FIELDS)
KIND_F16, KIND_INT8, KIND_Q4 = 0, 1, 2

_ZERO = np.float32(0)


@jit
def store_planes(
    planes: Any, page_size: int, k: Any, v: Any, cos: Any, sin: Any, interleaved: bool, positions: Any,
    sequence_index: Any, mirror_offset: Any, device_offset: Any, cell: Any, mirror: Any, device: Any, counts: Any,
    layer: int, nonfinite: Any,
) -> None:  # fmt: skip
    """Store K and V of all rows of a layer. planes: (2, PLANE_FIELDS) i64; the rest as in `KVKernels.store_rows`."""
    for is_v in range(2):
        _store_plane(
            planes[is_v], is_v, page_size, v if is_v else k, cos, sin, interleaved, positions, sequence_index,
            mirror_offset, device_offset, cell, mirror, device, counts[layer], nonfinite,
        )  # fmt: skip


@jit
def _store_plane(
    plane: Any, is_v: int, page_size: int, x: Any, cos: Any, sin: Any, interleaved: bool, positions: Any,
    sequence_index: Any, mirror_offset: Any, device_offset: Any, cell: Any, mirror: Any, device: Any, counts: Any,
    nonfinite: Any,
) -> None:  # fmt: skip
    """Store one plane. x: (R, heads, head_dim) f32. counts: (S, 2) i64 of this layer."""
    rows, heads, head_dim = x.shape
    vector = np.empty(head_dim, np.float32)
    codes = np.empty(plane[CODE_BYTES], np.uint8)
    scales = np.empty(plane[SCALE_BYTES], np.uint8)
    for row in range(rows):
        for head in range(heads):
            if is_v:
                vector[:] = x[row, head]
            else:
                rotate_position(x[row, head], vector, cos[positions[row]], sin[positions[row]], interleaved)
            if plane[ROTATED]:
                rotate_hadamard(vector)
            nonfinite[sequence_index[row]] += _clear_nonfinite(vector)
            _encode(plane[KIND], plane[GROUP], vector, codes, scales)
            place = head * page_size + cell[row]
            if device_offset[row] >= 0:
                _copy(device, device_offset[row] + plane[CODES] + place * plane[CODE_BYTES], codes)
                _copy(device, device_offset[row] + plane[SCALES] + place * plane[SCALE_BYTES], scales)
            _copy(mirror, mirror_offset[row] + plane[CODES] + place * plane[CODE_BYTES], codes)
            _copy(mirror, mirror_offset[row] + plane[SCALES] + place * plane[SCALE_BYTES], scales)
        counts[sequence_index[row], is_v] += 1


@jit
def _clear_nonfinite(vector: Any) -> int:
    """Zero a vector that holds NaN or Inf; returns whether it did."""
    finite = True
    for i in range(len(vector)):
        finite &= abs(vector[i]) <= np.float32(3.4028234663852886e38)
    if not finite:
        vector[:] = _ZERO
    return 0 if finite else 1


@jit
def _encode(kind: int, group: int, vector: Any, codes: Any, scales: Any) -> None:
    if kind == KIND_F16:
        for i in range(len(vector)):
            bits = half_bits(vector[i])
            codes[2 * i] = bits & 0xFF
            codes[2 * i + 1] = bits >> 8
        return
    for g in range(len(vector) // group):
        values = vector[g * group : (g + 1) * group]
        if kind == KIND_INT8:
            bits = _encode_int8(values, codes[g * group : (g + 1) * group])
        else:
            bits = _encode_q4(values, codes[g * group // 2 : (g + 1) * group // 2])
        scales[2 * g] = bits & 0xFF
        scales[2 * g + 1] = bits >> 8


@jit
def _encode_int8(values: Any, codes: Any) -> Any:
    """Codes rint(x / scale) clamped to +-127; returns the fp16 bits of the scale max|x| / 127."""
    largest = _ZERO
    for i in range(len(values)):
        largest = max(largest, abs(values[i]))
    bits = half_bits(np.float32(largest / np.float32(127)))
    scale = half_value(bits)
    if bits == 0:
        codes[:] = 0
        return bits
    for i in range(len(values)):
        code = np.rint(np.float32(values[i] / scale))
        codes[i] = np.uint8(np.int32(min(max(code, np.float32(-127)), np.float32(127))) & 0xFF)
    return bits


@jit
def _encode_q4(values: Any, codes: Any) -> Any:
    """Codes trunc(x / d + 8.5) clamped to 0..15, low nibble first; returns the fp16 bits of d."""
    highest, lowest = values[0], values[0]
    for i in range(1, len(values)):
        highest = max(highest, values[i])
        lowest = min(lowest, values[i])
    largest = highest if highest >= -lowest else lowest
    bits = half_bits(np.float32(largest / np.float32(-8)))
    scale = half_value(bits)
    for i in range(len(codes)):
        codes[i] = _code_q4(values[2 * i], scale) | (_code_q4(values[2 * i + 1], scale) << 4)
    return bits


@jit
def _code_q4(value: Any, scale: Any) -> Any:
    if scale == _ZERO:
        return 8
    code = np.float32(np.float32(value / scale) + np.float32(8.5))
    return np.int32(min(max(code, _ZERO), np.float32(15)))


@jit
def _copy(arena: Any, offset: int, values: Any) -> None:
    for i in range(len(values)):
        arena[offset + i] = values[i]
