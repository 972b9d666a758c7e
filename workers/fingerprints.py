"""The fingerprint of a worker: everything that must be equal for its pages to be of use elsewhere."""

from __future__ import annotations

import hashlib

import numpy as np

from gpu.backend import Backend
from gpu.cache import KVCache
from gpu.layout import KVLayout
from gpu.plan import PlanEntry, RowKind, StepPlan
from snapshot_store.fingerprint import FieldValue, Fingerprint, FormatRecord, NumericsRecord
from workers.model_source import LoadedSource

KV_CONVENTIONS = "k-after-rope;zero=+0;int8=rne/127/64;q4=hadamard,signed-max/-8,32;scale=f16"
CPU_NUMERICS_VERSION = 1
CUDA_NUMERICS_VERSION = 1
_PROBE_TOKENS = 24
_PROBE_ROWS = 8


def fingerprint_of(source: LoadedSource, layout: KVLayout, backend: Backend, storage: str) -> Fingerprint:
    """Describe format and numerics. Runs a short probe through the backend, whose cells become part of the numerics.

    storage: how the weights are kept in memory. On the engine's thread or before it starts.
    """
    config = source.config
    scaling = config.rope_scaling
    values: dict[str, FieldValue] = {
        "schema": 1,
        "weights": source.weights_digest,
        "tokenizer": source.bundle.digest,
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": float(config.rms_norm_eps),
        "qkv_bias": int(config.qkv_bias),
        "qk_norm": int(config.qk_norm),
        "rope_theta": float(config.rope_theta),
        "rope_dim": config.rope_dim,
        "rope_pairing": config.rope_pairing.value,
        "rope_scaling": scaling.kind.value,
        "rope_factor": float(scaling.factor),
        "rope_original_context": scaling.original_context,
        "rope_low_freq_factor": float(scaling.low_freq_factor),
        "rope_high_freq_factor": float(scaling.high_freq_factor),
        "page_size": layout.page_size,
        "k_format": layout.k_format.name,
        "k_group_size": layout.k_format.group_size,
        "v_format": layout.v_format.name,
        "v_group_size": layout.v_format.group_size,
        "conventions": KV_CONVENTIONS,
        "shard": "0/1",
    }
    numerics: dict[str, FieldValue] = {
        **backend.numerics,
        "kernel_version": CUDA_NUMERICS_VERSION if backend.name == "cuda" else CPU_NUMERICS_VERSION,
        "weight_storage": storage,
        "probe": probe_digest(backend),
    }
    return Fingerprint(FormatRecord.of(values), NumericsRecord.of(numerics))


def probe_digest(backend: Backend) -> bytes:
    """Digest of the cells of a fixed token list: kernels that compute something else have other numerics."""
    cache: KVCache = backend.cache
    vocab_size = backend.config.vocab_size
    tokens = tuple(int(i) for i in (np.arange(_PROBE_TOKENS) * 7919 + 13) % vocab_size)
    sequence = cache.open()
    try:
        cache.reserve(sequence, _PROBE_TOKENS)
        for first in range(0, _PROBE_TOKENS, _PROBE_ROWS):
            entry = PlanEntry(sequence, RowKind.PREFILL, tokens[first : first + _PROBE_ROWS])
            backend.launch(StepPlan((entry,))).wait()
        page = sequence.pages[0]
        view = cache.memory.mirror.view(page.index * cache.layout.page_bytes, cache.layout.page_bytes)
        return hashlib.blake2b(view, digest_size=16, person=b"kvalet.probe").digest()
    finally:
        cache.close(sequence)
