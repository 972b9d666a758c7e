"""Safetensors headers that lie, sharded directories, and configurations that ask for what we don't have."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpu.errors import FileTruncated, ModelFileError, TensorMissing, UnsupportedModel
from gpu.model.config import RopeScaling, RopeScalingKind
from gpu.model.load import load_weights, open_source
from gpu.model.safetensors_file import SafetensorsFile, parse_safetensors_header
from gpu.model.safetensors_source import read_config
from gpu.model.tensor_names import safetensors_name
from gpu.model.tensors import WeightStorage
from tests.model_files import config_json, random_tensors, tiny_config, write_safetensors

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)


def block_of(entries: Any, num_data_bytes: int = 0) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_data_bytes)


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (struct.pack("<Q", 2**63), "at most"),
        (block_of(b"[]"), "must be a JSON object"),
        (block_of(b"{" + b'"a":{' * 50_000), "must be JSON"),
        (block_of(b"{nonsense"), "must be JSON"),
        (block_of(b'{"a":1,"a":2}'), "a key occurs twice"),
        (block_of({"a": [1]}), "needs dtype, shape"),
        (block_of({"a": {"dtype": "F32", "shape": [1]}}), "needs dtype, shape"),
        (block_of({"a": entry(0, 4, [1], "F13")}, 4), "dtype unsupported"),
        (block_of({"a": entry(0, 4, [1], 7)}, 4), "dtype unsupported"),
        (block_of({"a": entry(0, 4, [-1])}, 4), "integers from 0 up"),
        (block_of({"a": entry(0, 4, [True])}, 4), "integers from 0 up"),
        (block_of({"a": entry(0, 4, [1.0])}, 4), "integers from 0 up"),
        (block_of({"a": entry(4, 0, [1])}, 4), "an end that is not before"),
        (block_of({"a": entry(0, 8, [1])}, 8), "takes 4 bytes"),
        (block_of({"a": entry(0, 4, [2**40, 2**40])}, 4), "takes"),
        (block_of({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, 8), "overlaps a"),
        (block_of({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12), "leaves a gap after a"),
        (block_of({"a": entry(0, 4, [1])}, 9), "5 bytes follow"),
    ],
)
def test_header_that_breaks_a_rule_is_refused_by_name(block: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        parse_safetensors_header(block, len(block))


def test_offset_far_beyond_the_end_is_refused_as_a_gap() -> None:
    block = block_of({"a": entry(2**64 - 32, 2**64 - 28, [1])}, 4)
    with pytest.raises(ModelFileError, match="leaves a gap"):
        parse_safetensors_header(block, len(block))


def test_every_cut_of_a_file_is_refused_and_never_crashes() -> None:
    block = block_of({"a": entry(0, 8, [2])}, 8)
    for length in range(len(block)):
        with pytest.raises(FileTruncated):
            parse_safetensors_header(block[:length], length)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_written_by_the_library_are_read_back(tmp_path: Path, dtype: str) -> None:
    values = np.array([[1.5, -2.0, 65_504.0], [0.0, -0.0, 6e-5]], dtype)
    save_file({"t": values, "other": np.arange(3)}, tmp_path / "m.safetensors")
    assert np.array_equal(SafetensorsFile(tmp_path / "m.safetensors").tensor_f32("t"), values.astype(np.float32))


def test_bfloat16_values_are_read_exactly(tmp_path: Path) -> None:
    values = np.array([1.0, -3.140625, 1e30, -0.0], np.float32)
    stored = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    (tmp_path / "m.safetensors").write_bytes(block_of({"t": entry(0, 8, [4], "BF16")}) + stored)
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(SafetensorsFile(tmp_path / "m.safetensors").tensor_f32("t"), expected)


def test_integer_tensor_is_refused_when_it_is_read(tmp_path: Path) -> None:
    save_file({"t": np.arange(3)}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModel, match="t dtype"):
        SafetensorsFile(tmp_path / "m.safetensors").tensor_f32("t")


def write_shards(folder: Path, names: tuple[str, str] = ("a.safetensors", "b.safetensors")) -> dict[str, str]:
    write_safetensors(folder, CONFIG, {})
    (folder / "model.safetensors").unlink()
    stored = sorted((safetensors_name(name), values) for name, values in TENSORS.items())
    half = len(stored) // 2
    weight_map: dict[str, str] = {}
    for name, part in zip(names, (stored[:half], stored[half:]), strict=True):
        save_file(dict(part), folder / name)
        weight_map |= {tensor: name for tensor, _ in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_directory_gives_the_weights_of_one_file(tmp_path: Path) -> None:
    write_shards(tmp_path / "sharded")
    write_safetensors(tmp_path / "single", CONFIG, TENSORS, "float32")
    sharded, single = (load_weights(open_source(tmp_path / name)) for name in ("sharded", "single"))
    assert all(
        np.array_equal(left.down.codes, right.down.codes)
        for left, right in zip(sharded.layers, single.layers, strict=True)
    )


def test_shard_that_is_missing_is_a_model_file_error(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"b\.safetensors"):
        open_source(tmp_path)


def test_index_that_names_a_tensor_no_shard_holds_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, weight_map | {"model.ghost.weight": "a.safetensors"})
    with pytest.raises(TensorMissing, match=r"model\.ghost\.weight"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", ".safetensors", "a.bin"])
def test_shard_name_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, weight_map | {"model.norm.weight": name})
    with pytest.raises(ModelFileError, match="shard name"):
        open_source(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    save_file({"model.norm.weight": TENSORS["output_norm.weight"]}, tmp_path / "c.safetensors")
    write_index(tmp_path, weight_map | {"model.norm.weight": "c.safetensors"})
    with pytest.raises(ModelFileError, match="as well"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act unsupported"),
        ({"sliding_window": 512}, "sliding_window unsupported"),
        ({"attention_bias": True}, "attention_bias unsupported"),
        ({"mlp_bias": True}, "mlp_bias unsupported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config unsupported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor unsupported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type unsupported"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({"num_key_value_heads": 3}, "num_heads"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"architectures": []}, "architecture unsupported"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_config(config_json(CONFIG) | change)


def test_llama3_rope_scaling_is_read() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling(RopeScalingKind.LLAMA3, 8.0, 8192, 1.0, 4.0)
    assert read_config(config_json(CONFIG) | {"rope_scaling": scaling}).rope_scaling == expected


def test_full_width_sliding_window_is_taken_as_full_attention() -> None:
    assert read_config(config_json(CONFIG) | {"sliding_window": 2048}).context_length == 2048


def test_bf16_storage_on_request_halves_f32_codes(tmp_path: Path) -> None:
    source = open_source(write_safetensors(tmp_path, CONFIG, TENSORS, "float32"))
    exact, narrow = (source.matrix("blk.0.ffn_up.weight", storage) for storage in (None, WeightStorage.BF16))
    assert narrow.codes.nbytes * 2 == exact.codes.nbytes
