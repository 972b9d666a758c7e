"""Small models with random weights: the shapes of real ones, made in milliseconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.model.config import ModelConfig
from gpu.model.tensors import Floats, LayerWeights, ModelWeights, WeightMatrix, WeightStorage


def tiny_config(vocab_size: int = 256, **changes: Any) -> ModelConfig:
    """2 layers, 4 heads, 2 KV heads, head_dim 64, tied embeddings; `changes` replace fields of ModelConfig."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "vocab_size": vocab_size,
        "context_length": 4096,
        "tie_embeddings": True,
    }
    return ModelConfig(**(fields | changes))


def tiny_weights(config: ModelConfig, seed: int = 0, storage: WeightStorage = WeightStorage.F32) -> ModelWeights:
    """Random weights of `config`: equal seeds give equal weights. Scaled so that logits spread like a real model's."""
    rng = np.random.default_rng(seed)
    hidden, width = config.hidden_size, config.intermediate_size

    def matrix(rows: int, cols: int) -> WeightMatrix:
        values = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(1.5 / np.sqrt(cols))
        return WeightMatrix.from_f32(values, storage)

    def vector(size: int, centre: float) -> Floats:
        return np.float32(centre) + np.float32(0.1) * rng.standard_normal(size, dtype=np.float32)

    def layer() -> LayerWeights:
        bias, norm = config.qkv_bias, config.qk_norm
        return LayerWeights(
            attn_norm=vector(hidden, 1.0),
            q=matrix(config.q_width, hidden),
            k=matrix(config.kv_width, hidden),
            v=matrix(config.kv_width, hidden),
            o=matrix(hidden, config.q_width),
            ffn_norm=vector(hidden, 1.0),
            gate=matrix(width, hidden),
            up=matrix(width, hidden),
            down=matrix(hidden, width),
            q_bias=vector(config.q_width, 0.0) if bias else None,
            k_bias=vector(config.kv_width, 0.0) if bias else None,
            v_bias=vector(config.kv_width, 0.0) if bias else None,
            q_norm=vector(config.head_dim, 1.0) if norm else None,
            k_norm=vector(config.head_dim, 1.0) if norm else None,
        )

    embedding = WeightMatrix.from_f32(rng.standard_normal((config.vocab_size, hidden), dtype=np.float32), storage)
    layers = tuple(layer() for _ in range(config.num_layers))
    head = None if config.tie_embeddings else matrix(config.vocab_size, hidden)
    return ModelWeights(embedding, layers, vector(hidden, 1.0), head)
