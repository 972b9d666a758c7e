"""A page store with planted faults, for tests of everything that must survive a bad page server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreUnreachable
from snapshot_store.record import check_field_of
from snapshot_store.store import (
    FetchOutcome,
    FetchRequest,
    IsQuarantined,
    PageStore,
    PageUnreachable,
    PutOutcome,
    PutStatus,
    nobody_quarantined,
)


class FaultKind(StrEnum):
    """What goes wrong with the pages that a fault picks."""

    DROP = "drop"
    """put: answered as stored, nothing is stored."""
    TRUNCATE = "truncate"
    """put: the record is stored without its last `amount` bytes."""
    FLIP = "flip"
    """put: one bit of the record is flipped at offset `amount`, negative from its end."""
    SWAP = "swap"
    """put: this record and the next one that the fault picks are stored under each other's keys."""
    OUT_OF_MEMORY = "out_of_memory"
    """put: refused like a full server without anything to evict."""
    EVICT = "evict"
    """put: stored, then deleted at once."""
    DELAY = "delay"
    """put and fetch: take `delay_s` longer."""
    UNREACHABLE = "unreachable"
    """put is refused, fetch unreachable, touch and delete_if raise StoreUnreachable."""


def every_page(key: str) -> bool:
    """The predicate of a fault that picks every page."""
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault on the pages whose key `picks` accepts, the first `times` of them."""

    kind: FaultKind
    picks: Callable[[str], bool] = every_page
    times: int = 1 << 30
    amount: int = 1
    delay_s: float = 0.0


class FaultyPageStore:
    """A PageStore around another one. Faults can be planted and lifted while it is in use."""

    def __init__(self, inner: PageStore, faults: Sequence[Fault] = ()) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._faults = list(faults)
        self._used = [0] * len(self._faults)
        self._held: tuple[str, bytes] | None = None

    def plant(self, fault: Fault) -> None:
        """Add a fault."""
        with self._lock:
            self._faults.append(fault)
            self._used.append(0)

    def lift_all(self) -> None:
        """Remove all faults; what they have done to stored pages stays."""
        with self._lock:
            self._faults, self._used, self._held = [], [], None

    def times_struck(self, kind: FaultKind) -> int:
        """How often faults of this kind have struck; 0 means that a test did not run its path."""
        with self._lock:
            return sum(used for fault, used in zip(self._faults, self._used, strict=True) if fault.kind is kind)

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        """See PageStore."""
        self._delay(key)
        if self._strikes(FaultKind.UNREACHABLE, key):
            return PutOutcome(PutStatus.REFUSED, "planted: unreachable")
        if self._strikes(FaultKind.OUT_OF_MEMORY, key):
            return PutOutcome(PutStatus.REFUSED, "OOM: planted")
        if self._strikes(FaultKind.DROP, key):
            return PutOutcome(PutStatus.STORED)
        if self._strikes(FaultKind.SWAP, key):
            return self._put_swapped(key, header + bytes(body), ttl_s)
        record = self._damaged(key, header, body)
        outcome = self._inner.put(key, *record, ttl_s)
        if self._strikes(FaultKind.EVICT, key):
            self._inner.delete_if(key, check_field_of(header))
        return outcome

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        is_quarantined: IsQuarantined = nobody_quarantined,
        deadline: Deadline | None = None,
    ) -> Generator[FetchOutcome, None, None]:
        """See PageStore."""
        inner = self._inner.fetch(requests, is_quarantined, deadline)
        return self._faulty_outcomes(inner)

    def touch(self, keys: Sequence[str], ttl_s: int | Sequence[int], deadline: Deadline | None = None) -> list[bool]:
        """See PageStore."""
        self._check_reachable(keys)
        return self._inner.touch(keys, ttl_s, deadline)

    def delete_if(self, key: str, check: bytes) -> bool:
        """See PageStore."""
        self._check_reachable([key])
        return self._inner.delete_if(key, check)

    def close(self) -> None:
        """See PageStore."""
        self._inner.close()

    def _faulty_outcomes(self, inner: Generator[FetchOutcome, None, None]) -> Generator[FetchOutcome, None, None]:
        try:
            for outcome in inner:
                self._delay(outcome.key)
                unreachable = self._strikes(FaultKind.UNREACHABLE, outcome.key)
                yield PageUnreachable(outcome.key, "planted: unreachable") if unreachable else outcome
        finally:
            inner.close()

    def _damaged(self, key: str, header: bytes, body: memoryview) -> tuple[bytes, memoryview]:
        if (fault := self._strikes(FaultKind.TRUNCATE, key)) is not None:
            whole = header + bytes(body)
            return whole[: max(0, len(whole) - fault.amount)], memoryview(b"")
        if (fault := self._strikes(FaultKind.FLIP, key)) is not None:
            flipped = bytearray(header + bytes(body))
            flipped[fault.amount] ^= 1
            return bytes(flipped), memoryview(b"")
        return header, body

    def _put_swapped(self, key: str, record: bytes, ttl_s: int) -> PutOutcome:
        with self._lock:
            held, self._held = self._held, None if self._held else (key, record)
        if held is None:
            return PutOutcome(PutStatus.STORED)
        other_key, other_record = held
        self._inner.put(other_key, record, memoryview(b""), ttl_s)
        return self._inner.put(key, other_record, memoryview(b""), ttl_s)

    def _strikes(self, kind: FaultKind, key: str) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.kind is kind and self._used[index] < fault.times and fault.picks(key):
                    self._used[index] += 1
                    return fault
        return None

    def _delay(self, key: str) -> None:
        if (fault := self._strikes(FaultKind.DELAY, key)) is not None:
            time.sleep(fault.delay_s)

    def _check_reachable(self, keys: Sequence[str]) -> None:
        if any(self._strikes(FaultKind.UNREACHABLE, key) for key in keys):
            raise StoreUnreachable("planted: unreachable")
