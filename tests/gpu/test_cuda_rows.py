"""Append, page and row kernels against NumPy: every byte of the mirror and the device arena, every count, every bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.cuda.activations import ActivationLayout, pack_activations
from gpu.cuda.device import DeviceBuffer, PinnedBuffer
from gpu.cuda.rows import DeviceRope, HeadNorm, PageKernels, RowTables, embed_tokens, publish_step, rms_norm
from gpu.cuda.weight_packing import PackedStorage, bf16_bits, pack, unpack
from gpu.errors import LayoutError
from gpu.formats import CACHE_FORMATS
from gpu.kv_kernels import RopeTable, RowTable
from gpu.layout import KVLayout
from gpu.proof import Poison, page_parts
from gpu.reference import ReferenceKVKernels
from gpu.reference.codecs import hadamard, rotate_positions
from tests.gpu.lab import Lab
from tests.kv_vectors import EDGES, KINDS, hard_vectors

pytestmark = pytest.mark.gpu

FORMATS = tuple(CACHE_FORMATS)
GUARD = 0xA5
FRAGMENT = ActivationLayout.FRAGMENT
NUM_LAYERS, LAYER = 3, 1
SHAPES = [
    (name, head_dim, (16, 32, 64, 128)[(index + head_dim // 64) % 4])
    for index, name in enumerate(FORMATS)
    for head_dim in (64, 128)
]
PAGE_SHAPES = [*SHAPES, ("k8v4", 128, 16), ("k8v4", 64, 64), ("f16", 128, 64)]


def layout_of(name: str, head_dim: int, page_size: int, num_kv_heads: int = 3) -> KVLayout:
    fmt = CACHE_FORMATS[name]
    return KVLayout(NUM_LAYERS, num_kv_heads, head_dim, page_size, fmt.k, fmt.v)


def rope_of(rope_dim: int, max_position: int = 4096) -> RopeTable:
    angles = np.arange(max_position)[:, None] * 10000.0 ** (-np.arange(0, rope_dim, 2) / rope_dim)[None, :]
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), "half")


def rows_of_entries(layout: KVLayout, entries: list[tuple[int, int]]) -> RowTable:
    """Rows of entries (first position, rows), each entry with pages of its own; the last page of all stays a guard."""
    positions, index, pages, first_page = [], [], [], 0
    for entry, (first, count) in enumerate(entries):
        at = np.arange(first, first + count)
        positions.append(at)
        index.append(np.full(count, entry))
        pages.append(first_page + at // layout.page_size - first // layout.page_size)
        first_page = int(pages[-1][-1]) + 1
    page = np.concatenate(pages).astype(np.int64)
    at = np.concatenate(positions).astype(np.int64)
    offset = page * layout.page_bytes
    return RowTable(at, np.concatenate(index).astype(np.int64), offset, offset.copy(), at % layout.page_size)


@dataclass
class World:
    """A step's rows among padding rows, with guarded arenas on host and device."""

    lab: Lab
    layout: KVLayout
    rows: RowTable
    rope: RopeTable
    num_heads: int = 6
    buffers: list[DeviceBuffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, rows = self.layout, self.rows
        self.num_bytes = int(max(rows.mirror_offset.max(), rows.device_offset.max())) + 2 * layout.page_bytes
        self.mirror: PinnedBuffer = self.lab.device.pin(self.num_bytes)
        self.mirror.array[:] = GUARD
        self.device = self.keep(self.lab.filled(self.num_bytes, GUARD))
        count = rows.num_rows
        self.num_rows = count + 3
        # Padding rows at the start, in the middle and at the end.
        self.place = np.arange(count) + 1 + (np.arange(count) >= count // 2)
        self.num_entries = int(rows.sequence_index.max()) + 1
        self.kernels = PageKernels(self.lab.device.kernels, layout)
        self.tables = RowTables(
            slots=self.table(rows.sequence_index, np.int32, -1),
            positions=self.table(rows.positions, np.int32, -1),
            entries=self.table(rows.sequence_index, np.int32, 0),
            mirror_pages=self.table(self.mirror.address + rows.mirror_offset, np.uint64, 0),
            device_pages=self.table(
                np.where(rows.device_offset >= 0, self.device.address + rows.device_offset, 0), np.uint64, 0
            ),
        )
        self.device_rope = DeviceRope(self.upload(self.rope.cos), self.upload(self.rope.sin), self.rope.rope_dim)
        self.counts = self.keep(self.lab.array(np.zeros((self.num_entries, 2), np.int32)))
        self.nonfinite = self.keep(self.lab.array(np.zeros(self.num_entries, np.int32)))
        self.queries = self.keep(self.lab.filled(self.num_rows * self.num_heads * layout.head_dim * 2, GUARD))

    def keep(self, buffer: DeviceBuffer) -> DeviceBuffer:
        self.buffers.append(buffer)
        return buffer

    def upload(self, values: NDArray[Any]) -> int:
        return self.keep(self.lab.array(values)).address

    def table(self, values: NDArray[Any], dtype: Any, padding: int) -> int:
        padded = np.full(self.num_rows, padding, dtype)
        padded[self.place] = values.astype(dtype)
        return self.upload(padded)

    def append(self, q: Any, k: Any, v: Any, norm: HeadNorm | None = None, *, mirror_in_kernel: bool = True) -> None:
        shape = (self.num_rows, self.num_heads + 2 * self.layout.num_kv_heads, self.layout.head_dim)
        qkv = np.full(shape, np.nan, np.float32)
        qkv[self.place] = np.concatenate((q, k, v), axis=1)
        self.kernels.append(
            self.lab.stream, LAYER, self.num_rows, self.tables, num_heads=self.num_heads, rope=self.device_rope,
            qkv=self.upload(qkv), queries=self.queries.address, counts=self.counts.address,
            nonfinite=self.nonfinite.address, head_norm=norm, mirror_in_kernel=mirror_in_kernel,
        )  # fmt: skip

    def mirror_cells(self) -> None:
        self.kernels.mirror(self.lab.stream, LAYER, self.num_rows, self.tables, self.counts.address)

    def check(self, k: Any, v: Any, *, mirrored: bool = True) -> None:
        """Both arenas, counts and non-finite counts equal the reference's after storing k and v."""
        counts = np.zeros((NUM_LAYERS, self.num_entries, 2), np.int64)
        nonfinite = np.zeros(self.num_entries, np.int64)
        mirror, device = (np.full(self.num_bytes, GUARD, np.uint8) for _ in range(2))
        with np.errstate(all="ignore"):
            ReferenceKVKernels().store_rows(
                self.layout, LAYER, k, v, self.rope, self.rows, mirror, device, counts, nonfinite
            )
        assert np.array_equal(self.lab.get(self.device, np.uint8), device)
        assert np.array_equal(self.lab.get(self.nonfinite, np.int32), nonfinite)
        stored = self.lab.get(self.counts, np.int32, (-1, 2))
        if mirrored:
            assert np.array_equal(self.mirror.array, mirror)
            assert np.array_equal(stored, counts[LAYER] * self.layout.num_kv_heads)
        else:
            assert (self.mirror.array == GUARD).all()
            assert not stored.any()

    def check_queries(self, q: Any) -> None:
        expected = np.full((self.num_rows, self.num_heads, self.layout.head_dim), GUARD * 257, np.uint16)
        expected[self.place] = reference_queries(self.layout, q, self.rope, self.rows.positions).view(np.uint16)
        got = self.lab.get(self.queries, np.uint16, expected.shape)
        both_nan = np.isnan(got.view(np.float16)) & np.isnan(expected.view(np.float16))
        assert np.array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, expected))

    def reset(self) -> None:
        self.lab.sync()
        self.mirror.array[:] = GUARD
        for buffer, byte in ((self.device, GUARD), (self.queries, GUARD), (self.counts, 0), (self.nonfinite, 0)):
            fresh = self.lab.filled(buffer.num_bytes, byte)
            self.lab.device.copy_async(buffer.address, fresh.address, buffer.num_bytes, self.lab.stream)
            self.lab.sync()
            self.lab.device.free(fresh)

    def close(self) -> None:
        self.lab.sync()
        self.lab.device.unpin(self.mirror)
        for buffer in self.buffers:
            self.lab.device.free(buffer)


