"""Matrix products on a CUDA device beside the bytes or the arithmetic that they cannot avoid.

    python -m benchmarks.cuda.products [--json FILE] [--sweep]

Shapes of Llama-3 8B, all products of a decode step and of a prefill chunk, and the small shapes of Llama-3.2 1B. Times
are medians of graph replays over weights of more bytes than the second-level cache holds. `floor` is the weights'
bytes at copy bandwidth; prefill is in TFLOP/s. --sweep also times the forms and shapes that were not chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _record
from gpu.cuda.activations import ActivationLayout
from gpu.cuda.device import DeviceBuffer
from gpu.cuda.product_plans import (
    WIDE_SHAPES,
    Epilogue,
    ProductCase,
    ProductPlan,
    SkinnyShape,
    choose_skinny_shape,
    skinny_plan,
    wide_plan,
)
from gpu.cuda.products import Products, SourceType, activation_layout, pack_matrix
from gpu.cuda.programs import ProgramCompiler
from gpu.cuda.weight_packing import PackedStorage, PackedWeights, bf16_bits, pack, packed_bytes
from tests.gpu.lab import Lab

# name, epilogue, outputs, width, products of a step
MATRICES_8B = (
    ("qkv", Epilogue.STORE, 6144, 4096, 32),
    ("o", Epilogue.ADD, 4096, 4096, 32),
    ("gate-up", Epilogue.SWIGLU, 28672, 4096, 32),
    ("down", Epilogue.ADD, 4096, 14336, 32),
    ("head", Epilogue.STORE, 128256, 4096, 1),
)
MATRICES_1B = (
    ("qkv", Epilogue.STORE, 3072, 2048, 16),
    ("o", Epilogue.ADD, 2048, 2048, 16),
    ("gate-up", Epilogue.SWIGLU, 16384, 2048, 16),
    ("down", Epilogue.ADD, 2048, 8192, 16),
    ("head", Epilogue.STORE, 128256, 2048, 1),
)
DECODE_ROWS = (1, 8, 16, 32, 64)
PREFILL_ROWS = (512, 2048, 4096)
CACHE_BYTES = 150 << 20
Matrices = tuple[tuple[str, Epilogue, int, int, int], ...]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_products.json")
    parser.add_argument("--sweep", action="store_true", help="time forms and shapes that were not chosen too")
    arguments = parser.parse_args()
    lab = Lab()
    bench = Bench(lab)
    figures = [_record.figure("device copy", [bench.bandwidth / 1e12], "TB/s")]
    bench.compile(bench.chosen(case) for case in _all_cases(lab.device.arch))
    for storage in PackedStorage:
        for rows in DECODE_ROWS:
            figures += _step(bench, "8B", MATRICES_8B, storage, rows)
    figures += _step(bench, "1B", MATRICES_1B, PackedStorage.BF16, 1)
    for rows in PREFILL_ROWS:
        figures += _prefill(bench, PackedStorage.BF16, rows)
    for storage in (PackedStorage.INT8, PackedStorage.INT4):
        figures += _prefill(bench, storage, max(PREFILL_ROWS))
    if arguments.sweep:
        figures += _sweep(bench)
    figures += _packing(bench)
    _record.write("cuda.products", figures, arguments.json, device=lab.device.name, arch=lab.device.arch)
    lab.close()


class Bench:
    """Random weights and activations, big enough for every case, and the timing of plans."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.bandwidth = lab.copy_bandwidth()
        self.products = Products(lab.device.kernels, lab.device.num_processors)
        largest = packed_bytes(PackedStorage.BF16, 128256, 4096)
        self.weights = {storage: self._weights(storage, largest) for storage in PackedStorage}
        values = np.random.default_rng(1).normal(0, 1, 1 << 20).astype(np.float32)
        size = ActivationLayout.TILE.num_bytes(max(PREFILL_ROWS), 14336)
        # Any bf16 values are activations, in either layout.
        self.activations = lab.array(np.resize(bf16_bits(values), size // 2))
        # As large as the widest f32 output, for every row.
        self.output = lab.filled(max(PREFILL_ROWS) * 28672 * 4, 0)

    def chosen(self, case: ProductCase) -> ProductPlan:
        """What the engine would launch."""
        return self.products.plan(case)

    def compile(self, plans: Iterable[ProductPlan]) -> None:
        """Compile variants side by side into the disk cache."""
        compiler = ProgramCompiler(self.lab.device.arch)
        variants = {(plan.source.file, tuple(sorted(plan.parameters.items()))): plan for plan in plans}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda plan: compiler.compile(plan.source, plan.parameters), variants.values()))

    def time_us(self, case: ProductCase, plan: ProductPlan) -> float:
        """Median time of a call; calls take turns among copies of the weights."""
        size = packed_bytes(case.storage, case.num_outputs, case.width)
        copies = min(max(1, -(-CACHE_BYTES // size)), self.weights[case.storage].num_bytes // size)
        base = self.weights[case.storage].address
        matrices = [
            PackedWeights(base + index * size, case.storage, case.num_outputs, case.width) for index in range(copies)
        ]
        source = self.activations.address
        calls = 20 if case.num_rows <= 64 else 4

        def record(stream: Any, index: int) -> None:
            weights = matrices[index % copies]
            plan.launch(self.lab.device.kernels, stream, weights, source, self.output.address, case.num_rows)

        return self.lab.time_us(record, calls, replays=9, warmup=3)

    def _weights(self, storage: PackedStorage, num_bytes: int) -> DeviceBuffer:
        """Packed units of random values, repeated: any run of whole units is a matrix."""
        values = np.random.default_rng(0).normal(0, 0.02, (512, 4096)).astype(np.float32)
        block = pack(storage, values).ravel()
        buffer = self.lab.device.allocate(num_bytes * storage.unit_bytes // 2048 + block.nbytes)
        source = self.lab.array(block)
        for start in range(0, buffer.num_bytes - block.nbytes + 1, block.nbytes):
            self.lab.device.copy_async(buffer.address + start, source.address, block.nbytes, self.lab.stream)
        self.lab.sync()
        self.lab.device.free(source)
        return buffer


def _case(storage: PackedStorage, rows: int, epilogue: Epilogue, outputs: int, width: int, arch: str) -> ProductCase:
    """SwiGLU writes what the product after it, with `width` outputs, reads."""
    layout = activation_layout(arch, rows, width) if epilogue is Epilogue.SWIGLU else ActivationLayout.FRAGMENT
    return ProductCase(storage, epilogue, rows, outputs, width, layout)


def _all_cases(arch: str) -> Iterator[ProductCase]:
    for storage in PackedStorage:
        for rows in (*DECODE_ROWS, *PREFILL_ROWS):
            for _, epilogue, outputs, width, _ in MATRICES_8B:
                if rows <= max(DECODE_ROWS) or outputs < 100_000:
                    yield _case(storage, rows, epilogue, outputs, width, arch)


def _step(bench: Bench, model: str, matrices: Matrices, storage: PackedStorage, rows: int) -> list[dict[str, Any]]:
    figures, total, floors = [], 0.0, 0.0
    for name, epilogue, outputs, width, count in matrices:
        case = _case(storage, rows, epilogue, outputs, width, bench.lab.device.arch)
        micros = bench.time_us(case, bench.chosen(case))
        floor = packed_bytes(storage, outputs, width) / bench.bandwidth * 1e6
        total, floors = total + micros * count, floors + floor * count
        figures.append(_us(f"{model} {storage.name} {name}", micros, floor, rows=rows))
    figures.append(_us(f"{model} {storage.name} step", total, floors, rows=rows))
    return figures


def _prefill(bench: Bench, storage: PackedStorage, rows: int) -> list[dict[str, Any]]:
    figures, micros_total, work_total = [], 0.0, 0.0
    for name, epilogue, outputs, width, _ in MATRICES_8B[:-1]:
        case = _case(storage, rows, epilogue, outputs, width, bench.lab.device.arch)
        micros, work = bench.time_us(case, bench.chosen(case)), 2 * rows * outputs * width
        micros_total, work_total = micros_total + micros, work_total + work
        rate = work / micros / 1e6
        figures.append(_record.figure(f"8B {storage.name} {name} many rows", [rate], "TFLOP/s", rows=rows))
    rate = work_total / micros_total / 1e6
    figures.append(_record.figure(f"8B {storage.name} layer many rows", [rate], "TFLOP/s", rows=rows))
    return figures


def _packing(bench: Bench) -> list[dict[str, Any]]:
    """A matrix of 28672 x 4096 from bf16, over the weights of the measurements before."""
    figures, lab, source = [], bench.lab, bench.output.address
    for storage in PackedStorage:
        packed = PackedWeights(bench.weights[storage].address, storage, 28672, 4096)

        def record(stream: Any, _: int, packed: PackedWeights = packed) -> None:
            pack_matrix(lab.device.kernels, stream, source, SourceType.BF16, 28672, packed)

        floor = (28672 * 4096 * 2 + packed_bytes(storage, 28672, 4096)) / bench.bandwidth * 1e6
        figures.append(_us(f"pack {storage.name}", lab.time_us(record, 2, 5, 2), floor, rows=28672))
    return figures


def _sweep(bench: Bench) -> list[dict[str, Any]]:
    """Other variants of the 8B matrices at few rows, and of block shapes at more."""
    arch, processors = bench.lab.device.arch, bench.lab.device.num_processors
    candidates: list[tuple[str, ProductCase, ProductPlan]] = []
    for storage in PackedStorage:
        for name, epilogue, outputs, width, _ in MATRICES_8B[:-1]:
            for rows in (1, 8, 32, 64):
                case = _case(storage, rows, epilogue, outputs, width, arch)
                chosen = choose_skinny_shape(case, arch, processors)
                for shape in _neighbours(chosen, storage, epilogue):
                    label = f"tiles={shape.tiles} units={shape.units} stages={shape.stages} prefetch={shape.prefetch}"
                    candidates.append((f"{storage.name} {name} {label}", case, skinny_plan(case, shape)))
            for rows in (32, 64, 128, 256, 512, 2048, 4096):
                case = _case(storage, rows, epilogue, outputs, width, arch)
                for wide in WIDE_SHAPES if arch == "sm_90a" else ():
                    if (storage is PackedStorage.BF16 or wide.rows <= 96) and (rows > 512) <= (wide.rows >= 96):
                        label = f"block={wide.rows}x{wide.warpgroups}"
                        candidates.append((f"{storage.name} {name} {label}", case, wide_plan(case, wide, processors)))
    bench.compile(plan for _, _, plan in candidates)
    figures = []
    for label, case, plan in candidates:
        micros = bench.time_us(case, plan)
        floor = packed_bytes(case.storage, case.num_outputs, case.width) / bench.bandwidth * 1e6
        rate = 2 * case.num_rows * case.num_outputs * case.width / micros / 1e6
        figures.append(_us(label, micros, floor, rows=case.num_rows, tflops=round(rate)))
    return figures


def _neighbours(chosen: SkinnyShape, storage: PackedStorage, epilogue: Epilogue) -> list[SkinnyShape]:
    """The chosen shape and others around it whose rings fit two to a processor."""
    shapes = []
    for tiles in (1, 2) if epilogue is not Epilogue.SWIGLU else (2,):
        for units in (1, 2, 4, 8):
            for stages in (2, 3, 4):
                shape = SkinnyShape(
                    chosen.row_groups, tiles, units, stages, min(chosen.prefetch, 2 * units), chosen.ctas
                )
                if 48 << 10 <= shape.ring_bytes(storage) <= 112 << 10:
                    shapes.append(shape)
    return shapes


def _us(name: str, micros: float, floor: float, **facts: Any) -> dict[str, Any]:
    return _record.figure(name, [micros], "us", **facts, floor=round(floor, 3), ratio=round(micros / floor, 2))


if __name__ == "__main__":
    main()
