"""Runs a short reply before a worker is ready, so that no turn waits for a kernel to be compiled."""

from __future__ import annotations

import time

from gpu.backend import Backend
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.sampling import TokenHistory

COMPILED = "kernels compiled:"
"""Begins the log messages that tell how far compiling is; their number follows."""

_ROWS = 8
# Together these pass through every branch of the sampler.
_SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=4, top_p=0.9, min_p=0.01, logprobs=0),
)


def warm_up(backend: Backend) -> float:
    """Prefill and decode a few rows with every kind of sampling; returns prefill rows per second, compiling left out.

    The rate is a lower bound: real prompts have more rows in a step. On the engine's thread or before it starts.
    """
    sequence = backend.cache.open()
    tokens = tuple(index % backend.config.vocab_size for index in range(_ROWS))
    history = TokenHistory(tokens)
    try:
        backend.cache.reserve(sequence, 2 * _ROWS + len(_SAMPLINGS))
        prefill = StepPlan((PlanEntry(sequence, RowKind.PREFILL, tokens),))
        backend.launch(prefill).wait()
        for index, sampling in enumerate(_SAMPLINGS):
            entry = PlanEntry(sequence, RowKind.DECODE, tokens[:1], sampling, index, history)
            backend.launch(StepPlan((entry,))).wait()
        begun = time.monotonic()
        backend.launch(prefill).wait()
        return _ROWS / (time.monotonic() - begun)
    finally:
        backend.cache.close(sequence)
