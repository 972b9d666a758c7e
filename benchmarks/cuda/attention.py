"""Decode attention on a CUDA device beside the bytes of K and V that it has to read.

    python -m benchmarks.cuda.attention [--json FILE] [--kv f16 int8 k8v4 q4] [--sweep]

Shape of Llama-3 8B. Each figure is the median of graph replays, in microseconds for one layer; layers and sequences
take turns, so that nothing is read from the second-level cache. `floor` is the bytes of K and V at the copy bandwidth
of the same run, or at `BUS_RATE` for pages in host memory. "attend" is the attention kernel alone, "both" with the
fold. --sweep: some cases with other rings, instead of the figures.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _record
from gpu.cuda.activations import ActivationLayout
from gpu.cuda.attention import AttentionTables, DecodeAttention
from gpu.cuda.attention_rings import BlockRing, DecodeRing, HalfRing
from gpu.cuda.programs import ProgramCompiler
from tests.gpu.lab import Lab
from tests.gpu.paged_attention import make_layout, random_pages, random_queries

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 32, 8, 128, 64
CASES = ((1, 131_072), (32, 4096), (8, 32_768), (1, 32_768), (1, 4096), (1, 1024), (32, 1024))
"""(sequences, cells of each)."""

VERIFY_ROWS, VERIFY_CELLS = 4, (131_072, 32_768, 1024)
MIRROR_CELLS = 8192
BUS_RATE = 51.2e9
DISTINCT_PAGES = 8
SECOND_LEVEL_CACHE = 60e6
RINGS: dict[int, tuple[DecodeRing, ...]] = {
    1: (
        *(DecodeRing(2, 1, 8, padding) for padding in (0, 32)),
        *(DecodeRing(*stages, 8) for stages in ((1, 1), (1, 2), (2, 2), (3, 2))),
        *(DecodeRing(*stages, 12) for stages in ((1, 1), (2, 1), (1, 2))),
        DecodeRing(2, 1, 10),
        DecodeRing(2, 2, 11),
    ),
    VERIFY_ROWS: tuple(
        DecodeRing(*ring) for ring in ((1, 1, 8), (1, 2, 8), (2, 1, 6), (2, 1, 7), (2, 1, 8), (2, 2, 8), (2, 1, 8, 32))
    ),
}
"""What --sweep tries for one row and for rows of verify, as far as it fits."""

HALF_RINGS = (HalfRing(3, 2), HalfRing(2, 3))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_attention.json")
    parser.add_argument("--kv", nargs="+", default=["f16", "int8", "k8v4", "q4"])
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    lab = Lab()
    bandwidth = lab.copy_bandwidth()
    figures = [_record.figure("device copy", [bandwidth / 1e12], "TB/s")]
    for kv_format in arguments.kv:
        bench = Bench(lab, kv_format)
        if arguments.sweep:
            bench.sweep(bandwidth)
            bench.close()
            continue
        for sequences, cells in CASES:
            figures += bench.measure(sequences, cells, 1, bandwidth)
        for cells in VERIFY_CELLS:
            figures += bench.measure(1, cells, VERIFY_ROWS, bandwidth)
        figures += bench.measure_mirror()
        bench.close()
    if not arguments.sweep:
        _record.write("cuda.attention", figures, arguments.json, device=lab.device.name, arch=lab.device.arch)
    lab.close()


class Bench:
    """A pool of pages of one format, as large as the largest case needs, filled with copies of a few random pages."""

    def __init__(self, lab: Lab, kv_format: str) -> None:
        self.lab, self.kv_format = lab, kv_format
        self.layout = make_layout(kv_format, HEAD_DIM, PAGE_SIZE, NUM_KV_HEADS, NUM_LAYERS)
        device = lab.device
        self.attention = DecodeAttention(device.kernels, self.layout, NUM_HEADS, device.num_processors)
        self.num_pages = max(sequences * cells for sequences, cells in CASES) // PAGE_SIZE
        self.random = random_pages(self.layout, DISTINCT_PAGES, 1)
        self.pool = device.allocate(self.num_pages * self.layout.page_bytes)
        first = lab.array(self.random)
        for page in range(0, self.num_pages, DISTINCT_PAGES):
            target = self.pool.address + page * self.layout.page_bytes
            device.copy_async(target, first.address, first.num_bytes, lab.stream)
        lab.sync()
        device.free(first)

    def measure(self, sequences: int, cells: int, rows: int, bandwidth: float) -> list[dict[str, Any]]:
        """Both figures of a case; rows: of each sequence, at its last positions."""
        floor = sequences * cells * self.layout.cell_bytes / NUM_LAYERS / bandwidth * 1e6
        return self._time(f"{self.kv_format} {sequences} x {cells}", self.pool.address, sequences, cells, rows, floor)

    def sweep(self, bandwidth: float) -> None:
        """Print some cases with every ring that fits."""
        device, chosen = self.lab.device, self.attention
        tried: list[tuple[int, int, BlockRing, DecodeAttention]] = []
        for rows, rings in RINGS.items():
            for ring in rings if self.layout.k_format.group_size else HALF_RINGS:
                attention = DecodeAttention(device.kernels, self.layout, NUM_HEADS, device.num_processors, ring)
                tiles = attention.plan(rows, 1, PAGE_SIZE, rows).query_tiles
                variant = attention.decode_variant(tiles)
                if ring.shared_bytes(self.layout, tiles) <= variant["SHARED_BYTES"]:
                    tried.append((rows, tiles, ring, attention))
        compiler = ProgramCompiler(device.arch)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: compiler.compile(one[3].decode_source(), one[3].decode_variant(one[1])), tried))
        for rows, _, ring, attention in tried:
            self.attention = attention
            print(ring)
            if rows == 1:
                for sequences, cells in CASES[:2]:
                    self.measure(sequences, cells, 1, bandwidth)
                self.measure_mirror()
            else:
                for cells in VERIFY_CELLS[:2]:
                    self.measure(1, cells, rows, bandwidth)
        self.attention = chosen

    def measure_mirror(self) -> list[dict[str, Any]]:
        """A sequence whose pages all lie in host memory."""
        pages = MIRROR_CELLS // PAGE_SIZE
        pinned = self.lab.device.pin(pages * self.layout.page_bytes)
        pinned.array.reshape(-1, DISTINCT_PAGES, self.layout.page_bytes)[:] = self.random
        floor = MIRROR_CELLS * self.layout.cell_bytes / NUM_LAYERS / BUS_RATE * 1e6
        figures = self._time(f"{self.kv_format} mirror 1 x {MIRROR_CELLS}", pinned.address, 1, MIRROR_CELLS, 1, floor)
        self.lab.device.unpin(pinned)
        return figures

    def _time(self, name: str, base: int, sequences: int, cells: int, rows: int, floor: float) -> list[dict[str, Any]]:
        lab, attention, layout = self.lab, self.attention, self.layout
        pages = cells // PAGE_SIZE
        # Sets of sequences take turns where one set's layers fit into the cache.
        needed = SECOND_LEVEL_CACHE * 3 // (sequences * pages * layout.page_bytes) + 1
        sets = int(min(needed, max(1, self.num_pages // (sequences * pages))))
        order = np.random.default_rng(2).permutation(sets * sequences * pages).astype(np.uint64)
        table = np.uint64(base) + order.reshape(sets, sequences, pages) * np.uint64(layout.page_bytes)
        tiles = [[(slot, slot * rows, rows, cells - rows) for slot in range(sequences)]]
        plan = attention.plan(sequences * rows, sequences, cells, rows)
        buffers = [lab.array(table), lab.array(np.array(tiles, np.int32))]
        buffers.append(lab.array(random_queries(sequences * rows, NUM_HEADS, HEAD_DIM, 3)))
        buffers.append(lab.device.allocate(attention.scratch_bytes(plan)))
        buffers.append(lab.filled(ActivationLayout.FRAGMENT.num_bytes(sequences * rows, NUM_HEADS * HEAD_DIM)))
        page_table, tile_table, queries, scratch, activations = (buffer.address for buffer in buffers)

        def attend(stream: Any, index: int) -> None:
            place = page_table + index // NUM_LAYERS % sets * sequences * pages * 8
            tables = AttentionTables(tile_table, place, pages)
            attention.attend(stream, index % NUM_LAYERS, plan, tables, queries=queries, scratch=scratch)

        def both(stream: Any, index: int) -> None:
            attend(stream, index)
            tables = AttentionTables(tile_table, page_table, pages)
            attention.fold(
                stream, plan, tables, scratch=scratch, activations=activations,
                activation_layout=ActivationLayout.FRAGMENT,
            )  # fmt: skip

        # Long calls need no whole round of layers; short ones take every set in turn.
        calls = 8 if floor > 1000 else NUM_LAYERS * sets if floor < 50 else NUM_LAYERS
        figures = []
        for part, record in (("attend", attend), ("both", both)):
            micros = lab.time_us(record, calls, replays=9, warmup=2)
            figures.append(
                _record.figure(
                    f"{name} {part}", [micros], "us", rows=rows, chunks=plan.chunks, floor=round(floor, 2),
                    percent=round(100 * floor / micros, 1),
                )
            )  # fmt: skip
        for buffer in buffers:
            lab.device.free(buffer)
        return figures

    def close(self) -> None:
        """Free the pool."""
        self.lab.device.free(self.pool)


if __name__ == "__main__":
    main()
