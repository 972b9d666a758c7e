"""The task of one attention call: its fields, and how rows are cut into items that threads take.

A row visits its pages in order. Pages are grouped into segments of about 256 cells at absolute positions; each segment
starts from nothing and the segments fold left to right, so that threads may take the segments of one long row without
changing a bit.
"""

from __future__ import annotations

from typing import Any

from gpu.cpu.scalar_math import jit
from gpu.cpu.store_cells import PLANE_FIELDS
from gpu.cpu.task import CHUNKS, FUNCTION

BLOCK_QUERIES = 96
SEGMENT_CELLS = 256
SPLIT_ROWS = 4
ITEM_FIELDS = 4

_FIRST = max(CHUNKS, FUNCTION) + 1
(
    Q, OUT, COS, SIN, HALF_DIM, INTERLEAVED, POSITIONS, MIRROR_PAGES, DEVICE_PAGES, TABLE_WIDTH, MIRROR, DEVICE,
    HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, ITEMS, PARTIALS, SEGMENTS, NUM_SPLIT,
) = range(_FIRST, _FIRST + 20)  # fmt: skip
K_PLANE = _FIRST + 20
V_PLANE = K_PLANE + PLANE_FIELDS


def scratch_floats(group: int, head_dim: int, page_size: int) -> int:
    """How many f32 of scratch one thread needs."""
    queries, padded = max(BLOCK_QUERIES, group), (head_dim + 15) // 16 * 16
    return queries * (3 * padded + page_size + 4) + page_size * (head_dim + padded + head_dim // 8)


def max_segments(num_pages: int, page_size: int) -> int:
    """Segments of a sequence of `num_pages`."""
    return -(-num_pages // max(1, SEGMENT_CELLS // page_size))


@jit
def fill_task(
    task: Any, q: Any, out: Any, cos: Any, sin: Any, interleaved: bool, positions: Any, row_start: Any,
    mirror_pages: Any, device_pages: Any, mirror: Any, device: Any, planes: Any, kv_heads: int, page_size: int,
    items: Any, partials: Any,
) -> None:  # fmt: skip
    """Set every field of task: (TASK_FIELDS,) i64. planes: (2, PLANE_FIELDS) i64. items: (n, 4) i64, large enough."""
    heads, head_dim = q.shape[1], q.shape[2]
    block_rows = max(1, BLOCK_QUERIES // (heads // kv_heads))
    count = _plan_items(positions, row_start, page_size, block_rows, items)
    task[CHUNKS] = count * kv_heads
    task[Q], task[OUT] = q.ctypes.data, out.ctypes.data
    task[COS], task[SIN] = cos.ctypes.data, sin.ctypes.data
    task[HALF_DIM], task[INTERLEAVED] = cos.shape[1], 1 if interleaved else 0
    task[POSITIONS], task[TABLE_WIDTH] = positions.ctypes.data, mirror_pages.shape[1]
    task[MIRROR_PAGES], task[DEVICE_PAGES] = mirror_pages.ctypes.data, device_pages.ctypes.data
    task[MIRROR], task[DEVICE] = mirror.ctypes.data, device.ctypes.data
    task[HEADS], task[KV_HEADS], task[HEAD_DIM], task[PAGE_SIZE] = heads, kv_heads, head_dim, page_size
    task[ITEMS], task[PARTIALS] = items.ctypes.data, partials.ctypes.data
    task[SEGMENTS] = (mirror_pages.shape[1] * page_size - 1) // _segment_cells(page_size) + 1
    task[NUM_SPLIT] = 0
    for item in range(count):
        task[NUM_SPLIT] += 1 if items[item, 3] >= 0 else 0
    for i in range(PLANE_FIELDS):
        task[K_PLANE + i], task[V_PLANE + i] = planes[0, i], planes[1, i]


@jit
def _segment_cells(page_size: int) -> int:
    return page_size * max(1, SEGMENT_CELLS // page_size)


@jit
def _plan_items(positions: Any, row_start: Any, page_size: int, block_rows: int, items: Any) -> int:
    """Cut the rows into work items (sequence, first row, rows, segment or -1 for all); returns how many."""
    count = 0
    for sequence in range(len(row_start) - 1):
        first = row_start[sequence]
        while first < row_start[sequence + 1]:
            rows = min(block_rows, row_start[sequence + 1] - first)
            segments = positions[first + rows - 1] // (_segment_cells(page_size)) + 1
            split = rows <= SPLIT_ROWS and segments > 1
            for segment in range(segments if split else 1):
                items[count, 0], items[count, 1], items[count, 2] = sequence, first, rows
                items[count, 3] = segment if split else -1
                count += 1
            first += rows
    return count
