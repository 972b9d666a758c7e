"""The forward pass against a decoder in f64 NumPy, for every architecture switch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu.model.config import RopePairing, RopeScaling, RopeScalingKind
from gpu.model.rope import rope_frequencies, rope_table
from gpu.model.tensors import WeightStorage
from gpu.model.tiny import tiny_config, tiny_weights
from tests.kernel_lab import make_model_lab, same_bits
from tests.reference_decoder import loaded_tensors, reference_logits

IDS = [3, 250, 7, 7, 91, 0, 18, 200, 41, 5, 66, 123, 9, 14, 33, 240, 2, 77, 8]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "tie_embeddings": False},
    "one_kv_head": {"num_kv_heads": 1},
    "no_grouping": {"num_kv_heads": 4},
    "odd_widths": {"hidden_size": 72, "intermediate_size": 88, "vocab_size": 251},
    "head_dim_16": {"head_dim": 16},
    "head_dim_128": {"head_dim": 128},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_model_logits_of_every_architecture_agree_with_f64(name: str) -> None:
    config = tiny_config(**({"vocab_size": 256} | VARIANTS[name]))
    weights = tiny_weights(config, seed=4)
    lab = make_model_lab(config, weights)
    (logits,) = lab.step((lab.cache.open(), IDS))
    exact = reference_logits(config, loaded_tensors(weights), IDS)
    np.testing.assert_allclose(logits, exact, rtol=0, atol=4e-3 * np.abs(exact).max())


@pytest.mark.parametrize(("kv_format", "limit"), [("int8", 0.03), ("k8v4", 0.2), ("q4", 0.3)])
def test_model_logits_with_quantized_cells_stay_near_f64(kv_format: str, limit: float) -> None:
    config = tiny_config()
    weights = tiny_weights(config, seed=4)
    lab = make_model_lab(config, weights, kv_format)
    (logits,) = lab.step((lab.cache.open(), IDS))
    exact = reference_logits(config, loaded_tensors(weights), IDS)
    assert np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)) < limit


def test_model_returns_logits_of_the_asked_rows_alone() -> None:
    config = tiny_config()
    lab = make_model_lab(config, tiny_weights(config))
    (all_rows,) = lab.step((lab.cache.open(), IDS))
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, len(IDS))
    from gpu.plan import PlanEntry, RowKind, StepPlan

    cells = lab.cache.begin_step(StepPlan((PlanEntry(sequence, RowKind.PREFILL, tuple(IDS)),)))
    some = lab.model.run(np.array(IDS), np.array([4, 18]), cells, lab.cache)
    assert same_bits(np.array(some), all_rows[[4, 18]])


def test_model_without_sampled_rows_returns_no_logits() -> None:
    from gpu.plan import PlanEntry, RowKind, StepPlan

    config = tiny_config()
    lab = make_model_lab(config, tiny_weights(config))
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 2)
    cells = lab.cache.begin_step(StepPlan((PlanEntry(sequence, RowKind.PREFILL, (1, 2)),)))
    assert lab.model.run(np.array([1, 2]), np.array([], np.int64), cells, lab.cache).shape == (0, 256)


def test_model_weights_of_equal_seeds_are_equal() -> None:
    config = tiny_config()
    first, again = tiny_weights(config, 9), tiny_weights(config, 9)
    assert same_bits(first.layers[1].down.to_f32(), again.layers[1].down.to_f32())
    assert not same_bits(first.layers[1].down.to_f32(), tiny_weights(config, 8).layers[1].down.to_f32())


def test_model_with_bf16_weights_has_the_bits_of_the_same_values_in_f32() -> None:
    config = tiny_config()
    packed = tiny_weights(config, 2, WeightStorage.BF16)
    lab = make_model_lab(config, packed)
    (logits,) = lab.step((lab.cache.open(), IDS))
    exact = reference_logits(config, loaded_tensors(packed), IDS)
    np.testing.assert_allclose(logits, exact, rtol=0, atol=4e-3 * np.abs(exact).max())


def test_rope_table_of_a_plain_model_is_cos_and_sin_of_position_times_frequency() -> None:
    config = tiny_config(rope_theta=500.0)
    table = rope_table(config, 50)
    angle = 37 * 500.0 ** (-10 / 64)
    assert table.cos[37, 5] == np.float32(np.cos(angle))
    assert table.sin[37, 5] == np.float32(np.sin(angle))
    assert table.pairing == "half"


def test_rope_table_keeps_pairing_and_partial_width() -> None:
    table = rope_table(tiny_config(rope_dim=32, rope_pairing=RopePairing.INTERLEAVED), 4)
    assert (table.pairing, table.rope_dim) == ("interleaved", 32)


def test_rope_linear_scaling_divides_every_frequency() -> None:
    plain = rope_frequencies(tiny_config())
    scaled = rope_frequencies(tiny_config(rope_scaling=RopeScaling(RopeScalingKind.LINEAR, 4.0)))
    assert np.array_equal(scaled, plain / 4)


def test_rope_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Numbers of Llama 3.2: factor 32, waves up to 2,048 tokens as they are, from 8,192 on divided by 32."""
    scaling = RopeScaling(RopeScalingKind.LLAMA3, 32.0, 8192, 1.0, 4.0)
    config = tiny_config(rope_theta=500000.0, rope_scaling=scaling)
    plain = rope_frequencies(tiny_config(rope_theta=500000.0))
    scaled = rope_frequencies(config)
    waves = 2 * np.pi / plain
    assert np.allclose(scaled[waves < 2048], plain[waves < 2048])
    assert np.allclose(scaled[waves > 8192], plain[waves > 8192] / 32)
    between = (waves > 2048) & (waves < 8192)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 32)).all()
