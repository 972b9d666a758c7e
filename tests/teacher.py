"""One teacher-forced pass over a committed conversation: what would have been sampled at every output position?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.sampling import TokenHistory
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_reader import fold_token_ids
from workers.model_runtime import ModelRuntime, load_runtime
from workers.settings import WorkerSettings

VERIFY_ROWS = 64


def teacher(model: Path, **settings: Any) -> ModelRuntime:
    """A runtime of its own, with no store and no history."""
    return load_runtime(WorkerSettings(model=model, mirror_mib=64, **settings))


def resampled(
    runtime: ModelRuntime, path: Sequence[TranscriptEntry], samplings: Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    """Compute the last turn's whole id list once; per turn, the ids that sampling gives at its output positions.

    samplings: of each turn. Every row is computed in one sequence, as rows of prefill and verify steps.
    """
    ids = fold_token_ids(path)
    sequence = runtime.backend.cache.open()
    drawn: list[tuple[int, ...]] = []
    try:
        runtime.backend.cache.reserve(sequence, len(ids))
        for index, sampling in enumerate(samplings):
            prefix = fold_token_ids(path[: index + 1])
            num_output = len(path[index].output_ids)
            first = len(prefix) - num_output - 1
            _prefill(runtime, sequence, ids, first)
            history = TokenHistory(prefix[: first + 1])
            drawn.append(_verify(runtime, sequence, ids[first : first + num_output], sampling, history))
    finally:
        runtime.backend.cache.close(sequence)
    return drawn


def _prefill(runtime: ModelRuntime, sequence: Any, ids: Sequence[int], end: int) -> None:
    while sequence.length < end:
        chunk = tuple(ids[sequence.length : min(end, sequence.length + runtime.backend.max_rows)])
        runtime.backend.launch(StepPlan((PlanEntry(sequence, RowKind.PREFILL, chunk),))).wait()


def _verify(
    runtime: ModelRuntime, sequence: Any, tokens: Sequence[int], sampling: SamplingParams, history: TokenHistory
) -> tuple[int, ...]:
    """Rows at the positions before each output id: each draws the id that follows it."""
    drawn: list[int] = []
    while len(drawn) < len(tokens):
        chunk = tuple(tokens[len(drawn) : len(drawn) + min(runtime.backend.max_rows, VERIFY_ROWS)])
        entry = PlanEntry(sequence, RowKind.VERIFY, chunk, sampling, len(drawn), history)
        [result] = runtime.backend.launch(StepPlan((entry,))).wait().entries
        runtime.backend.cache.truncate(sequence, sequence.length)
        history.extend(chunk[1:])
        drawn.extend(result.token_ids)
    return tuple(drawn)
