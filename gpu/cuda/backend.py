"""The `cuda` backend: steps are queued on a stream; the host reads them one step behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from cuda.core import Event
from numpy.typing import NDArray

from gpu.cache import KVCache
from gpu.cuda.cell_kernels import StepCellKernels
from gpu.cuda.device import CudaDevice, PinnedBuffer
from gpu.cuda.graphs import StepGraphs
from gpu.cuda.memory import CudaMemory
from gpu.cuda.model import DeviceModel
from gpu.cuda.sampling import DeviceSampler
from gpu.cuda.step_builder import ON_DEVICE, BuiltStep, StepBuilder, known_token_ids
from gpu.errors import DeviceFailure, GpuError, NonFiniteInput, PlanError
from gpu.plan import EntryResult, PlanEntry, RowKind, StepPlan, StepResult
from gpu.sampling import Sampled, SampleRequest, requests_of
from gpu.step_cells import StepCells

if TYPE_CHECKING:
    from gpu.model.config import ModelConfig

PIPELINE_DEPTH: Final = 1
STEPS_IN_FLIGHT: Final = PIPELINE_DEPTH + 2
"""Staging and result buffers: the steps that are launched and unread, and the one being built."""


class CudaStep:
    """A launched step; implements `gpu.backend.StepHandle`."""

    def __init__(
        self,
        backend: CudaBackend,
        cells: StepCells,
        requests: list[list[SampleRequest]],
        built: BuiltStep,
        results: PinnedBuffer,
        begin: Event | None,
        event: Event,
    ) -> None:
        self.cells = cells
        self.requests = requests
        self.built = built
        self.results = results
        self.begin = begin
        self.event = event
        self.outcome: StepResult | GpuError | None = None
        self._backend = backend

    def done(self) -> bool:
        """Whether the step's event has passed."""
        return self.outcome is not None or bool(self.event.is_done)

    def wait(self) -> StepResult:
        """Wait for the events up to this step's, in order; the result, or what the step's proof raised."""
        outcome = self.outcome or self._backend.finish(self)
        if isinstance(outcome, GpuError):
            raise outcome
        return outcome


