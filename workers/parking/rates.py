"""Measured speeds by which a restore is weighed against computing."""

from __future__ import annotations

import time
from dataclasses import dataclass

_RATE_LIFE_S = 60.0


@dataclass(slots=True)
class Rates:
    """Measured speeds, moving averages; 0 = not measured yet.

    warm_up_tokens_per_s: what a few rows reached at the start, a lower bound of the prefill rate. The store's rate is
    forgotten after a minute without a restore: a slow one must not end all later ones.
    """

    store_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    warm_up_tokens_per_s: float = 0.0
    _store_measured_at: float = 0.0

    def observe_store(self, num_bytes: int, seconds: float) -> None:
        """Account a restore."""
        self.forget_old(time.monotonic())
        self.store_bytes_per_s = _average(self.store_bytes_per_s, num_bytes / max(seconds, 1e-6))
        self._store_measured_at = time.monotonic()

    def forget_old(self, now: float) -> None:
        """Drop what is too old to decide by. now: on the monotonic clock."""
        if now - self._store_measured_at > _RATE_LIFE_S:
            self.store_bytes_per_s = 0.0

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds that computing a prompt takes, rather too many than too few; None while that is unknown."""
        rate = self.prefill_tokens_per_s or self.warm_up_tokens_per_s
        return num_tokens / rate if rate else None

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Account the computation of a prompt."""
        self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, num_tokens / max(seconds, 1e-6))


def _average(previous: float, sample: float) -> float:
    return sample if previous == 0.0 else 0.7 * previous + 0.3 * sample
