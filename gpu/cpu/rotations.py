"""RoPE and the Hadamard rotation of one head vector, each operation rounded on its own (no contraction)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.cpu.scalar_math import jit


@jit
def rotate_position(src: Any, dst: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    """dst = src turned by one position's cos, sin: (rope_dim / 2,) f32. src, dst: (head_dim,) f32, not the same."""
    half = len(cos)
    step, apart = (2, 1) if interleaved else (1, half)
    for i in range(half):
        a, b = src[step * i], src[step * i + apart]
        dst[step * i] = np.float32(a * cos[i]) - np.float32(b * sin[i])
        dst[step * i + apart] = np.float32(b * cos[i]) + np.float32(a * sin[i])
    for i in range(2 * half, len(src)):
        dst[i] = src[i]


@jit
def rotate_hadamard(x: Any) -> None:
    """x: (power of two,) f32 in place: butterflies of stride 1, 2, 4, ..., then one multiply by 1 / sqrt(n)."""
    n = len(x)
    stride = 1
    while stride < n:
        for first in range(0, n, 2 * stride):
            for i in range(first, first + stride):
                low, high = x[i], x[i + stride]
                x[i] = np.float32(low + high)
                x[i + stride] = np.float32(low - high)
        stride *= 2
    scale = np.float32(1.0 / np.sqrt(np.float64(n)))
    for i in range(n):
        x[i] = np.float32(x[i] * scale)
