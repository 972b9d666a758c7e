"""The two kernels that touch cells, and the plain arrays they take.

`store_rows` is the only function that writes generated cells, `attend` the only one that reads cells. Implementations:
`gpu.reference` (NumPy, the oracle of the bytes) and `gpu.cpu.kv_kernels` (Numba). All arrays are C-contiguous; offsets
are in bytes from the start of an arena; R rows, S sequences, P pages of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.layout import KVLayout

RopePairing = Literal["interleaved", "half"]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotation of each position: cos, sin: (max_position, rope_dim / 2) f32, computed in f64.

    Pair i is dims (2i, 2i + 1) when interleaved, (i, i + rope_dim / 2) when half. Dims from rope_dim on pass through.
    (a, b) becomes (a cos - b sin, b cos + a sin); each product and each sum is rounded to f32 on its own.
    """

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    pairing: RopePairing

    @property
    def max_position(self) -> int:
        """Positions 0 .. max_position - 1 have a rotation."""
        return int(self.cos.shape[0])

    @property
    def rope_dim(self) -> int:
        """Leading dims of a head that rotate."""
        return 2 * int(self.cos.shape[1])


@dataclass(frozen=True, slots=True)
class RowTable:
    """Where each row of a step goes; all (R,) int64.

    positions: position in its sequence. sequence_index: row of `PageTables`. mirror_offset: the row's page in the
    mirror arena. device_offset: the row's page in the device arena, or -1. cell: cell inside the page.
    """

    positions: NDArray[np.int64]
    sequence_index: NDArray[np.int64]
    mirror_offset: NDArray[np.int64]
    device_offset: NDArray[np.int64]
    cell: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return int(self.positions.shape[0])


@dataclass(frozen=True, slots=True)
class PageTables:
    """Pages of each sequence in order.

    mirror: (S, P) int64, offsets in the mirror arena. device: (S, P) int64, offsets in the device arena, -1 for a page
    that is read from the mirror. Entries beyond a sequence's pages are -1 in both and are never read.
    row_start: (S + 1,) int64, rows row_start[s] .. row_start[s + 1] - 1 belong to sequence s, at growing positions.
    """

    mirror: NDArray[np.int64]
    device: NDArray[np.int64]
    row_start: NDArray[np.int64]

    @property
    def num_sequences(self) -> int:
        """Sequences of the step."""
        return int(self.mirror.shape[0])


class KVKernels(Protocol):
    """The KV kernels of one backend."""

    def store_rows(
        self,
        layout: KVLayout,
        layer: int,
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        rope: RopeTable,
        rows: RowTable,
        mirror: NDArray[np.uint8],
        device: NDArray[np.uint8],
        counts: NDArray[np.int64],
        nonfinite: NDArray[np.int64],
    ) -> None:
        """Quantize the rows' K and V of one layer and store them: to the mirror always, to the device if it has them.

        k, v: (R, num_kv_heads, head_dim) f32, K before RoPE. mirror: (n,) u8. device: (m,) u8, m may be 0.
        counts: (num_layers, S, 2) int64; [layer, s, 0] grows by one for each row of sequence s whose K (all heads) was
        stored to the mirror, [layer, s, 1] for V, by the code that stores it.
        nonfinite: (S,) int64, grows by one for each vector (row, plane, head) that is not finite after RoPE and
        Hadamard rotation; such a vector is stored as zeros.
        Bytes are the same in every implementation: no fused multiply-add, fp16 by round-to-nearest-even, saturating at
        +-65504, every zero (code or scale) as +0.0.
        """
        ...

    def attend(
        self,
        layout: KVLayout,
        layer: int,
        q: NDArray[np.float32],
        rope: RopeTable,
        rows: RowTable,
        tables: PageTables,
        mirror: NDArray[np.uint8],
        device: NDArray[np.uint8],
        out: NDArray[np.float32],
    ) -> None:
        """Attend each row to positions 0 .. its own of its sequence, reading K and V as stored, page after page.

        q: (R, num_heads, head_dim) f32 before RoPE; rotated inside by RoPE and, where K is rotated, by Hadamard.
        Query head h reads KV head h // (num_heads / num_kv_heads). Scale 1 / sqrt(head_dim).
        out: (R, num_heads, head_dim) f32, overwritten; rotated back where V is rotated.
        A row's result depends on its own query and cells alone, not on other rows, sequences or where pages lie.
        """
        ...
