"""What became of the search for a turn's pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Resolution:
    """What a turn reuses. reasons: why pages that earlier turns had sealed are recomputed, with their number.

    foreign: the part of the reused pages that other numerics have computed, by numerics. restore_s: time spent on the
    store, also when nothing came of it.
    """

    mirror_pages: int = 0
    store_pages: int = 0
    store_bytes: int = 0
    restore_s: float = 0.0
    foreign: Counter[bytes] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def num_pages(self) -> int:
        """Pages that need no computation."""
        return self.mirror_pages + self.store_pages

    def explain_missing(self, num_sealed: int, num_readable: int, reason: str) -> None:
        """Count why pages are recomputed where nothing else was counted.

        num_sealed: leading pages that earlier runs have sealed, only those need a reason. num_readable: those that were
        sealed under numerics that are read here; they get `reason`, the others `numerics`.
        """
        lost = max(0, min(num_readable, num_sealed) - self.num_pages)
        foreign = max(0, num_sealed - self.num_pages) - lost
        if not self.reasons:
            self.reasons.update({name: number for name, number in ((reason, lost), ("numerics", foreign)) if number})
