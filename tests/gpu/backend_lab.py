"""Small models on the cuda backend, driven like the labs of the other backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gpu.cuda.backend import CudaBackend
from gpu.cuda.load import CudaOptions, load_cuda_backend
from gpu.cuda.weight_packing import PackedStorage
from gpu.formats import cache_format
from gpu.layout import KVLayout
from gpu.model.config import ModelConfig
from gpu.model.rope import rope_table
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.sampling import TokenHistory
from tests.kv_lab import GREEDY, Lab
from tests.model_files import random_tensors, tiny_config


@dataclass(frozen=True)
class TensorSource:
    """Tensors in memory as a model file."""

    tensors: Mapping[str, np.ndarray]

    def dense(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def vector(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def release(self) -> None:
        """Nothing was read."""


@cache
def tensors_of(config: ModelConfig, seed: int = 1) -> dict[str, np.ndarray]:
    return random_tensors(config, seed)


def layout_of(config: ModelConfig, kv_format: str, page_size: int) -> KVLayout:
    fmt = cache_format(kv_format)
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, fmt.k, fmt.v)


def cuda_backend(
    config: ModelConfig | None = None,
    kv_format: str = "k8v4",
    *,
    page_size: int = 16,
    num_pages: int = 64,
    num_slots: int | None = None,
    resident_cells: int | None = None,
    attest: str = "always",
    step_rows: int = 512,
    max_sequences: int = 40,
    storage: PackedStorage = PackedStorage.BF16,
    source: Any = None,
) -> CudaBackend:
    config = config or tiny_config(vocab_size=512)
    layout = layout_of(config, kv_format, page_size)
    options = CudaOptions(
        storage=storage,
        mirror_bytes=num_pages * layout.page_bytes,
        device_kv_bytes=(num_slots or num_pages) * layout.page_bytes,
        max_sequences=max_sequences,
        step_rows=step_rows,
        attest=attest,
        resident_cells=resident_cells,
    )
    return load_cuda_backend(source or TensorSource(tensors_of(config)), config, layout, rope_table(config), options)


def cuda_lab(*args: Any, **kwargs: Any) -> Lab:
    backend = cuda_backend(*args, **kwargs)
    return Lab(backend, backend.cache.layout)  # type: ignore[arg-type]


class Talk:
    """One sequence that is prefilled, decoded and sealed as an engine would do it."""

    def __init__(self, lab: Lab, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        self.lab = lab
        self.sequence = lab.cache.open()
        self.ids = list(prompt)
        self.params = params
        self.history = TokenHistory(prompt)
        self.num_output = 0

    def prefill_entry(self, num_rows: int) -> PlanEntry:
        start = self.sequence.length
        rows = tuple(self.ids[start : start + num_rows])
        self.lab.cache.reserve(self.sequence, start + len(rows))
        if start + len(rows) < len(self.ids):
            return PlanEntry(self.sequence, RowKind.PREFILL, rows)
        return PlanEntry(self.sequence, RowKind.PREFILL, rows, self.params, self.num_output, self.history)

    def decode_entry(self) -> PlanEntry:
        self.lab.cache.reserve(self.sequence, self.sequence.length + 1)
        return PlanEntry(self.sequence, RowKind.DECODE, (), self.params, self.num_output, self.history)

    def take(self, token_ids: tuple[int, ...]) -> None:
        self.ids.extend(token_ids)
        self.num_output += len(token_ids)


def run_talks(lab: Lab, talks: list[Talk], num_decoded: int, chunk: int = 512) -> None:
    """Prefill in chunks of at most `chunk` rows a step, then decode all together."""
    while waiting := [talk for talk in talks if talk.num_output == 0]:
        entries: list[PlanEntry] = []
        for talk in waiting:
            budget = chunk - sum(entry.num_rows for entry in entries)
            if budget > 0:
                entries.append(talk.prefill_entry(min(budget, len(talk.ids) - talk.sequence.length)))
        result = lab.backend.launch(StepPlan(tuple(entries))).wait()
        for talk, entry in zip(waiting, result.entries, strict=False):
            talk.take(entry.token_ids)
    for _ in range(num_decoded):
        result = lab.backend.launch(StepPlan(tuple(talk.decode_entry() for talk in talks))).wait()
        for talk, entry in zip(talks, result.entries, strict=True):
            talk.take(entry.token_ids)


def page_bytes_of(lab: Lab, talk: Talk) -> bytes:
    """All cells of the sequence's full pages, from the mirror."""
    size, full = lab.layout.page_bytes, talk.sequence.length // lab.layout.page_size
    mirror = lab.cache.memory.mirror
    return b"".join(bytes(mirror.view(page.index * size, size)) for page in talk.sequence.pages[:full])
