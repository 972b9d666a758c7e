"""Append, mirror, page comparison and norms on a CUDA device, each beside the bytes that it cannot avoid.

    python -m benchmarks.cuda.append [--json FILE]

Shapes of Llama-3 8B. Each figure is the median of graph replays, in microseconds for one layer. `floor` is the larger
of device bytes at copy bandwidth and bus bytes at the rate that `mirror_cells` reaches alone; launches (about 0.5 us
each) are not in it. "scratch" aims the mirror addresses at device memory: what the append costs without the bus.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _record
from gpu.cuda.activations import ActivationLayout
from gpu.cuda.rows import DeviceRope, PageKernels, RowTables, rms_norm
from gpu.formats import CACHE_FORMATS
from gpu.layout import KVLayout
from tests.gpu.lab import Lab

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, PAGE_SIZE = 32, 32, 8, 128, 4096, 64
DECODE_ROWS, PREFILL_ROWS = (1, 8, 32), 2048
COMPARED_PAGES = 32
FORMATS = ("f16", "int8", "k8v4")
NORMS = ((1, ActivationLayout.FRAGMENT), (32, ActivationLayout.FRAGMENT), (4096, ActivationLayout.TILE))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_append.json")
    arguments = parser.parse_args()
    lab = Lab()
    bandwidth = lab.copy_bandwidth()
    figures = [_record.figure("device copy", [bandwidth / 1e12], "TB/s")]
    for name in FORMATS:
        for rows in DECODE_ROWS:
            figures += _decode(Bench(lab, name, rows), bandwidth)
        figures += _prefill(Bench(lab, name, PREFILL_ROWS), bandwidth)
        figures += _compare(Bench(lab, name, COMPARED_PAGES * PAGE_SIZE))
    figures += _norms(lab, bandwidth)
    _record.write("cuda.append", figures, arguments.json, device=lab.device.name, arch=lab.device.arch)
    lab.close()


@dataclass(frozen=True)
class Homes:
    """Row tables whose mirror pages are pinned memory, and ones whose mirror pages are device memory."""

    pinned: RowTables
    scratch: RowTables


class Bench:
    """Buffers of a step: decode rows in pages of their own, or prefill rows in consecutive pages."""

    def __init__(self, lab: Lab, name: str, num_rows: int) -> None:
        fmt = CACHE_FORMATS[name]
        self.lab, self.name, self.num_rows = lab, name, num_rows
        self.layout = KVLayout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, fmt.k, fmt.v)
        self.kernels = PageKernels(lab.device.kernels, self.layout)
        device = lab.device
        is_prefill = num_rows > max(DECODE_ROWS)
        page = np.arange(num_rows) // PAGE_SIZE if is_prefill else np.arange(num_rows)
        positions = np.arange(num_rows) if is_prefill else 1000 + 7 * np.arange(num_rows)
        self.num_pages = int(page[-1]) + 1
        num_bytes = self.num_pages * self.layout.page_bytes
        self.mirror, self.slots, scratch = device.pin(num_bytes), device.allocate(num_bytes), device.allocate(num_bytes)
        self.buffers = [self.slots, scratch]
        offsets = page.astype(np.uint64) * np.uint64(self.layout.page_bytes)
        slots, at = self.upload(np.zeros(num_rows, np.int32)), self.upload(positions.astype(np.int32))
        device_pages = self.upload(np.uint64(self.slots.address) + offsets)
        self.homes = Homes(
            *(
                RowTables(slots, at, slots, self.upload(np.uint64(base) + offsets), device_pages)
                for base in (self.mirror.address, scratch.address)
            )
        )
        angles = np.arange(4096)[:, None] * 5e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)[None, :]
        cosines, sines = (self.upload(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        self.rope = DeviceRope(cosines, sines, HEAD_DIM)
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        random = np.random.default_rng(0)
        # Prefill rows take turns among more bytes than the second-level cache holds.
        copies = 3 if is_prefill else 1
        values = random.standard_normal((num_rows, width), np.float32)
        self.qkv = [self.upload(values) for _ in range(copies)]
        self.queries = self.upload(np.zeros(num_rows * NUM_HEADS * HEAD_DIM, np.uint16))
        self.counts, self.nonfinite = self.upload(np.zeros(2, np.int32)), self.upload(np.zeros(1, np.int32))

    def upload(self, values: Any) -> int:
        """Address of a copy that lives as long as the bench."""
        buffer = self.lab.array(values)
        self.buffers.append(buffer)
        return buffer.address

    def append(self, stream: Any, layer: int, tables: RowTables, *, mirror_in_kernel: bool = True) -> None:
        """Queue one layer's append."""
        self.kernels.append(
            stream, layer % NUM_LAYERS, self.num_rows, tables, num_heads=NUM_HEADS, rope=self.rope,
            qkv=self.qkv[layer % len(self.qkv)], queries=self.queries, counts=self.counts,
            nonfinite=self.nonfinite, mirror_in_kernel=mirror_in_kernel,
        )  # fmt: skip

    @property
    def cell_bytes(self) -> int:
        """Bytes of the rows' cells in one layer."""
        return self.num_rows * self.layout.cell_bytes // NUM_LAYERS

    @property
    def device_bytes(self) -> int:
        """Bytes that one layer's append reads and writes in device memory."""
        return self.num_rows * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 4 + NUM_HEADS * 2) * HEAD_DIM + self.cell_bytes

    def close(self) -> None:
        """Free the buffers."""
        self.lab.sync()
        self.lab.device.unpin(self.mirror)
        for buffer in self.buffers:
            self.lab.device.free(buffer)


