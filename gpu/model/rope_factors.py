"""Llama-3 RoPE scaling, which GGUF stores as one divisor per frequency instead of its parameters."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpu.errors import UnsupportedModel
from gpu.model.config import RopeScaling, RopeScalingKind

_ORIGINAL_CONTEXT: Final = 8192
_LOW_FREQ_FACTOR: Final = 1.0
_HIGH_FREQ_FACTOR: Final = 4.0
_TOLERANCE: Final = 1e-4


def rope_scaling_from_factors(factors: NDArray[np.float32], theta: float, rope_dim: int) -> RopeScaling:
    """The scaling that yields `factors`: (rope_dim / 2,) f32, divisors of the frequencies.

    The parameters are those that every Llama 3.1 and 3.2 model has; factors that they don't explain raise
    UnsupportedModel, since a near match would be a different model.
    """
    if factors.shape == (rope_dim // 2,) and np.all(np.isfinite(factors)) and factors.max() > 1.0:
        scaling = RopeScaling(
            RopeScalingKind.LLAMA3, float(factors.max()), _ORIGINAL_CONTEXT, _LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR
        )
        if np.allclose(factors, llama3_factors(scaling, theta, rope_dim), rtol=_TOLERANCE):
            return scaling
    elif factors.shape == (rope_dim // 2,) and np.all(factors == 1.0):
        return RopeScaling()
    raise UnsupportedModel("rope_freqs.weight", factors.tolist()[-1:], "divisors of Llama 3 scaling")


def llama3_factors(scaling: RopeScaling, theta: float, rope_dim: int) -> NDArray[np.float64]:
    """Divisor of each frequency, (rope_dim / 2,) f64: 1 for short waves, `factor` for long ones, a blend between."""
    frequencies = theta ** -(np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    waves = 2.0 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((scaling.original_context / waves - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / scaling.factor + blend), np.float64)
