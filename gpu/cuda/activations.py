"""bf16 activations between kernels (`activation.cuh`): their layouts, sizes, and both directions in NumPy."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

TILE_ROWS: Final = 192


class ActivationLayout(IntEnum):
    """Order of activations; the value is the kernels' ACTIVATION_LAYOUT."""

    FRAGMENT = 0
    TILE = 1

    @property
    def group_rows(self) -> int:
        """A buffer holds a multiple of this many rows."""
        return TILE_ROWS if self is ActivationLayout.TILE else 8

    def num_bytes(self, num_rows: int, width: int) -> int:
        """Size of a buffer for this many rows."""
        return -(-num_rows // self.group_rows) * self.group_rows * width * 2


def pack_activations(layout: ActivationLayout, bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """bf16 bits (num_rows, width) in a layout, flat; rows that fill the last group are NaN."""
    num_rows, width = bits.shape
    rows = np.full((-(-num_rows // layout.group_rows) * layout.group_rows, width), 0x7FC0, np.uint16)
    rows[:num_rows] = bits
    packed = np.empty(rows.size, np.uint16)
    packed[_places(layout, len(rows), width)] = rows
    return packed


def unpack_activations(
    layout: ActivationLayout, packed: NDArray[np.uint16], num_rows: int, width: int
) -> NDArray[np.uint16]:
    """bf16 bits (num_rows, width) out of a flat buffer of a layout."""
    return packed[_places(layout, num_rows, width)]


def _places(layout: ActivationLayout, num_rows: int, width: int) -> NDArray[np.int64]:
    """Index of each (row, column) in the flat buffer: `activation_index` of activation.cuh."""
    row, k = np.arange(num_rows)[:, None], np.arange(width)[None, :]
    if layout is ActivationLayout.FRAGMENT:
        k16 = k % 16
        group = row // 8 * (width // 32) + k // 32
        lane = row % 8 * 4 + k16 % 8 // 2
        return group * 256 + lane * 8 + k % 32 // 16 * 4 + k16 // 8 * 2 + k % 2
    in_tile = row % TILE_ROWS
    block = row // TILE_ROWS * (width // 64) + k // 64
    return (block * TILE_ROWS + in_tile) * 64 + ((k % 64 // 8) ^ (in_tile % 8)) * 8 + k % 8
