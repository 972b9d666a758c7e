"""Builders for tests of the CPU kernels: products on plain arrays, and models that run steps without an engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gpu.cache import KVCache, MirrorArena, Sequence
from gpu.cpu.backend import unified_cache
from gpu.cpu.kernels import MODE_PLAIN
from gpu.cpu.kv_kernels import NumbaKVKernels
from gpu.cpu.product_task import ProductTask, padded_width
from gpu.cpu.threads import CpuThreads
from gpu.formats import cache_format
from gpu.layout import KVLayout
from gpu.model.config import ModelConfig
from gpu.model.forward import HostModel
from gpu.model.rope import rope_table
from gpu.model.tensors import ModelWeights, WeightMatrix, WeightStorage
from gpu.plan import PlanEntry, RowKind, StepPlan

Floats = NDArray[np.float32]


@cache
def threads_of(num_threads: int) -> CpuThreads:
    """Threads that tests share; they sleep between tasks."""
    return CpuThreads(num_threads)


def matrix_of(storage: WeightStorage, num_rows: int, num_cols: int, seed: int = 0) -> WeightMatrix:
    """A random matrix in any storage, with fp16 scales where it has scales."""
    random = np.random.default_rng(seed)
    if storage in (WeightStorage.F32, WeightStorage.BF16):
        return WeightMatrix.from_f32(random.standard_normal((num_rows, num_cols), np.float32), storage)
    codes = random.integers(0, 16 if storage is WeightStorage.Q4 else 256, (num_rows, num_cols)).astype(np.uint8)
    codes.flat[0] = 15 if storage is WeightStorage.Q4 else 255
    scales, minimums = random.standard_normal((2, num_rows, num_cols // 32)).astype(np.float16).astype(np.float32)
    return WeightMatrix.from_groups(codes, scales, minimums)


def product(x: Floats, matrix: WeightMatrix, num_threads: int = 1, bias: Floats | None = None) -> Floats:
    """x: (R, num_cols) times the matrix, (R, num_rows)."""
    out = np.full((len(x), padded_width(matrix.num_rows)), np.nan, np.float32)
    task = ProductTask(MODE_PLAIN, np.ascontiguousarray(x), [matrix], [out], [bias])
    task.run(threads_of(num_threads), len(x))
    return out[:, : matrix.num_rows]


def same_bits(a: Floats, b: Floats) -> bool:
    """Whether two f32 arrays hold the same bits, signs of zeros included."""
    return a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@dataclass
class ModelLab:
    """A model and its cache."""

    model: HostModel
    cache: KVCache
    mirror: MirrorArena

    def step(self, *parts: tuple[Sequence, Items[int]], kind: RowKind = RowKind.PREFILL) -> list[Floats]:
        """Run one step of several sequences; logits of every row, (rows, vocab_size) per sequence."""
        for sequence, tokens in parts:
            self.cache.reserve(sequence, sequence.length + len(tokens))
        plan = StepPlan(tuple(PlanEntry(sequence, kind, tuple(tokens)) for sequence, tokens in parts))
        cells = self.cache.begin_step(plan)
        ids = np.array([token for _, tokens in parts for token in tokens], np.int64)
        logits = self.model.run(ids, np.arange(len(ids)), cells, self.cache)
        self.cache.finish_step(cells)
        ends = np.cumsum([len(tokens) for _, tokens in parts])
        return [np.array(part) for part in np.split(logits, ends[:-1])]

    def cell_bytes(self, sequence: Sequence) -> bytes:
        """All bytes of the sequence's full pages."""
        size, full = self.cache.layout.page_bytes, sequence.length // self.cache.layout.page_size
        return b"".join(bytes(self.mirror.view(page.index * size, size)) for page in sequence.pages[:full])


def make_model_lab(
    config: ModelConfig, weights: ModelWeights, kv_format: str = "f16", num_threads: int = 1, num_pages: int = 32
) -> ModelLab:
    """A model over a small arena with pages of 16 cells."""
    fmt = cache_format(kv_format)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, fmt.k, fmt.v)
    mirror, threads = MirrorArena.allocate(num_pages * layout.page_bytes), threads_of(num_threads)
    kernels, rope = NumbaKVKernels(threads), rope_table(config, 1024)
    cache = unified_cache(layout, mirror, kernels, rope, attest="always")
    return ModelLab(HostModel(config, weights, threads), cache, mirror)
