"""A decoder in a page of f64 NumPy, written from the published models' equations: whole sequence, no cache.

Reads plain arrays under GGUF names with rows in the published (half-pairing) order; knows nothing of our loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gpu.model.config import ModelConfig
from gpu.model.tensors import LayerWeights, ModelWeights

Doubles = NDArray[np.float64]


def reference_logits(config: ModelConfig, tensors: Mapping[str, NDArray[np.float32]], ids: Sequence[int]) -> Doubles:
    """Logits at every position, (len(ids), vocab_size) f64."""
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    hidden = weights["token_embd.weight"][list(ids)]
    for layer in range(config.num_layers):
        part = {name.split(".", 2)[2]: values for name, values in weights.items() if name.startswith(f"blk.{layer}.")}
        hidden = hidden + _attention(config, part, _norm(hidden, part["attn_norm.weight"], config.rms_norm_eps))
        normed = _norm(hidden, part["ffn_norm.weight"], config.rms_norm_eps)
        gate = normed @ part["ffn_gate.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (normed @ part["ffn_up.weight"].T)
        hidden = hidden + gated @ part["ffn_down.weight"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    logits: Doubles = _norm(hidden, weights["output_norm.weight"], config.rms_norm_eps) @ head.T
    return logits


def loaded_tensors(weights: ModelWeights) -> dict[str, NDArray[np.float32]]:
    """What our loader read, back under GGUF names."""
    tensors = {"token_embd.weight": weights.embedding.to_f32(), "output_norm.weight": weights.final_norm}
    if weights.head is not None:
        tensors["output.weight"] = weights.head.to_f32()
    for layer, part in enumerate(weights.layers):
        tensors |= {f"blk.{layer}.{name}": values for name, values in _layer_tensors(part).items()}
    return tensors


def _layer_tensors(part: LayerWeights) -> dict[str, NDArray[np.float32]]:
    matrices = {
        "attn_q": part.q, "attn_k": part.k, "attn_v": part.v, "attn_output": part.o,
        "ffn_gate": part.gate, "ffn_up": part.up, "ffn_down": part.down,
    }  # fmt: skip
    vectors = {
        "attn_norm.weight": part.attn_norm, "ffn_norm.weight": part.ffn_norm,
        "attn_q.bias": part.q_bias, "attn_k.bias": part.k_bias, "attn_v.bias": part.v_bias,
        "attn_q_norm.weight": part.q_norm, "attn_k_norm.weight": part.k_norm,
    }  # fmt: skip
    present = {name: values for name, values in vectors.items() if values is not None}
    return {f"{name}.weight": matrix.to_f32() for name, matrix in matrices.items()} | present


def _attention(config: ModelConfig, part: Mapping[str, Doubles], normed: Doubles) -> Doubles:
    def heads(name: str, count: int) -> Doubles:
        flat = normed @ part[f"attn_{name}.weight"].T + part.get(f"attn_{name}.bias", 0.0)
        return np.asarray(flat.reshape(len(normed), count, config.head_dim).swapaxes(0, 1))

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if "attn_q_norm.weight" in part:
        q = _norm(q, part["attn_q_norm.weight"], config.rms_norm_eps)
        k = _norm(k, part["attn_k_norm.weight"], config.rms_norm_eps)
    q, k = _rotate(config, q), _rotate(config, k)
    k, v = (np.repeat(x, config.num_heads // config.num_kv_heads, axis=0) for x in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(config.head_dim)
    scores = np.where(np.tri(len(normed), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = shares / shares.sum(axis=-1, keepdims=True) @ v
    joined: Doubles = mixed.swapaxes(0, 1).reshape(len(normed), -1) @ part["attn_output.weight"].T
    return joined


def _rotate(config: ModelConfig, x: Doubles) -> Doubles:
    """x: (heads, positions, head_dim); element i turns with i + head_dim / 2."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate(
        (left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)), axis=-1
    )


def _norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)
