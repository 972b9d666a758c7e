"""The forward pass on the CPU without engine and queue: prefill, decode and compilation.

    python -m benchmarks.cpu_kernels [MODEL] [--threads 1 2] [--kv k8v4 f16] [--out results/cpu_kernels.json]

Each sample is one step's wall time in milliseconds. `floor`: one read of all packed weights from memory by as many
threads, what a single decode step cannot go below.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpu.cache import MirrorArena, Sequence
from gpu.cpu.backend import unified_cache
from gpu.cpu.kv_kernels import NumbaKVKernels
from gpu.cpu.threads import CpuThreads
from gpu.formats import cache_format
from gpu.layout import KVLayout, default_page_size
from gpu.model.config import ModelConfig
from gpu.model.forward import HostModel
from gpu.model.load import load_weights, open_source
from gpu.model.rope import rope_table
from gpu.model.tensors import ModelWeights
from gpu.plan import PlanEntry, RowKind, StepPlan
from workers.settings import default_model_path

PROMPT, LONG_PROMPT, CHUNK, BATCH = 512, 4096, 256, 8
STEPS, PREFILLS = 40, 3


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kv", nargs="+", default=["k8v4", "f16"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_kernels.json")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    source = open_source(arguments.model)
    config, weights = source.config, load_weights(source)
    if arguments.first_step:
        _first_step(config, weights)
        return
    samples = [_compile_sample(arguments.model, kind) for kind in ("cold", "warm")]
    for num_threads in arguments.threads:
        samples.append(_sample("floor", num_threads, "", 1, lambda n=num_threads: _read_weights(weights, n), STEPS))
        for kv_format in arguments.kv:
            samples += _measure(Bench(config, weights, kv_format, num_threads))
    _write(arguments.out, samples)


class Bench:
    """A model with a cache, and steps on it."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_format: str, num_threads: int) -> None:
        fmt = cache_format(kv_format)
        shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        layout = KVLayout(*shape, default_page_size(*shape, fmt.k, fmt.v), fmt.k, fmt.v)
        num_pages = (LONG_PROMPT + BATCH * PROMPT + 1024) // layout.page_size + BATCH
        self.kv_format, self.num_threads = kv_format, num_threads
        self.threads = CpuThreads(num_threads)
        mirror, kernels = MirrorArena.allocate(num_pages * layout.page_bytes), NumbaKVKernels(self.threads)
        self.cache = unified_cache(layout, mirror, kernels, rope_table(config), attest="off")
        self.model = HostModel(config, weights, self.threads)
        self.ids = np.random.default_rng(0).integers(0, config.vocab_size, LONG_PROMPT + 1024).tolist()

    def step(self, sequences: list[Sequence], num_rows: int, kind: RowKind) -> None:
        """The next `num_rows` tokens of each sequence; logits of its last row."""
        entries = []
        for sequence in sequences:
            self.cache.reserve(sequence, sequence.length + num_rows)
            tokens = tuple(self.ids[sequence.length : sequence.length + num_rows])
            entries.append(PlanEntry(sequence, kind, tokens))
        cells = self.cache.begin_step(StepPlan(tuple(entries)))
        token_ids = np.array([token for entry in entries for token in entry.tokens], np.int64)
        last_rows = np.arange(1, len(entries) + 1, dtype=np.int64) * num_rows - 1
        self.model.run(token_ids, last_rows, cells, self.cache)
        self.cache.finish_step(cells)

    def prompt(self, num_tokens: int) -> Sequence:
        """A sequence of `num_tokens` cells."""
        sequence = self.cache.open()
        for _ in range(0, num_tokens, CHUNK):
            self.step([sequence], min(CHUNK, num_tokens), RowKind.PREFILL)
        return sequence


def _measure(bench: Bench) -> list[dict[str, Any]]:
    def sample(name: str, tokens: int, run: Callable[[], object], repeats: int) -> dict[str, Any]:
        return _sample(name, bench.num_threads, bench.kv_format, tokens, run, repeats)

    def decode(sequences: list[Sequence]) -> Callable[[], None]:
        return lambda: bench.step(sequences, 1, RowKind.DECODE)

    samples = [sample("prefill_512", PROMPT, lambda: bench.cache.close(bench.prompt(PROMPT)), PREFILLS)]
    batch = [bench.prompt(PROMPT) for _ in range(BATCH)]
    samples.append(sample("decode_512", 1, decode(batch[:1]), STEPS))
    samples.append(sample("decode_8x512", BATCH, decode(batch), STEPS))
    for sequence in batch:
        bench.cache.close(sequence)
    samples.append(sample("decode_4096", 1, decode([bench.prompt(LONG_PROMPT)]), STEPS))
    bench.threads.close()
    return samples


def _sample(
    name: str, num_threads: int, kv_format: str, tokens: int, run: Callable[[], object], repeats: int
) -> dict[str, Any]:
    run()
    raw = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        raw.append(1e3 * (time.perf_counter() - begun))
    median = statistics.median(raw)
    print(f"{name:14} {kv_format:5} {num_threads} threads  {median:9.2f} ms  {1e3 * tokens / median:8.1f} tokens/s")
    return {
        "name": name, "kv": kv_format, "threads": num_threads, "tokens": tokens, "median_ms": round(median, 3),
        "tokens_per_s": round(1e3 * tokens / median, 1), "raw_ms": [round(value, 3) for value in raw],
    }  # fmt: skip


def _read_weights(weights: ModelWeights, num_threads: int) -> None:
    matrices = [m for p in weights.layers for m in (p.q, p.k, p.v, p.o, p.gate, p.up, p.down)] + [weights.output_head]
    parts = [
        part.reshape(-1).view(np.uint64) for m in matrices for part in (m.codes, m.scales, m.minimums) if part.size
    ]
    shares = [parts[index::num_threads] for index in range(num_threads)]
    readers = [threading.Thread(target=lambda share=share: [part.max() for part in share]) for share in shares]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def _first_step(config: ModelConfig, weights: ModelWeights) -> None:
    """One step in this process, for its compilation; prints the seconds it took."""
    begun = time.perf_counter()
    Bench(config, weights, "k8v4", 1).prompt(CHUNK)
    print(time.perf_counter() - begun)


_COLD_FOLDER = tempfile.TemporaryDirectory(prefix="kvalet-bench-")


def _compile_sample(model: Path, kind: str) -> dict[str, Any]:
    """Seconds to the first step of a fresh process: cold with an empty compile cache, then warm."""
    command = [sys.executable, "-m", "benchmarks.cpu_kernels", str(model), "--first-step"]
    environment = os.environ | {"NUMBA_CACHE_DIR": _COLD_FOLDER.name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    seconds = float(done.stdout.split()[-1])
    print(f"first step, {kind}: {seconds:.2f} s")
    return {"name": f"first_step_{kind}", "seconds": round(seconds, 3)}


def _write(path: Path, samples: list[dict[str, Any]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "command": ["python", "-m", "benchmarks.cpu_kernels", *(Path(word).name for word in sys.argv[1:])],
        "commit": commit,
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "python": platform.python_version(),
        "samples": samples,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
