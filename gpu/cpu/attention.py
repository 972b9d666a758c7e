"""Paged attention of one block of rows and one KV head, straight from the stored pages.

A row visits its pages in order, one online-softmax step per page. Pages are grouped into segments of about 256 cells
at absolute positions; each segment starts from nothing and the segments fold left to right, so that threads may take
segments of one long row without changing a bit. The heads that share a KV head are packed: query i of a block is row
i / group, head i % group. K is unpacked transposed, [dim][cell], so that scores are a product like any other.

A thread's scratch, in f32: queries, state and total [M][padded dim], scores [M][page], K [dim][page], V [page][padded
dim], then per query the running maximum and sum of state and total.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from gpu.cpu.intrinsics import fma, pointer
from gpu.cpu.kernels import CHUNKS, product_f32
from gpu.cpu.rotations import rotate_hadamard, rotate_position
from gpu.cpu.scalar_math import exp, half_value, jit
from gpu.cpu.softmax_step import softmax_step
from gpu.cpu.store_cells import (
    CODE_BYTES,
    CODES,
    GROUP,
    KIND,
    KIND_F16,
    KIND_INT8,
    KIND_Q4,
    PLANE_FIELDS,
    ROTATED,
    SCALE_BYTES,
    SCALES,
)
from gpu.cpu.unpack_cells import unpack_keys, unpack_values

BLOCK_QUERIES = 96
SEGMENT_CELLS = 256
SPLIT_ROWS = 4

(
    Q, OUT, COS, SIN, HALF_DIM, INTERLEAVED, POSITIONS, MIRROR_PAGES, DEVICE_PAGES, TABLE_WIDTH, MIRROR, DEVICE,
    HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, ITEMS, PARTIALS, SEGMENTS,
) = range(CHUNKS + 1, CHUNKS + 20)  # fmt: skip
K_PLANE = CHUNKS + 20
V_PLANE = K_PLANE + PLANE_FIELDS
ITEM_FIELDS = 4

_keys_f16, _keys_int8, _keys_q4 = (unpack_keys(kind) for kind in (KIND_F16, KIND_INT8, KIND_Q4))
_values_f16, _values_int8, _values_q4 = (unpack_values(kind) for kind in (KIND_F16, KIND_INT8, KIND_Q4))
_LOWEST = np.float32(-1e30)
_ONE = np.float32(1)


def scratch_floats(group: int, head_dim: int, page_size: int) -> int:
    """How many f32 of scratch one thread needs."""
    queries, padded = max(BLOCK_QUERIES, group), (head_dim + 15) // 16 * 16
    return queries * (3 * padded + page_size + 4) + page_size * (head_dim + padded + head_dim // 8)


def segment_pages(page_size: int) -> int:
    """Pages of one segment."""
    return max(1, SEGMENT_CELLS // page_size)


@jit
def plan_items(positions: Any, row_start: Any, page_size: int, block_rows: int, segment_pages: int, items: Any) -> int:
    """Cut the rows into work items (sequence, first row, rows, segment or -1 for all); returns how many.

    items: (n, 4) i64, large enough (see `max_items`).
    """
    count = 0
    for sequence in range(len(row_start) - 1):
        first = row_start[sequence]
        while first < row_start[sequence + 1]:
            rows = min(block_rows, row_start[sequence + 1] - first)
            segments = positions[first + rows - 1] // (page_size * segment_pages) + 1
            split = rows <= SPLIT_ROWS and segments > 1
            for segment in range(segments if split else 1):
                items[count, 0], items[count, 1], items[count, 2] = sequence, first, rows
                items[count, 3] = segment if split else -1
                count += 1
            first += rows
    return count


@jit
def attend_chunk(task: Any, chunk: int, scratch: int) -> None:
    """Attend one item and one KV head: all its segments into out, or one segment into the partials."""
    kv_heads, head_dim, page_size = task[KV_HEADS], task[HEAD_DIM], task[PAGE_SIZE]
    items = numba.carray(pointer(task[ITEMS]), (chunk // kv_heads + 1, ITEM_FIELDS), np.int64)
    item, kv_head = items[chunk // kv_heads], chunk % kv_heads
    group = task[HEADS] // kv_heads
    queries, padded = item[2] * group, (head_dim + 15) // 16 * 16
    q = scratch
    state = q + 4 * queries * padded
    total = state + 4 * queries * padded
    scores = total + 4 * queries * padded
    keys = scores + 4 * queries * page_size
    values = keys + 4 * head_dim * page_size
    peaks = values + 4 * page_size * padded
    _load_queries(task, item, kv_head, q, padded)
    positions = numba.carray(pointer(task[POSITIONS]), (item[1] + item[2],), np.int64)
    last = positions[item[1] + item[2] - 1]
    span = page_size * max(1, SEGMENT_CELLS // page_size)
    segment, end = item[3], item[3] + 1
    if segment < 0:
        segment, end = 0, last // span + 1
    whole = item[3] < 0
    while segment < end:
        _clear(state, peaks, queries, padded)
        start = segment * span
        while start < (segment + 1) * span and start <= last:
            _page_step(task, item, kv_head, start, q, state, scores, keys, values, peaks, padded)
            start += page_size
        if whole:
            _fold(state, peaks, total, peaks + 8 * queries, queries, padded, segment == 0)
        segment += 1
    if whole:
        _write_out(task, item[1], item[2], kv_head, total, peaks + 8 * queries, padded)
    else:
        _write_partial(task, item, kv_head, state, peaks, padded)


@jit
def fold_chunk(task: Any, chunk: int, scratch: int) -> None:
    """Fold the partials of one split item and one KV head, left to right; items of later segments do nothing."""
    kv_heads, head_dim = task[KV_HEADS], task[HEAD_DIM]
    items = numba.carray(pointer(task[ITEMS]), (chunk // kv_heads + 1, ITEM_FIELDS), np.int64)
    item, kv_head = items[chunk // kv_heads], chunk % kv_heads
    if item[3] != 0:
        return
    group, padded = task[HEADS] // kv_heads, (head_dim + 15) // 16 * 16
    queries = item[2] * group
    positions = numba.carray(pointer(task[POSITIONS]), (item[1] + item[2],), np.int64)
    span = task[PAGE_SIZE] * max(1, SEGMENT_CELLS // task[PAGE_SIZE])
    segments = positions[item[1] + item[2] - 1] // span + 1
    state = scratch
    total = state + 4 * queries * padded
    peaks = total + 4 * queries * padded
    for segment in range(segments):
        _read_partial(task, item, kv_head, segment, state, peaks, padded)
        _fold(state, peaks, total, peaks + 8 * queries, queries, padded, segment == 0)
    _write_out(task, item[1], item[2], kv_head, total, peaks + 8 * queries, padded)


@jit
def _load_queries(task: Any, item: Any, kv_head: int, q: int, padded: int) -> None:
    """Rotate and scale the queries of an item."""
    heads, head_dim, half = task[HEADS], task[HEAD_DIM], task[HALF_DIM]
    group = heads // task[KV_HEADS]
    end = item[1] + item[2]
    source = numba.carray(pointer(task[Q]), (end, heads, head_dim), np.float32)
    positions = numba.carray(pointer(task[POSITIONS]), (end,), np.int64)
    rows = positions[end - 1] + 1
    cos = numba.carray(pointer(task[COS]), (rows, half), np.float32)
    sin = numba.carray(pointer(task[SIN]), (rows, half), np.float32)
    target = numba.carray(pointer(q), (item[2] * group, padded), np.float32)
    scale = np.float32(1.0 / math.sqrt(np.float64(head_dim)))
    for row in range(item[2]):
        position = positions[item[1] + row]
        for g in range(group):
            vector = target[row * group + g, :head_dim]
            head = source[item[1] + row, kv_head * group + g]
            rotate_position(head, vector, cos[position], sin[position], task[INTERLEAVED] != 0)
            if task[K_PLANE + ROTATED]:
                rotate_hadamard(vector)
            for i in range(head_dim):
                vector[i] = np.float32(vector[i] * scale)


@jit
def _clear(state: int, peaks: int, queries: int, padded: int) -> None:
    sums = numba.carray(pointer(state), (queries * padded,), np.float32)
    marks = numba.carray(pointer(peaks), (2 * queries,), np.float32)
    sums[:] = np.float32(0)
    marks[:queries] = _LOWEST
    marks[queries:] = np.float32(0)


@jit
def _page_step(
    task: Any, item: Any, kv_head: int, start: int, q: int, state: int, scores: int, keys: int, values: int,
    peaks: int, padded: int,
) -> None:  # fmt: skip
    """One softmax step of every row that reaches the page whose first cell is at position `start`."""
    group, head_dim, page_size = task[HEADS] // task[KV_HEADS], task[HEAD_DIM], task[PAGE_SIZE]
    positions = numba.carray(pointer(task[POSITIONS]), (item[1] + item[2],), np.int64)
    first = 0
    while positions[item[1] + first] < start:
        first += 1
    cells = min(page_size, positions[item[1] + item[2] - 1] + 1 - start)
    width = (cells + 15) // 16 * 16
    page = _page_address(task, item[0], start // page_size)
    scales = peaks + 16 * item[2] * group
    _unpack_keys(task, page, kv_head, cells, keys, scales)
    _unpack_values(task, page, kv_head, cells, values, padded, scales)
    query, count = first * group, (item[2] - first) * group
    score_rows = scores + 4 * query * page_size
    product_f32(q + 4 * query * padded, padded, keys, page_size, head_dim, score_rows, page_size, count, width, 0)
    full = first
    for row in range(first, item[2]):
        visible = min(page_size, positions[item[1] + row] + 1 - start)
        for i in range(row * group, (row + 1) * group):
            peak = peaks + 4 * i
            total = peak + 4 * item[2] * group
            softmax_step(scores + 4 * i * page_size, visible, width, state + 4 * i * padded, padded, peak, total)
        if visible < cells:
            _accumulate(row * group, group, visible, scores, page_size, values, state, padded)
            full = row + 1
    _accumulate(full * group, (item[2] - full) * group, cells, scores, page_size, values, state, padded)


@jit
def _accumulate(
    query: int, count: int, cells: int, scores: int, page_size: int, values: int, state: int, padded: int
) -> None:
    """state += probabilities times V over the first `cells` cells."""
    place = state + 4 * query * padded
    product_f32(scores + 4 * query * page_size, page_size, values, padded, cells, place, padded, count, padded, 1)


@jit
def _page_address(task: Any, sequence: int, page: int) -> int:
    """Where the page lies: in the device arena if it is resident, else in the mirror."""
    width = task[TABLE_WIDTH]
    device = numba.carray(pointer(task[DEVICE_PAGES]), ((sequence + 1) * width,), np.int64)
    offset = device[sequence * width + page]
    if offset >= 0:
        return task[DEVICE] + offset
    mirror = numba.carray(pointer(task[MIRROR_PAGES]), ((sequence + 1) * width,), np.int64)
    return task[MIRROR] + mirror[sequence * width + page]


@jit
def _unpack_keys(task: Any, page: int, kv_head: int, cells: int, keys: int, scales: int) -> None:
    """K of one head as f32 [dim][page_size], 16 cells at a time; beyond `cells` are values that nobody reads."""
    head_dim, page_size, kind = task[HEAD_DIM], task[PAGE_SIZE], task[K_PLANE + KIND]
    codes, group = _load_plane(task, K_PLANE, page, kv_head, cells, scales)
    blocks = (cells + 15) // 16
    if kind == KIND_INT8:
        _keys_int8(codes, scales, blocks, head_dim, keys, page_size, group)
    elif kind == KIND_Q4:
        _keys_q4(codes, scales, blocks, head_dim, keys, page_size, group)
    elif head_dim % 16 == 0:
        _keys_f16(codes, scales, blocks, head_dim, keys, page_size, group)
    else:
        out = numba.carray(pointer(keys), (head_dim, page_size), np.float32)
        _unpack_odd(codes, cells, head_dim, out.T)


@jit
def _unpack_values(task: Any, page: int, kv_head: int, cells: int, values: int, padded: int, scales: int) -> None:
    """V of one head as f32 [cell][padded dim]."""
    head_dim, page_size, kind = task[HEAD_DIM], task[PAGE_SIZE], task[V_PLANE + KIND]
    codes, group = _load_plane(task, V_PLANE, page, kv_head, cells, scales)
    if kind == KIND_INT8:
        _values_int8(codes, scales, cells, head_dim, values, page_size, group)
    elif kind == KIND_Q4:
        _values_q4(codes, scales, cells, head_dim, values, page_size, group)
    elif head_dim % 16 == 0:
        _values_f16(codes, scales, cells, head_dim, values, page_size, group)
    else:
        out = numba.carray(pointer(values), (page_size, padded), np.float32)
        out[:cells, head_dim:] = np.float32(0)
        _unpack_odd(codes, cells, head_dim, out)


@jit
def _load_plane(task: Any, plane: int, page: int, kv_head: int, cells: int, scales: int) -> Any:
    """Address of a head's codes and the values per scale; its scales go to f32 [group][page_size]."""
    page_size, group, code_bytes = task[PAGE_SIZE], task[plane + GROUP], task[plane + CODE_BYTES]
    codes = page + task[plane + CODES] + kv_head * page_size * code_bytes
    if group == 0:
        return codes, group
    groups = task[HEAD_DIM] // group
    place = page + task[plane + SCALES] + kv_head * page_size * task[plane + SCALE_BYTES]
    halves = numba.carray(pointer(place), (cells, groups), np.uint16)
    out = numba.carray(pointer(scales), (groups, page_size), np.float32)
    for g in range(groups):
        for cell in range(cells):
            out[g, cell] = half_value(np.int32(halves[cell, g]))
    return codes, group


