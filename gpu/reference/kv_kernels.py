"""The KV kernels in NumPy, one row and one plane at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gpu.formats import PlaneFormat
from gpu.kv_kernels import PageTables, RopeTable, RowTable
from gpu.layout import KVLayout
from gpu.reference.codecs import decode, encode, hadamard, rotate_positions


class ReferenceKVKernels:
    """The oracle: implements `gpu.kv_kernels.KVKernels`."""

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
        planes = (
            (0, layout.k_format, rotate_positions(k, rope, rows.positions)),
            (1, layout.v_format, v),
        )
        for is_v, fmt, values in planes:
            rotated = hadamard(values) if fmt.rotated else values
            finite = np.asarray(np.isfinite(rotated).all(axis=-1))
            codes, scales = encode(fmt, np.where(finite[..., None], rotated, np.float32(0)))
            np.add.at(nonfinite, rows.sequence_index, (~finite).sum(axis=-1))
            for row in range(rows.num_rows):
                _store_cell(layout, layer, is_v, rows, row, codes[row], scales[row], mirror, device)
                counts[layer, rows.sequence_index[row], is_v] += 1

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
        """See `KVKernels.attend`. Sums in f64, so it is an oracle of values, not of the Numba kernel's bits."""
        rotated = rotate_positions(q, rope, rows.positions)
        if layout.k_format.rotated:
            rotated = hadamard(rotated)
        for sequence in range(tables.num_sequences):
            first, end = int(tables.row_start[sequence]), int(tables.row_start[sequence + 1])
            if first == end:
                continue
            num_cells = int(rows.positions[end - 1]) + 1
            k, v = read_sequence(layout, layer, tables, sequence, num_cells, mirror, device)
            for row in range(first, end):
                out[row] = _attend_row(rotated[row], k, v, int(rows.positions[row]) + 1)
        if layout.v_format.rotated:
            out[:] = hadamard(out)


def read_page(
    layout: KVLayout, layer: int, is_v: int, page: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Views of one plane of a page: codes (num_kv_heads, page_size, code_bytes), scales (.., scale_bytes)."""
    plane = layout.plane(layer, is_v)
    shape = (layout.num_kv_heads, layout.page_size, -1)
    codes = page[plane.codes_offset : plane.codes_offset + plane.codes_bytes].reshape(shape)
    if not plane.scales_bytes:
        return codes, np.zeros((*shape[:2], 0), np.uint8)
    return codes, page[plane.scales_offset : plane.scales_offset + plane.scales_bytes].reshape(shape)


def read_sequence(
    layout: KVLayout,
    layer: int,
    tables: PageTables,
    sequence: int,
    num_cells: int,
    mirror: NDArray[np.uint8],
    device: NDArray[np.uint8],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """K and V of cells 0 .. num_cells - 1 of a sequence as stored (still rotated): (heads, num_cells, head_dim) f64."""
    planes: list[NDArray[np.float64]] = []
    for is_v, fmt in ((0, layout.k_format), (1, layout.v_format)):
        parts = []
        for index in range(-(-num_cells // layout.page_size)):
            cells = min(layout.page_size, num_cells - index * layout.page_size)
            codes, scales = read_page(layout, layer, is_v, _page(layout, tables, sequence, index, mirror, device))
            parts.append(_decode_cells(fmt, codes[:, :cells], scales[:, :cells]))
        planes.append(np.concatenate(parts, axis=1))
    return planes[0], planes[1]


def _page(
    layout: KVLayout,
    tables: PageTables,
    sequence: int,
    index: int,
    mirror: NDArray[np.uint8],
    device: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    offset = int(tables.device[sequence, index])
    arena = device if offset >= 0 else mirror
    offset = offset if offset >= 0 else int(tables.mirror[sequence, index])
    return arena[offset : offset + layout.page_bytes]


def _decode_cells(fmt: PlaneFormat, codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    return decode(fmt, codes, scales).astype(np.float64)


def _attend_row(
    q: NDArray[np.float32], k: NDArray[np.float64], v: NDArray[np.float64], num_cells: int
) -> NDArray[np.float32]:
    heads_per_kv = q.shape[0] // k.shape[0]
    grouped = q.astype(np.float64).reshape(k.shape[0], heads_per_kv, 1, -1)
    scores = (grouped * k[:, None, :num_cells]).sum(axis=-1) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = (weights[..., None] * v[:, None, :num_cells]).sum(axis=2)
    result: NDArray[np.float32] = mixed.reshape(q.shape).astype(np.float32)
    return result


def _store_cell(
    layout: KVLayout,
    layer: int,
    is_v: int,
    rows: RowTable,
    row: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    mirror: NDArray[np.uint8],
    device: NDArray[np.uint8],
) -> None:
    cell = int(rows.cell[row])
    for arena, start in ((mirror, int(rows.mirror_offset[row])), (device, int(rows.device_offset[row]))):
        if start < 0:
            continue
        page = arena[start : start + layout.page_bytes]
        stored_codes, stored_scales = read_page(layout, layer, is_v, page)
        stored_codes[:, cell] = codes
        stored_scales[:, cell] = scales
