"""The page store as its users see it: put, fetch, touch, delete_if. Synchronous, callable from any thread.

A store never raises for what happens to a page: each page gets an outcome, and every outcome but `PagePresent` is a
miss with a reason. `memory.py`, `redis_store.py` and `faults.py` implement it and pass one conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from snapshot_store.errors import DamagedRecord
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.record import PageHeader

IsQuarantined = Callable[[bytes], bool]
"""Tells whether a writer's boot id is quarantined; the caller reads the set from control."""


def nobody_quarantined(boot_id: bytes) -> bool:
    """The predicate of a fleet without quarantined writers."""
    return False


class PutStatus(StrEnum):
    """What became of a page that was to be stored."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """status PRESENT: the key existed and was left alone. REFUSED: nothing is stored, `reason` says why."""

    status: PutStatus
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One page to read.

    segments: byte lengths of the planes in page order (layer 0 K, layer 0 V, layer 1 K, ...), from KVLayout.
    into: writable, exactly sum(segments) bytes; mutated while the fetch iterator is alive, never after it is closed.
    Unless the outcome is PagePresent its content is undefined afterwards.
    """

    key: str
    expected: ExpectedPage
    segments: tuple[int, ...]
    into: memoryview


@dataclass(frozen=True, slots=True)
class PagePresent:
    """The page is in `into`, verified against its checksums and the reader's own tokens."""

    key: str
    header: PageHeader


@dataclass(frozen=True, slots=True)
class PageMissing:
    """No such page, or its writer is quarantined; then `check` is that record's check field, for delete_if."""

    key: str
    quarantined: bool = False
    check: bytes = b""


@dataclass(frozen=True, slots=True)
class PageDamaged:
    """A record that must not be read. check: its check field as read, for delete_if."""

    key: str
    error: DamagedRecord
    check: bytes


@dataclass(frozen=True, slots=True)
class PageUnreachable:
    """The server did not deliver this page in time; whether it is there is unknown."""

    key: str
    reason: str


FetchOutcome = PagePresent | PageMissing | PageDamaged | PageUnreachable


class PageStore(Protocol):
    """Immutable page records under content-derived keys."""

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        """Store a record if the key is absent; it expires after `ttl_s` seconds.

        header: from record.build_header. body: contiguous bytes, read until this returns, not copied.
        """
        ...

    def fetch(
        self, requests: Sequence[FetchRequest], is_quarantined: IsQuarantined = nobody_quarantined
    ) -> Iterator[FetchOutcome]:
        """Yield one outcome per request, in order, pages read ahead on several connections.

        Closing the iterator early stops what is under way; once it is closed or exhausted no buffer is written.
        """
        ...

    def touch(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """Tell which keys are present and make each live at least `ttl_s` seconds more. Raises StoreUnreachable."""
        ...

    def delete_if(self, key: str, check: bytes) -> bool:
        """Delete a record if its check field is still `check`; tell whether it was deleted. Raises StoreUnreachable."""
        ...

    def close(self) -> None:
        """Close the connections. Operations under way end as unreachable."""
        ...
