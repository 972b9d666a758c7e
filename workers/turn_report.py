"""Figures of one run of a turn, for usage and metrics."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from snapshot_store.fingerprint import numerics_id
from workers.parking.resolution import Resolution


@dataclass(slots=True)
class TurnReport:
    """Figures of one run, for usage and metrics. Times are seconds on the monotonic clock.

    resolution: of the first attempt. numerics: of the pages that the last attempt writes. foreign_pages: reused
    pages of other numerics, in any attempt. forced_numerics: ids of other numerics that sampled the start of the reply.
    """

    claimed_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_sampled: int = 0
    prompt_tokens: int = 0
    attempts: int = 0
    resolution: Resolution = field(default_factory=Resolution)
    numerics: bytes = b""
    foreign_pages: Counter[bytes] = field(default_factory=Counter)
    forced_numerics: tuple[str, ...] = ()
    end: str = ""

    def note_attempt(self, resolution: Resolution, numerics: bytes) -> None:
        """Account what an attempt reuses. numerics: of the pages that it writes."""
        if self.attempts == 1:
            self.resolution = resolution
        self.numerics = numerics
        self.foreign_pages |= resolution.foreign

    def marks(self) -> dict[str, Any]:
        """The part that other numerics had in this turn; empty where they had none."""
        marks: dict[str, Any] = {}
        if self.foreign_pages:
            marks["foreign_pages"] = {numerics_id(numerics): num for numerics, num in self.foreign_pages.items()}
        if self.forced_numerics:
            marks["forced_numerics"] = list(self.forced_numerics)
        return marks

    def note_tokens(self, num_tokens: int) -> None:
        """Account tokens that have just arrived."""
        if num_tokens:
            self.last_token_at = time.monotonic()
            self.first_token_at = self.first_token_at or self.last_token_at
            self.num_sampled += num_tokens

    def cached_tokens(self, page_size: int) -> int:
        """Prompt tokens that were not computed in this run."""
        return min(self.resolution.num_pages * page_size, self.prompt_tokens)

    def usage(self, completion_tokens: int, page_size: int, worker_id: str, num_runs: int) -> dict[str, Any]:
        """The terminal event's usage: counts, then what a client may want to know about reuse and speed."""
        resolution = self.resolution
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": self.cached_tokens(page_size),
            "cached": {"mirror": resolution.mirror_pages * page_size, "store": resolution.store_pages * page_size},
            "worker_id": worker_id,
            "restored_pages": resolution.store_pages,
            "restored_bytes": resolution.store_bytes,
            "restore_ms": round(resolution.restore_s * 1000, 3),
            "attempts": self.attempts,
            "runs": num_runs,
        }
        if self.first_token_at is not None and self.last_token_at is not None:
            usage["first_token_ms"] = round((self.first_token_at - self.claimed_at) * 1000, 3)
            decode_s = self.last_token_at - self.first_token_at
            usage["token_ms"] = round(decode_s * 1000 / max(1, self.num_sampled - 1), 3)
        if self.numerics:
            usage["numerics"] = numerics_id(self.numerics)
        usage |= self.marks()
        if resolution.reasons:
            usage["recompute"] = dict(resolution.reasons)
        return usage
