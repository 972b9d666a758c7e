"""The KV kernels of the CPU: Numba implementations of `gpu.kv_kernels.KVKernels`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu.cpu import attention as at
from gpu.cpu.kernels import CHUNKS, OP, OP_ATTEND, OP_FOLD, TASK_FIELDS
from gpu.cpu.store_cells import store_plane
from gpu.cpu.threads import SCRATCH_FLOATS, CpuThreads
from gpu.errors import LayoutError
from gpu.formats import PlaneFormat
from gpu.kv_kernels import PageTables, RopeTable, RowTable
from gpu.layout import KVLayout


class NumbaKVKernels:
    """Stores and attends on the CPU. Results do not depend on the number of threads."""

    def __init__(self, threads: CpuThreads) -> None:
        self._threads = threads
        self._planes: dict[tuple[KVLayout, int], NDArray[np.int64]] = {}
        self._task = np.zeros(TASK_FIELDS, np.int64)
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
        planes = self._plane_fields(layout, layer)
        for is_v, x in ((0, k), (1, v)):
            store_plane(
                planes[is_v], is_v, layout.page_size, x, rope.cos, rope.sin, rope.pairing == "interleaved",
                rows.positions, rows.sequence_index, rows.mirror_offset, rows.device_offset, rows.cell, mirror, device,
                counts[layer], nonfinite,
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
        group = q.shape[1] // layout.num_kv_heads
        needed = at.scratch_floats(group, layout.head_dim, layout.page_size)
        if needed > SCRATCH_FLOATS:
            raise LayoutError(
                "head_dim", layout.head_dim, f"attention needs {needed} of {SCRATCH_FLOATS} scratch floats"
            )
        span = at.segment_pages(layout.page_size)
        segments = -(-tables.mirror.shape[1] // span)
        items = np.empty((rows.num_rows * (1 + segments), at.ITEM_FIELDS), np.int64)
        block_rows = max(1, at.BLOCK_QUERIES // group)
        num_items = at.plan_items(rows.positions, tables.row_start, layout.page_size, block_rows, span, items)
        floats = rows.num_rows * q.shape[1] * segments * ((layout.head_dim + 15) // 16 * 16 + 2)
        if bool((items[:num_items, 3] >= 0).any()) and floats > len(self._partials):
            self._partials = np.empty(floats, np.float32)
        task = self._task
        task[OP], task[CHUNKS] = OP_ATTEND, num_items * layout.num_kv_heads
        task[at.Q], task[at.OUT] = q.ctypes.data, out.ctypes.data
        task[at.COS], task[at.SIN] = rope.cos.ctypes.data, rope.sin.ctypes.data
        task[at.HALF_DIM], task[at.INTERLEAVED] = rope.rope_dim // 2, rope.pairing == "interleaved"
        task[at.POSITIONS], task[at.TABLE_WIDTH] = rows.positions.ctypes.data, tables.mirror.shape[1]
        task[at.MIRROR_PAGES], task[at.DEVICE_PAGES] = tables.mirror.ctypes.data, tables.device.ctypes.data
        task[at.MIRROR], task[at.DEVICE] = mirror.ctypes.data, device.ctypes.data
        task[at.HEADS], task[at.KV_HEADS] = q.shape[1], layout.num_kv_heads
        task[at.HEAD_DIM], task[at.PAGE_SIZE] = layout.head_dim, layout.page_size
        task[at.ITEMS], task[at.PARTIALS], task[at.SEGMENTS] = items.ctypes.data, self._partials.ctypes.data, segments
        task[at.K_PLANE : at.V_PLANE + at.PLANE_FIELDS] = self._plane_fields(layout, layer).ravel()
        self._threads.run(task)
        if bool((items[:num_items, 3] >= 0).any()):
            task[OP] = OP_FOLD
            self._threads.run(task)

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
