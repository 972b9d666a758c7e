"""A GGUF file, opened by mapping it: header checked at once, tensors read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from gpu.errors import TensorMissing, UnsupportedModel
from gpu.model.gguf_header import GgufArray, GgufTensor, parse_header
from gpu.model.mapped_file import map_file, release_pages

_PLAIN_TYPES: Final[dict[GGMLQuantizationType, Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.F64: np.dtype("<f8"),
}


class GgufFile:
    """A mapped GGUF file: `metadata`, `tensors` (places by name) and their contents."""

    def __init__(self, path: Path) -> None:
        """Map `path` and parse its header. Raises ModelFileError; reads nothing of the tensors."""
        self.path = path
        self._data = map_file(path)
        header = parse_header(self._data, len(self._data))
        self.version = header.version
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GgufTensor] = header.tensors

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Bytes of a tensor as stored, (rows..., row bytes) u8, a read-only view of the file. Raises TensorMissing."""
        place = self._place(name)
        flat = np.frombuffer(self._data, np.uint8, place.num_bytes, place.offset)
        return flat.reshape(*place.shape[:-1], -1)

    def tensor_f32(self, name: str) -> NDArray[np.float32]:
        """A tensor's values, dequantized: (rows..., row) f32. Raises TensorMissing or UnsupportedModel."""
        place = self._place(name)
        if (plain := _PLAIN_TYPES.get(place.type)) is not None:
            return np.asarray(self.raw(name).view(plain), np.float32, copy=True)
        try:
            values = quants.dequantize(self.raw(name), place.type)
        except NotImplementedError:
            raise UnsupportedModel(f"{name} type", place.type.name, "types that the gguf library decodes") from None
        return np.ascontiguousarray(values, np.float32)

    def tensor_chunks(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """Yield (name, type, shape, bytes) of every tensor, by name, for the weights digest."""
        view = memoryview(self._data)
        for name in sorted(self.tensors):
            place = self.tensors[name]
            yield name, place.type.name, place.shape, view[place.offset : place.offset + place.num_bytes]

    def release(self) -> None:
        """Give back the memory of what was read; the file stays open."""
        release_pages(self._data)

    def tokenizer_metadata(self) -> dict[str, Any]:
        """The `tokenizer.*` entries as plain Python values, arrays decoded."""
        return {
            key: value.decoded() if isinstance(value, GgufArray) else value
            for key, value in self.metadata.items()
            if key.startswith("tokenizer.")
        }

    def _place(self, name: str) -> GgufTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorMissing(name) from None
