"""Safetensors files: bounded header check, tensors read from the mapped bytes.

    header length u64 | JSON header of that length | tensor bytes, without gaps
    header: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, "__metadata__": {str: str}}

Format: https://github.com/huggingface/safetensors. The library's NumPy reader has no bfloat16, hence our own.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.errors import FileTruncated, ModelFileError, TensorMissing, UnsupportedModel
from gpu.model.mapped_file import map_file, release_pages

MAX_HEADER_BYTES: Final = 1 << 24
MAX_INDEX_BYTES: Final = 1 << 24
MAX_SHARDS: Final = 1024
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"

_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
# Types we can skip but not use; sizes in bytes.
_OTHER_DTYPES: Final = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where one tensor lies; offset is absolute, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        """Map `path` and check its header. Raises ModelFileError."""
        self.path = path
        self._data = map_file(path)
        self.tensors = parse_safetensors_header(self._data, len(self._data))

    def tensor_f32(self, name: str) -> NDArray[np.float32]:
        """A tensor's values, shape as stored, f32 (exact for f32, f16 and bf16). Raises TensorMissing."""
        entry = self.entry(name)
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            raise UnsupportedModel(f"{name} dtype", entry.dtype, ", ".join(_DTYPES))
        flat = np.frombuffer(self._data, dtype, math.prod(entry.shape), entry.offset)
        if entry.dtype == "BF16":
            flat = (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.array(flat, np.float32).reshape(entry.shape)

    def tensor_bf16(self, name: str) -> NDArray[np.uint16] | None:
        """A bf16 tensor's bits, shape as stored, a read-only view of the file; None for another type."""
        entry = self.entry(name)
        if entry.dtype != "BF16":
            return None
        return np.frombuffer(self._data, np.uint16, math.prod(entry.shape), entry.offset).reshape(entry.shape)

    def entry(self, name: str) -> SafetensorsEntry:
        """Place of a tensor. Raises TensorMissing."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorMissing(name) from None

    def tensor_chunks(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, type, shape, bytes) of every tensor, by name."""
        view = memoryview(self._data)
        for name in sorted(self.tensors):
            entry = self.tensors[name]
            yield name, entry.dtype, entry.shape, view[entry.offset : entry.offset + entry.num_bytes]

    def release(self) -> None:
        """Give back the memory of what was read; the file stays open."""
        release_pages(self._data)


def open_shards(directory: Path) -> list[SafetensorsFile]:
    """Open every file of a model directory, in name order. Raises ModelFileError if one is missing or not sound."""
    index = directory / INDEX_NAME
    if not index.exists():
        return [SafetensorsFile(directory / SINGLE_NAME)]
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(INDEX_NAME, type(weight_map).__name__, "weight_map maps tensor names to file names")
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise ModelFileError("shards", len(names), f"at most {MAX_SHARDS}")
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise ModelFileError("shard name", name, "a plain file name that ends in .safetensors")
    shards = {name: SafetensorsFile(directory / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise TensorMissing(tensor)
    return list(shards.values())


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes. Raises ModelFileError."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelFileError(path.name, size, f"at most {limit} bytes")
        return _parse_object(path.read_bytes(), path.name)
    except OSError as error:
        raise ModelFileError(path.name, str(path), error.strerror or "cannot be read") from error


def parse_safetensors_header(data: mmap.mmap | bytes, size: int) -> dict[str, SafetensorsEntry]:
    """Check the header of `data` and return the places of its tensors. Raises FileTruncated or ModelFileError."""
    if size < 8:
        raise FileTruncated("header length", 8, size)
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelFileError("header length", length, f"at most {MAX_HEADER_BYTES} bytes")
    if 8 + length > size:
        raise FileTruncated("header", 8 + length, size)
    entries = {
        name: _parse_entry(name, fields, 8 + length)
        for name, fields in _parse_object(bytes(data[8 : 8 + length]), "header").items()
        if name != "__metadata__"
    }
    _check_places(entries, 8 + length, size)
    return entries


def _parse_object(text: bytes, field: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(field, text[:32], f"must be JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelFileError(field, type(parsed).__name__, "must be a JSON object")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key occurs twice")
    return parsed


def _parse_entry(name: str, fields: Any, data_offset: int) -> SafetensorsEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ModelFileError(f"{name} entry", fields, "needs dtype, shape and data_offsets")
    shape, offsets, dtype = fields["shape"], fields["data_offsets"], fields["dtype"]
    for field, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ModelFileError(f"{name} {field}", numbers, "a list of integers from 0 up")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(f"{name} data_offsets", offsets, "a begin and an end that is not before it")
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    item_bytes = known.itemsize if known is not None else _OTHER_DTYPES.get(str(dtype))
    if item_bytes is None:
        raise UnsupportedModel(f"{name} dtype", dtype, ", ".join([*_DTYPES, *_OTHER_DTYPES]))
    if (num_bytes := math.prod(shape) * item_bytes) != offsets[1] - offsets[0]:
        raise ModelFileError(f"{name} data_offsets", offsets, f"shape {shape} of {dtype} takes {num_bytes} bytes")
    return SafetensorsEntry(str(dtype), tuple(shape), data_offset + offsets[0], num_bytes)


def _check_places(entries: dict[str, SafetensorsEntry], data_offset: int, size: int) -> None:
    end, previous = data_offset, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            fault = "overlaps" if entry.offset < end else "leaves a gap after"
            raise ModelFileError(f"{name} offset", entry.offset, f"tensor {fault} {previous}, which ends at {end}")
        end, previous = entry.offset + entry.num_bytes, name
    if end > size:
        raise FileTruncated("tensor data", end, size)
    if end < size:
        raise ModelFileError("file size", size, f"{size - end} bytes follow the last tensor")
