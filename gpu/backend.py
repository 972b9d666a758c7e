"""The asynchronous protocol that `cuda`, `cpu` and `simulated` implement, and that the engine drives.

One thread owns a backend. `launch` queues a step and returns at once; effects are visible to the host only after
`StepHandle.wait`. The engine keeps at most `pipeline_depth` launched steps unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from gpu.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from gpu.cache import KVCache
    from gpu.model.config import ModelConfig


class StepHandle(Protocol):
    """A launched step."""

    def done(self) -> bool:
        """Whether `wait` would return without blocking."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's event, prove its mirror stores, drop its page holds and return the samples.

        Raises UnprovenAppend if the mirror-store counts differ from the plan. Idempotent.
        """
        ...


class Backend(Protocol):
    """A device with one model and its KV cache.

    numerics: what decides the bits that it computes, beside its kernels' version and the weights' storage; part of the
    fingerprint.
    """

    name: str
    numerics: Mapping[str, str]
    config: ModelConfig
    cache: KVCache
    pipeline_depth: int
    max_rows: int

    def bind_thread(self) -> None:
        """Make the calling thread the owner; called by the thread that uses backend and cache from now on."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue one step: embed, for every layer append through `cache.append` and attend, then sample.

        Each entry's sequence grows by its rows. Pages for the rows must have been reserved (`cache.reserve`).
        Raises GpuError before anything is queued when the plan breaks a rule.
        """
        ...

    def close(self) -> None:
        """Wait for queued steps, then release everything in order."""
        ...
