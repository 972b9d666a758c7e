"""Bounded parser of a GGUF header: nothing is allocated from a number that the file's size does not cover.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string | type u32 | value                     string = length u64 | UTF-8 bytes
    tensors:   name string | dims u32 | ne[dims] u64 | type u32 | offset u64 (from the data's start)
    padding to `general.alignment`, then the tensors' bytes

Arrays are not decoded but remembered by place (`GgufArray`), so a vocabulary costs a walk over its lengths.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu.errors import FileTruncated, ModelFileError, UnsupportedModel

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_METADATA: Final = 1 << 16
MAX_TENSORS: Final = 1 << 18
MAX_KEY_BYTES: Final = 65_535
MAX_TENSOR_NAME_BYTES: Final = 128
MAX_STRING_BYTES: Final = 1 << 26
MAX_ARRAY_ITEMS: Final = 1 << 22
MAX_ARRAY_DEPTH: Final = 3
MAX_DIMS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]
_MIN_METADATA_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. shape: rows first (numpy order); offset: absolute, in bytes."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufArray(Sequence[Any]):
    """An array of the header, decoded when it is read. Nested arrays read as GgufArray."""

    def __init__(self, data: Any, item_type: int, count: int, offset: int) -> None:
        self._data = data
        self._item_type = item_type
        self._count = count
        self._offset = offset

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.decoded()[index]

    def decoded(self) -> list[Any]:
        """Decode all items. Raises ModelFileError for text that is not UTF-8."""
        scalar = _SCALARS.get(self._item_type)
        if scalar is not None:
            block = self._data[self._offset : self._offset + self._count * scalar.size]
            return [item for (item,) in scalar.iter_unpack(block)]
        reader = HeaderReader(self._data, self._offset)
        return [reader.value(self._item_type, "array item", 0) for _ in range(self._count)]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header. metadata values are numbers, bools, strings or GgufArray."""

    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_offset: int


