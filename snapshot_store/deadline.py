"""A point in time by which an operation on the page server must be over."""

from __future__ import annotations

import time

from snapshot_store.errors import StoreUnreachable


class Deadline:
    """`seconds` from now on the monotonic clock."""

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def within(self, seconds: float) -> Deadline:
        """This deadline, or one in `seconds` if that is earlier."""
        return self if self._at <= time.monotonic() + seconds else Deadline(seconds)

    @property
    def has_passed(self) -> bool:
        """Whether nothing can be waited for any more."""
        return self._at <= time.monotonic()

    def remaining(self) -> float:
        """Seconds left, more than zero. Raises StoreUnreachable when it has passed."""
        left = self._at - time.monotonic()
        if left <= 0.0:
            raise StoreUnreachable(f"no answer within {self.seconds:g} s")
        return left
