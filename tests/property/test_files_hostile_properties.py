"""Model files with random damage are read or refused by type, never anything else."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.errors import ModelFileError
from gpu.model.gguf_header import parse_header
from gpu.model.load import load_weights
from gpu.model.safetensors_file import parse_safetensors_header
from tests.model_files import byte_vocabulary, random_tensors, tiny_config, write_gguf, write_safetensors
from workers.model_source import open_model
from workers.prompt.errors import TokenizerError

POSITIONS = st.floats(0, 1, exclude_max=True)
DAMAGE = st.lists(st.tuples(POSITIONS, st.integers(0, 255)), min_size=1, max_size=4)


@cache
def gguf_block() -> bytes:
    """A whole small model, its vocabulary cut down so that damage lands in interesting places."""
    config = tiny_config(num_layers=1, vocab_size=262)
    vocabulary = byte_vocabulary(("h e", "he l", "Ġ t"))
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf", config, random_tensors(config), vocabulary).read_bytes()


@cache
def safetensors_block() -> bytes:
    config = tiny_config(num_layers=1)
    with tempfile.TemporaryDirectory() as folder:
        return (write_safetensors(Path(folder), config, random_tensors(config)) / "model.safetensors").read_bytes()


def damaged(block: bytes, num_header_bytes: int, damage: list[tuple[float, int]]) -> bytes:
    changed = bytearray(block)
    for position, value in damage:
        changed[int(position * num_header_bytes)] = value
    return bytes(changed)


@settings(deadline=None, max_examples=150)
@given(damage=DAMAGE)
def test_gguf_with_random_damage_is_opened_or_refused_by_type(damage: list[tuple[float, int]]) -> None:
    header = parse_header(gguf_block(), len(gguf_block()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(damaged(gguf_block(), header.data_offset, damage))
        try:
            load_weights(open_model(path, Path(folder)).source)
        except (ModelFileError, TokenizerError) as error:
            assert str(error)


@settings(deadline=None, max_examples=150)
@given(damage=DAMAGE)
def test_safetensors_header_with_random_damage_is_read_or_refused_by_type(damage: list[tuple[float, int]]) -> None:
    length = 8 + int.from_bytes(safetensors_block()[:8], "little")
    block = damaged(safetensors_block(), length, damage)
    try:
        parse_safetensors_header(block, len(block))
    except ModelFileError as error:
        assert str(error)


@settings(deadline=None, max_examples=150)
@given(block=st.binary(max_size=200))
def test_random_bytes_behind_the_magic_are_refused_by_type(block: bytes) -> None:
    try:
        parse_header(b"GGUF\3\0\0\0" + block, 8 + len(block))
    except ModelFileError as error:
        assert str(error)