def parse_header(data: Any, size: int) -> GgufHeader:
    """Parse the header of `data` (bytes or mmap of `size` bytes) and check every tensor's place.

    Raises FileTruncated, UnsupportedModel or ModelFileError; touches only the header's bytes.
    """
    reader = HeaderReader(data, 0, size)
    if (magic := reader.take(4, "magic")) != MAGIC:
        raise ModelFileError("magic", magic, f"a GGUF file starts with {MAGIC!r}")
    version = _check_version(reader.u32("version"))
    num_tensors = reader.count("tensor count", _MIN_TENSOR_BYTES, MAX_TENSORS)
    num_metadata = reader.count("metadata count", _MIN_METADATA_BYTES, MAX_METADATA)
    metadata = _read_metadata(reader, num_metadata)
    alignment = _check_alignment(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    entries = _read_tensors(reader, num_tensors)
    data_offset = _align(reader.position, alignment)
    tensors = _place_tensors(entries, data_offset, alignment, size)
    return GgufHeader(version, alignment, metadata, tensors, data_offset)


class HeaderReader:
    """A cursor over the header that checks each length before it takes the bytes."""

    def __init__(self, data: Any, position: int, size: int | None = None) -> None:
        self._data = data
        self.position = position
        self._size = len(data) if size is None else size

    def take(self, num_bytes: int, field: str) -> bytes:
        """Return the next bytes. Raises FileTruncated."""
        start = self.position
        if num_bytes > self._size - start:
            raise FileTruncated(field, start + num_bytes, self._size)
        self.position = start + num_bytes
        return bytes(self._data[start : self.position])

    def u32(self, field: str) -> int:
        """Read a u32."""
        return int(_U32.unpack(self.take(4, field))[0])

    def u64(self, field: str) -> int:
        """Read a u64."""
        return int(_U64.unpack(self.take(8, field))[0])

    def count(self, field: str, item_bytes: int, limit: int) -> int:
        """Read a u64 count of items that take at least `item_bytes` each."""
        count = self.u64(field)
        if count > limit:
            raise ModelFileError(field, count, f"at most {limit}")
        if count * item_bytes > self._size - self.position:
            raise FileTruncated(field, self.position + count * item_bytes, self._size)
        return count

    def string(self, field: str, limit: int) -> str:
        """Read a length-prefixed UTF-8 string of at most `limit` bytes."""
        length = self.u64(f"{field} length")
        if length > limit:
            raise ModelFileError(f"{field} length", length, f"at most {limit} bytes")
        block = self.take(length, f"{field} length")
        try:
            return block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(field, block[:64], f"must be UTF-8 ({error.reason})") from None

    def value(self, value_type: int, field: str, depth: int) -> Any:
        """Read one metadata value; an array is skipped and returned as GgufArray."""
        if (scalar := _SCALARS.get(value_type)) is not None:
            return scalar.unpack(self.take(scalar.size, field))[0]
        if value_type == _STRING:
            return self.string(field, MAX_STRING_BYTES)
        if value_type == _ARRAY:
            return self._array(field, depth + 1)
        raise ModelFileError(f"{field} type", value_type, "value types are 0 to 12")

    def _array(self, field: str, depth: int) -> GgufArray:
        if depth > MAX_ARRAY_DEPTH:
            raise ModelFileError(field, depth, f"arrays nest at most {MAX_ARRAY_DEPTH} deep")
        item_type = self.u32(f"{field} item type")
        scalar = _SCALARS.get(item_type)
        if scalar is not None:
            count = self.count(f"{field} items", scalar.size, MAX_ARRAY_ITEMS)
            array = GgufArray(self._data, item_type, count, self.position)
            self.position += count * scalar.size
            return array
        if item_type not in (_STRING, _ARRAY):
            raise ModelFileError(f"{field} item type", item_type, "value types are 0 to 12")
        count = self.count(f"{field} items", 8 if item_type == _STRING else 12, MAX_ARRAY_ITEMS)
        array = GgufArray(self._data, item_type, count, self.position)
        if item_type == _STRING:
            self._skip_strings(count, field)
        else:
            for _ in range(count):
                self._array(field, depth + 1)
        return array

    def _skip_strings(self, count: int, field: str) -> None:
        unpack, data, position, last = _U64.unpack_from, self._data, self.position, self._size - 8
        for _ in range(count):
            if position > last:
                raise FileTruncated(field, position + 8, self._size)
            position += 8 + unpack(data, position)[0]
        if position > self._size:
            raise FileTruncated(field, position, self._size)
        self.position = position


def _check_version(version: int) -> int:
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in range(1, 100):
        raise UnsupportedModel("byte order", "big endian", "little endian files")
    raise UnsupportedModel("GGUF version", version, ", ".join(map(str, VERSIONS)))


def _check_alignment(alignment: object) -> int:
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError("general.alignment", alignment, f"a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_metadata(reader: HeaderReader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = reader.string(f"metadata[{index}] key", MAX_KEY_BYTES)
        if key in metadata:
            raise ModelFileError("metadata key", key, "must not occur twice")
        metadata[key] = reader.value(reader.u32(f"{key} type"), key, 0)
    return metadata


def _read_tensors(reader: HeaderReader, count: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for index in range(count):
        name = reader.string(f"tensor[{index}] name", MAX_TENSOR_NAME_BYTES)
        if name in tensors:
            raise ModelFileError("tensor name", name, "must not occur twice")
        num_dims = reader.u32(f"{name} dimensions")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ModelFileError(f"{name} dimensions", num_dims, f"1 to {MAX_DIMS}")
        shape = tuple(reader.u64(f"{name} shape") for _ in range(num_dims))[::-1]
        tensor_type = _tensor_type(name, reader.u32(f"{name} type"))
        offset = reader.u64(f"{name} offset")
        tensors[name] = GgufTensor(name, tensor_type, shape, offset, _num_bytes(name, tensor_type, shape))
    return tensors


def _tensor_type(name: str, type_id: int) -> GGMLQuantizationType:
    try:
        tensor_type = GGMLQuantizationType(type_id)
    except ValueError:
        raise UnsupportedModel(f"{name} type", type_id, "the tensor types of the gguf library") from None
    if tensor_type not in GGML_QUANT_SIZES:
        raise UnsupportedModel(f"{name} type", tensor_type.name, "the tensor types of the gguf library")
    return tensor_type


def _num_bytes(name: str, tensor_type: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block_items, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block_items:
        raise ModelFileError(f"{name} row", shape[-1], f"{tensor_type.name} rows are multiples of {block_items}")
    num_items = 1
    for dim in shape:
        if dim < 1:
            raise ModelFileError(f"{name} shape", shape, "dimensions are positive")
        num_items *= dim
    return num_items // block_items * block_bytes


def _place_tensors(
    entries: dict[str, GgufTensor], data_offset: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Turn relative offsets into absolute ones. Tensors may not overlap, and none lies outside what all take."""
    total = sum(_align(tensor.num_bytes, alignment) for tensor in entries.values())
    previous_end, previous_name, end = 0, "", data_offset
    for tensor in sorted(entries.values(), key=lambda entry: entry.offset):
        if tensor.offset % alignment:
            raise ModelFileError(f"{tensor.name} offset", tensor.offset, f"a multiple of {alignment}")
        if tensor.offset >= max(total, 1):
            raise ModelFileError(f"{tensor.name} offset", tensor.offset, f"below {total}, the bytes all tensors take")
        if tensor.offset < previous_end:
            raise ModelFileError(f"{tensor.name} offset", tensor.offset, f"tensor overlaps {previous_name}")
        previous_end, previous_name = tensor.offset + tensor.num_bytes, tensor.name
        end = data_offset + previous_end
    if end > size:
        raise FileTruncated("tensor data", end, size)
    return {
        name: GgufTensor(name, entry.type, entry.shape, data_offset + entry.offset, entry.num_bytes)
        for name, entry in entries.items()
    }


def _align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment
