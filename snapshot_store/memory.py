"""The page store in this process's memory: for one-process use and for tests. Evicts like volatile-ttl."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from snapshot_store.deadline import Deadline
from snapshot_store.errors import DamagedRecord, StoreUnreachable
from snapshot_store.page_read import check_header
from snapshot_store.record import check_body, check_field_of, header_length
from snapshot_store.store import (
    FetchOutcome,
    FetchRequest,
    IsQuarantined,
    PageDamaged,
    PageMissing,
    PagePresent,
    PageUnreachable,
    PutOutcome,
    PutStatus,
    check_requests,
    check_ttls,
    nobody_quarantined,
)

_LATE = "the deadline has passed"


@dataclass(slots=True)
class _Stored:
    value: bytes
    expires_at: float


class MemoryPageStore:
    """A PageStore. max_bytes: the sum of all values; beyond it the records with the shortest time to live go first."""

    def __init__(self, max_bytes: int = 1 << 30, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, _Stored] = {}

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        """See PageStore."""
        (ttl,) = check_ttls([key], ttl_s)
        value = header + bytes(body)
        with self._lock:
            self._drop_expired()
            if key in self._records:
                return PutOutcome(PutStatus.PRESENT)
            if len(value) > self._max_bytes:
                return PutOutcome(PutStatus.REFUSED, f"OOM: {len(value)} bytes, the store holds {self._max_bytes}")
            self._make_room(len(value))
            self._records[key] = _Stored(value, self._clock() + ttl)
        return PutOutcome(PutStatus.STORED)

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        is_quarantined: IsQuarantined = nobody_quarantined,
        deadline: Deadline | None = None,
    ) -> Generator[FetchOutcome, None, None]:
        """See PageStore."""
        check_requests(requests)
        return (
            PageUnreachable(request.key, _LATE)
            if deadline is not None and deadline.has_passed
            else self._read(request, is_quarantined)
            for request in requests
        )

    def touch(self, keys: Sequence[str], ttl_s: int | Sequence[int], deadline: Deadline | None = None) -> list[bool]:
        """See PageStore."""
        ttls = check_ttls(keys, ttl_s)
        if deadline is not None and deadline.has_passed:
            raise StoreUnreachable(_LATE)
        with self._lock:
            self._drop_expired()
            now = self._clock()
            for key, ttl in zip(keys, ttls, strict=True):
                if (stored := self._records.get(key)) is not None:
                    stored.expires_at = max(stored.expires_at, now + ttl)
            return [key in self._records for key in keys]

    def delete_if(self, key: str, check: bytes) -> bool:
        """See PageStore."""
        with self._lock:
            stored = self._records.get(key)
            if stored is None or check_field_of(stored.value) != check:
                return False
            del self._records[key]
            return True

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._records.clear()

    def _read(self, request: FetchRequest, is_quarantined: IsQuarantined) -> FetchOutcome:
        with self._lock:
            self._drop_expired()
            stored = self._records.get(request.key)
        if stored is None:
            return PageMissing(request.key)
        value = memoryview(stored.value)
        try:
            body_at = header_length(value)
            header = check_header(request, bytes(value[:body_at]), len(value))
            check_body(header, value[body_at:])
        except DamagedRecord as error:
            return PageDamaged(request.key, error, check_field_of(value))
        if is_quarantined(header.identity.writer_boot_id):
            return PageMissing(request.key, quarantined=True, check=header.check)
        request.prepare()
        request.into[:] = value[body_at:]
        return PagePresent(request.key, header)

    def _drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, stored in self._records.items() if stored.expires_at <= now]:
            del self._records[key]

    def _make_room(self, num_bytes: int) -> None:
        held = sum(len(stored.value) for stored in self._records.values())
        by_life = sorted(self._records.items(), key=lambda item: item[1].expires_at)
        for key, stored in by_life:
            if held + num_bytes <= self._max_bytes:
                return
            held -= len(stored.value)
            del self._records[key]
