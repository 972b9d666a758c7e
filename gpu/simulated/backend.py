"""The `simulated` backend: computes on the host, but behaves like a device with a queue.

A step's samples, counts and mirror stores become visible at its event: in `wait`, never before. With `hold_open` set,
events do not happen until `open_gate` is called, so that tests can act while a step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from threading import Event
from typing import TYPE_CHECKING

from gpu.cache import KVCache
from gpu.cell_kernels import HostCellKernels
from gpu.cpu.backend import CpuBackend
from gpu.cpu.threads import CpuThreads
from gpu.errors import GpuError
from gpu.host_step import ComputedStep, HostStep, StepModel
from gpu.kv_kernels import KVKernels, RopeTable
from gpu.layout import KVLayout
from gpu.mirror import MirrorArena
from gpu.plan import StepPlan, StepResult
from gpu.sampling import Sampler
from gpu.simulated.faults import Fault, FaultyKernels, FaultyPoison, StoreFault
from gpu.simulated.memory import SimulatedMemory

if TYPE_CHECKING:
    from gpu.model.config import ModelConfig


class SimulatedStep:
    """A launched step; implements `gpu.backend.StepHandle`."""

    def __init__(self, backend: SimulatedBackend, computed: ComputedStep) -> None:
        self.computed = computed
        self.outcome: StepResult | GpuError | None = None
        self._backend = backend

    def done(self) -> bool:
        """Whether the step's event may happen now."""
        return self.outcome is not None or self._backend.gate_is_open

    def wait(self) -> StepResult:
        """Let the events up to this step's happen, in order; the result, or what the step's proof raised."""
        outcome = self.outcome or self._backend.happen(self)
        if isinstance(outcome, GpuError):
            raise outcome
        return outcome


class SimulatedBackend:
    """Implements `gpu.backend.Backend` with a device arena of its own in host memory.

    num_slots: device slots, one page each; None for as many as the mirror has pages. threads: closed with it.
    """

    name = "simulated"
    # It computes with the CPU's kernels: its bytes are the same by the contract suite.
    numerics: Mapping[str, str] = CpuBackend.numerics
    pipeline_depth = 1

    def __init__(
        self,
        model: StepModel,
        layout: KVLayout,
        mirror: MirrorArena,
        kernels: KVKernels,
        rope: RopeTable,
        sampler: Sampler,
        max_rows: int,
        *,
        attest: str = "always",
        resident_cells: int | None = None,
        num_slots: int | None = None,
        threads: CpuThreads | None = None,
    ) -> None:
        slots = mirror.num_bytes // layout.page_bytes if num_slots is None else num_slots
        memory = SimulatedMemory(layout, slots, mirror.num_bytes)
        self.kernels = FaultyKernels(kernels, memory.add_stray)
        self.config: ModelConfig = model.config
        self.max_rows = max_rows
        self._poison = FaultyPoison(layout)
        self.cache = KVCache(
            layout,
            mirror,
            memory,
            HostCellKernels(layout, self.kernels, rope, mirror.array, memory.arena),
            attest=attest,
            resident_cells=resident_cells,
            poison=self._poison,
        )
        self._step = HostStep(model, self.cache, sampler, max_rows)
        self._queue: deque[SimulatedStep] = deque()
        self._gate = Event()
        self._gate.set()
        self._free_early = False
        self._threads = threads

    @property
    def gate_is_open(self) -> bool:
        """Whether events may happen."""
        return self._gate.is_set()

    def hold_open(self) -> None:
        """Keep launched steps running until `open_gate`."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Let events happen again. Any thread."""
        self._gate.set()

    def plant(self, fault: StoreFault) -> None:
        """Make something go wrong from now on."""
        if fault.fault is Fault.NO_POISON:
            self._poison.skip = True
        elif fault.fault is Fault.FREE_EARLY:
            self._free_early = True
        else:
            self.kernels.faults.append(fault)

    def bind_thread(self) -> None:
        """Any thread will do."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """Queue one step. Raises GpuError before anything is queued when the plan breaks a rule."""
        self.kernels.step_kinds = tuple(entry.kind for entry in plan.entries)
        step = SimulatedStep(self, self._step.compute(plan))
        self._queue.append(step)
        if self._free_early:
            cells = step.computed.cells
            self.cache.memory.pool.release_step(cells.held, cells.generations)
        return step

    def happen(self, last: SimulatedStep) -> StepResult | GpuError:
        """Let the events of queued steps happen, up to and with that of `last`; blocks while the gate is closed."""
        self._gate.wait()
        while last.outcome is None:
            step = self._queue.popleft()
            try:
                step.outcome = self._step.finish(step.computed)
            except GpuError as error:
                step.outcome = error
        return last.outcome

    def close(self) -> None:
        """Let every event happen."""
        self._gate.set()
        if self._queue:
            self.happen(self._queue[-1])
        if self._threads is not None:
            self._threads.close()
