"""What an engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass

from gpu.plan import RowKind, StepPlan


@dataclass(slots=True)
class EngineCounters:
    """Totals. Rows: computed cells by kind; steps; preemptions; seconds spent in launching and waiting for steps.

    drafted: rows that were guessed; accepted: of those, the ones that the model would have drawn.

    Written by the engine thread, read by any.
    """

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    preemptions: int = 0
    step_s: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def count_launch(self, plan: StepPlan, seconds: float) -> None:
        """A step was launched."""
        self.steps += 1
        self.step_s += seconds
        for entry in plan.entries:
            if entry.kind is RowKind.PREFILL:
                self.prefill_rows += entry.num_rows
                continue
            self.decode_rows += entry.num_rows
            self.drafted += entry.num_rows - 1
