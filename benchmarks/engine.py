"""The engine on the CPU beside llama.cpp and the machine's own limits.

    python -m benchmarks.engine [MODEL] [--threads 2] [--kv f16 k8v4] [--llama-bench PATH] [--out FILE]

llama-bench, if given, runs the same sizes with the same threads between our samples. Floors: reading all packed weights
once (decode), multiply-adds of all weights at the rate of a plain compiled loop in registers (prefill).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks._record import figure, write
from gpu.cache import Sequence
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.sampling import TokenHistory
from workers.model_runtime import ModelRuntime, load_runtime
from workers.settings import WorkerSettings, default_model_path

PROMPT, LONG, BATCH, CHUNK = 512, 4096, 8, 128
STEPS, PREFILLS = 48, 5


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", nargs="+", default=["f16", "k8v4"], help="cache formats")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's benchmark, run beside")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = _floors(arguments.model, arguments.threads)
    for kv_format in arguments.kv:
        figures += _engine(arguments.model, arguments.threads, kv_format)
        if arguments.llama_bench:
            figures += _llama(arguments.llama_bench, arguments.model, arguments.threads, kv_format)
    write("engine", figures, arguments.out, threads=arguments.threads)


class Steps:
    """Steps of a runtime, without turns."""

    def __init__(self, model: Path, threads: int, kv_format: str) -> None:
        settings = WorkerSettings(model=model, kv_format=kv_format, threads=threads, mirror_mib=512, attest="off")
        self.runtime: ModelRuntime = load_runtime(settings)
        self.backend = self.runtime.backend
        vocab_size = self.runtime.source.config.vocab_size
        self.ids = np.random.default_rng(0).integers(0, vocab_size, LONG + 1024).tolist()

    def run(self, sequences: list[Sequence], num_rows: int, kind: RowKind) -> float:
        """One step; its seconds. The last row of each sequence is sampled when decoding."""
        entries = []
        for sequence in sequences:
            self.backend.cache.reserve(sequence, sequence.length + num_rows)
            tokens = tuple(self.ids[sequence.length : sequence.length + num_rows])
            greedy = SamplingParams(0.0) if kind is RowKind.DECODE else None
            entries.append(PlanEntry(sequence, kind, tokens, greedy, 0, TokenHistory(())))
        begun = time.perf_counter()
        self.backend.launch(StepPlan(tuple(entries))).wait()
        return time.perf_counter() - begun

    def prompt(self, num_tokens: int) -> tuple[Sequence, float]:
        """A sequence of `num_tokens` cells and the seconds it took."""
        sequence = self.backend.cache.open()
        seconds = sum(self.run([sequence], CHUNK, RowKind.PREFILL) for _ in range(num_tokens // CHUNK))
        return sequence, seconds


def _engine(model: Path, threads: int, kv_format: str) -> list[dict[str, Any]]:
    steps = Steps(model, threads, kv_format)
    facts = {"kv": kv_format, "engine": "kvalet"}
    steps.backend.cache.close(steps.prompt(PROMPT)[0])
    prefills = []
    for _ in range(PREFILLS):
        sequence, seconds = steps.prompt(PROMPT)
        prefills.append(PROMPT / seconds)
        steps.backend.cache.close(sequence)
    figures = [figure("prefill at 512", prefills, "tokens/s", **facts)]
    batch = [steps.prompt(PROMPT)[0] for _ in range(BATCH)]
    for name, sequences in (("decode at 512", batch[:1]), ("decode 8 x 512", batch)):
        steps.run(sequences, 1, RowKind.DECODE)
        rates = [len(sequences) / steps.run(sequences, 1, RowKind.DECODE) for _ in range(STEPS)]
        figures.append(figure(name, rates, "tokens/s", **facts))
    for sequence in batch:
        steps.backend.cache.close(sequence)
    sequence, _ = steps.prompt(LONG)
    rates = [1 / steps.run([sequence], 1, RowKind.DECODE) for _ in range(STEPS)]
    figures.append(figure("decode at 4096", rates, "tokens/s", **facts))
    steps.runtime.close()
    return figures


def _llama(binary: Path, model: Path, threads: int, kv_format: str) -> list[dict[str, Any]]:
    """llama-bench at the same sizes; k8v4 runs as its q8_0 keys and q4_0 values."""
    cache = {"f16": ("f16", "f16"), "int8": ("q8_0", "q8_0"), "q4": ("q4_0", "q4_0"), "k8v4": ("q8_0", "q4_0")}
    k, v = cache[kv_format]
    common = ["-m", str(model), "-t", str(threads), "-fa", "on", "-ctk", k, "-ctv", v]
    common += ["-o", "json"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
    figures = []
    for name, sizes in (
        ("prefill at 512", ["-r", "3", "-p", str(PROMPT), "-n", "0"]),
        ("decode at 512", ["-r", "3", "-p", "0", "-n", "32", "-d", str(PROMPT)]),
        ("decode at 4096", ["-r", "1", "-p", "0", "-n", "16", "-d", str(LONG)]),
    ):
        command = [str(binary), *common, *sizes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
        [result] = json.loads(done.stdout)
        facts = {"kv": kv_format, "engine": "llama.cpp", "build": result["build_commit"]}
        figures.append(figure(name, result["samples_ts"], "tokens/s", **facts))
    return figures


def _floors(model: Path, threads: int) -> list[dict[str, Any]]:
    """What the machine allows: one read of the weights per step, and multiply-adds that never leave registers."""
    settings = WorkerSettings(model=model, threads=threads, mirror_mib=64, attest="off")
    runtime = load_runtime(settings)
    weights = runtime.source.load_weights()
    matrices = [m for w in weights.layers for m in (w.q, w.k, w.v, w.o, w.gate, w.up, w.down)] + [weights.output_head]
    num_bytes = sum(m.num_bytes for m in matrices)
    num_weights = sum(m.num_rows * m.num_cols for m in matrices)
    layer_weights = num_weights - weights.output_head.num_rows * weights.output_head.num_cols
    runtime.close()
    block = np.ones(64 << 20, np.uint64)
    _together(threads, lambda: _read(block))
    reads = [_timed(threads, lambda: _read(block)) for _ in range(7)]
    bandwidth = [threads * block.nbytes / s / 1e9 for s in reads]
    _together(threads, lambda: _multiply_add(1000))
    adds = [_timed(threads, lambda: _multiply_add(2_000_000)) for _ in range(7)]
    rate = [threads * 2_000_000 * 128 * 2 / s / 1e9 for s in adds]
    gbs, gflops = float(np.median(bandwidth)), float(np.median(rate))
    facts = {"weight_bytes": num_bytes, "weights": num_weights}
    return [
        figure("floor: memory read", bandwidth, "GB/s"),
        figure("limit: f32 multiply-add, plain loop", rate, "GFLOP/s"),
        figure("floor: decode, weights read once", [gbs * 1e9 / num_bytes], "tokens/s", **facts),
        figure("limit: prefill at that rate", [gflops * 1e9 / (2 * layer_weights)], "tokens/s", **facts),
    ]


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _read(block: Any) -> int:
    total = 0
    for i in range(len(block)):
        total ^= block[i]
    return total


@numba.njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _multiply_add(count: int) -> float:
    sums = np.zeros(128, np.float32)
    for _ in range(count):
        for j in range(128):
            sums[j] = sums[j] * np.float32(0.999) + np.float32(0.5)
    return float(sums.sum())


def _timed(threads: int, action: Any) -> float:
    begun = time.perf_counter()
    _together(threads, action)
    return time.perf_counter() - begun


def _together(threads: int, action: Any) -> None:
    workers = [threading.Thread(target=action) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
