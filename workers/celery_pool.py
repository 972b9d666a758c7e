"""The thread pool of a worker: Celery's own, which also tells the event loop when a slot has become free.

With prefetch off the loop asks for a message only while a slot is free, and it looks again when something wakes it. A
task that ends in its thread wakes nothing, so the next message would lie in the queue for up to a second.

All threads are started with the pool: a worker that has run for long is no larger than one that has just begun.
"""

from __future__ import annotations

import threading
from typing import Any

from celery.concurrency.thread import ApplyResult, TaskPool


class TurnPool(TaskPool):  # type: ignore[misc]
    """Celery's thread pool, complete from its start; a finished task wakes the event loop."""

    _hub: Any = None

    def on_start(self) -> None:
        """Start a thread for each slot: the executor starts one whenever none is idle, so all must be busy at once."""
        together = threading.Barrier(self.limit)
        for started in [self.executor.submit(together.wait) for _ in range(self.limit)]:
            started.result()

    def register_with_event_loop(self, hub: Any) -> None:
        """Remember the loop to wake."""
        self._hub = hub

    def on_apply(self, *args: Any, **options: Any) -> ApplyResult:
        """Run a task in a thread. The loop is woken after Celery has counted it as done."""
        result = super().on_apply(*args, **options)
        result.f.add_done_callback(self._wake)
        return result

    def _wake(self, _: object) -> None:
        if self._hub is not None:
            self._hub.call_soon(_nothing)


def _nothing() -> None:
    """What the loop is woken for: it polls again by itself."""
