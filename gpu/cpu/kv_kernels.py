"""The KV kernels of the CPU: Numba implementations of `gpu.kv_kernels.KVKernels`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu.cpu.attention import attend_chunk, fold_chunk
from gpu.cpu.attention_task import ITEM_FIELDS, NUM_SPLIT, fill_task, max_segments, scratch_floats
from gpu.cpu.store_cells import store_planes
from gpu.cpu.task import FUNCTION, TASK_FIELDS, chunk_function
from gpu.cpu.threads import SCRATCH_FLOATS, CpuThreads
from gpu.errors import LayoutError
from gpu.formats import PlaneFormat
from gpu.kv_kernels import PageTables, RopeTable, RowTable
from gpu.layout import KVLayout


class NumbaKVKernels:
    """Stores and attends on the CPU. Results do not depend on the number of threads."""

    def __init__(self, threads: CpuThreads) -> None:
        self._threads = threads
        self._attend, self._fold = chunk_function(attend_chunk), chunk_function(fold_chunk)
        self._planes: dict[tuple[KVLayout, int], NDArray[np.int64]] = {}
        self._task = np.zeros(TASK_FIELDS, np.int64)
        self._items = np.zeros((0, ITEM_FIELDS), np.int64)
        self._partials = np.zeros(0, np.float32)

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
        """See `KVKernels.store_rows`."""
        store_planes(
            self._plane_fields(layout, layer), layout.page_size, k, v, rope.cos, rope.sin,
            rope.pairing == "interleaved", rows.positions, rows.sequence_index, rows.mirror_offset, rows.device_offset,
            rows.cell, mirror, device, counts, layer, nonfinite,
        )  # fmt: skip

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
        """See `KVKernels.attend`. Raises LayoutError if a head is too large for a thread's scratch."""
        group, head_dim = q.shape[1] // layout.num_kv_heads, layout.head_dim
        needed = scratch_floats(group, head_dim, layout.page_size)
        if needed > SCRATCH_FLOATS:
            raise LayoutError("head_dim", head_dim, f"attention needs {needed} of {SCRATCH_FLOATS} scratch floats")
        segments = max_segments(tables.mirror.shape[1], layout.page_size)
        self._grow(rows.num_rows * segments, q.shape[1] * (head_dim + 15 + 2))
        task = self._task
        fill_task(
            task, q, out, rope.cos, rope.sin, rope.pairing == "interleaved", rows.positions, tables.row_start,
            tables.mirror, tables.device, mirror, device, self._plane_fields(layout, layer), layout.num_kv_heads,
            layout.page_size, self._items, self._partials,
        )  # fmt: skip
        task[FUNCTION] = self._attend
        self._threads.run(task)
        if task[NUM_SPLIT]:
            task[FUNCTION] = self._fold
            self._threads.run(task)

    def _grow(self, num_items: int, floats_per_item: int) -> None:
        """Room for a segment of every row: as items, and as partial states."""
        if num_items > len(self._items):
            self._items = np.zeros((2 * num_items, ITEM_FIELDS), np.int64)
        if num_items * floats_per_item > len(self._partials):
            self._partials = np.empty(2 * num_items * floats_per_item, np.float32)

    def _plane_fields(self, layout: KVLayout, layer: int) -> NDArray[np.int64]:
        """(2, PLANE_FIELDS) i64: where and how K and V of a layer lie in a page."""
        fields = self._planes.get((layout, layer))
        if fields is None:
            fields = np.array(
                [_fields(layout, layer, is_v, f) for is_v, f in ((0, layout.k_format), (1, layout.v_format))], np.int64
            )
            self._planes[layout, layer] = fields
        return fields


def _fields(layout: KVLayout, layer: int, is_v: int, fmt: PlaneFormat) -> list[int]:
    """In the order of `gpu.cpu.store_cells`: kind, codes, code bytes, scales, scale bytes, group, rotated."""
    plane = layout.plane(layer, is_v)
    dim = layout.head_dim
    return [
        fmt.kernel_id, plane.codes_offset, fmt.code_bytes(dim), plane.scales_offset, fmt.scale_bytes(dim),
        fmt.group_size, int(fmt.rotated),
    ]  # fmt: skip