def _decode(bench: Bench, bandwidth: float) -> list[dict[str, Any]]:
    lab, homes = bench.lab, bench.homes
    floor = bench.device_bytes / bandwidth * 1e6
    figures = []
    for label, tables in (("scratch", homes.scratch), ("mirror", homes.pinned)):
        micros = lab.time_us(lambda stream, i, tables=tables: bench.append(stream, i, tables), NUM_LAYERS)
        figures.append(_us(f"append {bench.name} {label}", micros, floor, rows=bench.num_rows))
    bench.close()
    return figures


def _prefill(bench: Bench, bandwidth: float) -> list[dict[str, Any]]:
    lab, tables, rows = bench.lab, bench.homes.pinned, bench.num_rows
    device_floor = bench.device_bytes / bandwidth * 1e6
    alone = lab.time_us(lambda stream, i: bench.append(stream, i, tables, mirror_in_kernel=False), 8)
    both = lab.time_us(lambda stream, i: bench.append(stream, i, tables), 8)
    copied = lab.time_us(lambda stream, i: bench.kernels.mirror(stream, i, rows, tables, bench.counts), 8)
    bus = bench.cell_bytes / copied * 1e6
    figures = [
        _us(f"append {bench.name} device half", alone, device_floor, rows=rows),
        _us(f"append {bench.name} both in kernel", both, max(device_floor, bench.cell_bytes / bus * 1e6), rows=rows),
        _record.figure(f"mirror_cells {bench.name}", [copied], "us", rows=rows, GB_per_s=round(bus / 1e9, 1)),
    ]
    bench.close()
    return figures


def _compare(bench: Bench) -> list[dict[str, Any]]:
    lab, layout = bench.lab, bench.layout
    starts = np.arange(bench.num_pages, dtype=np.uint64) * np.uint64(layout.page_bytes)
    pages = [bench.upload(np.uint64(base) + starts) for base in (bench.slots.address, bench.mirror.address)]
    cells = bench.upload(np.full(bench.num_pages, PAGE_SIZE, np.int32))
    differing = bench.upload(np.zeros(bench.num_pages, np.int32))
    lab.device.copy_async(bench.slots.address, bench.mirror.address, bench.mirror.num_bytes, lab.stream)
    figures = []
    for num_ctas in (2, 8, 32):
        micros = lab.time_us(
            lambda stream, _, n=num_ctas: bench.kernels.compare(
                stream, pages[0], pages[1], cells, bench.num_pages, differing, n
            ),
            calls=1, replays=5, warmup=1,
        )  # fmt: skip
        rate = bench.mirror.num_bytes / micros / 1e3
        figures.append(_record.figure(f"compare_pages {bench.name}", [rate], "GB/s", ctas=num_ctas))
    bench.close()
    return figures


def _norms(lab: Lab, bandwidth: float) -> list[dict[str, Any]]:
    figures = []
    for rows, layout in (
        (1, ActivationLayout.FRAGMENT),
        (32, ActivationLayout.FRAGMENT),
        (4096, ActivationLayout.TILE),
    ):
        residual = lab.array(np.random.default_rng(0).standard_normal((rows, HIDDEN), np.float32))
        weight, out = lab.array(np.ones(HIDDEN, np.float32)), lab.filled(layout.num_bytes(rows, HIDDEN))

        def record(
            stream: Any, _: int, rows: int = rows, layout: ActivationLayout = layout, at: Any = (residual, weight, out)
        ) -> None:
            rms_norm(
                lab.device.kernels, stream, HIDDEN, rows, residual=at[0].address, weight=at[1].address, eps=1e-5,
                activations=at[2].address, activation_layout=layout,
            )  # fmt: skip

        floor = rows * HIDDEN * 6 / bandwidth * 1e6
        figures.append(_us(f"rms_norm {layout.name}", lab.time_us(record), floor, rows=rows))
        for buffer in (residual, weight, out):
            lab.device.free(buffer)
    return figures


def _us(name: str, micros: float, floor: float, **facts: Any) -> dict[str, Any]:
    return _record.figure(name, [micros], "us", **facts, floor=round(floor, 3), ratio=round(micros / floor, 2))


if __name__ == "__main__":
    main()
