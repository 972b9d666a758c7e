"""The `cpu` backend: a step is computed inside `launch`, and the mirror page is itself the resident copy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpu.cache import KVCache
from gpu.cell_kernels import HostCellKernels
from gpu.cpu.threads import CpuThreads
from gpu.device_memory import UnifiedMemory
from gpu.errors import GpuError
from gpu.host_step import HostStep, StepModel
from gpu.kv_kernels import KVKernels, RopeTable
from gpu.layout import KVLayout
from gpu.mirror import MirrorArena
from gpu.plan import StepPlan, StepResult
from gpu.sampling import Sampler

if TYPE_CHECKING:
    from gpu.model.config import ModelConfig


def unified_cache(
    layout: KVLayout,
    mirror: MirrorArena,
    kernels: KVKernels,
    rope: RopeTable,
    *,
    attest: str = "sampled",
    resident_cells: int | None = None,
) -> KVCache:
    """A cache whose mirror pages are themselves the resident copies."""
    memory = UnifiedMemory()
    cell_kernels = HostCellKernels(layout, kernels, rope, mirror.array, memory.arena)
    return KVCache(layout, mirror, memory, cell_kernels, attest=attest, resident_cells=resident_cells)


class FinishedStep:
    """A step whose event has passed: its result, or the error that its proof raised."""

    def __init__(self, outcome: StepResult | GpuError) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> StepResult:
        """The result. Raises what the step's proof raised."""
        if isinstance(self._outcome, GpuError):
            raise self._outcome
        return self._outcome


class CpuBackend:
    """Implements `gpu.backend.Backend` on the host. threads: closed with it, if it owns any."""

    name = "cpu"
    numerics: Mapping[str, str] = MappingProxyType({"backend": "cpu"})
    pipeline_depth = 0

    def __init__(
        self, model: StepModel, cache: KVCache, sampler: Sampler, max_rows: int, threads: CpuThreads | None = None
    ) -> None:
        self.config: ModelConfig = model.config
        self.cache = cache
        self.max_rows = max_rows
        self._step = HostStep(model, cache, sampler, max_rows)
        self._threads = threads

    def bind_thread(self) -> None:
        """Any thread will do."""

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Compute the step. Errors of its proof are raised by `wait`, errors of the plan here."""
        computed = self._step.compute(plan)
        try:
            return FinishedStep(self._step.finish(computed))
        except GpuError as error:
            return FinishedStep(error)

    def close(self) -> None:
        """End the threads; no step is ever left queued."""
        if self._threads is not None:
            self._threads.close()
