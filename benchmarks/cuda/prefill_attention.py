"""Prefill attention on a CUDA device beside the tensor operations that it cannot avoid.

    python -m benchmarks.cuda.prefill_attention [--json FILE] [--kv f16 int8 k8v4 q4] [--sweep]

Shape of Llama-3 8B. Each figure is the median of graph replays, in microseconds for one layer; layers take turns.
Operations: 4 head_dim for each query head, row and cell that the row attends. `floor` is their time at `PEAK`, the
dense f16 rate of an H200 at 1830 MHz; under load the clock is lower. The time is that of both kernels; "blocks alone"
is the first one's, which converts the blocks, beside a copy of the bytes that it reads and writes. --sweep: the cases
of `SWEPT` with other rings, instead of the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _record
from gpu.cuda.activations import ActivationLayout
from gpu.cuda.attention import AttentionTables
from gpu.cuda.device import DeviceBuffer
from gpu.cuda.prefill_attention import PrefillAttention, PrefillPlan, PrefillRing
from gpu.errors import LayoutError
from tests.gpu.lab import Lab
from tests.gpu.paged_attention import make_layout, random_pages, random_queries

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 32, 8, 128, 64
CASES = ((2048, 0), (4096, 0), (8192, 0), (2048, 30_720), (4096, 32_768), (2048, 129_024))
"""(rows, position of the first)."""

SWEPT = ((4096, 0), (4096, 32_768))
BLOCKS_CASE = (4096, 32_768)
"""Its blocks do not fit into the second level cache."""

WARP_CASE = (2048, 0)
MIRROR_CASE = (256, 8192 - 256)
RINGS = tuple(PrefillRing(stages, 4, alternate) for stages in (3, 4) for alternate in (True, False))
DISTINCT_PAGES = 8
PEAK = 989.4e12


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_prefill_attention.json")
    parser.add_argument("--kv", nargs="+", default=["f16", "int8", "k8v4", "q4"])
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    lab = Lab()
    figures: list[dict[str, Any]] = []
    bandwidth = 0.0 if arguments.sweep else lab.copy_bandwidth()
    for kv_format in arguments.kv:
        bench = Bench(lab, kv_format)
        if arguments.sweep:
            bench.sweep()
        else:
            figures += bench.measure_all(bandwidth)
        bench.close()
    if not arguments.sweep:
        _record.write(
            "cuda.prefill_attention", figures, arguments.json, device=lab.device.name, arch=lab.device.arch,
            copy_bandwidth=round(bandwidth),
        )  # fmt: skip
    lab.close()


@dataclass(frozen=True)
class Prompt:
    """Rows of one sequence on the device, ready for launches. buffers: of all that the addresses name."""

    plan: PrefillPlan
    tables: AttentionTables
    queries: int
    activations: int
    scratch: int
    buffers: list[DeviceBuffer]


class Bench:
    """A pool of pages of one format, as large as the longest case needs, filled with copies of a few random pages."""

    def __init__(self, lab: Lab, kv_format: str) -> None:
        self.lab, self.kv_format = lab, kv_format
        self.layout = make_layout(kv_format, HEAD_DIM, PAGE_SIZE, NUM_KV_HEADS, NUM_LAYERS)
        self.num_pages = max(sum(case) for case in CASES) // PAGE_SIZE
        self.random = random_pages(self.layout, DISTINCT_PAGES, 1)
        device = lab.device
        self.pool = device.allocate(self.num_pages * self.layout.page_bytes)
        first = lab.array(self.random)
        for page in range(0, self.num_pages, DISTINCT_PAGES):
            target = self.pool.address + page * self.layout.page_bytes
            device.copy_async(target, first.address, first.num_bytes, lab.stream)
        lab.sync()
        device.free(first)

    def measure_all(self, bandwidth: float) -> list[dict[str, Any]]:
        """All figures of the format. bandwidth: of a copy on the device, bytes per second."""
        figures = [self.measure(self.build(), *case) for case in CASES]
        if self.build().by_warpgroups:
            figures.append(self.measure_blocks(self.build(), *BLOCKS_CASE, bandwidth))
        figures.append(self.measure(self.build("KVALET_NO_WGMMA"), *WARP_CASE, name="without wgmma"))
        pages = sum(MIRROR_CASE) // PAGE_SIZE
        pinned = self.lab.device.pin(pages * self.layout.page_bytes)
        pinned.array.reshape(-1, DISTINCT_PAGES, self.layout.page_bytes)[:] = self.random
        figures.append(self.measure(self.build(), *MIRROR_CASE, name="pages in the mirror", base=pinned.address))
        self.lab.device.unpin(pinned)
        return figures

    def sweep(self) -> None:
        """Print the swept cases with every ring that fits."""
        for ring in RINGS:
            try:
                attention = self.build(ring=ring)
            except LayoutError:
                continue
            print(ring)
            for case in SWEPT:
                self.measure(attention, *case)

    def build(self, *without: str, ring: PrefillRing | None = None) -> PrefillAttention:
        """The launcher."""
        device = self.lab.device
        cells = max(sum(case) for case in CASES)
        return PrefillAttention(
            device.kernels, self.layout, NUM_HEADS, device.num_processors, cells, without=without, ring=ring
        )

    def measure(
        self, attention: PrefillAttention, rows: int, first: int, name: str = "", base: int = 0
    ) -> dict[str, Any]:
        """One prompt of `rows` rows from position `first` on; base: address of the pages, if not the pool."""
        prompt = self._prompt(attention, rows, first, base or self.pool.address)

        def record(stream: Any, index: int) -> None:
            attention.launch(
                stream, index % NUM_LAYERS, prompt.plan, prompt.tables, queries=prompt.queries,
                activations=prompt.activations, activation_layout=ActivationLayout.TILE, scratch=prompt.scratch,
            )  # fmt: skip

        operations = 4 * NUM_HEADS * HEAD_DIM * (rows * first + rows * (rows + 1) // 2)
        micros = self._time_us(record, prompt)
        return _record.figure(
            f"{self.kv_format} {rows} after {first}" + (f", {name}" if name else ""), [micros], "us",
            tflops=round(operations / micros / 1e6, 1), floor=round(operations / PEAK * 1e6, 1),
            percent=round(100 * operations / PEAK * 1e6 / micros, 1),
        )  # fmt: skip

    def measure_blocks(self, attention: PrefillAttention, rows: int, first: int, bandwidth: float) -> dict[str, Any]:
        """What of `measure` brings the blocks from their pages. bandwidth: of a copy, bytes per second."""
        prompt = self._prompt(attention, rows, first, self.pool.address)

        def record(stream: Any, index: int) -> None:
            for part in prompt.plan.rounds:
                attention.convert(stream, index % NUM_LAYERS, part, prompt.tables, prompt.scratch)

        read = self.layout.layer_bytes * ((first + rows) // PAGE_SIZE)
        written = 2 * 2 * HEAD_DIM * NUM_KV_HEADS * (first + rows)
        micros = self._time_us(record, prompt)
        floor = (read + written) / bandwidth * 1e6
        return _record.figure(
            f"{self.kv_format} {rows} after {first}, blocks alone", [micros], "us",
            gb_s=round((read + written) / micros / 1e3, 1), floor=round(floor, 1),
            percent=round(100 * floor / micros, 1),
        )  # fmt: skip

    def _prompt(self, attention: PrefillAttention, rows: int, first: int, base: int) -> Prompt:
        """A prompt whose pages lie in any order from the address `base` on."""
        lab, layout = self.lab, self.layout
        pages = -(-(first + rows) // PAGE_SIZE)
        order = np.random.default_rng(2).permutation(pages).astype(np.uint64)
        table = np.uint64(base) + order * np.uint64(layout.page_bytes)
        starts = range(0, rows, attention.tile_rows)
        plan = attention.plan((0, row, min(attention.tile_rows, rows - row), first + row) for row in reversed(starts))
        buffers = [lab.array(table), lab.array(plan.tiles), lab.array(plan.sequences)]
        buffers.append(lab.array(random_queries(rows, NUM_HEADS, HEAD_DIM, 3)))
        buffers.append(lab.filled(ActivationLayout.TILE.num_bytes(rows, NUM_HEADS * HEAD_DIM)))
        buffers.append(lab.device.allocate(attention.scratch_bytes))
        page_table, tiles, sequences, queries, activations, scratch = (buffer.address for buffer in buffers)
        tables = AttentionTables(tiles, page_table, pages, sequences)
        return Prompt(plan, tables, queries, activations, scratch, buffers)

    def _time_us(self, record: Callable[[Any, int], None], prompt: Prompt) -> float:
        """Median microseconds of one layer; the prompt is freed."""
        micros = self.lab.time_us(record, NUM_LAYERS, replays=7, warmup=2)
        for buffer in prompt.buffers:
            self.lab.device.free(buffer)
        return micros

    def close(self) -> None:
        """Free the pool."""
        self.lab.device.free(self.pool)


if __name__ == "__main__":
    main()