@jit
def _unpack_odd(codes: int, cells: int, head_dim: int, out: Any) -> None:
    """f16 cells whose head_dim is no multiple of 16 to out[cell, dim]."""
    halves = numba.carray(pointer(codes), (cells, head_dim), np.uint16)
    for cell in range(cells):
        for d in range(head_dim):
            out[cell, d] = half_value(np.int32(halves[cell, d]))


@jit
def _fold(state: int, peaks: int, total: int, total_peaks: int, queries: int, padded: int, fresh: bool) -> None:
    """total = total joined with state, both rescaled to the larger maximum."""
    marks = numba.carray(pointer(peaks), (2 * queries,), np.float32)
    total_marks = numba.carray(pointer(total_peaks), (2 * queries,), np.float32)
    sums = numba.carray(pointer(state), (queries, padded), np.float32)
    total_sums = numba.carray(pointer(total), (queries, padded), np.float32)
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
def _write_out(task: Any, first_row: int, rows: int, kv_head: int, total: int, peaks: int, padded: int) -> None:
    """out = total / sum, rotated back where V is rotated."""
    heads, head_dim = task[HEADS], task[HEAD_DIM]
    group = heads // task[KV_HEADS]
    sums = numba.carray(pointer(total), (rows * group, padded), np.float32)
    marks = numba.carray(pointer(peaks), (2 * rows * group,), np.float32)
    out = numba.carray(pointer(task[OUT]), (first_row + rows, heads, head_dim), np.float32)
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
    return numba.carray(pointer(task[PARTIALS] + 4 * index * size), (size,), np.float32)


@jit
def _write_partial(task: Any, item: Any, kv_head: int, state: int, peaks: int, padded: int) -> None:
    group = task[HEADS] // task[KV_HEADS]
    queries = item[2] * group
    marks = numba.carray(pointer(peaks), (2 * queries,), np.float32)
    sums = numba.carray(pointer(state), (queries, padded), np.float32)
    for i in range(queries):
        saved = _partial(task, item[1] + i // group, kv_head * group + i % group, item[3], padded)
        saved[0], saved[1] = marks[i], marks[queries + i]
        saved[2:] = sums[i]


@jit
def _read_partial(task: Any, item: Any, kv_head: int, segment: int, state: int, peaks: int, padded: int) -> None:
    group = task[HEADS] // task[KV_HEADS]
    queries = item[2] * group
    marks = numba.carray(pointer(peaks), (2 * queries,), np.float32)
    sums = numba.carray(pointer(state), (queries, padded), np.float32)
    for i in range(queries):
        saved = _partial(task, item[1] + i // group, kv_head * group + i % group, segment, padded)
        marks[i], marks[queries + i] = saved[0], saved[1]
        sums[i] = saved[2:]
