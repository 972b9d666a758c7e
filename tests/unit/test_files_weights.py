"""Quantized blocks as codes and scales, Llama 3 factors, and the weights digest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import load_file

from gpu.errors import ModelFileError, UnsupportedModel
from gpu.model.config import RopeScaling, RopeScalingKind
from gpu.model.digest import compute_weights_digest, weights_digest
from gpu.model.load import load_weights, open_source
from gpu.model.quantized_groups import has_groups, read_groups
from gpu.model.rope_factors import llama3_factors, rope_scaling_from_factors
from gpu.model.tensors import WeightStorage
from tests.model_files import random_tensors, tiny_config, write_gguf, write_safetensors

GROUPED = [kind for kind in GGMLQuantizationType if has_groups(kind)]
HALVES = {"Q4_0": 1, "Q5_0": 1, "Q8_0": 1, "Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
F32 = GGMLQuantizationType.F32
CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)


def random_blocks(kind: GGMLQuantizationType) -> np.ndarray:
    """Every byte random but the fp16 scales in front, which are finite."""
    rng = np.random.default_rng(int(kind))
    block_bytes = GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (6, 4 * block_bytes), dtype=np.uint8)
    num_scale_bytes = 2 * HALVES[kind.name]
    scales = rng.standard_normal((24, HALVES[kind.name])).astype(np.float16)
    raw.reshape(24, block_bytes)[:, :num_scale_bytes] = scales.view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_of_random_blocks_give_the_librarys_values(kind: GGMLQuantizationType) -> None:
    raw = random_blocks(kind)
    groups = read_groups(raw, kind)
    scales, minimums = (np.repeat(part, 32, axis=1) for part in (groups.scales, groups.minimums))
    values = scales * groups.codes.astype(np.float32) + minimums
    assert np.array_equal(values, quants.dequantize(raw, kind))


def test_groups_exist_for_the_usual_small_types() -> None:
    assert {kind.name for kind in GROUPED} == set(HALVES)


@pytest.mark.parametrize(
    ("kind", "storage"),
    [
        (GGMLQuantizationType.F32, WeightStorage.F32),
        (GGMLQuantizationType.F16, WeightStorage.F32),
        (GGMLQuantizationType.BF16, WeightStorage.BF16),
        (GGMLQuantizationType.Q8_0, WeightStorage.Q8),
        (GGMLQuantizationType.Q4_0, WeightStorage.Q4),
    ],
)
def test_default_storage_keeps_the_files_values_exactly(
    tmp_path: Path, kind: GGMLQuantizationType, storage: WeightStorage
) -> None:
    values = TENSORS["blk.0.ffn_up.weight"]
    source = open_source(write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, matrix_type=kind))
    matrix = source.matrix("blk.0.ffn_up.weight", None)
    assert matrix.storage is storage
    assert np.array_equal(matrix.to_f32(), quants.dequantize(quants.quantize(values, kind), kind))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_0])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.ffn_up.weight"])
def test_dense_rows_of_a_gguf_are_the_matrix(tmp_path: Path, kind: GGMLQuantizationType, name: str) -> None:
    source = open_source(write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, matrix_type=kind))
    assert np.array_equal(widened(source.dense(name)), source.matrix(name, WeightStorage.F32).to_f32())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dense_rows_of_safetensors_are_the_matrix(tmp_path: Path, dtype: str) -> None:
    source = open_source(write_safetensors(tmp_path / "m", CONFIG, TENSORS, dtype))
    assert np.array_equal(source.dense("blk.0.ffn_up.weight"), TENSORS["blk.0.ffn_up.weight"])


def test_dense_rows_of_bf16_safetensors_are_the_stored_bits(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m", CONFIG, TENSORS) / "model.safetensors"
    stored = load_file(path)
    bits = {
        name: (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, values in stored.items()
    }
    header = {
        name: {"dtype": "BF16", "shape": list(values.shape), "data_offsets": list(offsets)}
        for (name, values), offsets in zip(bits.items(), offsets_of(bits), strict=True)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in bits.values()))
    values = open_source(path.parent).dense("blk.0.ffn_up.weight")
    assert values.dtype == np.uint16
    assert np.array_equal(widened(values), TENSORS["blk.0.ffn_up.weight"])


def widened(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def offsets_of(bits: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    ends = np.cumsum([values.nbytes for values in bits.values()]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_recognized_as_their_scaling(factor: float) -> None:
    scaling = RopeScaling(RopeScalingKind.LLAMA3, factor, 8192, 1.0, 4.0)
    factors = llama3_factors(scaling, 500_000.0, 128).astype(np.float32)
    assert rope_scaling_from_factors(factors, 500_000.0, 128) == scaling


def test_llama3_factors_match_the_published_formula() -> None:
    """transformers' _compute_llama3_parameters, element by element."""
    scaling = RopeScaling(RopeScalingKind.LLAMA3, 8.0, 8192, 1.0, 4.0)
    expected = []
    for pair in range(64):
        wave = 2 * np.pi * 500_000.0 ** (2 * pair / 128)
        smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
        inverse = 1.0 if wave < 8192 / 4 else 1 / 8 if wave > 8192 else (1 - smooth) / 8 + smooth
        expected.append(1 / inverse)
    assert np.allclose(llama3_factors(scaling, 500_000.0, 128), expected, rtol=1e-12)


