"""The page store as its users see it: put, fetch, touch, delete_if. Synchronous, callable from any thread.

A store never raises for what happens to a page: each page gets an outcome, and every outcome but `PagePresent` is a
miss with a reason. `memory.py`, `redis_store.py` and `faults.py` implement it and pass one conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from snapshot_store.deadline import Deadline
from snapshot_store.errors import BadPage, DamagedRecord
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.record import PageHeader

IsQuarantined = Callable[[bytes], bool]
"""Tells whether a writer's boot id is quarantined; the caller reads the set from control."""


def nobody_quarantined(boot_id: bytes) -> bool:
    """The predicate of a fleet without quarantined writers."""
    return False


def nothing_to_prepare() -> None:
    """The preparation of a buffer that needs none."""


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
    into: writable, exactly sum(segments) bytes; mutated while the fetch generator is alive, never after it is closed.
    Unless the outcome is PagePresent its content is undefined afterwards.
    prepare: called once, before the first byte is written to `into`, by the thread that reads the page; not at all for
    a page that is not there. What it raises is raised where the page's outcome is due.
    """

    key: str
    expected: ExpectedPage
    segments: tuple[int, ...]
    into: memoryview
    prepare: Callable[[], None] = nothing_to_prepare


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
        self,
        requests: Sequence[FetchRequest],
        is_quarantined: IsQuarantined = nobody_quarantined,
        deadline: Deadline | None = None,
    ) -> Generator[FetchOutcome, None, None]:
        """Yield one outcome per request, in order, pages read ahead on several connections.

        deadline: for all pages together; a page that is not there by then is unreachable. Each page also has the
        store's own limit. Close the generator (contextlib.closing) to stop what is under way; once it is closed or
        exhausted no buffer is written any more. An exception of `is_quarantined` is raised where that page's outcome
        is due.
        """
        ...

    def touch(self, keys: Sequence[str], ttl_s: int | Sequence[int], deadline: Deadline | None = None) -> list[bool]:
        """Tell which keys are present and make each live at least `ttl_s` seconds more, in one round trip.

        ttl_s: one for all keys or one for each; it never shortens a life. deadline: earlier than the store's own.
        Raises StoreUnreachable.
        """
        ...

    def delete_if(self, key: str, check: bytes) -> bool:
        """Delete a record if its check field is still `check`; tell whether it was deleted. Raises StoreUnreachable."""
        ...

    def close(self) -> None:
        """Close the connections. Operations under way end as unreachable."""
        ...


def check_requests(requests: Sequence[FetchRequest]) -> None:
    """Raise BadPage unless each buffer is writable and exactly as long as its segments."""
    for index, request in enumerate(requests):
        into = request.into
        if into.readonly or into.itemsize != 1 or not into.c_contiguous:
            raise BadPage(f"requests[{index}].into", into.format, "writable contiguous bytes")
        if len(into) != sum(request.segments):
            raise BadPage(f"requests[{index}].into", len(into), f"exactly the {sum(request.segments)} bytes of a page")


def check_ttls(keys: Sequence[str], ttl_s: int | Sequence[int]) -> list[int]:
    """One time to live per key. Raises BadPage for another number of them or one below a second."""
    ttls = [ttl_s] * len(keys) if isinstance(ttl_s, int) else list(ttl_s)
    if len(ttls) != len(keys):
        raise BadPage("ttl_s", len(ttls), f"one for each of {len(keys)} keys")
    for ttl in ttls:
        if ttl < 1:
            raise BadPage("ttl_s", ttl, "at least 1 second")
    return ttls
