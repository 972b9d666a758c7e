"""Running state of attention: per query a maximum, a sum and weighted values, and how states fold and leave.

state: f32 [query][padded dim] at an address; peaks: f32 [query] maxima, then [query] sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.cpu.attention_task import HEAD_DIM, HEADS, KV_HEADS, OUT, PARTIALS, SEGMENTS, V_PLANE
from gpu.cpu.intrinsics import carray, fma, pointer
from gpu.cpu.rotations import rotate_hadamard
from gpu.cpu.scalar_math import exp, jit
from gpu.cpu.store_cells import ROTATED

_LOWEST = np.float32(-1e30)
_ONE = np.float32(1)


@jit
def clear_state(state: int, peaks: int, queries: int, padded: int) -> None:
    """Start from nothing."""
    sums = carray(pointer(state), (queries * padded,), np.float32)
    marks = carray(pointer(peaks), (2 * queries,), np.float32)
    sums[:] = np.float32(0)
    marks[:queries] = _LOWEST
    marks[queries:] = np.float32(0)


@jit
def fold_state(state: int, peaks: int, total: int, total_peaks: int, queries: int, padded: int, fresh: bool) -> None:
    """total = total joined with state, both rescaled to the larger maximum."""
    marks = carray(pointer(peaks), (2 * queries,), np.float32)
    total_marks = carray(pointer(total_peaks), (2 * queries,), np.float32)
    sums = carray(pointer(state), (queries, padded), np.float32)
    total_sums = carray(pointer(total), (queries, padded), np.float32)
    for i in range(queries):
        if marks[queries + i] == np.float32(0) and not fresh:
            continue
        peak = marks[i] if fresh else max(marks[i], total_marks[i])
        keep = np.float32(0) if fresh else exp(np.float32(total_marks[i] - peak))
        gain = exp(np.float32(marks[i] - peak))
        before = np.float32(0) if fresh else total_marks[queries + i]
        total_marks[i] = peak
        total_marks[queries + i] = fma(before, keep, np.float32(marks[queries + i] * gain))
        for d in range(padded):
            old = np.float32(0) if fresh else total_sums[i, d]
            total_sums[i, d] = fma(old, keep, np.float32(sums[i, d] * gain))


@jit
def write_out(task: Any, first_row: int, rows: int, kv_head: int, total: int, peaks: int, padded: int) -> None:
    """out = total / sum, rotated back where V is rotated."""
    heads, head_dim = task[HEADS], task[HEAD_DIM]
    group = heads // task[KV_HEADS]
    sums = carray(pointer(total), (rows * group, padded), np.float32)
    marks = carray(pointer(peaks), (2 * rows * group,), np.float32)
    out = carray(pointer(task[OUT]), (first_row + rows, heads, head_dim), np.float32)
    for i in range(rows * group):
        target = out[first_row + i // group, kv_head * group + i % group]
        scale = np.float32(_ONE / marks[rows * group + i])
        for d in range(head_dim):
            target[d] = np.float32(sums[i, d] * scale)
        if task[V_PLANE + ROTATED]:
            rotate_hadamard(target)


@jit
def _partial(task: Any, row: int, head: int, segment: int, padded: int) -> Any:
    """The saved state of one query and segment: maximum, sum, then padded values."""
    size = padded + 2
    index = (row * task[HEADS] + head) * task[SEGMENTS] + segment
    return carray(pointer(task[PARTIALS] + 4 * index * size), (size,), np.float32)


@jit
def write_partial(task: Any, item: Any, kv_head: int, state: int, peaks: int, padded: int) -> None:
    """Save the state of one segment."""
    group = task[HEADS] // task[KV_HEADS]
    queries = item[2] * group
    marks = carray(pointer(peaks), (2 * queries,), np.float32)
    sums = carray(pointer(state), (queries, padded), np.float32)
    for i in range(queries):
        saved = _partial(task, item[1] + i // group, kv_head * group + i % group, item[3], padded)
        saved[0], saved[1] = marks[i], marks[queries + i]
        saved[2:] = sums[i]


@jit
def read_partial(task: Any, item: Any, kv_head: int, segment: int, state: int, peaks: int, padded: int) -> None:
    """Load the state of one segment."""
    group = task[HEADS] // task[KV_HEADS]
    queries = item[2] * group
    marks = carray(pointer(peaks), (2 * queries,), np.float32)
    sums = carray(pointer(state), (queries, padded), np.float32)
    for i in range(queries):
        saved = _partial(task, item[1] + i // group, kv_head * group + i % group, segment, padded)
        marks[i], marks[queries + i] = saved[0], saved[1]
        sums[i] = saved[2:]
