"""Paged attention of one block of rows and one KV head, straight from the stored pages.

The heads that share a KV head are packed: query i of a block is row i / group, head i % group. K is unpacked
transposed, [dim][cell], so that scores are a product like any other; one online-softmax step per page.

A thread's scratch, in f32: queries, state and total [M][padded dim], scores [M][page], K [dim][page], V [page][padded
dim], then per query the running maximum and sum of state and total.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu.cpu.attention_state import clear_state, fold_state, read_partial, write_out, write_partial
from gpu.cpu.attention_task import (
    COS,
    HALF_DIM,
    HEAD_DIM,
    HEADS,
    INTERLEAVED,
    ITEM_FIELDS,
    ITEMS,
    K_PLANE,
    KV_HEADS,
    PAGE_SIZE,
    POSITIONS,
    SEGMENT_CELLS,
    SIN,
    Q,
)  # fmt: skip
from gpu.cpu.intrinsics import carray, pointer
from gpu.cpu.kernels import product_f32
from gpu.cpu.page_cells import page_address, unpack_keys, unpack_values
from gpu.cpu.rotations import rotate_hadamard, rotate_position
from gpu.cpu.scalar_math import jit
from gpu.cpu.softmax_step import softmax_step
from gpu.cpu.store_cells import ROTATED
from gpu.cpu.task import TASK_FIELDS


def attend_chunk(task_at: int, chunk: int, scratch: int) -> None:
    """Attend one item and one KV head: all its segments into out, or one segment into the partials."""
    task = carray(pointer(task_at), (TASK_FIELDS,), np.int64)
    kv_heads, head_dim, page_size = task[KV_HEADS], task[HEAD_DIM], task[PAGE_SIZE]
    items = carray(pointer(task[ITEMS]), (chunk // kv_heads + 1, ITEM_FIELDS), np.int64)
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
    positions = carray(pointer(task[POSITIONS]), (item[1] + item[2],), np.int64)
    last = positions[item[1] + item[2] - 1]
    span = page_size * max(1, SEGMENT_CELLS // page_size)
    segment, end = item[3], item[3] + 1
    if segment < 0:
        segment, end = 0, last // span + 1
    whole = item[3] < 0
    while segment < end:
        clear_state(state, peaks, queries, padded)
        start = segment * span
        while start < (segment + 1) * span and start <= last:
            _page_step(task, item, kv_head, start, q, state, scores, keys, values, peaks, padded)
            start += page_size
        if whole:
            fold_state(state, peaks, total, peaks + 8 * queries, queries, padded, segment == 0)
        segment += 1
    if whole:
        write_out(task, item[1], item[2], kv_head, total, peaks + 8 * queries, padded)
    else:
        write_partial(task, item, kv_head, state, peaks, padded)


def fold_chunk(task_at: int, chunk: int, scratch: int) -> None:
    """Fold the partials of one split item and one KV head, left to right; items of later segments do nothing."""
    task = carray(pointer(task_at), (TASK_FIELDS,), np.int64)
    kv_heads, head_dim = task[KV_HEADS], task[HEAD_DIM]
    items = carray(pointer(task[ITEMS]), (chunk // kv_heads + 1, ITEM_FIELDS), np.int64)
    item, kv_head = items[chunk // kv_heads], chunk % kv_heads
    if item[3] != 0:
        return
    group, padded = task[HEADS] // kv_heads, (head_dim + 15) // 16 * 16
    queries = item[2] * group
    positions = carray(pointer(task[POSITIONS]), (item[1] + item[2],), np.int64)
    span = task[PAGE_SIZE] * max(1, SEGMENT_CELLS // task[PAGE_SIZE])
    segments = positions[item[1] + item[2] - 1] // span + 1
    state = scratch
    total = state + 4 * queries * padded
    peaks = total + 4 * queries * padded
    for segment in range(segments):
        read_partial(task, item, kv_head, segment, state, peaks, padded)
        fold_state(state, peaks, total, peaks + 8 * queries, queries, padded, segment == 0)
    write_out(task, item[1], item[2], kv_head, total, peaks + 8 * queries, padded)


@jit
def _load_queries(task: Any, item: Any, kv_head: int, q: int, padded: int) -> None:
    """Rotate and scale the queries of an item."""
    heads, head_dim, half = task[HEADS], task[HEAD_DIM], task[HALF_DIM]
    group = heads // task[KV_HEADS]
    end = item[1] + item[2]
    source = carray(pointer(task[Q]), (end, heads, head_dim), np.float32)
    positions = carray(pointer(task[POSITIONS]), (end,), np.int64)
    rows = positions[end - 1] + 1
    cos = carray(pointer(task[COS]), (rows, half), np.float32)
    sin = carray(pointer(task[SIN]), (rows, half), np.float32)
    target = carray(pointer(q), (item[2] * group, padded), np.float32)
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
def _page_step(
    task: Any, item: Any, kv_head: int, start: int, q: int, state: int, scores: int, keys: int, values: int,
    peaks: int, padded: int,
) -> None:  # fmt: skip
    """One softmax step of every row that reaches the page whose first cell is at position `start`."""
    group, head_dim, page_size = task[HEADS] // task[KV_HEADS], task[HEAD_DIM], task[PAGE_SIZE]
    positions = carray(pointer(task[POSITIONS]), (item[1] + item[2],), np.int64)
    first = 0
    while positions[item[1] + first] < start:
        first += 1
    cells = min(page_size, positions[item[1] + item[2] - 1] + 1 - start)
    width = (cells + 15) // 16 * 16
    page = page_address(task, item[0], start // page_size)
    scales = peaks + 16 * item[2] * group
    unpack_keys(task, page, kv_head, cells, keys, scales)
    unpack_values(task, page, kv_head, cells, values, padded, scales)
    query, count = first * group, (item[2] - first) * group
    score_rows = scores + 4 * query * page_size
    product_f32(
        q + 4 * query * padded, padded, keys, page_size, head_dim, score_rows, page_size, count, width, np.int64(0)
    )
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
    product_f32(
        scores + 4 * query * page_size, page_size, values, padded, cells, place, padded, count, padded, np.int64(1)
    )