@pytest.fixture
def worlds(lab: Lab) -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def reference_queries(
    layout: KVLayout, q: NDArray[np.float32], rope: RopeTable, positions: NDArray[np.int64]
) -> NDArray[np.float16]:
    with np.errstate(all="ignore"):
        rotated = rotate_positions(q, rope, positions)
        rotated = hadamard(rotated) if layout.k_format.rotated else rotated
        return (rotated * np.float32(math.log2(math.e) / math.sqrt(layout.head_dim))).astype(np.float16)


ENTRIES = [(5, 37), (1000, 1), (126, 4), (0, 130)]


def vectors_of(world: World, kind: str, random: np.random.Generator) -> list[NDArray[np.float32]]:
    count, dim, heads = world.rows.num_rows, world.layout.head_dim, world.layout.num_kv_heads
    magnitude = float(np.float32(2.0 ** random.uniform(-20, 20)))
    return [hard_vectors(kind, random, (count, n, dim), magnitude) for n in (world.num_heads, heads, heads)]


@pytest.mark.parametrize(("name", "head_dim", "page_size"), PAGE_SHAPES)
def test_append_bytes_counts_and_tails_equal_the_reference(
    lab: Lab, worlds: list[World], name: str, head_dim: int, page_size: int
) -> None:
    layout = layout_of(name, head_dim, page_size)
    world = World(lab, layout, rows_of_entries(layout, ENTRIES), rope_of(head_dim))
    worlds.append(world)
    random = np.random.default_rng(head_dim + page_size)
    for kind in KINDS:
        q, k, v = vectors_of(world, kind, random)
        world.reset()
        world.append(q, k, v)
        world.check(k, v)
        world.check_queries(q)


