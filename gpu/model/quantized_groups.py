"""Quantized GGUF blocks as codes, scales and minimums per 32 values, without any loss.

Only types whose value is `scale * code + minimum` over at least 32 neighbours have such a form; the rest is
dequantized by the gguf library. Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as QuantType
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GROUP_SIZE: Final = 32


class Groups(NamedTuple):
    """codes: (rows, cols) u8; scales, minimums: (rows, cols / 32) f32; value = scale * code + minimum."""

    codes: Bytes
    scales: Floats
    minimums: Floats

    def with_rows(self, order: NDArray[np.intp]) -> Groups:
        """The rows in another order."""
        return Groups(self.codes[order], self.scales[order], self.minimums[order])


def has_groups(tensor_type: QuantType) -> bool:
    """Whether `read_groups` knows the type."""
    return tensor_type in _READERS


def read_groups(raw: Bytes, tensor_type: QuantType) -> Groups:
    """Split raw blocks (rows, row bytes) u8 of a type for which `has_groups` holds."""
    block_bytes, reader = _READERS[tensor_type]
    num_rows = raw.shape[0]
    codes, scales, minimums = reader(raw.reshape(-1, block_bytes))
    return Groups(
        np.ascontiguousarray(codes, np.uint8).reshape(num_rows, -1),
        np.ascontiguousarray(scales, np.float32).reshape(num_rows, -1),
        np.ascontiguousarray(minimums, np.float32).reshape(num_rows, -1),
    )


def _q4_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:18]), scale, np.float32(-8.0) * scale)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:20]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    codes = _nibbles(blocks[:, 6:22]) | _high_bits(blocks[:, 2:6])
    return Groups(codes, scale, np.float32(-16.0) * scale)


def _q5_1(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 8:24]) | _high_bits(blocks[:, 4:8])
    return Groups(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return Groups(blocks[:, 2:34] ^ np.uint8(0x80), scale, np.float32(-128.0) * scale)


def _q4_k(blocks: Bytes) -> Groups:
    scales, minimums = _k_scales(blocks)
    packed = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    codes = np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=2)
    return Groups(codes, scales, minimums)


def _q5_k(blocks: Bytes) -> Groups:
    scales, minimums = _k_scales(blocks)
    packed = blocks[:, 48:176].reshape(-1, 4, 1, 32)
    low = np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=2).reshape(-1, 8, 32)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    return Groups(low | (high << np.uint8(4)), scales, minimums)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and minimums of a K block: two halves, then 12 bytes that pack 6-bit factors."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, third = packed[:, 0], packed[:, 1], packed[:, 2]
    scale_codes = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minimum_codes = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    scales = _half(blocks, 0) * scale_codes.astype(np.float32)
    return scales, -(_half(blocks, 2) * minimum_codes.astype(np.float32))


def _half(blocks: Bytes, offset: int) -> Floats:
    """The fp16 value at a byte offset of each block, (blocks, 1) f32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """16 bytes -> 32 codes: all low nibbles, then all high ones."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=1)


def _high_bits(packed: Bytes) -> Bytes:
    """4 bytes -> bit 4 of 32 codes."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


_READERS: Final[dict[QuantType, tuple[int, Callable[[Bytes], Groups]]]] = {
    QuantType.Q4_0: (18, _q4_0),
    QuantType.Q4_1: (20, _q4_1),
    QuantType.Q5_0: (22, _q5_0),
    QuantType.Q5_1: (24, _q5_1),
    QuantType.Q8_0: (34, _q8_0),
    QuantType.Q4_K: (144, _q4_k),
    QuantType.Q5_K: (176, _q5_k),
}
