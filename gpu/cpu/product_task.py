"""Product tasks for `CpuThreads`: which fields a product needs, filled from matrices and buffers."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from gpu.cpu import kernels as kn
from gpu.cpu.product_tile import STORED_BF16, STORED_F32, STORED_Q4, STORED_Q8
from gpu.cpu.task import CHUNKS, FUNCTION, TASK_FIELDS, chunk_function
from gpu.cpu.threads import CpuThreads
from gpu.model.tensors import BLOCK_ROWS, Floats, WeightMatrix, WeightStorage

STORED = {
    WeightStorage.F32: STORED_F32,
    WeightStorage.BF16: STORED_BF16,
    WeightStorage.Q8: STORED_Q8,
    WeightStorage.Q4: STORED_Q4,
}


class ProductTask:
    """One product of a layer: x times one to three matrices, each into its own buffer.

    Made once per buffer size; a step sets only the number of rows. Keeps every array alive that the task points to.
    """

    def __init__(
        self,
        mode: int,
        x: Floats,
        matrices: Items[WeightMatrix],
        outs: Items[Floats],
        biases: Items[Floats | None] = (),
    ) -> None:
        """x: (max_rows, stride) f32. outs: (max_rows, stride) f32 each, strides padded to whole blocks."""
        fields = np.zeros(TASK_FIELDS, np.int64)
        fields[kn.MODE], fields[kn.INPUTS] = mode, matrices[0].num_cols
        fields[kn.X], fields[kn.X_STRIDE] = x.ctypes.data, x.shape[1]
        padded = [None if bias is None else pad_blocks(bias) for bias in biases] or [None] * len(matrices)
        for index, (matrix, out, bias) in enumerate(zip(matrices, outs, padded, strict=True)):
            first = kn.FIRST_MATRIX + index * kn.MATRIX_FIELDS
            fields[first : first + kn.MATRIX_FIELDS] = (
                STORED[matrix.storage], matrix.codes.shape[0], matrix.codes.ctypes.data, matrix.scales.ctypes.data,
                matrix.minimums.ctypes.data, out.ctypes.data, out.shape[1], 0 if bias is None else bias.ctypes.data,
            )  # fmt: skip
        blocks = [matrix.codes.shape[0] for matrix in matrices]
        fields[FUNCTION] = chunk_function(kn.product_chunk)
        fields[CHUNKS] = blocks[0] if mode == kn.MODE_GATED else sum(blocks)
        self._fields: NDArray[np.int64] = fields
        self._kept: list[object] = [x, *matrices, *outs, *padded]

    def normalize(self, hidden: Floats, weight: Floats, eps: float) -> ProductTask:
        """Make x = RMSNorm(hidden) * weight before the product."""
        weight = np.ascontiguousarray(weight, np.float32)
        self._fields[kn.NORM] = weight.ctypes.data
        self._fields[kn.EPS_BITS] = int(np.float32(eps).view(np.int32))
        self._kept.append(weight)
        return self.add_to(hidden)

    def add_to(self, hidden: Floats) -> ProductTask:
        """Where the residual stream lies: (max_rows, stride) f32."""
        self._fields[kn.HIDDEN], self._fields[kn.HIDDEN_STRIDE] = hidden.ctypes.data, hidden.shape[1]
        self._kept.append(hidden)
        return self

    def run(self, threads: CpuThreads, num_rows: int) -> None:
        """Compute the first `num_rows` rows."""
        self._fields[kn.ROWS] = num_rows
        if self._fields[kn.NORM]:
            kn.normalize_rows(self._fields)
        threads.run(self._fields)


def pad_blocks(vector: Floats) -> Floats:
    """(n,) f32 with zeros up to a multiple of 64."""
    padded = np.zeros(padded_width(len(vector)), np.float32)
    padded[: len(vector)] = vector
    return padded


def padded_width(width: int) -> int:
    """Columns of a buffer that whole blocks of outputs are written to."""
    return -(-width // BLOCK_ROWS) * BLOCK_ROWS