@pytest.mark.parametrize(("name", "head_dim", "page_size"), SHAPES)
def test_append_device_half_then_mirror_half_equal_the_reference(
    lab: Lab, worlds: list[World], name: str, head_dim: int, page_size: int
) -> None:
    layout = layout_of(name, head_dim, page_size)
    world = World(lab, layout, rows_of_entries(layout, ENTRIES), rope_of(head_dim))
    worlds.append(world)
    q, k, v = vectors_of(world, "edges", np.random.default_rng(3))
    world.append(q, k, v, mirror_in_kernel=False)
    world.check(k, v, mirrored=False)
    world.mirror_cells()
    world.check(k, v)


@pytest.mark.parametrize("name", FORMATS)
def test_append_without_device_page_stores_the_mirror_alone(lab: Lab, worlds: list[World], name: str) -> None:
    layout = layout_of(name, 128, 16)
    rows = rows_of_entries(layout, [(3, 20), (40, 9)])
    rows.device_offset[5:22] = -1
    world = World(lab, layout, rows, rope_of(128))
    worlds.append(world)
    q, k, v = vectors_of(world, "zero_groups", np.random.default_rng(4))
    world.append(q, k, v)
    world.check(k, v)


@pytest.mark.parametrize("name", ["f16", "k8v4"])
def test_append_without_a_mirror_page_is_not_counted(lab: Lab, worlds: list[World], name: str) -> None:
    layout = layout_of(name, 64, 32)
    world = World(lab, layout, rows_of_entries(layout, [(0, 8)]), rope_of(64))
    worlds.append(world)
    lost = np.where(np.arange(8) == 6, 0, world.mirror.address + world.rows.mirror_offset)
    tables = world.tables
    world.tables = RowTables(
        tables.slots, tables.positions, tables.entries, world.table(lost, np.uint64, 0), tables.device_pages
    )
    q, k, v = vectors_of(world, "zero_groups", np.random.default_rng(5))
    world.append(q, k, v)
    per_row = layout.num_kv_heads
    assert lab.get(world.counts, np.int32).tolist() == [7 * per_row, 7 * per_row]
    world.reset()
    world.append(q, k, v, mirror_in_kernel=False)
    world.mirror_cells()
    assert lab.get(world.counts, np.int32).tolist() == [7 * per_row, 7 * per_row]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "head_dim"), [(name, dim) for name in FORMATS for dim in (64, 128)])
