"""Sequences in pages for tests and benchmarks of attention kernels: random planes, page tables, float64 attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.activations import ActivationLayout, unpack_activations
from gpu.cuda.attention import AttentionTables, DecodeAttention, DecodePlan
from gpu.formats import cache_format
from gpu.layout import KVLayout
from gpu.reference.codecs import decode
from gpu.reference.kv_kernels import read_page
from tests.gpu.lab import Lab

NO_PAGE = 0x10
"""Address in page tables where a sequence has no page: reading it is an error."""

Array = NDArray[Any]


def make_layout(kv_format: str, head_dim: int, page_size: int, num_kv_heads: int, num_layers: int = 2) -> KVLayout:
    chosen = cache_format(kv_format)
    return KVLayout(num_layers, num_kv_heads, head_dim, page_size, chosen.k, chosen.v)


def random_pages(layout: KVLayout, num_pages: int, seed: int) -> Array:
    """(num_pages, page_bytes) u8: every byte random, scales and f16 values of ordinary size."""
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 256, (num_pages, layout.page_bytes), np.uint8)
    for layer in range(layout.num_layers):
        for is_v, fmt in ((0, layout.k_format), (1, layout.v_format)):
            plane = layout.plane(layer, is_v)
            if fmt.bits == 16:
                shape = (num_pages, plane.codes_bytes // 2)
                halves = rng.standard_normal(shape, np.float32).astype(np.float16)
                pages[:, plane.codes_offset : plane.codes_offset + plane.codes_bytes] = halves.view(np.uint8)
            else:
                step = 2.0 / (1 << (fmt.bits - 1))
                shape = (num_pages, plane.scales_bytes // 2)
                scales = (rng.uniform(0.5, 1.5, shape) * step * rng.choice((-1, 1), shape)).astype(np.float16)
                pages[:, plane.scales_offset : plane.scales_offset + plane.scales_bytes] = scales.view(np.uint8)
    return pages


def random_queries(num_rows: int, num_heads: int, head_dim: int, seed: int) -> Array:
    """(num_rows, num_heads, head_dim) f16 as append leaves them: scores are exponents of 2."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_rows, num_heads, head_dim), np.float32)
    return (values * np.float32(1.5 / np.sqrt(head_dim))).astype(np.float16)


def decode_cells(layout: KVLayout, layer: int, pages: Array, num_cells: int) -> tuple[Array, Array]:
    """K and V of consecutive pages, rounded to f16 as they enter attention: (num_kv_heads, num_cells, head_dim) f64."""
    planes = []
    for is_v, fmt in ((0, layout.k_format), (1, layout.v_format)):
        parts = [decode(fmt, *read_page(layout, layer, is_v, page)).astype(np.float16) for page in pages]
        planes.append(np.concatenate(parts, axis=1)[:, :num_cells].astype(np.float64))
    return planes[0], planes[1]


def attend(query: Array, k: Array, v: Array, length: int) -> Array:
    """(num_heads, head_dim) f64: attention of one row over cells 0 .. length - 1, V still rotated where it is."""
    grouped = query.astype(np.float64).reshape(k.shape[0], -1, k.shape[2])
    scores = grouped @ k[:, :length].transpose(0, 2, 1)
    weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ v[:, :length]
    result: Array = mixed.reshape(query.shape)
    return result


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one sequence that attention takes together."""

    slot: int
    first_row: int
    rows: int
    first_position: int


class PagedCells:
    """Pages with random planes, in device memory and the same bytes in pinned memory."""

    def __init__(self, lab: Lab, layout: KVLayout, num_pages: int, seed: int = 1) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.bytes = random_pages(layout, num_pages, seed)
        self._lab = lab
        self.device = lab.array(self.bytes)
        self.mirror = lab.device.pin(self.bytes.nbytes)
        self.mirror.array[:] = self.bytes.reshape(-1)

    def device_addresses(self, pages: Array) -> Array:
        """u64 addresses of pages (their numbers) in device memory."""
        return self.device.address + pages.astype(np.uint64) * np.uint64(self.layout.page_bytes)

    def mirror_addresses(self, pages: Array) -> Array:
        """u64 addresses of pages in pinned memory."""
        return self.mirror.address + pages.astype(np.uint64) * np.uint64(self.layout.page_bytes)

    def close(self) -> None:
        self._lab.device.free(self.device)
        self._lab.device.unpin(self.mirror)


class DecodeRun:
    """One launch of decode attention over tables made by the caller.

    addresses: (slots, max_pages) u64. `output`: bf16 bits (rows, width); `exact`: f64 from the stored partial results.
    """

    def __init__(
        self,
        lab: Lab,
        attention: DecodeAttention,
        addresses: Array,
        tiles: list[Tile],
        queries: Array,
        *,
        chunks: int = 0,
        layer: int = 1,
        activation_layout: ActivationLayout = ActivationLayout.FRAGMENT,
    ) -> None:
        num_rows, num_heads, head_dim = queries.shape
        longest = max(tile.first_position + tile.rows for tile in tiles)
        plan = attention.plan(num_rows, len(tiles), longest)
        if chunks:
            plan = _with_chunks(plan, chunks)
        table = np.array([(t.slot, t.first_row, t.rows, t.first_position) for t in tiles], np.int32)
        width = num_heads * head_dim
        inputs = [lab.array(values) for values in (addresses.astype(np.uint64), table, queries)]
        page_table, tile_table, query_buffer = inputs
        scratch = lab.filled(attention.scratch_bytes(plan), 0xFF)
        activations = lab.filled(activation_layout.num_bytes(num_rows, width), 0xFF)
        attention.launch(
            lab.stream,
            layer,
            plan,
            AttentionTables(tile_table.address, page_table.address, addresses.shape[1]),
            queries=query_buffer.address,
            scratch=scratch.address,
            activations=activations.address,
            activation_layout=activation_layout,
        )
        packed = lab.get(activations, np.uint16)
        self.output = unpack_activations(activation_layout, packed, num_rows, width)
        self._partials, self._statistics = _split_scratch(lab.get(scratch, np.float32), plan, num_heads, head_dim)
        for buffer in (*inputs, scratch, activations):
            lab.device.free(buffer)

    def exact(self, row: int) -> Array:
        """(num_heads, head_dim) f64: the stored partial results of a row put together in float64."""
        maximum, total = self._statistics[row, ..., 0], self._statistics[row, ..., 1]
        stored = ~np.isnan(maximum)
        maximum = np.where(stored, maximum, -np.inf).astype(np.float64)
        weight = np.exp2(maximum - maximum.max(axis=-1, keepdims=True))
        values = np.where(stored[..., None], self._partials[row], 0).astype(np.float64)
        mixed = (weight[..., None] * values).sum(axis=1)
        result: Array = mixed / (weight * np.where(stored, total, 0)).sum(axis=1)[:, None]
        return result


def bf16_values(bits: Array) -> Array:
    """f32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def relative_error(got: Array, expected: Array) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _with_chunks(plan: DecodePlan, chunks: int) -> DecodePlan:
    fields = {name: getattr(plan, name) for name in DecodePlan.__slots__}
    return DecodePlan(**{**fields, "chunks": chunks})


def _split_scratch(scratch: Array, plan: DecodePlan, num_heads: int, head_dim: int) -> tuple[Array, Array]:
    entries = plan.scratch_rows * num_heads * plan.max_splits
    shape = (plan.scratch_rows, num_heads, plan.max_splits)
    partials = scratch[: entries * head_dim].reshape(*shape, head_dim)
    statistics = scratch[entries * head_dim : entries * (head_dim + 2)].reshape(*shape, 2)
    return partials, statistics
