"""Prefill attention: the bits of decode attention for every row, whatever the tile, the chunk and the form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pytest

from gpu.cuda.activations import ActivationLayout, unpack_activations
from gpu.cuda.attention import AttentionTables, DecodeAttention
from gpu.cuda.prefill_attention import PrefillAttention
from gpu.errors import LayoutError
from gpu.formats import CACHE_FORMATS
from gpu.reference.codecs import hadamard
from tests.gpu.lab import Lab
from tests.gpu.paged_attention import (
    NO_PAGE,
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
CASES = [
    *((kv, 128, 4, 64) for kv in FORMATS),
    ("int8", 128, 1, 16),
    ("q4", 128, 5, 32),
    ("k8v4", 128, 2, 128),
    ("f16", 64, 3, 16),
    ("int8", 64, 6, 64),
    ("k8v4", 64, 7, 128),
    ("f16", 64, 8, 32),
]
"""(format, head_dim, query heads per KV head, page size)"""

PROMPTS = ((1, 0), (300, 0), (65, 1), (2, 63), (130, 64), (97, 1000), (33, 4095), (700, 5000), (1, 700))
"""(rows, position of the first) of sequences."""

GUARD = 4096


@dataclass(frozen=True)
class Prompt:
    """Rows of a sequence: row first_row of the step is at position `first_position`."""

    slot: int
    first_row: int
    rows: int
    first_position: int


class Scene:
    """Sequences over shared pages of random cells, each with an order of its own, and rows of prompts."""

    def __init__(
        self,
        lab: Lab,
        kv_format: str,
        head_dim: int,
        group: int,
        page_size: int,
        prompts: tuple[tuple[int, int], ...] = PROMPTS,
    ) -> None:
        self.lab = lab
        self.layout = make_layout(kv_format, head_dim, page_size, num_kv_heads=2)
        self.num_heads = 2 * group
        starts = np.cumsum([0, *(rows for rows, _ in prompts)])
        self.num_rows = int(starts[-1])
        self.prompts = [Prompt(slot, int(starts[slot]), *prompt) for slot, prompt in enumerate(prompts)]
        self.lengths = [rows + first for rows, first in prompts]
        self.max_pages = -(-max(self.lengths) // page_size)
        self.cells = PagedCells(lab, self.layout, self.max_pages)
        rng = np.random.default_rng(7)
        self.orders = np.array([rng.permutation(self.max_pages) for _ in prompts])
        self.queries = random_queries(self.num_rows, self.num_heads, head_dim, 3)
        device = lab.device
        self.decode = DecodeAttention(device.kernels, self.layout, self.num_heads, device.num_processors)

    def prefill(self, *without: str, num_processors: int = 0, block_limit: int = 1 << 30) -> PrefillAttention:
        device = self.lab.device
        count = num_processors or device.num_processors
        return PrefillAttention(
            device.kernels, self.layout, self.num_heads, count, max(self.lengths), without, block_limit=block_limit
        )

    def addresses(self, home: str = "device") -> Any:
        """Page tables; pages beyond a length do not exist."""
        in_mirror = self.cells.mirror_addresses(self.orders)
        table = in_mirror.copy() if home == "mirror" else self.cells.device_addresses(self.orders)
        if home == "mixed":
            table[:, 1::3] = in_mirror[:, 1::3]
        for slot, length in enumerate(self.lengths):
            table[slot, -(-length // self.layout.page_size) :] = NO_PAGE
        return table

    def decoded(self) -> Any:
        """bf16 bits of all rows by decode attention."""
        tiles = self.tiles(self.decode.tile_rows)
        plan = self.decode.plan(self.num_rows, len(tiles), max(self.lengths))
        return self._launch(
            self.addresses(), _rows(tiles), _rows(()), self.decode.scratch_bytes(plan), ActivationLayout.FRAGMENT,
            lambda tables, **more: self.decode.launch(self.lab.stream, 1, plan, tables, **more),
        )  # fmt: skip

    def prefilled(
        self,
        attention: PrefillAttention | None = None,
        tiles: list[Tile] | None = None,
        addresses: Any = None,
        layout: ActivationLayout = ActivationLayout.TILE,
    ) -> Any:
        """bf16 bits of all rows by prefill attention; rows outside the tiles are 0xFFFF."""
        attention = attention or self.prefill()
        plan = attention.plan(astuple(tile) for tile in tiles or self.tiles(attention.tile_rows))
        return self._launch(
            self.addresses() if addresses is None else addresses, plan.tiles, plan.sequences,
            attention.scratch_bytes, layout,
            lambda tables, **more: attention.launch(self.lab.stream, 1, plan, tables, **more),
        )  # fmt: skip

    def tiles(self, tile_rows: int, prompts: list[Prompt] | None = None) -> list[Tile]:
        """Tiles of prompts, longest first."""
        tiles = [
            Tile(p.slot, p.first_row + row, min(tile_rows, p.rows - row), p.first_position + row)
            for p in prompts or self.prompts
            for row in range(0, p.rows, tile_rows)
        ]
        return sorted(tiles, key=lambda tile: -tile.first_position)

    def expected(self, prompt: Prompt, row: int) -> Any:
        """(num_heads, head_dim) f64 of one of a prompt's rows."""
        length = prompt.first_position + row + 1
        pages = self.orders[prompt.slot, : -(-length // self.layout.page_size)]
        k, v = decode_cells(self.layout, 1, self.cells.bytes[pages], length)
        values = attend(self.queries[prompt.first_row + row], k, v, length)
        return hadamard(values.astype(np.float32)) if self.layout.v_format.rotated else values

    def check(self, output: Any, prompt: Prompt, row: int) -> None:
        expected = self.expected(prompt, row)
        got = bf16_values(output[prompt.first_row + row]).reshape(expected.shape)
        assert relative_error(got, expected) <= 2**-8, (prompt, row)

    def close(self) -> None:
        self.cells.close()

    def _launch(
        self, addresses: Any, tiles: Any, sequences: Any, scratch_bytes: int, layout: ActivationLayout, launch: Any
    ) -> Any:
        lab, width = self.lab, self.num_heads * self.layout.head_dim
        inputs = [lab.array(values) for values in (addresses.astype(np.uint64), tiles, sequences, self.queries)]
        page_table, tile_table, sequence_table, queries = (buffer.address for buffer in inputs)
        activations = lab.filled(layout.num_bytes(self.num_rows, width), 0xFF)
        scratch = lab.filled(scratch_bytes + GUARD, 0xFF)
        launch(
            AttentionTables(tile_table, page_table, addresses.shape[1], sequence_table), queries=queries,
            activations=activations.address, activation_layout=layout, scratch=scratch.address,
        )  # fmt: skip
        output = unpack_activations(layout, lab.get(activations, np.uint16), self.num_rows, width)
        assert (lab.get(scratch, np.uint8)[scratch_bytes:] == 0xFF).all()
        for buffer in (*inputs, activations, scratch):
            lab.device.free(buffer)
        return output


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
def test_every_row_has_the_bits_of_decode(
    scenes: Any, kv_format: str, head_dim: int, group: int, page_size: int
) -> None:
    scene = scenes(kv_format, head_dim, group, page_size)
    output = scene.prefilled()
    assert _differing_rows(output, scene.decoded()) == []
    for prompt in scene.prompts:
        scene.check(output, prompt, prompt.rows - 1)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_tiles_and_chunks_of_any_size_give_the_same_bits(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, ((300, 0), (200, 4000)))
    expected = scene.prefilled()
    most = scene.prefill().tile_rows
    for tile_rows in (1, 5, most // 2, most // 2 + 1, most - 1):
        assert _differing_rows(scene.prefilled(tiles=scene.tiles(tile_rows)), expected) == [], tile_rows


@pytest.mark.parametrize("kv_format", ["f16", "k8v4"])
def test_the_number_of_processors_does_not_change_bits(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, ((150, 0), (700, 100), (1, 3), (40, 5000)))
    expected = scene.prefilled()
    for count in (1, 2, 7):
        attention = scene.prefill(num_processors=count)
        assert _differing_rows(scene.prefilled(attention), expected) == [], count
        tiles = scene.tiles(attention.tile_rows)
        padded = [Tile(0, 0, 0, 0), *tiles[:3], Tile(0, 0, 0, 0), Tile(0, 0, 0, 0), *tiles[3:], Tile(0, 0, 0, 0)]
        assert _differing_rows(scene.prefilled(attention, padded), expected) == [], count


@pytest.mark.parametrize(("kv_format", "head_dim"), [("f16", 64), ("int8", 128), ("k8v4", 128)])
def test_rounds_over_heads_and_sequences_do_not_change_bits(scenes: Any, kv_format: str, head_dim: int) -> None:
    scene = scenes(kv_format, head_dim, 4, 32, ((150, 0), (700, 100), (1, 3), (40, 5000), (90, 4000)))
    expected = scene.prefilled()
    for limit in (1, 1 << 20, 3 << 20, 5 << 20):
        attention = scene.prefill(block_limit=limit)
        assert _differing_rows(scene.prefilled(attention), expected) == [], limit
    if attention.by_warpgroups:
        tiles = scene.tiles(attention.tile_rows)
        assert (
            len(scene.prefill(block_limit=1).plan(astuple(tile) for tile in tiles).rounds) > scene.layout.num_kv_heads
        )


@pytest.mark.parametrize(("kv_format", "head_dim", "group"), [("f16", 128, 4), ("int8", 64, 3), ("k8v4", 128, 8)])
def test_levels_of_hardware_give_the_same_bits(scenes: Any, kv_format: str, head_dim: int, group: int) -> None:
    scene = scenes(kv_format, head_dim, group, 32, ((130, 0), (77, 4090), (1, 9)))
    expected = scene.prefilled()
    for level in ("KVALET_NO_WGMMA", "KVALET_NO_BULK"):
        attention = scene.prefill(level)
        assert _differing_rows(scene.prefilled(attention), expected) == [], level
        assert _differing_rows(scene.prefilled(attention, scene.tiles(3)), expected) == [], level


@pytest.mark.parametrize("kv_format", ["f16", "k8v4"])
def test_products_without_tensor_cores_agree_with_float64(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 64, 4, 32, ((70, 0), (20, 180)))
    output = scene.prefilled(scene.prefill("KVALET_NO_MMA"))
    for prompt in scene.prompts:
        for row in range(prompt.rows):
            scene.check(output, prompt, row)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_outside_the_tiles_are_not_written(scenes: Any, kv_format: str) -> None:
    scene = scenes(kv_format, 128, 4, 64, ((40, 0), (37, 200), (50, 64)))
    expected = scene.prefilled(layout=ActivationLayout.FRAGMENT)
    prompt = scene.prompts[1]
    tiles = scene.tiles(scene.prefill().tile_rows, [prompt])
    output = scene.prefilled(tiles=tiles, layout=ActivationLayout.FRAGMENT)
    rows = slice(prompt.first_row, prompt.first_row + prompt.rows)
    assert np.array_equal(output[rows], expected[rows])
    output[rows] = 0xFFFF
    assert (output == 0xFFFF).all()
    assert np.array_equal(scene.prefilled(), expected)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("page_size", [16, 128])
def test_bytes_beyond_the_length_do_not_matter(scenes: Any, kv_format: str, page_size: int) -> None:
    scene = scenes(kv_format, 128, 4, page_size, ((5, 0), (17, 50), (33, 96), (64, 257), (1, 63)))
    for prompt, length in zip(scene.prompts, scene.lengths, strict=True):
        tiles = scene.tiles(scene.prefill().tile_rows, [prompt])
        before = scene.prefilled(tiles=tiles)
        junk = scene.cells.bytes.copy()
        last = junk[scene.orders[prompt.slot, (length - 1) // page_size]]
        for layer in range(2):
            for is_v in (0, 1):
                _fill_cells(scene, last, layer, is_v, (length - 1) % page_size + 1)
        with_junk = scene.lab.array(junk)
        table = scene.addresses()
        moved = np.where(table == NO_PAGE, table, table - scene.cells.device.address + with_junk.address)
        after = scene.prefilled(tiles=tiles, addresses=moved)
        scene.lab.device.free(with_junk)
        assert np.array_equal(after, before), length


@pytest.mark.parametrize(("kv_format", "page_size"), [("f16", 64), ("int8", 16), ("q4", 32), ("k8v4", 128)])
def test_pages_in_host_memory_give_the_same_bits(scenes: Any, kv_format: str, page_size: int) -> None:
    scene = scenes(kv_format, 128, 4, page_size, ((100, 3000), (40, 0)))
    expected = scene.prefilled()
    for home in ("mirror", "mixed"):
        assert _differing_rows(scene.prefilled(addresses=scene.addresses(home)), expected) == [], home


def test_shapes_that_no_kernel_takes_are_refused(lab: Lab) -> None:
    device = lab.device
    with pytest.raises(LayoutError, match="page_size=48"):
        PrefillAttention(device.kernels, make_layout("f16", 128, 48, 2), 8, 1, 64)
    with pytest.raises(LayoutError, match="num_heads=18"):
        PrefillAttention(device.kernels, make_layout("f16", 128, 64, 2), 18, 1, 64)


def _rows(tiles: Iterable[Tile]) -> Any:
    return np.array([astuple(tile) for tile in tiles], np.int32).reshape(-1, 4)


def _differing_rows(got: Any, expected: Any) -> list[int]:
    return [int(row) for row in np.flatnonzero((got != expected).any(axis=1))]


def _fill_cells(scene: Scene, page: Any, layer: int, is_v: int, first: int) -> None:
    """0xFF (NaN as f16) in the cells from `first` on of one plane of a page."""
    plane = scene.layout.plane(layer, is_v)
    heads, cells = scene.layout.num_kv_heads, scene.layout.page_size
    for offset, size in ((plane.codes_offset, plane.codes_bytes), (plane.scales_offset, plane.scales_bytes)):
        if size:
            page[offset : offset + size].reshape(heads, cells, -1)[:, first:] = 0xFF
