"""Dense kernels: products of a few rows with packed weights, in blocks of 64 outputs.

One chunk of a task computes one block of 64 outputs for all rows, so threads share work by output columns and no sum
is ever split. Constant arguments are passed as np.int64: Numba would compile a function once more for each literal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.cpu.intrinsics import bits_float, carray, fma, pointer
from gpu.cpu.product_tile import STORED_BF16, STORED_F32, STORED_Q4, STORED_Q8, product_tile, unpack_tile
from gpu.cpu.scalar_math import inverse_root, jit
from gpu.cpu.softmax_step import gate_step
from gpu.cpu.task import CHUNKS, FUNCTION, TASK_FIELDS
from gpu.model.tensors import BLOCK_ROWS, GROUP_COLS

_FIRST = max(CHUNKS, FUNCTION) + 1
MODE, ROWS, INPUTS, X, X_STRIDE, NORM, HIDDEN, HIDDEN_STRIDE, EPS_BITS = range(_FIRST, _FIRST + 9)
FIRST_MATRIX, MATRIX_FIELDS = _FIRST + 9, 8
STORAGE, BLOCKS, CODES, SCALES, MINIMUMS, OUT, OUT_STRIDE, BIAS = range(MATRIX_FIELDS)
MODE_PLAIN, MODE_ADD, MODE_GATED = range(3)

UNPACK_ROWS = 8
PANEL = 128
PANEL_FLOATS = PANEL * BLOCK_ROWS

_f1x4, _f2x4, _f3x4, _f4x4, _f6x4 = (product_tile(rows, 4, STORED_F32) for rows in (1, 2, 3, 4, 6))
_f1x1, _f2x1, _f4x1, _f6x1 = (product_tile(rows, 1, STORED_F32) for rows in (1, 2, 4, 6))
_h1x4, _h2x4, _h4x4 = (product_tile(rows, 4, STORED_BF16) for rows in (1, 2, 4))
_q1x4, _q2x4, _q4x4 = (product_tile(rows, 4, STORED_Q8) for rows in (1, 2, 4))
_n1x4, _n2x4, _n4x4 = (product_tile(rows, 4, STORED_Q4) for rows in (1, 2, 4))
_unpack_bf16, _unpack_q8, _unpack_q4 = (unpack_tile(storage) for storage in (STORED_BF16, STORED_Q8, STORED_Q4))


@jit
def normalize_rows(task: Any) -> None:
    """x = RMSNorm(hidden) * weight of a product task, row by row."""
    rows, width = task[ROWS], task[INPUTS]
    stride_in, stride_out = task[HIDDEN_STRIDE], task[X_STRIDE]
    hidden = carray(pointer(task[HIDDEN]), (rows * stride_in,), np.float32)
    x = carray(pointer(task[X]), (rows * stride_out,), np.float32)
    weight = carray(pointer(task[NORM]), (width,), np.float32)
    for row in range(rows):
        source = hidden[row * stride_in : row * stride_in + width]
        scale = root_mean_square(source, bits_float(np.int32(task[EPS_BITS])))
        for i in range(width):
            x[row * stride_out + i] = np.float32(np.float32(source[i] * scale) * weight[i])


@jit
def root_mean_square(source: Any, eps: float) -> float:
    """1 / sqrt(mean(x^2) + eps) of source: (n,) f32."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    whole = len(source) // 8 * 8
    for i in range(0, whole, 8):
        s0 = fma(source[i], source[i], s0)
        s1 = fma(source[i + 1], source[i + 1], s1)
        s2 = fma(source[i + 2], source[i + 2], s2)
        s3 = fma(source[i + 3], source[i + 3], s3)
        s4 = fma(source[i + 4], source[i + 4], s4)
        s5 = fma(source[i + 5], source[i + 5], s5)
        s6 = fma(source[i + 6], source[i + 6], s6)
        s7 = fma(source[i + 7], source[i + 7], s7)
    for i in range(whole, len(source)):
        s0 = fma(source[i], source[i], s0)
    total = np.float32(np.float32(np.float32(s0 + s4) + np.float32(s2 + s6))
                       + np.float32(np.float32(s1 + s5) + np.float32(s3 + s7)))  # fmt: skip
    return inverse_root(np.float32(np.float32(total / np.float32(len(source))) + eps))