def test_append_nonfinite_vectors_are_zeroed_and_counted(
    lab: Lab, worlds: list[World], name: str, head_dim: int, value: float
) -> None:
    layout = layout_of(name, head_dim, 16)
    world = World(lab, layout, rows_of_entries(layout, [(0, 5), (77, 3)]), rope_of(head_dim))
    worlds.append(world)
    q, k, v = vectors_of(world, "zero_groups", np.random.default_rng(6))
    k[1, 2, head_dim - 1] = v[1, 2, 0] = v[4, 0, 7] = k[6, 1, 3] = value
    world.append(q, k, v)
    world.check(k, v)
    assert lab.get(world.nonfinite, np.int32).tolist() == [3, 1]


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 32), (64, 4), (128, 64), (128, 96)])
def test_append_partial_rope_leaves_the_other_dims(lab: Lab, worlds: list[World], head_dim: int, rope_dim: int) -> None:
    layout = layout_of("q4", head_dim, 16)
    world = World(lab, layout, rows_of_entries(layout, [(9, 12)]), rope_of(rope_dim))
    worlds.append(world)
    q, k, v = vectors_of(world, "zero_groups", np.random.default_rng(7))
    world.append(q, k, v)
    world.check(k, v)
    world.check_queries(q)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_append_head_norm_comes_before_rope(lab: Lab, worlds: list[World], head_dim: int) -> None:
    layout = layout_of("int8", head_dim, 16)
    world = World(lab, layout, rows_of_entries(layout, [(9, 12)]), rope_of(head_dim))
    worlds.append(world)
    random = np.random.default_rng(8)
    q, k, v = (random.standard_normal((12, n, head_dim), np.float32) * np.float32(3) for n in (6, 3, 3))
    q_weight, k_weight = (random.uniform(0.5, 2, head_dim).astype(np.float32) for _ in range(2))
    world.append(q, k, v, HeadNorm(world.upload(q_weight), world.upload(k_weight), 1e-6))
    lane_values = head_dim // 32
    world.check(normalized(k, k_weight, 1e-6, 32, lane_values), v)
    world.check_queries(normalized(q, q_weight, 1e-6, 32, lane_values))


def test_append_unusable_rope_tables_are_refused_by_name() -> None:
    table = rope_of(64)
    DeviceRope.check(table, 64)
    with pytest.raises(LayoutError, match="rope pairing='interleaved'"):
        DeviceRope.check(RopeTable(table.cos, table.sin, "interleaved"), 64)
    with pytest.raises(LayoutError, match="rope_dim=36: must be a multiple of 8 up to 128"):
        DeviceRope.check(rope_of(36), 128)


def test_append_unusable_head_dims_are_refused_by_name(lab: Lab) -> None:
    with pytest.raises(LayoutError, match="head_dim=96: must be 64 or 128"):
        PageKernels(lab.device.kernels, layout_of("f16", 96, 16))


@pytest.mark.parametrize(("name", "head_dim", "page_size"), PAGE_SHAPES)
def test_poison_pages_sets_the_marks_of_the_proof(lab: Lab, name: str, head_dim: int, page_size: int) -> None:
    layout = layout_of(name, head_dim, page_size)
    size = layout.page_bytes
    arena = lab.filled(5 * size, GUARD)
    chosen = [3, 1]
    pages = lab.array(np.array([arena.address + index * size for index in chosen], np.uint64))
    PageKernels(lab.device.kernels, layout).poison(lab.stream, pages.address, len(chosen))
    expected = np.full(5 * size, GUARD, np.uint8)
    for index in chosen:
        Poison(layout).set(expected[index * size : (index + 1) * size])
    assert np.array_equal(lab.get(arena, np.uint8), expected)
    for buffer in (pages, arena):
        lab.device.free(buffer)


def flipped(page: NDArray[np.uint8], at: int) -> NDArray[np.uint8]:
    changed = page.copy()
    changed[at] ^= 1 << (at % 8)
    return changed


@pytest.mark.parametrize("num_ctas", [1, 2, 8])
@pytest.mark.parametrize(("name", "head_dim", "page_size"), SHAPES)
def test_compare_finds_one_flipped_bit_on_its_page(
    lab: Lab, name: str, head_dim: int, page_size: int, num_ctas: int
) -> None:
    layout = layout_of(name, head_dim, page_size)
    size = layout.page_bytes
    random = np.random.default_rng(num_ctas)
    page = random.integers(0, 256, size, np.uint8)
    places = [None, 0, size - 1, *random.integers(0, size, 5).tolist()]
    device = np.concatenate([page if at is None else flipped(page, at) for at in places])
    differing = compare(lab, layout, device, np.tile(page, len(places)), [page_size] * len(places), num_ctas)
    assert differing == [0 if at is None else 1 for at in places]


