"""Decode attention and its fold: values against float64, and bits of a row, which depend on its own cells only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.attention import DecodeAttention
from gpu.formats import CACHE_FORMATS
from gpu.reference.codecs import hadamard
from tests.gpu.lab import Lab
from tests.gpu.paged_attention import (
    NO_PAGE,
    DecodeRun,
    PagedCells,
    Tile,
    attend,
    bf16_values,
    decode_cells,
    make_layout,
    random_queries,
    relative_error,
)

pytestmark = pytest.mark.gpu

FORMATS = tuple(CACHE_FORMATS)
ERROR_LIMIT = 5e-4
SHAPES = {
    ("f16", 128): ((1, 16), (4, 64)),
    ("f16", 64): ((3, 32), (8, 128)),
    ("int8", 128): ((2, 32), (5, 64)),
    ("int8", 64): ((6, 16), (7, 128)),
    ("q4", 128): ((4, 128), (8, 16)),
    ("q4", 64): ((1, 64), (5, 32)),
    ("k8v4", 128): ((3, 16), (4, 64)),
    ("k8v4", 64): ((2, 128), (7, 32)),
}
"""(query heads per KV head, page size) for each format and head_dim; every value of both occurs."""

CASES = [(kv, dim, *shape) for (kv, dim), shapes in SHAPES.items() for shape in shapes]


class Scene:
    """Sequences that share pages of random cells: slot s reads the pages in an order of its own."""

    def __init__(
        self, lab: Lab, kv_format: str, head_dim: int, group: int, page_size: int, num_cells: int, num_slots: int = 1
    ) -> None:
        self.lab = lab
        self.layout = make_layout(kv_format, head_dim, page_size, num_kv_heads=2)
        self.num_heads = 2 * group
        self.max_pages = -(-num_cells // page_size)
        self.cells = PagedCells(lab, self.layout, self.max_pages)
        rng = np.random.default_rng(7)
        self.orders = np.array([rng.permutation(self.max_pages) for _ in range(num_slots)])
        self.attention = self.build()

    def build(self, *without: str) -> DecodeAttention:
        device = self.lab.device
        return DecodeAttention(device.kernels, self.layout, self.num_heads, device.num_processors, without=without)

    def queries(self, num_rows: int, seed: int = 3) -> Any:
        return random_queries(num_rows, self.num_heads, self.layout.head_dim, seed)

    def addresses(self, lengths: list[int], *, home: str = "device") -> Any:
        """Page tables of slots with these lengths; pages beyond a length do not exist."""
        table = (
            self.cells.mirror_addresses(self.orders) if home == "mirror" else self.cells.device_addresses(self.orders)
        )
        if home == "mixed":
            table[:, 1::3] = self.cells.mirror_addresses(self.orders)[:, 1::3]
        table = table[: len(lengths)].copy()
        for slot, length in enumerate(lengths):
            table[slot, -(-length // self.layout.page_size) :] = NO_PAGE
        return table

    def expected(self, slot: int, query: Any, length: int) -> Any:
        """(num_heads, head_dim) f64, V as stored."""
        num_pages = -(-length // self.layout.page_size)
        k, v = decode_cells(self.layout, 1, self.cells.bytes[self.orders[slot, :num_pages]], length)
        return attend(query, k, v, length)

    def rotate_back(self, values: Any) -> Any:
        return hadamard(values.astype(np.float32)) if self.layout.v_format.rotated else values.astype(np.float32)

    def check_row(self, run: DecodeRun, row: int, expected: Any) -> None:
        exact = run.exact(row)
        assert relative_error(exact, expected) <= ERROR_LIMIT
        # The fold rounds to bf16, and its input only to f32: apart from that, the stored partial results.
        got = bf16_values(run.output[row]).reshape(exact.shape)
        assert relative_error(got, self.rotate_back(exact)) <= 2**-8

    def close(self) -> None:
        self.cells.close()


@pytest.fixture
def scenes(lab: Lab) -> Iterator[Any]:
    made: list[Scene] = []

    def make(*args: Any, **more: Any) -> Scene:
        made.append(Scene(lab, *args, **more))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.mark.parametrize(("kv_format", "head_dim", "group", "page_size"), CASES)
def test_rows_of_every_length_agree_with_float64(
    scenes: Any, kv_format: str, head_dim: int, group: int, page_size: int
) -> None:
    scene = scenes(kv_format, head_dim, group, page_size, 300, 300)
    lengths = list(range(1, 301))
    queries = scene.queries(300)
    tiles = [Tile(row, row, 1, length - 1) for row, length in enumerate(lengths)]
    run = DecodeRun(scene.lab, scene.attention, scene.addresses(lengths), tiles, queries)
    for row, length in enumerate(lengths):
        scene.check_row(run, row, scene.expected(row, queries[row], length))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_long_rows_agree_with_float64(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, 9000, 6)
    lengths = [4096, 4097, 5000, 8999, *np.random.default_rng(5).integers(301, 9000, 2).tolist()]
    queries = scene.queries(len(lengths))
    tiles = [Tile(row, row, 1, length - 1) for row, length in enumerate(lengths)]
    for chunks in (0, 1, 7):
        run = DecodeRun(scene.lab, scene.attention, scene.addresses(lengths), tiles, queries, chunks=chunks)
        for row, length in enumerate(lengths):
            scene.check_row(run, row, scene.expected(row, queries[row], length))


@pytest.mark.parametrize("kv_format", ["f16", "k8v4"])
def test_the_last_position_of_128k_agrees_with_float64(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, 64 * 96)
    order = np.random.default_rng(9).integers(0, 96, 2048)
    queries = scene.queries(1)
    table = scene.cells.device_addresses(order[None])
    run = DecodeRun(scene.lab, scene.attention, table, [Tile(0, 0, 1, 131_071)], queries)
    k, v = decode_cells(scene.layout, 1, scene.cells.bytes, 64 * 96)
    cells = (order[:, None] * 64 + np.arange(64)).reshape(-1)
    scene.check_row(run, 0, attend(queries[0], k[:, cells], v[:, cells], 131_072))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_has_the_same_bits_alone_in_a_tile_and_in_a_batch(scenes: Any, kv_format: str, head_dim: int) -> None:
    scene = scenes(kv_format, head_dim, 4, 64, 5200, 3)
    firsts = [0, 61, 127, 1020, 4094, 5000]
    for first in firsts:
        queries = scene.queries(4)
        table = scene.addresses([first + 4, 700, 5200])
        alone = [
            DecodeRun(scene.lab, scene.attention, table, [Tile(0, 0, 1, first + row)], queries[row : row + 1]).output[0]
            for row in range(4)
        ]
        tile = DecodeRun(scene.lab, scene.attention, table, [Tile(0, 0, 4, first)], queries).output
        assert np.array_equal(tile, alone)
        others = scene.queries(5, seed=11)
        batch = DecodeRun(
            scene.lab,
            scene.attention,
            table,
            [Tile(1, 0, 1, 699), Tile(0, 2, 3, first + 1), Tile(0, 1, 1, first), Tile(0, 0, 0, 0), Tile(2, 5, 4, 5196)],
            np.concatenate((others[:1], queries, others[1:])),
        ).output
        assert np.array_equal(batch[1:5], alone)


def test_rows_of_tiles_among_many_others_have_the_same_bits(scenes: Any) -> None:
    scene = scenes("k8v4", 128, 4, 64, 1000, 2)
    queries, table = scene.queries(40), scene.addresses([903, 64])
    run = DecodeRun(scene.lab, scene.attention, table, [Tile(0, 30, 3, 900), Tile(1, 7, 1, 63)], queries)
    alone = DecodeRun(scene.lab, scene.attention, table, [Tile(0, 0, 3, 900)], queries[30:33]).output
    assert np.array_equal(run.output[30:33], alone)
    other = DecodeRun(scene.lab, scene.attention, table, [Tile(1, 0, 1, 63)], queries[7:8]).output
    assert np.array_equal(run.output[7:8], other)
    untouched = [row for row in range(40) if row not in (7, 30, 31, 32)]
    assert (run.output[untouched] == 0xFFFF).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_schedules_and_levels_do_not_change_bits(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, 9000)
    queries, table, tiles = scene.queries(4), scene.addresses([8804]), [Tile(0, 0, 4, 8800)]
    expected = DecodeRun(scene.lab, scene.attention, table, tiles, queries).output
    for chunks in (1, 2, 3, 5, 31, 40, 64, 200):
        run = DecodeRun(scene.lab, scene.attention, table, tiles, queries, chunks=chunks)
        assert np.array_equal(run.output, expected), chunks
    plain = scene.build("KVALET_NO_BULK")
    assert np.array_equal(DecodeRun(scene.lab, plain, table, tiles, queries).output, expected)
    wide = DecodeRun(scene.lab, scene.attention, table, tiles, queries, activation_layout=ActivationLayout.TILE)
    assert np.array_equal(wide.output, expected)


@pytest.mark.parametrize(("kv_format", "page_size"), [("f16", 16), ("int8", 32), ("q4", 128), ("k8v4", 16)])
def test_small_and_large_pages_have_the_bits_of_plain_copies(scenes: Any, kv_format: str, page_size: int) -> None:
    scene = scenes(kv_format, 128, 4, page_size, 1500)
    queries, table, tiles = scene.queries(4), scene.addresses([1434]), [Tile(0, 0, 4, 1430)]
    expected = DecodeRun(scene.lab, scene.attention, table, tiles, queries).output
    plain = scene.build("KVALET_NO_BULK")
    assert np.array_equal(DecodeRun(scene.lab, plain, table, tiles, queries).output, expected)


@pytest.mark.parametrize("kv_format", ["f16", "k8v4"])
def test_products_without_tensor_cores_agree_with_float64(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 64, 4, 32, 200)
    queries, table = scene.queries(2), scene.addresses([131])
    run = DecodeRun(scene.lab, scene.build("KVALET_NO_MMA"), table, [Tile(0, 0, 2, 129)], queries)
    for row in range(2):
        scene.check_row(run, row, scene.expected(0, queries[row], 130 + row))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_bytes_beyond_the_length_do_not_matter(scenes: Any, kv_format: str, page_size: int) -> None:
    scene = scenes(kv_format, 128, 4, page_size, 400)
    for length in (1, 5, 17, 63, 64, 65, 130, 321, 399):
        queries, table = scene.queries(1), scene.addresses([length])
        before = DecodeRun(scene.lab, scene.attention, table, [Tile(0, 0, 1, length - 1)], queries).output
        junk = scene.cells.bytes.copy()
        last = junk[scene.orders[0, (length - 1) // page_size]]
        for layer in range(2):
            for is_v in (0, 1):
                _fill_cells(scene, last, layer, is_v, (length - 1) % page_size + 1)
        with_junk = scene.lab.array(junk)
        moved = np.where(table == NO_PAGE, table, table - scene.cells.device.address + with_junk.address)
        after = DecodeRun(scene.lab, scene.attention, moved, [Tile(0, 0, 1, length - 1)], queries).output
        scene.lab.device.free(with_junk)
        assert np.array_equal(after, before), length


@pytest.mark.parametrize("kv_format", FORMATS)
def test_pages_in_host_memory_give_the_same_bits(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, 5000)
    queries, tiles = scene.queries(3), [Tile(0, 0, 3, 4990)]
    device, mirror, mixed = (
        DecodeRun(scene.lab, scene.attention, scene.addresses([4993], home=home), tiles, queries).output
        for home in ("device", "mirror", "mixed")
    )
    assert np.array_equal(mirror, device)
    assert np.array_equal(mixed, device)


def _fill_cells(scene: Scene, page: Any, layer: int, is_v: int, first: int) -> None:
    """0xFF (NaN as f16) in the cells from `first` on of one plane of a page."""
    plane = scene.layout.plane(layer, is_v)
    heads, cells = scene.layout.num_kv_heads, scene.layout.page_size
    for offset, size in ((plane.codes_offset, plane.codes_bytes), (plane.scales_offset, plane.scales_bytes)):
        if size:
            page[offset : offset + size].reshape(heads, cells, -1)[:, first:] = 0xFF
