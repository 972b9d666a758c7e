"""C62 (ggml-org/llama.cpp PR#6885, 1bit-MONSTER/1bit-MONSTER#1606, Luce-Org/lucebox#438).

A download that ended early was accepted and crashed at first use, while another tool called a complete file truncated
because it did not know a tensor's name. Three faults, three messages: the file is short by so many bytes, a tensor is
missing, the architecture is not served.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu.errors import FileTruncated, ModelFileError, TensorMissing, UnsupportedModel
from gpu.model.load import open_source
from tests.model_files import config_json, random_tensors, tiny_config, write_gguf, write_safetensors

Cut = Callable[[int], int]
CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)
CUTS: dict[str, Cut] = {
    "one_byte": lambda size: size - 1,
    "a_page": lambda size: size - 4096,
    "half": lambda size: size // 2,
}


def shorten(path: Path, cut: Cut) -> int:
    size = path.stat().st_size
    os.truncate(path, cut(size))
    return size - cut(size)


@pytest.mark.parametrize("cut", CUTS)
def test_gguf_cut_short_says_by_how_much(tmp_path: Path, cut: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    missing = shorten(path, CUTS[cut])
    with pytest.raises(FileTruncated, match=f"file short by {missing} bytes"):
        open_source(path)


@pytest.mark.parametrize("cut", CUTS)
def test_safetensors_cut_short_says_by_how_much(tmp_path: Path, cut: str) -> None:
    folder = write_safetensors(tmp_path / "m", CONFIG, TENSORS)
    missing = shorten(folder / "model.safetensors", CUTS[cut])
    with pytest.raises(FileTruncated, match=f"file short by {missing} bytes"):
        open_source(folder)


@pytest.mark.parametrize("length", [3, 8, 16, 24, 200])
def test_gguf_cut_inside_its_header_is_short(tmp_path: Path, length: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    shorten(path, lambda _: length)
    with pytest.raises(FileTruncated, match="file short by"):
        open_source(path)


@pytest.mark.parametrize("length", [1, 8, 100])
def test_safetensors_cut_inside_its_header_is_short(tmp_path: Path, length: int) -> None:
    folder = write_safetensors(tmp_path / "m", CONFIG, TENSORS)
    shorten(folder / "model.safetensors", lambda _: length)
    with pytest.raises(FileTruncated, match="file short by"):
        open_source(folder)


def test_gguf_without_a_tensor_names_it(tmp_path: Path) -> None:
    part = {name: values for name, values in TENSORS.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(TensorMissing, match=r"tensor missing: blk\.1\.ffn_up\.weight"):
        open_source(write_gguf(tmp_path / "m.gguf", CONFIG, part))


def test_safetensors_without_a_tensor_names_it(tmp_path: Path) -> None:
    part = {name: values for name, values in TENSORS.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(TensorMissing, match=r"tensor missing: blk\.1\.ffn_up\.weight"):
        open_source(write_safetensors(tmp_path / "m", CONFIG, part))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_unknown_extra_tensor_is_not_called_truncation(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture)
    tensors = random_tensors(config)
    extra = {**tensors, "blk.0.some_new_thing.weight": tensors["output_norm.weight"]}
    assert open_source(write_gguf(tmp_path / "m.gguf", config, extra)).config.architecture == architecture


def test_gguf_of_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, metadata={"general.architecture": "mamba"})
    with pytest.raises(UnsupportedModel, match="'mamba': architecture unsupported"):
        open_source(path)


def test_safetensors_of_an_unknown_architecture_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "m", CONFIG, TENSORS)
    (folder / "config.json").write_text(json.dumps(config_json(CONFIG) | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="'MambaForCausalLM': architecture unsupported"):
        open_source(folder)


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    wrong = {**TENSORS, "blk.0.ffn_up.weight": TENSORS["blk.0.ffn_up.weight"][:64]}
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight shape=\(64, 128\)"):
        open_source(write_gguf(tmp_path / "m.gguf", CONFIG, wrong))
