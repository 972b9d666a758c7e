"""The cos/sin table of a model: every position's rotation, computed in f64 once and rounded to f32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu.kv_kernels import RopeTable
from gpu.model.config import ModelConfig, RopePairing, RopeScalingKind
from gpu.model.rope_factors import llama3_factors


def rope_table(config: ModelConfig, num_positions: int | None = None) -> RopeTable:
    """Rotations of positions 0 .. num_positions - 1; None means the whole context."""
    positions = np.arange(config.context_length if num_positions is None else num_positions, dtype=np.float64)
    angles = positions[:, None] * rope_frequencies(config)[None, :]
    pairing = config.rope_pairing
    return RopeTable(
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        "interleaved" if pairing is RopePairing.INTERLEAVED else "half",
    )


def rope_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians per position of each pair, (rope_dim / 2,) f64, after scaling."""
    exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling.kind is RopeScalingKind.LINEAR:
        frequencies = frequencies / scaling.factor
    elif scaling.kind is RopeScalingKind.LLAMA3:
        frequencies = frequencies / llama3_factors(scaling, config.rope_theta, config.rope_dim)
    return frequencies
