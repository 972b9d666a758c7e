"""Numbers of a cache, for metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass

from gpu.pages import HoldKind


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts in pages, unless said otherwise.

    cached: sealed and held by nothing. held: by kind of hold. resident: with a device copy. poisoned: times since
    start. evictions, device_evictions, promotions: events since start. streamed_bytes: bytes of non-resident pages
    that steps had to read from the mirror over the bus, since start.
    """

    num_pages: int
    free: int
    cached: int
    sealed: int
    held: dict[HoldKind, int]
    resident: int
    poisoned: int
    evictions: int
    device_evictions: int
    promotions: int
    streamed_bytes: int
