"""f32 vectors that are hard to store: edge values, ties, zero groups, the rounding edges of codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_F32 = float(np.finfo(np.float32).max)
EDGES = (
    [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754942e-38, MAX_F32, -MAX_F32, 65504.0, -65504.0, 65519.99, 65520.0]
    + [2.0**-24, 2.0**-25, -(2.0**-25), 2.0**-25 * (1 + 2**-20), 2.0**-14, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1.0, 127.0]
    + [k / 2 for k in range(-9, 10)]
)
KINDS = ("edges", "floats", "ties", "zero_groups", "rounding")


def hard_vectors(
    kind: str, random: np.random.Generator, shape: tuple[int, ...], magnitude: float = 1.0
) -> NDArray[np.float32]:
    """Finite vectors of one kind, `shape` f32; the last axis is a multiple of 32.

    edges: edge values. floats: any bits. ties: equal magnitudes of both signs. zero_groups: half of the groups of 32
    are (nearly) zero. rounding: values beside the edges where codes change.
    """
    count = int(np.prod(shape))
    if kind == "edges":
        values = random.choice(np.array(EDGES), count)
    elif kind == "floats":
        bits = random.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
        values = np.nan_to_num(bits.view(np.float32), nan=1.0, posinf=MAX_F32, neginf=-MAX_F32)
    elif kind == "ties":
        values = random.choice(np.array([-1.0, 1.0]), count) * magnitude
    elif kind == "zero_groups":
        values = random.standard_normal(count)
        near_zero = random.choice(np.array([0.0, -0.0, 1e-45, 1e-12]))
        values.reshape(-1, 32)[random.random(count // 32) < 0.5] = near_zero
    else:
        values = (random.integers(-254, 255, count) / 2) * magnitude
        values = np.nextafter(values.astype(np.float32), random.choice(np.array([-np.inf, np.inf]), count))
        values[::64] = 127 * magnitude
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.astype(np.float32).reshape(shape))
