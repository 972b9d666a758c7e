"""Random weights in the shapes of real models, made fast enough for a benchmark's start."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.model.config import ModelConfig
from gpu.model.tensor_names import required_tensors

_BASE_VALUES: Final = 64 << 20


def llama_8b(context_length: int = 131_072 + 4096) -> ModelConfig:
    """The shape of Llama-3 8B."""
    return ModelConfig(
        architecture="llama", num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8,
        head_dim=128, vocab_size=128256, context_length=context_length, rope_theta=500_000.0,
    )  # fmt: skip


def llama_1b(context_length: int = 131_072 + 4096) -> ModelConfig:
    """The shape of Llama-3.2 1B."""
    return ModelConfig(
        architecture="llama", num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8,
        head_dim=64, vocab_size=128256, context_length=context_length, rope_theta=500_000.0, tie_embeddings=True,
    )  # fmt: skip


class RandomSource:
    """Normal bf16 weights of deviation width^-0.5, cut from one block at a different place for every tensor."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes = required_tensors(config)
        values = np.random.default_rng(seed).standard_normal(_BASE_VALUES, np.float32)
        self._base = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        self._scaled: dict[int, NDArray[np.uint16]] = {}

    def dense(self, name: str) -> NDArray[Any]:
        """A matrix of bf16 bits."""
        rows, width = self._shapes[name]
        base = self._of_width(width)
        start = hash_of(name) % (len(base) // 2) // 8 * 8
        return np.resize(base[start:], (rows, width))

    def vector(self, name: str) -> NDArray[np.float32]:
        """Norm weights: all one."""
        return np.ones(self._shapes[name], np.float32)

    def release(self) -> None:
        """The block stays."""

    def _of_width(self, width: int) -> NDArray[np.uint16]:
        if width not in self._scaled:
            values = (self._base.astype(np.uint32) << np.uint32(16)).view(np.float32) * np.float32(width**-0.5)
            self._scaled[width] = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return self._scaled[width]


def hash_of(name: str) -> int:
    """A number that depends on the name alone."""
    return int.from_bytes(name.encode()[-8:], "little") * 2654435761 % (1 << 32)
