"""One suite for every page store: in memory, on a real server (unix socket, TCP), behind the fault layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest

from snapshot_store.deadline import Deadline
from snapshot_store.errors import (
    BadMagic,
    BadPage,
    BadVersion,
    DamagedRecord,
    ForeignRecord,
    HeaderMismatch,
    LayoutMismatch,
    OversizedRecord,
    SegmentMismatch,
    StoreUnreachable,
    TruncatedRecord,
)
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.faults import FaultyPageStore
from snapshot_store.memory import MemoryPageStore
from snapshot_store.record import FIXED_BYTES, check_field_of
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import (
    FetchOutcome,
    FetchRequest,
    PageDamaged,
    PageMissing,
    PagePresent,
    PageStore,
    PageUnreachable,
    PutStatus,
)
from snapshot_store.wire_pool import WireSettings
from tests.services import ValkeyServer
from tests.store_pages import PAGE_BYTES, SEGMENTS, TTL_S, Page, make_pages

TOKENS = list(range(100, 100 + 64))


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Pass = Callable[[float], None]
"""Makes that many seconds pass for the records of the store under test."""


@pytest.fixture(params=["memory", "redis_unix", "redis_tcp", "faulty"])
def store_in_time(request: pytest.FixtureRequest) -> Iterator[tuple[PageStore, Pass]]:
    clock = Clock()
    memory = MemoryPageStore(clock=clock)
    if request.param.startswith("redis"):
        server: ValkeyServer = request.getfixturevalue("pages_server")
        url = server.url if request.param == "redis_unix" else server.tcp_url
        opened: PageStore = RedisPageStore(WireSettings(url))
        passes: Pass = partial(_shorten_lives, server)
    else:
        opened = FaultyPageStore(memory) if request.param == "faulty" else memory
        passes = partial(_move, clock)
    yield opened, passes
    opened.close()


@pytest.fixture
def store(store_in_time: tuple[PageStore, Pass]) -> PageStore:
    return store_in_time[0]


def _move(clock: Clock, seconds: float) -> None:
    clock.now += seconds


def _shorten_lives(server: ValkeyServer, seconds: float) -> None:
    with server.client() as client:
        for key in client.keys("*"):
            client.pexpire(key, client.pttl(key) - int(1000 * seconds))


def _fetch_all(store: PageStore, pages: list[Page]) -> tuple[list[FetchOutcome], list[bytearray]]:
    buffers = [bytearray(sum(page.segments)) for page in pages]
    requests = [page.request(buffer) for page, buffer in zip(pages, buffers, strict=True)]
    return list(store.fetch(requests)), buffers


def _fetch_one(store: PageStore, page: Page) -> FetchOutcome:
    ((outcome,), _) = _fetch_all(store, [page])
    return outcome


def _put_raw(store: PageStore, key: str, record: bytes) -> None:
    assert store.put(key, record, memoryview(b""), TTL_S).status is PutStatus.STORED


def _damage(store: PageStore, page: Page, record: bytes) -> DamagedRecord:
    _put_raw(store, page.key, record)
    outcome = _fetch_one(store, page)
    assert isinstance(outcome, PageDamaged), outcome
    assert outcome.check == check_field_of(record)
    return outcome.error


def test_nothing_is_waited_for_when_the_deadline_has_passed(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    over = Deadline(0.0)
    (outcome,) = store.fetch([page.request(bytearray(PAGE_BYTES))], deadline=over)
    assert isinstance(outcome, PageUnreachable)
    with pytest.raises(StoreUnreachable):
        store.touch([page.key], 60, over)
    assert store.touch([page.key], 60, Deadline(5.0)) == [True]


def test_fetch_stored_pages_returns_their_bytes_in_order(store: PageStore) -> None:
    pages = make_pages(TOKENS)
    assert [page.put(store).status for page in pages] == [PutStatus.STORED] * 4
    outcomes, buffers = _fetch_all(store, pages)
    assert [outcome.key for outcome in outcomes] == [page.key for page in pages]
    assert all(isinstance(outcome, PagePresent) for outcome in outcomes)
    assert [bytes(buffer) for buffer in buffers] == [page.body for page in pages]


def test_fetch_stored_page_returns_its_header(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    outcome = _fetch_one(store, page)
    assert isinstance(outcome, PagePresent)
    assert outcome.header.identity == page.identity


def test_fetch_large_page_returns_its_bytes(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16], segments=(1 << 20, 1 << 19, 1 << 20, 1 << 19))
    page.put(store)
    (outcome,), (buffer,) = _fetch_all(store, [page])
    assert isinstance(outcome, PagePresent)
    assert bytes(buffer) == page.body


def test_fetch_no_requests_yields_nothing(store: PageStore) -> None:
    assert list(store.fetch([])) == []


def test_fetch_absent_page_is_missing_and_later_ones_are_read(store: PageStore) -> None:
    first, absent, last = make_pages(TOKENS[:48])
    first.put(store)
    last.put(store)
    outcomes, _ = _fetch_all(store, [first, absent, last])
    assert outcomes[1] == PageMissing(absent.key)
    assert isinstance(outcomes[2], PagePresent)


def test_put_twice_leaves_the_first_record_alone(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    other = Page(page.key, page.identity, bytes(PAGE_BYTES))
    assert other.put(store).status is PutStatus.PRESENT
    _, (buffer,) = _fetch_all(store, [page])
    assert bytes(buffer) == page.body


def test_put_with_short_life_expires(store_in_time: tuple[PageStore, Pass]) -> None:
    store, passes = store_in_time
    (page,) = make_pages(TOKENS[:16])
    page.put(store, ttl_s=20)
    passes(30)
    assert _fetch_one(store, page) == PageMissing(page.key)


def test_touch_tells_presence_by_key(store: PageStore) -> None:
    present, absent = make_pages(TOKENS[:32])
    present.put(store)
    assert store.touch([absent.key, present.key, absent.key], 60) == [False, True, False]


def test_touch_more_keys_than_one_batch_tells_presence_in_order(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    keys = [page.key if n % 7 == 0 else f"kvalet:local:page:{n:032x}" for n in range(1500)]
    assert store.touch(keys, 60) == [n % 7 == 0 for n in range(1500)]


def test_touch_extends_a_life(store_in_time: tuple[PageStore, Pass]) -> None:
    store, passes = store_in_time
    (page,) = make_pages(TOKENS[:16])
    page.put(store, ttl_s=20)
    store.touch([page.key], [60])
    passes(30)
    assert isinstance(_fetch_one(store, page), PagePresent)


def test_touch_with_shorter_life_does_not_shorten_it(store_in_time: tuple[PageStore, Pass]) -> None:
    store, passes = store_in_time
    (page,) = make_pages(TOKENS[:16])
    page.put(store, ttl_s=60)
    assert store.touch([page.key], 20) == [True]
    passes(30)
    assert isinstance(_fetch_one(store, page), PagePresent)


def test_touch_with_another_number_of_lives_is_refused(store: PageStore) -> None:
    with pytest.raises(BadPage, match="ttl_s=2"):
        store.touch(["kvalet:local:page:00"], [1, 2])


def test_put_with_a_life_below_a_second_is_refused(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    with pytest.raises(BadPage, match="ttl_s=0"):
        page.put(store, ttl_s=0)


def test_delete_if_with_the_check_as_read_deletes(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    assert store.delete_if(page.key, check_field_of(page.header))
    assert _fetch_one(store, page) == PageMissing(page.key)


def test_delete_if_with_another_check_leaves_the_record(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    assert not store.delete_if(page.key, b"x" * 16)
    assert isinstance(_fetch_one(store, page), PagePresent)


def test_delete_if_of_an_absent_key_deletes_nothing(store: PageStore) -> None:
    assert not store.delete_if("kvalet:local:page:00", b"")


@pytest.mark.parametrize("size", [0, 5, 31, FIXED_BYTES - 1])
def test_delete_if_of_a_record_shorter_than_its_header_deletes(store: PageStore, size: int) -> None:
    (page,) = make_pages(TOKENS[:16])
    _put_raw(store, page.key, page.record[:size])
    outcome = _fetch_one(store, page)
    assert isinstance(outcome, PageDamaged)
    assert store.delete_if(page.key, outcome.check)


def test_fetch_of_a_quarantined_writer_is_a_miss_with_its_check(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    (outcome,) = store.fetch(
        [page.request(bytearray(PAGE_BYTES))], lambda boot_id: boot_id == page.identity.writer_boot_id
    )
    assert outcome == PageMissing(page.key, quarantined=True, check=check_field_of(page.header))


def test_fetch_with_a_predicate_that_raises_raises_and_the_next_fetch_is_right(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)

    def fails(boot_id: bytes) -> bool:
        raise LookupError(boot_id)

    with pytest.raises(LookupError):
        list(store.fetch([page.request(bytearray(PAGE_BYTES))], fails))
    (outcome,), (buffer,) = _fetch_all(store, [page])
    assert isinstance(outcome, PagePresent)
    assert bytes(buffer) == page.body


def test_fetch_of_another_tenants_record_under_the_key_is_damaged(store: PageStore) -> None:
    (ours,), (theirs,) = make_pages(TOKENS[:16]), make_pages(TOKENS[:16], tenant="other")
    assert isinstance(_damage(store, ours, theirs.record), HeaderMismatch)


def test_fetch_of_a_sibling_record_under_the_key_is_damaged(store: PageStore) -> None:
    first, second = make_pages(TOKENS[:32])
    assert isinstance(_damage(store, first, second.record), HeaderMismatch)


def test_fetch_of_other_bytes_is_bad_magic(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    assert isinstance(_damage(store, page, b"\x80\x04" + bytes(4000)), BadMagic)


def test_fetch_of_a_later_version_is_bad_version(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    later = bytearray(page.record)
    later[8] += 1
    error = _damage(store, page, bytes(later))
    assert isinstance(error, BadVersion)
    assert error.found == error.known + 1


@pytest.mark.parametrize("cut", [1, SEGMENTS[-1], PAGE_BYTES, PAGE_BYTES + 1, PAGE_BYTES + FIXED_BYTES])
def test_fetch_of_a_cut_record_is_truncated(store: PageStore, cut: int) -> None:
    (page,) = make_pages(TOKENS[:16])
    assert isinstance(_damage(store, page, page.record[:-cut]), TruncatedRecord)


@pytest.mark.parametrize("extra", [1, SEGMENTS[0], 1 << 20])
def test_fetch_of_a_longer_record_is_oversized(store: PageStore, extra: int) -> None:
    (page,) = make_pages(TOKENS[:16])
    assert isinstance(_damage(store, page, page.record + bytes(extra)), OversizedRecord)


@pytest.mark.parametrize("segment", range(len(SEGMENTS)))
def test_fetch_of_a_flipped_body_bit_names_layer_and_plane(store: PageStore, segment: int) -> None:
    (page,) = make_pages(TOKENS[:16])
    flipped = bytearray(page.record)
    flipped[len(page.header) + sum(SEGMENTS[:segment])] ^= 0x10
    error = _damage(store, page, bytes(flipped))
    assert isinstance(error, SegmentMismatch)
    assert (error.layer, error.plane) == (segment // 2, "KV"[segment % 2])


def test_fetch_under_another_layout_is_a_layout_mismatch(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    request = FetchRequest(page.key, page.expected(), SEGMENTS[:-2], memoryview(bytearray(sum(SEGMENTS[:-2]))))
    (outcome,) = store.fetch([request])
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, LayoutMismatch)


@pytest.mark.parametrize("field", ["parent", "digest", "token_ids", "format_digest", "numerics_digest"])
def test_fetch_with_another_expectation_names_the_field(store: PageStore, field: str) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)
    expected = {name: getattr(page.expected(), name) for name in ExpectedPage.__slots__}
    expected[field] = tuple(range(16)) if field == "token_ids" else bytes(len(expected[field]))
    into = bytearray(b"\xaa" * PAGE_BYTES)
    (outcome,) = store.fetch([FetchRequest(page.key, ExpectedPage(**expected), SEGMENTS, memoryview(into))])
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, ForeignRecord)
    assert outcome.error.field == field


def test_fetch_of_a_foreign_record_writes_nothing(store: PageStore) -> None:
    ours, theirs = make_pages(TOKENS[:32])
    _put_raw(store, ours.key, theirs.record)
    into = bytearray(b"\xaa" * PAGE_BYTES)
    list(store.fetch([ours.request(into)]))
    assert into == b"\xaa" * PAGE_BYTES


def test_fetch_prepares_a_buffer_once_before_it_writes_and_only_if_it_will(store: PageStore) -> None:
    present, absent, foreign = make_pages(TOKENS[:48])
    present.put(store)
    _put_raw(store, foreign.key, present.record)
    buffers = [bytearray(b"\xaa" * PAGE_BYTES) for _ in range(3)]
    seen: list[tuple[int, bytes]] = []
    requests = [
        page.request(into, partial(lambda i, b: seen.append((i, bytes(b))), index, into))
        for index, (page, into) in enumerate(zip((present, absent, foreign), buffers, strict=True))
    ]
    list(store.fetch(requests))
    assert seen == [(0, b"\xaa" * PAGE_BYTES)]
    assert bytes(buffers[0]) == present.body


def test_fetch_whose_preparation_fails_raises_it_and_the_next_fetch_is_right(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    page.put(store)

    def fails() -> None:
        raise LookupError("prepare")

    into = bytearray(b"\xaa" * PAGE_BYTES)
    with pytest.raises(LookupError, match="prepare"):
        list(store.fetch([page.request(into, fails)]))
    assert into == b"\xaa" * PAGE_BYTES
    (outcome,), (buffer,) = _fetch_all(store, [page])
    assert isinstance(outcome, PagePresent)
    assert bytes(buffer) == page.body


def test_fetch_after_a_damaged_record_reads_the_next_page_right(store: PageStore) -> None:
    first, second, third = make_pages(TOKENS[:48])
    _put_raw(store, first.key, first.record[:-1])
    _put_raw(store, second.key, second.record + bytes(1 << 19))
    third.put(store)
    outcomes, buffers = _fetch_all(store, [first, second, third])
    assert [type(outcome) for outcome in outcomes] == [PageDamaged, PageDamaged, PagePresent]
    assert bytes(buffers[2]) == third.body


def test_fetch_into_a_buffer_of_another_length_is_refused(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    with pytest.raises(BadPage, match="into"):
        list(store.fetch([page.request(bytearray(PAGE_BYTES - 1))]))


def test_fetch_into_a_read_only_buffer_is_refused(store: PageStore) -> None:
    (page,) = make_pages(TOKENS[:16])
    request = FetchRequest(page.key, page.expected(), SEGMENTS, memoryview(bytes(PAGE_BYTES)))
    with pytest.raises(BadPage, match="writable"):
        list(store.fetch([request]))


def test_fetch_closed_early_leaves_the_store_usable(store: PageStore) -> None:
    pages = make_pages(list(range(16 * 40)))
    for page in pages:
        page.put(store)
    with closing(store.fetch([page.request(bytearray(PAGE_BYTES)) for page in pages])) as outcomes:
        assert isinstance(next(outcomes), PagePresent)
    fetched, buffers = _fetch_all(store, pages)
    assert all(isinstance(outcome, PagePresent) for outcome in fetched)
    assert [bytes(buffer) for buffer in buffers] == [page.body for page in pages]


def test_store_used_by_many_threads_mixes_no_bytes(store: PageStore) -> None:
    groups = [make_pages(list(range(1000 * group, 1000 * group + 96))) for group in range(6)]
    wrong: list[str] = []

    def run(pages: list[Page]) -> None:
        for _ in range(5):
            for page in pages:
                page.put(store)
            outcomes, buffers = _fetch_all(store, pages)
            for page, outcome, buffer in zip(pages, outcomes, buffers, strict=True):
                if not isinstance(outcome, PagePresent) or bytes(buffer) != page.body:
                    wrong.append(f"{page.key}: {outcome}")

    threads = [threading.Thread(target=run, args=(pages,)) for pages in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
