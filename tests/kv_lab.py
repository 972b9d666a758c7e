"""A small model and builders for tests of the KV cache. The model is elementwise, so its bits are stable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gpu.cache import FillPage, HoldKind, KVCache, MirrorArena, SealedPage, Sequence
from gpu.cpu.backend import CpuBackend, unified_cache
from gpu.formats import cache_format
from gpu.kv_kernels import KVKernels, RopeTable
from gpu.layout import KVLayout
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan, StepResult
from gpu.reference import ReferenceKVKernels
from gpu.sampling import Sampled, SampleRequest, TokenHistory
from gpu.simulated import SimulatedBackend
from gpu.step_cells import StepCells

FORMATS = ("f16", "int8", "q4", "k8v4")
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class LabConfig:
    """What backends need to know of a model."""

    vocab_size: int = 128


@cache
def layout_of(kv_format: str, page_size: int = 16, num_layers: int = 2, num_kv_heads: int = 2) -> KVLayout:
    fmt = cache_format(kv_format)
    return KVLayout(num_layers, num_kv_heads, 64, page_size, fmt.k, fmt.v)


@cache
def rope_table(max_position: int = 4096, rope_dim: int = 64, pairing: str = "half") -> RopeTable:
    angles = np.arange(max_position)[:, None] * 10000.0 ** (-np.arange(rope_dim // 2) / (rope_dim // 2))[None, :]
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), cast(Any, pairing))


@cache
def kernels_of(name: str) -> KVKernels:
    if name == "reference":
        return ReferenceKVKernels()
    from gpu.cpu.kv_kernels import NumbaKVKernels
    from gpu.cpu.threads import CpuThreads

    return NumbaKVKernels(CpuThreads(1))


class ChainModel:
    """Each layer's K, V and query are the hidden state times a constant; attention is added to the state."""

    def __init__(self, layout: KVLayout, vocab_size: int = 128) -> None:
        random = np.random.default_rng(7)
        self.config: Any = LabConfig(vocab_size)
        shape = (layout.num_kv_heads, layout.head_dim)
        self.embedding = random.standard_normal((vocab_size, *shape), np.float32)
        self.k, self.v, self.q = (random.standard_normal((layout.num_layers, *shape), np.float32) for _ in range(3))
        self.num_layers = layout.num_layers
        self.spoil_position: int | None = None

    def run(
        self, token_ids: NDArray[np.int64], sampled_rows: NDArray[np.int64], cells: StepCells, cache: KVCache
    ) -> NDArray[np.float32]:
        state = self.embedding[token_ids]
        for layer in range(self.num_layers):
            k, v = state * self.k[layer], state * self.v[layer]
            if self.spoil_position is not None:
                k[cells.rows.positions == self.spoil_position] = np.nan
            cache.append(cells.at(layer), k, v)
            query = np.repeat(state * self.q[layer], 2, axis=1)
            out = np.empty_like(query)
            cache.attend(cells.at(layer), query, out)
            state = np.float32(0.5) * state + out[:, 0::2] + np.float32(0.25) * out[:, 1::2]
        return state.reshape(len(token_ids), -1)[sampled_rows][:, : self.config.vocab_size]


class ArgMax:
    """A sampler: the first largest logit."""

    def sample(self, logits: NDArray[np.float32], requests: list[SampleRequest]) -> list[Sampled]:
        return [Sampled(int(row.argmax()), None) for row in logits]


@dataclass
class Lab:
    """A backend over a small arena, and shorthands for steps."""

    backend: CpuBackend | SimulatedBackend
    layout: KVLayout
    history: TokenHistory = field(default_factory=lambda: TokenHistory(()))

    @property
    def cache(self) -> KVCache:
        return self.backend.cache

    def entry(
        self, sequence: Sequence, tokens: Items[int], kind: RowKind = RowKind.PREFILL, *, sample: bool = False
    ) -> PlanEntry:
        params = GREEDY if sample else None
        return PlanEntry(sequence, kind, tuple(tokens), params, 0, self.history if sample else None)

    def step(self, sequence: Sequence, tokens: Items[int], kind: RowKind = RowKind.PREFILL) -> StepResult:
        """Reserve, launch and wait for one entry; samples where the kind does."""
        self.cache.reserve(sequence, sequence.length + max(1, len(tokens)))
        sample = kind is not RowKind.PREFILL
        return self.backend.launch(StepPlan((self.entry(sequence, tokens, kind, sample=sample),))).wait()

    def seal_all(self, sequence: Sequence, tokens: Items[int], salt: str = "") -> list[SealedPage]:
        """Seal every sealable page; digests follow from the tokens."""
        digests = chain(tokens, self.layout.page_size, salt)
        return [self.cache.seal(sequence, index, digests[index]) for index in self.cache.sealable(sequence)]

    def restore(self, store: dict[bytes, bytes], digests: Items[bytes]) -> list[SealedPage]:
        """Fill one page per digest from stored bytes."""
        restored = []
        for filled, digest in zip(self.cache.begin_fill(len(digests)), digests, strict=True):
            self.cache.prepare_fill(filled)
            filled.buffer[:] = store[digest]
            self.cache.prove_fill(filled)
            restored.append(self.cache.fill(filled, digest))
        return restored

    def filled(self) -> FillPage:
        """A page of zeros that is ready for `fill`."""
        [filled] = self.cache.begin_fill(1)
        self.cache.prepare_fill(filled)
        filled.buffer[:] = bytes(filled.buffer.nbytes)
        self.cache.prove_fill(filled)
        return filled


def make_lab(
    kv_format: str = "f16",
    *,
    backend: str = "simulated",
    kernels: str = "reference",
    num_pages: int = 16,
    resident_cells: int | None = None,
    attest: str = "always",
    model: Any = None,
    sampler: Any = None,
    num_slots: int | None = None,
    rope: RopeTable | None = None,
) -> Lab:
    layout = layout_of(kv_format)
    mirror = MirrorArena.allocate(num_pages * layout.page_bytes)
    model = model or ChainModel(layout)
    sampler = sampler or ArgMax()
    kv_kernels, rope = kernels_of(kernels), rope or rope_table()
    if backend == "cpu":
        cache = unified_cache(layout, mirror, kv_kernels, rope, attest=attest, resident_cells=resident_cells)
        return Lab(CpuBackend(model, cache, sampler, 256), layout)
    return Lab(
        SimulatedBackend(
            model,
            layout,
            mirror,
            kv_kernels,
            rope,
            sampler,
            256,
            attest=attest,
            resident_cells=resident_cells,
            num_slots=num_slots,
        ),
        layout,
    )


def chain(tokens: Items[int], page_size: int, salt: str = "") -> list[bytes]:
    """A digest per full page of `tokens`, each tied to all tokens before it."""
    digest, digests = salt.encode(), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        block = ",".join(map(str, tokens[start : start + page_size])).encode()
        digest = hashlib.blake2b(digest + b"|" + block, digest_size=16).digest()
        digests.append(digest)
    return digests


def park(lab: Lab, sequence: Sequence, tokens: Items[int], salt: str = "") -> dict[bytes, bytes]:
    """Seal and copy out all full pages of a sequence, as an upload would."""
    stored = {}
    lab.seal_all(sequence, tokens, salt)
    for digest in chain(tokens, lab.layout.page_size, salt)[: sequence.num_sealed]:
        sealed = lab.cache.lookup(digest)
        if sealed is None:
            raise KeyError(digest)
        lab.cache.hold(sealed, HoldKind.UPLOAD)
        stored[digest] = bytes(sealed.buffer)
        lab.cache.release(sealed, HoldKind.UPLOAD)
    return stored
