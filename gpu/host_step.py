"""One engine step computed on the host: shared by the `cpu` and `simulated` backends.

Rows of all entries go through the model together; only rows that are sampled get logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.cache import KVCache, StepCells
from gpu.errors import PlanError
from gpu.plan import EntryResult, PlanEntry, RowKind, StepPlan, StepResult
from gpu.sampling import Sampled, Sampler, SampleRequest, requests_of

if TYPE_CHECKING:
    from gpu.model.config import ModelConfig


class StepModel(Protocol):
    """A model that runs rows of a step: appends and attends every layer through the cache."""

    config: ModelConfig

    def run(
        self, token_ids: NDArray[np.int64], sampled_rows: NDArray[np.int64], cells: StepCells, cache: KVCache
    ) -> NDArray[np.float32]:
        """Logits of the sampled rows: (n, vocab_size) f32. token_ids: (R,) int64, sampled_rows: (n,) int64 growing."""
        ...


@dataclass(slots=True, eq=False)
class ComputedStep:
    """A step whose rows are computed and sampled, before its event. sampled: per entry, in row order."""

    cells: StepCells
    sampled: list[list[Sampled]]


class HostStep:
    """Runs plans on a model and a cache; `compute` then `finish`, in launch order."""

    def __init__(self, model: StepModel, cache: KVCache, sampler: Sampler, max_rows: int) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._max_rows = max_rows

    def compute(self, plan: StepPlan) -> ComputedStep:
        """Append, attend and sample a plan's rows. Raises GpuError before anything is changed when a rule is broken.

        Samples of DECODE and PREFILL entries are added to their history and remembered as the sequence's last.
        """
        token_ids = self._token_ids(plan)
        requests = [requests_of(entry) for entry in plan.entries]
        cells = self._cache.begin_step(plan)
        try:
            logits = self._model.run(token_ids, _sampled_rows(cells, requests), cells, self._cache)
            sampled = self._sample(logits, cells, requests)
        except Exception:
            self._cache.abandon_step(cells)
            raise
        for entry, drawn in zip(plan.entries, sampled, strict=True):
            _remember(entry, drawn)
        return ComputedStep(cells, sampled)

    def finish(self, step: ComputedStep) -> StepResult:
        """The step's event: prove its cells and say what was sampled. Raises UnprovenAppend."""
        errors = self._cache.finish_step(step.cells)
        return StepResult(
            tuple(
                _entry_result(drawn) if error is None else EntryResult((), (), error)
                for drawn, error in zip(step.sampled, errors, strict=True)
            )
        )

    def _token_ids(self, plan: StepPlan) -> NDArray[np.int64]:
        if plan.num_rows > self._max_rows:
            raise PlanError("num_rows", plan.num_rows, f"at most {self._max_rows}")
        ids: list[int] = []
        for entry in plan.entries:
            ids.extend(_entry_tokens(entry))
        token_ids = np.array(ids, np.int64)
        vocab_size = self._model.config.vocab_size
        foreign = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        if len(foreign):
            raise PlanError("tokens", int(foreign[0]), f"within 0 .. {vocab_size - 1}")
        return token_ids

    def _sample(
        self, logits: NDArray[np.float32], cells: StepCells, requests: list[list[SampleRequest]]
    ) -> list[list[Sampled]]:
        counts = [len(rows) for rows in requests]
        usable = np.repeat(cells.nonfinite == 0, counts)
        drawn = iter(
            self._sampler.sample(
                logits if usable.all() else logits[usable],
                [request for rows, bad in zip(requests, cells.nonfinite, strict=True) if not bad for request in rows],
            )
        )
        return [
            [] if bad else [next(drawn) for _ in range(count)]
            for count, bad in zip(counts, cells.nonfinite, strict=True)
        ]


def _entry_tokens(entry: PlanEntry) -> Items[int]:
    if entry.tokens:
        return entry.tokens
    if entry.kind is not RowKind.DECODE or entry.sequence.last_sampled is None:
        raise PlanError("tokens", (), f"{entry.kind.value} of {entry.sequence} has no last sampled token to go on")
    return (entry.sequence.last_sampled,)


def _sampled_rows(cells: StepCells, requests: list[list[SampleRequest]]) -> NDArray[np.int64]:
    ends = cells.tables.row_start[1:]
    rows = [np.arange(end - len(wanted), end) for end, wanted in zip(ends, requests, strict=True)]
    return np.concatenate(rows).astype(np.int64)


def _remember(entry: PlanEntry, drawn: list[Sampled]) -> None:
    entry.sequence.last_sampled = None
    if entry.kind is RowKind.VERIFY or not drawn:
        return
    entry.sequence.last_sampled = drawn[-1].token_id
    if entry.history is not None:
        entry.history.extend([drawn[-1].token_id])


def _entry_result(drawn: list[Sampled]) -> EntryResult:
    logprobs = tuple(sample.logprobs for sample in drawn if sample.logprobs is not None)
    return EntryResult(tuple(sample.token_id for sample in drawn), logprobs)