class CudaBackend:
    """Implements `gpu.backend.Backend` on one GPU. Owns the device: `close` releases it.

    device_s: seconds that the device spent on the steps read so far; counted while time_steps is set.
    """

    name = "cuda"
    pipeline_depth = PIPELINE_DEPTH

    def __init__(
        self,
        device: CudaDevice,
        model: DeviceModel,
        kernels: StepCellKernels,
        cache: KVCache,
        memory: CudaMemory,
        builder: StepBuilder,
        sampler: DeviceSampler,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        self.config: ModelConfig = model.config
        self.numerics: Mapping[str, str] = {"backend": "cuda", "architecture": device.arch}
        self.cache = cache
        self.device = device
        self.max_rows = max_rows
        self.graphs = StepGraphs(device.compute)
        self.time_steps = False
        self.device_s = 0.0
        self._model = model
        self._kernels = kernels
        self._memory = memory
        self.builder = builder
        self._sampler = sampler
        self._max_sampled = max_sampled
        self._results = [device.pin(4 * model.num_result_words) for _ in range(STEPS_IN_FLIGHT)]
        self._queue: deque[CudaStep] = deque()
        self._num_launched = 0

    def bind_thread(self) -> None:
        """See `Backend.bind_thread`."""
        self.device.bind()

    def launch(self, plan: StepPlan) -> CudaStep:
        """Queue one step. Raises GpuError before anything is queued when the plan breaks a rule."""
        token_ids = self._token_ids(plan)
        requests = [requests_of(entry) for entry in plan.entries]
        if (num_sampled := sum(map(len, requests))) > self._max_sampled:
            raise PlanError("sampled rows", num_sampled, f"at most {self._max_sampled}")
        for entry in plan.entries:
            self.builder.slots.slot(entry.sequence)
        cells = self.cache.begin_step(plan)
        try:
            step = self._queue_step(cells, token_ids, requests)
            self._sampler.launched(step.built.draws)
        except GpuError:
            self.device.compute.sync()
            self.cache.abandon_step(cells)
            raise
        except Exception as error:  # cuda.core's errors have no public root; whatever it is, the queue is unknown
            raise DeviceFailure(str(error)) from error
        for entry, rows in zip(plan.entries, requests, strict=True):
            entry.sequence.last_sampled = ON_DEVICE if rows and entry.kind is not RowKind.VERIFY else None
        self._queue.append(step)
        return step

    def finish(self, last: CudaStep) -> StepResult | GpuError:
        """Take the results of queued steps, oldest first, up to and with those of `last`."""
        while last.outcome is None:
            step = self._queue.popleft()
            try:
                step.event.sync()
            except Exception as error:
                raise DeviceFailure(str(error)) from error
            if step.begin is not None:
                self.device_s += (step.event - step.begin) * 1e-3
            try:
                step.outcome = self._read(step)
            except GpuError as error:
                step.outcome = error
        return last.outcome

    def close(self) -> None:
        """Wait for queued steps, then release everything in order."""
        self.device.bind()
        while self._queue:
            self.finish(self._queue[-1])
        self.graphs.close()
        self.device.close()

    def _token_ids(self, plan: StepPlan) -> NDArray[np.int64]:
        if plan.num_rows > self.max_rows:
            raise PlanError("num_rows", plan.num_rows, f"at most {self.max_rows}")
        for entry in plan.entries:
            _check_known(entry)
        token_ids = known_token_ids(plan.entries)
        told = np.concatenate([np.full(entry.num_rows, bool(entry.tokens)) for entry in plan.entries])
        foreign = token_ids[told & ((token_ids < 0) | (token_ids >= self.config.vocab_size))]
        if len(foreign):
            raise PlanError("tokens", int(foreign[0]), f"within 0 .. {self.config.vocab_size - 1}")
        return token_ids

    def _queue_step(
        self, cells: StepCells, token_ids: NDArray[np.int64], requests: list[list[SampleRequest]]
    ) -> CudaStep:
        self._memory.order_before_step()
        begin = self._record_event() if self.time_steps else None
        results = self._results[self._num_launched % len(self._results)]
        self._num_launched += 1
        built = self.builder.build(cells, token_ids, requests, results.address)

        def record(stream: Any) -> None:
            self._model.record(stream, built, cells, self.cache, self._kernels)

        if built.shape.skinny:
            self.graphs.launch(built.shape, record)
        else:
            record(self.device.compute)
        return CudaStep(self, cells, requests, built, results, begin, self._record_event())

    def _record_event(self) -> Event:
        event = self.device.create_event(timing=self.time_steps)
        self.device.compute.record(event)
        return event

    def _read(self, step: CudaStep) -> StepResult:
        words = self._model.read_results(step.built.shape, step.results)
        cells, count = step.cells, len(step.cells.entries)
        cells.counts[:] = words.counts[:, :count]
        cells.nonfinite[:] = words.nonfinite[:count]
        sampled = iter(self._sampler.read(words.samples, step.built.draws))
        errors = self.cache.finish_step(cells)
        drawn = [[next(sampled) for _ in rows] for rows in step.requests]
        entries = zip(cells.plan.entries, drawn, errors, strict=True)
        return StepResult(tuple(_entry_result(entry, samples, error) for entry, samples, error in entries))


def _check_known(entry: PlanEntry) -> None:
    """Raise PlanError if a row's token is neither told nor on the device."""
    if not entry.tokens and (entry.kind is not RowKind.DECODE or entry.sequence.last_sampled is None):
        raise PlanError("tokens", (), f"{entry.kind.value} of {entry.sequence} has no last sampled token to go on")


def _entry_result(entry: PlanEntry, drawn: list[Sampled], error: NonFiniteInput | None) -> EntryResult:
    if error is not None:
        return EntryResult((), (), error)
    token_ids = tuple(sample.token_id for sample in drawn)
    if entry.history is not None and entry.kind is not RowKind.VERIFY:
        entry.history.extend(token_ids)
    return EntryResult(token_ids, tuple(sample.logprobs for sample in drawn if sample.logprobs is not None))
