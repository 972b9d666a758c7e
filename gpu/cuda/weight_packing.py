"""Packed weights in NumPy: the layout and the quantization that `pack.cu` makes on the device, and back.

A matrix of `num_outputs` rows by `width` columns becomes `[tile of 16 rows][unit of 64 columns]`; docs/cuda-kernels.md
draws the units. Rows beyond `num_outputs` are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.errors import LayoutError

TILE_ROWS: Final = 16
UNIT_WIDTH: Final = 64

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class PackedStorage(IntEnum):
    """How packed weights are stored; the value is the kernels' STORAGE."""

    BF16 = 0
    INT8 = 1
    INT4 = 2

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit: 16 rows x 64 columns, scales included."""
        return (2048, 1056, 576)[self]

    @property
    def group_width(self) -> int:
        """Columns of a row that share a scale; 0 for bf16."""
        return (0, 64, 32)[self]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A packed matrix in device memory; 16-byte aligned. num_outputs, width: rows and columns."""

    address: int
    storage: PackedStorage
    num_outputs: int
    width: int


def num_tiles(num_outputs: int) -> int:
    """Tiles of a matrix, the last one perhaps filled up with zero rows."""
    return -(-num_outputs // TILE_ROWS)


def packed_bytes(storage: PackedStorage, num_outputs: int, width: int) -> int:
    """Size of a packed matrix. Raises LayoutError for a width that has no whole units."""
    return num_tiles(num_outputs) * num_units(width) * storage.unit_bytes


def num_units(width: int) -> int:
    """Units of a row tile. Raises LayoutError for a width that is not a positive multiple of 64."""
    if width <= 0 or width % UNIT_WIDTH:
        raise LayoutError("width", width, f"must be a positive multiple of {UNIT_WIDTH}")
    return width // UNIT_WIDTH


def pack(storage: PackedStorage, values: Floats) -> Bytes:
    """Quantize and pack values: (num_outputs, width) f32 -> (tiles, units, unit_bytes) u8. Raises LayoutError."""
    num_outputs, width = values.shape
    units = num_units(width)
    rows = np.zeros((num_tiles(num_outputs) * TILE_ROWS, width), np.float32)
    rows[:num_outputs] = values
    if storage is PackedStorage.BF16:
        # axes: tile, row half, g, unit, k16, column half, t, pair
        bits = bf16_bits(rows).reshape(-1, 2, 8, units, 4, 2, 4, 2)
        return _bytes(bits.transpose(0, 3, 4, 2, 6, 5, 1, 7), units)
    codes, scales = quantize(storage, rows)
    if storage is PackedStorage.INT8:
        # axes: tile, row half, g, unit, k32, k16, column half, t, pair
        split = codes.view(np.uint8).reshape(-1, 2, 8, units, 2, 2, 2, 4, 2)
        packed_codes = _bytes(split.transpose(0, 3, 4, 2, 7, 5, 6, 8, 1), units)
    else:
        split = codes.view(np.uint8).reshape(-1, 2, 8, units, 4, 2, 4, 2)
        nibbles = split.transpose(0, 3, 2, 6, 4, 7, 5, 1)
        packed_codes = _bytes(nibbles[..., 0] | (nibbles[..., 1] << np.uint8(4)), units)
    groups = UNIT_WIDTH // storage.group_width
    # axes: tile, row half, g, unit, group
    packed_scales = scales.reshape(-1, 2, 8, units, groups).transpose(0, 3, 4, 2, 1)
    return np.concatenate((packed_codes, _bytes(packed_scales, units)), axis=-1)


def unpack(storage: PackedStorage, packed: Bytes, num_outputs: int, width: int) -> Floats:
    """The values that a product uses, (num_outputs, width) f32, from `packed` in any shape. Raises LayoutError."""
    units = num_units(width)
    raw = np.ascontiguousarray(packed, np.uint8).reshape(-1, units, storage.unit_bytes)
    if storage is PackedStorage.BF16:
        bits = raw.view(np.uint16).reshape(-1, units, 4, 8, 4, 2, 2, 2).transpose(0, 6, 3, 1, 2, 5, 4, 7)
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.ascontiguousarray(values.reshape(-1, width)[:num_outputs])
    groups = UNIT_WIDTH // storage.group_width
    code_bytes = storage.unit_bytes - 2 * TILE_ROWS * groups
    packed_codes, packed_scales = np.split(raw, (code_bytes,), axis=-1)
    if storage is PackedStorage.INT8:
        split = packed_codes.reshape(-1, units, 2, 8, 4, 2, 2, 2, 2).transpose(0, 8, 3, 1, 2, 5, 6, 4, 7)
        codes = np.ascontiguousarray(split).view(np.int8).reshape(-1, width).astype(np.float32)
    else:
        pairs = packed_codes.reshape(-1, units, 8, 4, 4, 2, 2)
        nibbles = np.stack((pairs & np.uint8(15), pairs >> np.uint8(4)), axis=-1)
        split = nibbles.transpose(0, 7, 2, 1, 4, 6, 3, 5)
        codes = split.reshape(-1, width).astype(np.float32) - np.float32(8)
    halves = np.ascontiguousarray(packed_scales).view(np.float16).reshape(-1, units, groups, 8, 2)
    scales = halves.transpose(0, 4, 3, 1, 2).reshape(-1, width // storage.group_width).astype(np.float32)
    return (codes * np.repeat(scales, storage.group_width, axis=1))[:num_outputs]


def quantize(storage: PackedStorage, values: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes (rows, width) i8 and scales (rows, width / group_width) f16 of values (rows, width) f32.

    INT8: scale = f16(max abs / 127), code = rint(value / scale) within +-127. INT4: scale = f16(value of largest
    magnitude / -8), the positive one when both signs reach it, code = trunc(value / scale + 8.5) within 0..15, which
    stands for code - 8. A zero scale is +0; its codes stand for zero.
    """
    if storage is PackedStorage.BF16:
        raise LayoutError("storage", storage.name, "bf16 weights have no codes")
    groups = values.reshape(values.shape[0], -1, storage.group_width)
    if storage is PackedStorage.INT8:
        scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
    else:
        highest, lowest = groups.max(axis=-1), groups.min(axis=-1)
        scales = (np.where(highest >= -lowest, highest, lowest) / np.float32(-8)).astype(np.float16)
    scales[scales == 0] = 0
    divisors = scales.astype(np.float32)[..., None]
    ratios = np.divide(groups, divisors, out=np.zeros_like(groups), where=divisors != 0)
    if storage is PackedStorage.INT8:
        codes = np.clip(np.rint(ratios), -127, 127)
    else:
        codes = np.clip(np.trunc(ratios + np.float32(8.5)), 0, 15)
    return codes.astype(np.int8).reshape(values.shape), scales


def bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """The upper 16 bits of finite values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def interleave_tiles(first: Bytes, second: Bytes) -> Bytes:
    """Tiles of two packed matrices in turn, (tiles, units, unit_bytes) each: gate and up as one matrix."""
    return np.stack((first, second), axis=1).reshape(-1, *first.shape[1:])


def _bytes(parts: NDArray[Any], units: int) -> Bytes:
    """(tiles, units, ...) of any type as (tiles, units, bytes) u8."""
    return np.ascontiguousarray(parts).view(np.uint8).reshape(-1, units, parts[0, 0].nbytes)