def product_chunk(task_at: int, chunk: int, scratch: int) -> None:
    """Compute block `chunk` of a product task. scratch: address of PANEL_FLOATS f32."""
    task = carray(pointer(task_at), (TASK_FIELDS,), np.int64)
    if task[MODE] == MODE_GATED:
        _block(task, FIRST_MATRIX, chunk, scratch)
        _block(task, FIRST_MATRIX + MATRIX_FIELDS, chunk, scratch)
        _gate(task, chunk)
        return
    matrix, block = FIRST_MATRIX, chunk
    while block >= task[matrix + BLOCKS]:
        block -= task[matrix + BLOCKS]
        matrix += MATRIX_FIELDS
    _block(task, matrix, block, scratch)
    if task[MODE] == MODE_ADD:
        _add_residual(task, matrix, block)
    elif task[matrix + BIAS]:
        _add_bias(task, matrix, block)


@jit
def product_f32(
    x: int, x_stride: int, w: int, w_stride: int, num: int, out: int, out_stride: int, rows: int, width: int, chain: int
) -> None:
    """out (rows, width) = x (rows, num) times w (num, width), all f32 at addresses; width a multiple of 16."""
    for column in range(0, width // 64 * 64, 64):
        _wide(x, x_stride, w + 4 * column, w_stride, num, out + 4 * column, out_stride, rows, chain)
    for column in range(width // 64 * 64, width, 16):
        _narrow(x, x_stride, w + 4 * column, w_stride, num, out + 4 * column, out_stride, rows, chain)


@jit
def _block(task: Any, matrix: int, block: int, scratch: int) -> None:
    """One block of 64 outputs of one matrix, for all rows, into the matrix's out."""
    rows, num, storage = task[ROWS], task[INPUTS], task[matrix + STORAGE]
    input_bytes = input_size(storage)
    codes = task[matrix + CODES] + block * num * input_bytes
    groups = block * (num // GROUP_COLS) * BLOCK_ROWS * 4
    scales, minimums = task[matrix + SCALES] + groups, task[matrix + MINIMUMS] + groups
    out, stride = task[matrix + OUT] + block * BLOCK_ROWS * 4, task[matrix + OUT_STRIDE]
    x, x_stride = task[X], task[X_STRIDE]
    if storage == STORED_F32:
        _wide(x, x_stride, codes, BLOCK_ROWS, num, out, stride, rows, np.int64(0))
    elif rows < UNPACK_ROWS:
        _packed(storage, x, x_stride, codes, scales, minimums, num, out, stride, rows)
    else:
        for first in range(0, num, PANEL):
            count = min(PANEL, num - first)
            offset = first // GROUP_COLS * BLOCK_ROWS * 4
            panel = codes + first * input_bytes
            _unpack(storage, panel, scales + offset, minimums + offset, count, scratch)
            _wide(x + 4 * first, x_stride, scratch, BLOCK_ROWS, count, out, stride, rows, np.int64(first > 0))


@jit
def input_size(storage: int) -> int:
    """Bytes of codes that one input of one block takes."""
    if storage == STORED_F32:
        return 4 * BLOCK_ROWS
    if storage == STORED_BF16:
        return 2 * BLOCK_ROWS
    return BLOCK_ROWS if storage == STORED_Q8 else BLOCK_ROWS // 2


@jit
def _unpack(storage: int, codes: int, scales: int, minimums: int, num: int, scratch: int) -> None:
    """Weights of `num` inputs as f32 [num][64]."""
    if storage == STORED_BF16:
        _unpack_bf16(codes, scales, minimums, num, scratch)
    elif storage == STORED_Q8:
        _unpack_q8(codes, scales, minimums, num, scratch)
    else:
        _unpack_q4(codes, scales, minimums, num, scratch)


@jit
def _packed(
    storage: int, x: int, x_stride: int, w: int, s: int, m: int, num: int, out: int, out_stride: int, rows: int
) -> None:
    """A few rows, weights unpacked in registers."""
    row = 0
    while row < rows:
        left = rows - row
        x_row, out_row = x + 4 * row * x_stride, out + 4 * row * out_stride
        step = 4 if left >= 4 else 2 if left >= 2 else 1
        if storage == STORED_Q8:
            if step == 4:
                _q4x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
            elif step == 2:
                _q2x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
            else:
                _q1x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
        elif storage == STORED_Q4:
            if step == 4:
                _n4x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
            elif step == 2:
                _n2x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
            else:
                _n1x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
        elif step == 4:
            _h4x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
        elif step == 2:
            _h2x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
        else:
            _h1x4(x_row, x_stride, w, BLOCK_ROWS, s, m, num, out_row, out_stride, 0)
        row += step


@jit
def _wide(
    x: int, x_stride: int, w: int, w_stride: int, num: int, out: int, out_stride: int, rows: int, chain: int
) -> None:
    """64 outputs of f32 weights for all rows."""
    row = 0
    while row < rows:
        left = rows - row
        x_row, out_row = x + 4 * row * x_stride, out + 4 * row * out_stride
        if left >= 6 and left != 7 and left != 8:
            _f6x4(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 6
        elif left >= 4:
            _f4x4(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 4
        elif left == 3:
            _f3x4(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 3
        elif left >= 2:
            _f2x4(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 2
        else:
            _f1x4(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 1


@jit
def _narrow(
    x: int, x_stride: int, w: int, w_stride: int, num: int, out: int, out_stride: int, rows: int, chain: int
) -> None:
    """16 outputs of f32 weights for all rows."""
    row = 0
    while row < rows:
        left = rows - row
        x_row, out_row = x + 4 * row * x_stride, out + 4 * row * out_stride
        if left >= 6:
            _f6x1(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 6
        elif left >= 4:
            _f4x1(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 4
        elif left >= 2:
            _f2x1(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 2
        else:
            _f1x1(x_row, x_stride, w, w_stride, 0, 0, num, out_row, out_stride, chain)
            row += 1


@jit
def _gate(task: Any, block: int) -> None:
    """gate = silu(gate) * up on one block."""
    rows, stride = task[ROWS], task[FIRST_MATRIX + OUT_STRIDE]
    for row in range(rows):
        first = 4 * (row * stride + block * BLOCK_ROWS)
        up = task[FIRST_MATRIX + MATRIX_FIELDS + OUT] + first
        gate_step(task[FIRST_MATRIX + OUT] + first, up, BLOCK_ROWS)


@jit
def _add_residual(task: Any, matrix: int, block: int) -> None:
    """hidden += out on one block."""
    rows, stride, hidden_stride = task[ROWS], task[matrix + OUT_STRIDE], task[HIDDEN_STRIDE]
    out = carray(pointer(task[matrix + OUT]), (rows * stride,), np.float32)
    hidden = carray(pointer(task[HIDDEN]), (rows * hidden_stride,), np.float32)
    for row in range(rows):
        for i in range(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS):
            hidden[row * hidden_stride + i] = np.float32(hidden[row * hidden_stride + i] + out[row * stride + i])


@jit
def _add_bias(task: Any, matrix: int, block: int) -> None:
    """out += bias on one block; the bias is padded to whole blocks."""
    rows, stride = task[ROWS], task[matrix + OUT_STRIDE]
    out = carray(pointer(task[matrix + OUT]), (rows * stride,), np.float32)
    bias = carray(pointer(task[matrix + BIAS]), ((block + 1) * BLOCK_ROWS,), np.float32)
    for row in range(rows):
        for i in range(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS):
            out[row * stride + i] = np.float32(out[row * stride + i] + bias[i])


@jit
def gather_rows(storage: int, codes: int, scales: int, minimums: int, ids: Any, out: Any, panel: Any) -> None:
    """out[r, :num_cols] = row ids[r] of a packed matrix. out: (R, num_cols) f32. panel: (num_cols, 64) f32 scratch."""
    num = out.shape[1]
    size = num * input_size(storage)
    groups = num // GROUP_COLS * BLOCK_ROWS * 4
    for r in range(len(ids)):
        block, lane = ids[r] // BLOCK_ROWS, ids[r] % BLOCK_ROWS
        if storage == STORED_F32:
            dense = carray(pointer(codes + block * size), (num, BLOCK_ROWS), np.float32)
            out[r] = dense[:, lane]
        else:
            _unpack(
                storage, codes + block * size, scales + block * groups, minimums + block * groups, num,
                panel.ctypes.data,
            )  # fmt: skip
            out[r] = panel[:, lane]


@jit
def normalize_heads(x: Any, weight: Any, eps: float) -> None:
    """RMSNorm of every head in place. x: (R, heads, head_dim) f32, weight: (head_dim,) f32."""
    rows, heads, head_dim = x.shape
    for row in range(rows):
        for head in range(heads):
            vector = x[row, head]
            scale = root_mean_square(vector, eps)
            for i in range(head_dim):
                vector[i] = np.float32(np.float32(vector[i] * scale) * weight[i])
