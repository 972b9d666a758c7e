"""The GGUF header parser against files that lie about themselves."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from gpu.errors import FileTruncated, ModelFileError, TensorMissing, UnsupportedModel
from gpu.model.gguf_file import GgufFile
from gpu.model.gguf_header import MAX_ARRAY_DEPTH, GgufArray, parse_header
from tests.model_files import random_tensors, tiny_config, write_gguf
from workers.settings import default_model_path

F32 = int(GGMLQuantizationType.F32)


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


def header(metadata: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(metadata))
    return b"GGUF" + counts + b"".join(metadata) + b"".join(tensors)


def file_with(tensors: list[bytes], num_data_bytes: int, metadata: list[bytes] | None = None) -> bytes:
    head = header(metadata or [], tensors)
    return head + bytes(-len(head) % 32) + bytes(num_data_bytes)


def parse(block: bytes) -> Any:
    return parse_header(block, len(block))


def test_header_of_a_sound_file_reads_as_the_gguf_library_reads_it(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config))
    ours, theirs = GgufFile(path), GGUFReader(path)
    plain = {name: value for name, value in ours.metadata.items() if not isinstance(value, GgufArray)}
    assert plain == {name: theirs.fields[name].contents() for name in plain}
    assert len(plain) >= 12
    assert ours.metadata["tokenizer.ggml.tokens"].decoded() == theirs.fields["tokenizer.ggml.tokens"].contents()
    assert {name: (place.offset, place.num_bytes) for name, place in ours.tensors.items()} == {
        item.name: (int(item.data_offset), int(item.n_bytes)) for item in theirs.tensors
    }


def test_default_model_opens_within_a_fifth_of_a_second() -> None:
    path = default_model_path()
    start = time.perf_counter()
    opened = GgufFile(path)
    assert time.perf_counter() - start < 0.2
    assert len(opened.tensors) == 272


def test_scalar_values_of_every_type_are_read() -> None:
    values: list[tuple[int, str, Any]] = [
        (0, "<B", 200), (1, "<b", -100), (2, "<H", 60_000), (3, "<h", -30_000), (4, "<I", 4_000_000_000),
        (5, "<i", -2_000_000_000), (6, "<f", 0.5), (7, "<?", True), (10, "<Q", 2**63), (11, "<q", -(2**62)),
        (12, "<d", 0.1),
    ]  # fmt: skip
    block = header([entry(f"k{kind}", kind, struct.pack(form, value)) for kind, form, value in values], [])
    assert list(parse(block).metadata.values()) == [value for _, _, value in values]


def test_nested_arrays_within_the_limit_are_read() -> None:
    inner = struct.pack("<IQ", 8, 2) + string("a") + string("b")
    block = header([entry("k", 9, struct.pack("<IQ", 9, 1) + inner), entry("n", 4, struct.pack("<I", 7))], [])
    metadata = parse(block).metadata
    assert [list(item) for item in metadata["k"]] == [["a", "b"]]
    assert metadata["n"] == 7


def test_nested_arrays_beyond_the_limit_are_refused() -> None:
    value = struct.pack("<IQ", 9, 1) * MAX_ARRAY_DEPTH + struct.pack("<IQ", 4, 0)
    with pytest.raises(ModelFileError, match="nest at most"):
        parse(header([entry("k", 9, value)], []))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"GGML" + bytes(20), "starts with"),
        (header([], [], version=99), "GGUF version unsupported"),
        (header([], [], version=1), "GGUF version unsupported"),
        (header([], [], version=0), "GGUF version unsupported"),
        (header([], [], version=3 << 24), "byte order unsupported"),
        (header([entry("k", 13, b"")], []), "value types are 0 to 12"),
        (header([entry("k", 9, struct.pack("<IQ", 13, 0))], []), "value types are 0 to 12"),
        (header([entry("k", 0, b"\1"), entry("k", 0, b"\1")], []), "must not occur twice"),
        (header([entry("k", 8, string(b"\xff\xfe"))], []), "must be UTF-8"),
        (header([entry("general.alignment", 4, struct.pack("<I", 24))], []), "a power of two"),
        (header([entry("general.alignment", 4, struct.pack("<I", 0))], []), "a power of two"),
        (header([entry("general.alignment", 8, string("32"))], []), "a power of two"),
        (header([], [tensor("t", (1,)), tensor("t", (1,))]), "must not occur twice"),
        (header([], [tensor("t", (1, 1, 1, 1, 1))]), "1 to 4"),
        (header([], [tensor("t", ())]), "1 to 4"),
        (header([], [tensor("t", (0,))]), "dimensions are positive"),
        (header([], [tensor("t", (1,), kind=5)]), "unsupported"),
        (header([], [tensor("t", (33,), kind=int(GGMLQuantizationType.Q8_0))]), "multiples of 32"),
        (header([], [tensor("n" * 129, (1,))]), "at most 128"),
        (file_with([tensor("t", (1,), offset=4)], 64), "a multiple of 32"),
        (file_with([tensor("t", (1,), offset=2**64 - 32)], 64), "below 32"),
        (file_with([tensor("t", (1,), offset=4096)], 64), "below 32"),
        (file_with([tensor("a", (16,)), tensor("b", (16,), offset=32)], 128), "overlaps a"),
    ],
)
def test_header_that_breaks_a_rule_is_refused_by_name(block: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        parse(block)


@pytest.mark.parametrize("missing", [1, 31, 64])
def test_tensor_data_that_ends_early_is_short_by_that_many_bytes(missing: int) -> None:
    block = file_with([tensor("a", (16,)), tensor("b", (8,), offset=64)], 96)
    parse(block)
    with pytest.raises(FileTruncated, match=f"file short by {missing} bytes") as caught:
        parse(block[: len(block) - missing])
    assert caught.value.short_by == missing


def test_every_cut_of_a_header_is_refused_and_never_crashes() -> None:
    block = file_with([tensor("a", (16,))], 64, [entry("k", 9, struct.pack("<IQ", 8, 2) + string("x") + string("yz"))])
    for length in range(len(block)):
        with pytest.raises(ModelFileError):
            parse(block[:length])


def test_shape_that_overflows_64_bits_is_short_not_small() -> None:
    with pytest.raises(FileTruncated):
        parse(file_with([tensor("t", (2**32, 2**32, 2**32))], 64))


def test_reading_a_tensor_that_is_not_there_names_it(tmp_path: Path) -> None:
    config = tiny_config()
    opened = GgufFile(write_gguf(tmp_path / "model.gguf", config, random_tensors(config)))
    with pytest.raises(TensorMissing, match=r"tensor missing: blk\.7\.ffn_up\.weight"):
        opened.tensor_f32("blk.7.ffn_up.weight")


def test_tensor_type_without_a_decoder_is_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_with([tensor("t", (4,), kind=int(GGMLQuantizationType.I32))], 32))
    with pytest.raises(UnsupportedModel, match="t type unsupported"):
        GgufFile(path).tensor_f32("t")


def test_stored_values_of_a_plain_tensor_are_read_exactly(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    opened = GgufFile(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert np.array_equal(opened.tensor_f32("token_embd.weight"), tensors["token_embd.weight"])


@pytest.mark.parametrize("path", ["missing.gguf", "."])
def test_path_that_is_no_file_is_a_model_file_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelFileError, match="model file"):
        GgufFile(tmp_path / path)
