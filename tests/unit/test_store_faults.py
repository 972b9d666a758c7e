"""Each planted fault strikes, and shows as its own outcome behind the fault layer."""

from __future__ import annotations

import time

import pytest

from snapshot_store.errors import HeaderMismatch, SegmentMismatch, StoreUnreachable, TruncatedRecord
from snapshot_store.faults import Fault, FaultKind, FaultyPageStore
from snapshot_store.memory import MemoryPageStore
from snapshot_store.store import FetchOutcome, PageDamaged, PageMissing, PagePresent, PageUnreachable, PutStatus
from tests.store_pages import PAGE_BYTES, Page, make_pages

FIRST, SECOND = make_pages(list(range(32)))


def _store(*faults: Fault) -> FaultyPageStore:
    return FaultyPageStore(MemoryPageStore(), faults)


def _fetch(store: FaultyPageStore, page: Page) -> FetchOutcome:
    (outcome,) = store.fetch([page.request(bytearray(PAGE_BYTES))])
    return outcome


def test_drop_says_stored_and_stores_nothing() -> None:
    store = _store(Fault(FaultKind.DROP))
    assert FIRST.put(store).status is PutStatus.STORED
    assert _fetch(store, FIRST) == PageMissing(FIRST.key)


def test_truncate_makes_a_truncated_record() -> None:
    store = _store(Fault(FaultKind.TRUNCATE, amount=3))
    FIRST.put(store)
    outcome = _fetch(store, FIRST)
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, TruncatedRecord)


def test_flip_makes_a_damaged_segment() -> None:
    store = _store(Fault(FaultKind.FLIP, amount=-1))
    FIRST.put(store)
    outcome = _fetch(store, FIRST)
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, SegmentMismatch)


def test_swap_stores_two_records_under_each_others_keys() -> None:
    store = _store(Fault(FaultKind.SWAP))
    FIRST.put(store)
    SECOND.put(store)
    for page in (FIRST, SECOND):
        outcome = _fetch(store, page)
        assert isinstance(outcome, PageDamaged)
        assert isinstance(outcome.error, HeaderMismatch)


def test_out_of_memory_refuses_the_put() -> None:
    store = _store(Fault(FaultKind.OUT_OF_MEMORY))
    outcome = FIRST.put(store)
    assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, "OOM: planted")


def test_evict_loses_a_stored_page() -> None:
    store = _store(Fault(FaultKind.EVICT))
    assert FIRST.put(store).status is PutStatus.STORED
    assert _fetch(store, FIRST) == PageMissing(FIRST.key)


def test_delay_makes_a_put_take_longer() -> None:
    store = _store(Fault(FaultKind.DELAY, delay_s=0.05))
    started = time.monotonic()
    FIRST.put(store)
    assert time.monotonic() - started >= 0.05


def test_unreachable_shows_in_every_operation() -> None:
    store = _store()
    FIRST.put(store)
    store.plant(Fault(FaultKind.UNREACHABLE))
    assert isinstance(_fetch(store, FIRST), PageUnreachable)
    assert SECOND.put(store).status is PutStatus.REFUSED
    with pytest.raises(StoreUnreachable):
        store.touch([FIRST.key], 60)
    with pytest.raises(StoreUnreachable):
        store.delete_if(FIRST.key, b"")


def test_fault_that_picks_one_key_leaves_the_others() -> None:
    store = _store(Fault(FaultKind.DROP, picks=lambda key: key == FIRST.key))
    FIRST.put(store)
    SECOND.put(store)
    assert isinstance(_fetch(store, SECOND), PagePresent)


def test_fault_with_a_number_of_times_strikes_no_more_often() -> None:
    store = _store(Fault(FaultKind.DROP, times=1))
    FIRST.put(store)
    SECOND.put(store)
    assert store.times_struck(FaultKind.DROP) == 1
    assert isinstance(_fetch(store, SECOND), PagePresent)


def test_faults_lifted_strike_no_more() -> None:
    store = _store(Fault(FaultKind.DROP))
    store.lift_all()
    FIRST.put(store)
    assert isinstance(_fetch(store, FIRST), PagePresent)


def test_memory_store_that_is_full_drops_the_shortest_life_first() -> None:
    store = MemoryPageStore(max_bytes=2 * len(FIRST.record))
    third = make_pages(list(range(500, 516)))[0]
    FIRST.put(store, ttl_s=500)
    SECOND.put(store, ttl_s=100)
    third.put(store, ttl_s=300)
    assert store.touch([FIRST.key, SECOND.key, third.key], 1) == [True, False, True]


def test_memory_store_smaller_than_a_page_refuses_it() -> None:
    outcome = FIRST.put(MemoryPageStore(max_bytes=10))
    assert outcome.status is PutStatus.REFUSED