@pytest.mark.parametrize(("name", "head_dim", "page_size"), SHAPES)
def test_compare_of_first_cells_ignores_the_others(lab: Lab, name: str, head_dim: int, page_size: int) -> None:
    """Bytes of each part, on either side of the length."""
    layout = layout_of(name, head_dim, page_size)
    random = np.random.default_rng(2)
    page = random.integers(0, 256, layout.page_bytes, np.uint8)
    lengths, pages, expected = [], [], []
    index = np.arange(layout.page_bytes)
    for num_cells in (1, 2, 7, page_size - 1):
        for part in page_parts(layout, index):
            for cell, seen in ((num_cells - 1, 1), (num_cells, 0)):
                spot = part[random.integers(0, NUM_LAYERS), random.integers(0, layout.num_kv_heads), cell]
                lengths.append(num_cells)
                pages.append(flipped(page, int(random.choice(spot))))
                expected.append(seen)
    assert compare(lab, layout, np.concatenate(pages), np.tile(page, len(pages)), lengths, 2) == expected


def compare(
    lab: Lab, layout: KVLayout, device: NDArray[np.uint8], mirror: NDArray[np.uint8], lengths: list[int], num_ctas: int
) -> list[int]:
    """Numbers of differing pieces, page by page."""
    count = len(lengths)
    slots, pinned = lab.array(device), lab.device.pin(len(mirror))
    pinned.array[:] = mirror
    starts = np.arange(count, dtype=np.uint64) * np.uint64(layout.page_bytes)
    tables = [lab.array(np.uint64(base) + starts) for base in (slots.address, pinned.address)]
    cells, differing = lab.array(np.array(lengths, np.int32)), lab.filled(4 * count, 0)
    PageKernels(lab.device.kernels, layout).compare(
        lab.stream, tables[0].address, tables[1].address, cells.address, count, differing.address, num_ctas
    )
    found: list[int] = lab.get(differing, np.int32).tolist()
    lab.device.unpin(pinned)
    for buffer in (slots, *tables, cells, differing):
        lab.device.free(buffer)
    return found