def test_factors_of_another_scaling_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        rope_scaling_from_factors(np.linspace(1, 8, 64, dtype=np.float32), 500_000.0, 128)


def test_rope_factors_in_a_gguf_become_the_configurations_scaling(tmp_path: Path) -> None:
    scaling = RopeScaling(RopeScalingKind.LLAMA3, 8.0, 8192, 1.0, 4.0)
    factors = llama3_factors(scaling, CONFIG.rope_theta, 64).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", CONFIG, {**TENSORS, "rope_freqs.weight": factors})
    assert open_source(path).config.rope_scaling == scaling


def test_unknown_rope_scaling_in_a_gguf_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.type unsupported"):
        open_source(path)


def test_digest_does_not_depend_on_the_files_name_or_metadata(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf", CONFIG, TENSORS)
    two = write_gguf(tmp_path / "two.gguf", CONFIG, TENSORS, metadata={"general.name": "other"})
    assert compute_weights_digest(open_source(one)) == compute_weights_digest(open_source(two))


def test_digest_changes_with_one_bit_of_one_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    before = compute_weights_digest(open_source(path))
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert compute_weights_digest(open_source(path)) != before


def test_digest_changes_when_two_tensors_swap_their_bytes(tmp_path: Path) -> None:
    swapped = TENSORS | {
        "blk.0.ffn_up.weight": TENSORS["blk.0.ffn_gate.weight"],
        "blk.0.ffn_gate.weight": TENSORS["blk.0.ffn_up.weight"],
    }
    first, second = (
        compute_weights_digest(open_source(write_gguf(tmp_path / f"{index}.gguf", CONFIG, tensors)))
        for index, tensors in enumerate((TENSORS, swapped))
    )
    assert first != second


def test_digest_is_taken_from_the_cache_while_the_file_is_unchanged(tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS))
    digest = weights_digest(source, tmp_path / "cache")
    [entry] = (tmp_path / "cache" / "weights-digests").iterdir()
    entry.write_text("ab" * 32)
    assert digest == compute_weights_digest(source)
    assert weights_digest(source, tmp_path / "cache") == bytes.fromhex("ab" * 32)


def test_digest_is_computed_again_when_the_file_changed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    before = weights_digest(open_source(path), tmp_path / "cache")
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=2))
    source = open_source(path)
    assert weights_digest(source, tmp_path / "cache") == compute_weights_digest(source) != before


@pytest.mark.parametrize("content", ["", "zz", "abcd"])
def test_digest_cache_entry_that_is_damaged_is_replaced(tmp_path: Path, content: str) -> None:
    source = open_source(write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS))
    digest = weights_digest(source, tmp_path / "cache")
    [entry] = (tmp_path / "cache" / "weights-digests").iterdir()
    entry.write_text(content)
    assert weights_digest(source, tmp_path / "cache") == digest
    assert entry.read_text() == digest.hex()


def test_digest_without_a_writable_cache_is_computed(tmp_path: Path) -> None:
    source = open_source(write_safetensors(tmp_path / "m", CONFIG, TENSORS))
    (tmp_path / "file").write_text("")
    assert weights_digest(source, tmp_path / "file") == compute_weights_digest(source)


@pytest.mark.parametrize(("key", "field"), [("block_count", "num_layers"), ("context_length", "context_length")])
def test_number_that_would_take_all_memory_is_refused(tmp_path: Path, key: str, field: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, metadata={f"llama.{key}": 2**32 - 1})
    with pytest.raises(ModelFileError, match=f"{field}=4294967295"):
        open_source(path)


def test_part_of_a_split_model_is_refused_as_such(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, metadata={"split.count": 3})
    with pytest.raises(UnsupportedModel, match=r"split\.count=3"):
        open_source(path)


def test_file_takes_no_memory_after_its_weights_were_loaded(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=60_000)  # 30 MB of embedding
    source = open_source(write_gguf(tmp_path / "m.gguf", config, random_tensors(config), matrix_type=F32))
    weights = load_weights(source)
    assert mapped_bytes(tmp_path / "m.gguf") < 1 << 20
    assert np.array_equal(source.matrix("token_embd.weight", None).codes, weights.embedding.codes)


def mapped_bytes(path: Path) -> int:
    """Resident bytes of this process's mappings of a file."""
    return sum(part.rss for part in psutil.Process().memory_maps() if part.path == str(path))
