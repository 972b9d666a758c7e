"""Whole steps on a CUDA device: decode, verify and prefill of the 8B and 1B shapes with random weights.

    python -m benchmarks.cuda.engine [--parts decode,prefill,...] [--json FILE]

Steps go through the backend as the engine drives it: launched one ahead, read one behind, results proven. Rates are
wall clock. `floor`: bytes that a step must read (weights once, K and V of every attended cell) at the copy bandwidth
measured in the same run; for prefill, operations at MATRIX_RATE.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import _record
from benchmarks.cuda.models import RandomSource, llama_1b, llama_8b
from gpu.cache import Sequence
from gpu.cuda.backend import CudaBackend
from gpu.cuda.load import CudaOptions, load_cuda_backend
from gpu.cuda.weight_packing import PackedStorage
from gpu.formats import cache_format
from gpu.layout import KVLayout, default_page_size
from gpu.model.config import ModelConfig
from gpu.model.rope import rope_table
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.sampling import TokenHistory
from tests.gpu.lab import Lab

GREEDY: Final = SamplingParams(temperature=0.0)
MATRIX_RATE: Final = 790e12
"""bf16 operations per second of a large product on this kind of device; floors of prefill are stated against it."""

PREFILL_FORMATS: Final = ("k8v4", "int8")
PACES: Final = {"one at a time": 0.5, "back to back": 0.0}
"""How prompts follow each other in measurements of prefill: seconds before each."""


class Bench:
    """A backend with random weights, and steps on it."""

    def __init__(
        self,
        config: ModelConfig,
        kv_format: str,
        storage: PackedStorage,
        cells: int,
        sequences: int,
        rows: int = 4096,
        device_cells: int | None = None,
    ) -> None:
        fmt = cache_format(kv_format)
        shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        self.layout = KVLayout(*shape, default_page_size(*shape, fmt.k, fmt.v), fmt.k, fmt.v)
        self.config, self.storage, self.kv_format = config, storage, kv_format
        pages = cells // self.layout.page_size + 4 * sequences + 8
        slots = None if device_cells is None else device_cells // self.layout.page_size
        options = CudaOptions(
            storage=storage, mirror_bytes=pages * self.layout.page_bytes, max_sequences=2 * sequences + 2,
            step_rows=rows, attest="off",
            device_kv_bytes=None if slots is None else slots * self.layout.page_bytes,
        )  # fmt: skip
        begun = time.monotonic()
        self.backend: CudaBackend = load_cuda_backend(
            RandomSource(config), config, self.layout, rope_table(config), options
        )
        print(f"loaded in {time.monotonic() - begun:.1f} s: {kv_format}, {storage.name} weights", flush=True)
        self.cache = self.backend.cache
        self._num_filled = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: every matrix but the embedding's other rows."""
        config, per_unit = self.config, self.storage.unit_bytes / (16 * 64)
        width = config.q_width + 2 * config.kv_width
        layer = config.hidden_size * (width + config.q_width + 3 * config.intermediate_size)
        return int((config.num_layers * layer + config.vocab_size * config.hidden_size) * per_unit)

    def floor_s(self, cells: int, bandwidth: float) -> float:
        """Seconds for a step that attends `cells` cells in all. bandwidth: of a copy, read plus written."""
        return (self.weight_bytes + cells * self.layout.cell_bytes) / bandwidth

    def filled(self, num_cells: int) -> Sequence:
        """A sequence of num_cells cells, whole pages of plausible bytes put in as a restore would."""
        sequence = self.cache.open()
        pages = num_cells // self.layout.page_size
        pattern = self._pattern()
        sealed = []
        for fill in self.cache.begin_fill(pages):
            self.cache.prepare_fill(fill)
            fill.buffer[:] = pattern
            self.cache.prove_fill(fill)
            self._num_filled += 1
            sealed.append(self.cache.fill(fill, self._num_filled.to_bytes(16, "little")))
        self.cache.attach(sequence, sealed)
        return sequence

    def prefilled(self, num_cells: int, chunk: int = 4096) -> Sequence:
        """A sequence of random tokens, computed."""
        sequence = self.cache.open()
        self.extend(sequence, num_cells, chunk)
        return sequence

    def extend(self, sequence: Sequence, num_cells: int, chunk: int) -> None:
        """Prefill num_cells more tokens, launched one chunk ahead; pages are poisoned while a chunk runs."""
        ids = np.random.default_rng(num_cells).integers(0, self.config.vocab_size, num_cells).tolist()
        pending: deque[Any] = deque()
        for start in range(0, num_cells, chunk):
            last = start + chunk >= num_cells
            rows = tuple(ids[start : start + chunk])
            params = (GREEDY, 0, TokenHistory(())) if last else ()
            self.cache.reserve(sequence, sequence.length + len(rows))
            pending.append(self.backend.launch(StepPlan((PlanEntry(sequence, RowKind.PREFILL, rows, *params),))))
            if len(pending) > 1:
                self._wait(pending.popleft(), chunk)
        while pending:
            self._wait(pending.popleft(), chunk)

    def rest(self, seconds: float, rows: int) -> None:
        """Let `seconds` go by as an engine without turns does, which poisons the pages of a step of `rows` rows."""
        ends_at = time.perf_counter() + seconds
        while seconds and self.cache.poison_ahead(rows // self.layout.page_size):
            pass
        time.sleep(max(0.0, ends_at - time.perf_counter()))

    def _wait(self, handle: Any, rows: int) -> None:
        while not handle.done() and self.cache.poison_ahead(rows // self.layout.page_size):
            pass
        handle.wait()

    def decode(self, sequences: list[Sequence], num_steps: int) -> list[float]:
        """Seconds between the results of consecutive steps, one row of every sequence each, launched one ahead."""
        for sequence in sequences:
            self.cache.reserve(sequence, sequence.length + num_steps + 2)
        first = True
        pending: deque[Any] = deque()
        times: list[float] = []
        last = time.perf_counter()
        for _ in range(num_steps + 1):
            tokens = (17,) if first else ()
            first = False
            entries = tuple(
                PlanEntry(sequence, RowKind.DECODE, tokens, GREEDY, 1, TokenHistory(())) for sequence in sequences
            )
            pending.append(self.backend.launch(StepPlan(entries)))
            if len(pending) > 1:
                pending.popleft().wait()
                now = time.perf_counter()
                times.append(now - last)
                last = now
        pending.popleft().wait()
        return times[1:]

    def verify(self, sequence: Sequence, rows: int, num_steps: int) -> list[float]:
        """Seconds of steps with `rows` verify rows of one sequence, waited for one by one, then taken back."""
        length = sequence.length
        self.cache.reserve(sequence, length + rows)
        times = []
        for _ in range(num_steps):
            entry = PlanEntry(sequence, RowKind.VERIFY, tuple(range(rows)), GREEDY, 1, TokenHistory(()))
            begun = time.perf_counter()
            self.backend.launch(StepPlan((entry,))).wait()
            times.append(time.perf_counter() - begun)
            self.cache.truncate(sequence, length)
            self.cache.reserve(sequence, length + rows)
        return times

    def drop(self, *sequences: Sequence) -> None:
        """Close sequences and forget their pages."""
        for sequence in sequences:
            pages = [page for page in sequence.pages if page.digest is not None]
            self.cache.close(sequence)
            for page in pages:
                self.cache.drop(self.cache.memory.sealed(page))

    def _pattern(self) -> np.ndarray:
        """A page that computed cells left: scales and codes as they come."""
        sequence = self.prefilled(self.layout.page_size)
        page = self.cache.memory.view(sequence.pages[0]).copy()
        self.cache.close(sequence)
        return page


@contextmanager
def bench(*args: Any, **kwargs: Any) -> Iterator[Bench]:
    """A bench whose device is released afterwards."""
    made = Bench(*args, **kwargs)
    try:
        yield made
    finally:
        made.backend.close()


def rate(
    name: str, times: list[float], tokens: int, floor_s: float, target: float | None = None, **facts: Any
) -> dict[str, Any]:
    """Tokens per second with the floor's rate, the ratio, and the p99 step."""
    rates = [tokens / seconds for seconds in times]
    p99 = sorted(times)[int(len(times) * 0.99)] * 1e3
    median = statistics.median(times)
    shown = {"floor": round(tokens / floor_s, 1), "of_floor": round(floor_s / median, 3), "p99_ms": round(p99, 3)}
    if target is not None:
        shown["target"] = target
    return _record.figure(name, rates, "tokens/s", **shown, **facts)


def measure_decode(bandwidth: float) -> list[dict[str, Any]]:
    """Batch 1 at 1k, 32k, 128k; batch 32 at 4k; verify rows; bf16, int8 and 4-bit weights."""
    figures = []
    with bench(llama_8b(), "k8v4", PackedStorage.BF16, 140_000, 40) as made:
        for cells, target, steps in ((1024, 245.0, 300), (32 * 1024, 205.0, 200), (128 * 1024, None, 100)):
            sequence = made.filled(cells)
            made.decode([sequence], 20)
            figures.append(
                rate(f"decode 8B bf16 k8v4 1 x {cells}", made.decode([sequence], steps), 1,
                     made.floor_s(cells, bandwidth), target)
            )  # fmt: skip
            if cells == 1024:
                figures += _verify(made, sequence)
            made.drop(sequence)
        many = [made.filled(4096) for _ in range(32)]
        made.decode(many, 20)
        times = made.decode(many, 150)
        figures.append(rate("decode 8B bf16 k8v4 32 x 4096", times, 32, made.floor_s(32 * 4096, bandwidth), 4700.0))
        made.drop(*many)
    for storage, target, far in ((PackedStorage.INT8, 390.0, 190.0), (PackedStorage.INT4, 520.0, None)):
        with bench(llama_8b(), "k8v4", storage, 140_000, 4) as made:
            for cells, limit in ((1024, target), (128 * 1024, far)):
                sequence = made.filled(cells)
                made.decode([sequence], 20)
                figures.append(
                    rate(f"decode 8B {storage.name.lower()} k8v4 1 x {cells}", made.decode([sequence], 200), 1,
                         made.floor_s(cells, bandwidth), limit)
                )  # fmt: skip
                made.drop(sequence)
    return figures


def _verify(made: Bench, sequence: Sequence) -> list[dict[str, Any]]:
    made.verify(sequence, 4, 5)
    made.verify(sequence, 1, 5)
    one, four = made.verify(sequence, 1, 60), made.verify(sequence, 4, 60)
    cost = statistics.median(four) / statistics.median(one) - 1
    return [
        _record.figure(
            "4 verify rows over 1", [100 * cost], "%", target="<= 10", one_ms=1e3 * one[0], four_ms=1e3 * four[0]
        )
    ]


def measure_prefill(bandwidth: float) -> list[dict[str, Any]]:
    """4k tokens from nothing, and after 32k; chunks of 4096 and 2048 rows; prompts with a pause before each, as they
    come to an idle device, and back to back, where its power limit lowers the clock."""
    figures = []
    for kv_format in PREFILL_FORMATS:
        with bench(llama_8b(), kv_format, PackedStorage.BF16, 48_000, 6) as made:
            config = made.config
            operations = 2 * made.weight_bytes / 2 * 4096
            for start, target in ((0, 36_000.0), (32 * 1024, 18_000.0)):
                base = made.filled(start) if start else made.cache.open()
                attended = 4 * config.num_layers * config.q_width * 4096 * (start + 2048)
                floor_s = (operations + attended) / MATRIX_RATE
                name = f"prefill 8B bf16 {kv_format} 4096 after {start}"
                for pace, pause in PACES.items():
                    for chunk in (4096, 2048):
                        times = []
                        for repeat in range(5):
                            made.rest(pause, chunk)
                            begun = time.perf_counter()
                            made.extend(base, 4096, chunk)
                            if repeat:
                                times.append(time.perf_counter() - begun)
                            made.cache.truncate(base, start)
                        figures.append(rate(f"{name}, {pace}", times, 4096, floor_s, target, chunk=chunk))
                made.drop(base)
    return figures


def measure_overhead(bandwidth: float) -> list[dict[str, Any]]:
    """1B shape, batch 1: how busy the device is, from the time of a step's work alone."""
    figures = []
    with bench(llama_1b(), "k8v4", PackedStorage.BF16, 8192, 4) as made:
        sequence = made.filled(1024)
        made.decode([sequence], 30)
        times = made.decode([sequence], 500)
        figures.append(rate("decode 1B bf16 k8v4 1 x 1024", times, 1, made.floor_s(1024, bandwidth)))
        made.backend.time_steps = True
        times = made.decode([sequence], 200)
        busy = made.backend.device_s / 201
        share = 100 * busy / statistics.median(times)
        facts = {"target": ">= 85", "device_ms": busy * 1e3, "step_ms": statistics.median(times) * 1e3}
        figures.append(_record.figure("device busy, 1B batch 1", [share], "%", **facts))
    return figures


def measure_mirror(bandwidth: float) -> list[dict[str, Any]]:
    """What mirroring costs: the same steps with the mirror's addresses aimed at device memory, in turn (ABBA)."""
    figures = []
    with bench(llama_8b(), "k8v4", PackedStorage.BF16, 160_000, 40) as made:
        builder, device = made.backend.builder, made.backend.device
        scratch = device.allocate(made.cache.memory.mirror.num_bytes).address
        homes = {"mirror": builder.mirror_address, "scratch": scratch}
        order = ("scratch", "mirror", "mirror", "scratch") * 3
        for count, cells in ((1, 1024), (32, 4096)):
            many = [made.filled(cells) for _ in range(count)]
            made.decode(many, 20)
            times: dict[str, list[float]] = {home: [] for home in homes}
            for home in order:
                builder.mirror_address = homes[home]
                times[home] += made.decode(many, 60)
            builder.mirror_address = homes["mirror"]
            made.drop(*many)
            cost = statistics.median(times["mirror"]) / statistics.median(times["scratch"]) - 1
            figures.append(_record.figure(f"mirror in decode {count} x {cells}", [100 * cost], "%", target="<= 0.5"))
        spent: dict[str, list[float]] = {home: [] for home in homes}
        for home in ("scratch", "mirror", *order):
            builder.mirror_address = homes[home]
            sequence = made.cache.open()
            begun = time.perf_counter()
            made.extend(sequence, 4096, 2048)
            spent[home].append(time.perf_counter() - begun)
            made.cache.close(sequence)
        builder.mirror_address = homes["mirror"]
        cost = statistics.median(spent["mirror"][1:]) / statistics.median(spent["scratch"][1:]) - 1
        figures.append(_record.figure("mirror in prefill 4096", [100 * cost], "%", target="<= 2.5"))
    return figures


PARTS: Final = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "overhead": measure_overhead,
    "mirror": measure_mirror,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_engine.json")
    arguments = parser.parse_args()
    lab = Lab()
    bandwidth, name, arch = lab.copy_bandwidth(), lab.device.name, lab.device.arch
    lab.close()
    figures = [_record.figure("device copy", [bandwidth / 1e12], "TB/s")]
    for part in arguments.parts.split(","):
        figures += PARTS[part](bandwidth)
    _record.write("cuda.engine", figures, arguments.json, device=name, arch=arch)


if __name__ == "__main__":
    main()