def normalized(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, threads: int, values: int
) -> NDArray[np.float32]:
    """RMSNorm of the last axis in the contract's order, f32: thread i owns values (j * threads + i) * values .. ."""
    width = x.shape[-1]
    runs = -(-width // (threads * values))
    squares = np.zeros((*x.shape[:-1], runs * threads * values), np.float32)
    squares[..., :width] = x * x
    own = squares.reshape(*x.shape[:-1], runs, threads, values)
    sums = np.zeros((*x.shape[:-1], threads), np.float32)
    for run in range(runs):
        for i in range(values):
            sums = sums + own[..., run, :, i]
    warps = across_lanes(sums.reshape(*sums.shape[:-1], threads // 32, 32))
    padded = np.zeros((*warps.shape[:-1], 32), np.float32)
    padded[..., : warps.shape[-1]] = warps
    total = across_lanes(padded)
    mean = total * np.float32(1 / width) + np.float32(eps)
    scale = (1 / np.sqrt(mean.astype(np.float64))).astype(np.float32)
    return (x * scale[..., None]) * weight


def across_lanes(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum of the last 32 values by xor 16, 8, 4, 2, 1."""
    for lanes in (16, 8, 4, 2, 1):
        x = x + x[..., np.arange(32) ^ lanes]
    return x[..., 0]


@pytest.mark.parametrize("layout", ActivationLayout)
@pytest.mark.parametrize("width", [64, 576, 896, 1536, 4096, 5120, 16384])
def test_rms_norm_bits_equal_the_contract_in_both_layouts(lab: Lab, width: int, layout: ActivationLayout) -> None:
    random = np.random.default_rng(width)
    num_rows = 200 if width == 576 else 13
    x = (random.standard_normal((num_rows, width)) * 2.0 ** random.integers(-10, 10, (num_rows, 1))).astype(np.float32)
    x[3] = 0
    x[5, ::7] = random.choice(np.array([v for v in EDGES if abs(v) < 1e5], np.float32), len(x[5, ::7]))
    weight = random.uniform(0.1, 3, width).astype(np.float32)
    threads = min(512, -(-width // 256) * 32)
    expected = bf16_bits(normalized(x, weight, 1e-5, threads, 8))
    residual, gain, out = lab.array(x), lab.array(weight), guarded_activations(lab, layout, num_rows, width)
    rms_norm(
        lab.device.kernels, lab.stream, width, num_rows, residual=residual.address, weight=gain.address, eps=1e-5,
        activations=out.address, activation_layout=layout,
    )  # fmt: skip
    assert np.array_equal(lab.get(out, np.uint16), pack_activations(layout, expected))
    for buffer in (residual, gain, out):
        lab.device.free(buffer)


def test_rms_norm_of_listed_rows_equals_theirs_in_the_whole(lab: Lab) -> None:
    width, listed = 896, np.array([7, 2, -1, 11], np.int32)
    random = np.random.default_rng(9)
    x, weight = random.standard_normal((12, width), np.float32), np.ones(width, np.float32)
    buffers = [lab.array(x), lab.array(weight), lab.array(listed), guarded_activations(lab, FRAGMENT, 4, width)]
    residual, gain, indices, out = buffers
    rms_norm(
        lab.device.kernels, lab.stream, width, 4, residual=residual.address, weight=gain.address, eps=1e-6,
        activations=out.address, activation_layout=FRAGMENT, row_indices=indices.address,
    )  # fmt: skip
    expected = bf16_bits(normalized(x, weight, 1e-6, 128, 8))[listed]
    expected[2] = GUARD
    assert np.array_equal(lab.get(out, np.uint16), pack_activations(FRAGMENT, expected))
    for buffer in buffers:
        lab.device.free(buffer)


def guarded_activations(lab: Lab, layout: ActivationLayout, num_rows: int, width: int) -> DeviceBuffer:
    """A buffer whose rows 0 .. num_rows - 1 hold GUARD, the others what `pack_activations` fills up with."""
    return lab.array(pack_activations(layout, np.full((num_rows, width), GUARD, np.uint16)))


def test_rms_norm_unusable_widths_are_refused_by_name(lab: Lab) -> None:
    with pytest.raises(LayoutError, match="hidden_size=100: must be a multiple of 64"):
        rms_norm(
            lab.device.kernels,
            lab.stream,
            100,
            1,
            residual=0,
            weight=0,
            eps=0.0,
            activations=0,
            activation_layout=FRAGMENT,
        )


@pytest.mark.parametrize("storage", PackedStorage)
@pytest.mark.parametrize("width", [64, 576, 4096])
def test_embedding_rows_equal_the_packed_values(lab: Lab, storage: PackedStorage, width: int) -> None:
    packed = pack(storage, np.random.default_rng(width).standard_normal((96, width), np.float32))
    values = unpack(storage, packed, 96, width)
    ids = np.array([0, 95, -1, 17, 8, -1, 40], np.int32)
    slots = np.array([0, 1, 3, -1, 2, 1, 0], np.int32)
    last = np.array([1, 79, 2, 63], np.int32)
    expected = values[[0, 95, 63, 0, 8, 79, 40]]
    expected[3] = 0
    buffers = [lab.array(part) for part in (packed, ids, slots, last)]
    residual = lab.filled(8 * width * 4)
    embed_tokens(
        lab.device.kernels, lab.stream, width, 7, matrix=buffers[0].address, storage=storage,
        token_ids=buffers[1].address, slots=buffers[2].address, last_tokens=buffers[3].address,
        residual=residual.address,
    )  # fmt: skip
    got = lab.get(residual, np.uint32, (8, width))
    assert np.array_equal(got[:7], expected.view(np.uint32))
    assert (got[7] == 0xA5A5A5A5).all()
    for buffer in (*buffers, residual):
        lab.device.free(buffer)


def test_publish_copies_results_and_moves_proofs_into_the_named_buffer(lab: Lab) -> None:
    random = np.random.default_rng(10)
    results, proofs = (random.integers(0, 2**32, count, np.uint64).astype(np.uint32) for count in (300, 5000))
    pinned = lab.device.pin(2 * 4 * 6000)
    pinned.array[:] = GUARD
    buffers = [lab.array(results), lab.array(proofs), lab.array(np.array([pinned.address + 24000], np.uint64))]
    for _ in range(2):
        publish_step(
            lab.device.kernels, lab.stream, target=buffers[2].address, results=buffers[0].address, num_results=300,
            proofs=buffers[1].address, num_proofs=5000,
        )  # fmt: skip
        lab.sync()
        words = pinned.array.view(np.uint32)
        assert np.array_equal(words[6000:6300], results)
        assert np.array_equal(words[6300:11300], proofs)
        assert (np.concatenate((words[:6000], words[11300:])) == 0xA5A5A5A5).all()
        proofs = np.zeros_like(proofs)
        assert np.array_equal(lab.get(buffers[1], np.uint32), proofs)
    lab.device.unpin(pinned)
    for buffer in buffers:
        lab.device.free(buffer)
