"""Attention of every kernel set against the oracle, and what it must not depend on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.formats import cache_format
from gpu.kv_kernels import KVKernels, PageTables, RopeTable, RowTable
from gpu.layout import KVLayout
from tests.kv_lab import FORMATS, kernels_of, rope_table

LENGTHS = (1, 16, 37, 64)


@dataclass
class Scene:
    """Sequences of LENGTHS cells, stored by the oracle into shuffled pages; one step asks their last rows."""

    layout: KVLayout
    rope: RopeTable
    q: NDArray[np.float32]
    rows: RowTable
    tables: PageTables
    mirror: NDArray[np.uint8]
    device: NDArray[np.uint8]

    def attend(self, kernels: KVKernels, rows: slice = slice(None)) -> NDArray[np.float32]:
        out = np.full_like(self.q[rows], np.nan)
        table = RowTable(*(np.ascontiguousarray(a[rows]) for a in _columns(self.rows)))
        start = np.searchsorted(table.sequence_index, np.arange(len(LENGTHS) + 1)).astype(np.int64)
        tables = PageTables(self.tables.mirror, self.tables.device, start)
        q = np.ascontiguousarray(self.q[rows])
        kernels.attend(self.layout, 1, q, self.rope, table, tables, self.mirror, self.device, out)
        return out


def _columns(rows: RowTable) -> tuple[NDArray[np.int64], ...]:
    return rows.positions, rows.sequence_index, rows.mirror_offset, rows.device_offset, rows.cell


def make_scene(kv_format: str, page_size: int = 16, group: int = 3, pairing: str = "half", rope_dim: int = 64) -> Scene:
    fmt, random = cache_format(kv_format), np.random.default_rng(5)
    layout = KVLayout(2, 2, 64, page_size, fmt.k, fmt.v)
    rope = rope_table(256, rope_dim, pairing)
    num_pages = [-(-length // page_size) for length in LENGTHS]
    order = random.permutation(sum(num_pages)).astype(np.int64) * layout.page_bytes
    mirror = random.integers(0, 256, len(order) * layout.page_bytes, np.uint8)
    table = np.full((len(LENGTHS), max(num_pages)), -1, np.int64)
    first = 0
    for index, count in enumerate(num_pages):
        table[index, :count] = order[first : first + count]
        first += count
    for index, length in enumerate(LENGTHS):
        positions = np.arange(length, dtype=np.int64)
        same = np.zeros(length, np.int64)
        rows = RowTable(positions, same, table[index, positions // page_size], same - 1, positions % page_size)
        k, v = random.standard_normal((2, length, 2, 64), np.float32)
        counts = np.zeros((2, 1, 2), np.int64)
        empty = np.zeros(0, np.uint8)
        kernels_of("reference").store_rows(layout, 1, k, v, rope, rows, mirror, empty, counts, np.zeros(1, np.int64))
    asked = [np.arange(max(0, length - 5), length, dtype=np.int64) for length in LENGTHS]
    positions = np.concatenate(asked)
    sequence = np.repeat(np.arange(len(LENGTHS)), [len(rows) for rows in asked]).astype(np.int64)
    rows = RowTable(positions, sequence, positions, positions, positions)
    tables = PageTables(table, np.full_like(table, -1), np.zeros(len(LENGTHS) + 1, np.int64))
    q = random.standard_normal((len(positions), 2 * group, 64), np.float32) * np.float32(2)
    return Scene(layout, rope, q, rows, tables, mirror, np.zeros(0, np.uint8))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("pairing", "rope_dim"), [("half", 64), ("interleaved", 64), ("half", 32)])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_attend_numba_agrees_with_the_oracle(
    kv_format: str, group: int, pairing: str, rope_dim: int, page_size: int
) -> None:
    scene = make_scene(kv_format, page_size, group, pairing, rope_dim)
    expected = scene.attend(kernels_of("reference"))
    np.testing.assert_allclose(scene.attend(kernels_of("numba")), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_attend_is_the_same_from_mirror_device_or_both(kernels: str, kv_format: str) -> None:
    scene = make_scene(kv_format)
    from_mirror = scene.attend(kernels_of(kernels))
    device, mirror = scene.mirror.copy(), scene.mirror
    scene.device, scene.mirror = device, np.zeros_like(mirror)
    scene.tables = PageTables(scene.tables.mirror, scene.tables.mirror.copy(), scene.tables.row_start)
    assert np.array_equal(scene.attend(kernels_of(kernels)), from_mirror)
    scene.mirror = mirror
    scene.tables.device[:, 1::2] = -1
    assert np.array_equal(scene.attend(kernels_of(kernels)), from_mirror)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_attend_row_alone_equals_row_among_others(kernels: str, kv_format: str) -> None:
    scene = make_scene(kv_format)
    together = scene.attend(kernels_of(kernels))
    alone = [scene.attend(kernels_of(kernels), slice(row, row + 1))[0] for row in range(len(scene.q))]
    assert np.array_equal(np.stack(alone), together)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_attend_never_reads_cells_beyond_the_position(kernels: str, kv_format: str) -> None:
    """Cells behind a row hold junk whose f16 values are NaN and Inf; the result is that of zeros there."""
    scene = make_scene(kv_format)
    results = []
    for junk in (0xFF, 0x7C, 0x00):
        for index, length in enumerate(LENGTHS):
            offset = scene.tables.mirror[index, (length - 1) // 16]
            page = scene.mirror[offset : offset + scene.layout.page_bytes]
            for is_v in (0, 1):
                plane = scene.layout.plane(1, is_v)
                for start, size in ((plane.codes_offset, plane.codes_bytes), (plane.scales_offset, plane.scales_bytes)):
                    page[start : start + size].reshape(2, 16, -1)[:, (length - 1) % 16 + 1 :] = junk
        results.append(scene.attend(kernels_of(kernels)))
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[1], results[2])
