"""C21 (raullenchai/Rapid-MLX PR#2202), the store's part: a cache of another KV type or layout was loaded.

There an old persisted cache of another type gave runs of token 0. Here pages of another format, page size or RoPE lie
under other digests, so they are not found; put under our key all the same, they are refused with the field's name. A
change that leaves the bytes' meaning alone (a longer context under plain RoPE) is no field and reuses every page.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshot_store.errors import BadVersion, ForeignRecord, LayoutMismatch
from snapshot_store.fingerprint import FieldValue, Fingerprint, FormatRecord, diff
from snapshot_store.memory import MemoryPageStore
from snapshot_store.store import FetchOutcome, PageDamaged, PageMissing, PagePresent
from tests.store_pages import FINGERPRINT, PAGE_BYTES, TTL_S, Page, make_pages

TOKENS = list(range(64))
CHANGES: dict[str, dict[str, FieldValue]] = {
    "int8 to q4": {"k_format": "q4"},
    "int8 to f16": {"k_format": "f16", "v_format": "f16"},
    "page size": {"page_size": 32},
    "plain RoPE to YaRN": {"rope_scaling": "yarn", "rope_factor": 4.0},
    "RoPE theta": {"rope_theta": 500000.0},
    "other weights": {"weights": b"x" * 32},
    "other template": {"template": b"t" * 32},
}


def _changed(change: dict[str, FieldValue]) -> Fingerprint:
    return Fingerprint(FormatRecord.of(FINGERPRINT.format.as_dict() | change), FINGERPRINT.numerics)


def _fetch(store: MemoryPageStore, page: Page) -> FetchOutcome:
    (outcome,) = store.fetch([page.request(bytearray(PAGE_BYTES))])
    return outcome


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_c21_pages_parked_under_another_format_are_not_found(change: dict[str, FieldValue]) -> None:
    store = MemoryPageStore()
    for page in make_pages(TOKENS):
        page.put(store)
    changed = _changed(change)
    size = changed.format.as_dict()["page_size"]
    assert isinstance(size, int)
    for page in make_pages(TOKENS, fingerprint=changed, page_size=size):
        assert _fetch(store, page) == PageMissing(page.key)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_c21_difference_names_the_changed_fields(change: dict[str, FieldValue]) -> None:
    assert {difference.field for difference in diff(FINGERPRINT, _changed(change))} == set(change)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_c21_record_of_another_format_under_our_key_is_refused(change: dict[str, FieldValue]) -> None:
    (ours, *_), (theirs, *_) = make_pages(TOKENS), make_pages(TOKENS, fingerprint=_changed(change))
    store = MemoryPageStore()
    resealed = Page(ours.key, theirs.identity, theirs.body)
    store.put(ours.key, resealed.record, memoryview(b""), TTL_S)
    outcome = _fetch(store, ours)
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, ForeignRecord)
    assert outcome.error.field == "format_digest"


def test_c21_record_of_another_layout_under_our_identity_is_refused() -> None:
    (page, *_) = make_pages(TOKENS)
    (wider, *_) = make_pages(TOKENS, segments=(192, 96, 192, 96, 192, 96))
    store = MemoryPageStore()
    store.put(page.key, Page(page.key, page.identity, wider.body, wider.segments).record, memoryview(b""), TTL_S)
    outcome = _fetch(store, page)
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, LayoutMismatch)


def test_c21_record_of_another_page_size_under_our_key_is_refused() -> None:
    (page, *_) = make_pages(TOKENS)
    store = MemoryPageStore()
    longer = replace(page.identity, token_ids=tuple(range(32)))
    store.put(page.key, Page(page.key, longer, page.body).record, memoryview(b""), TTL_S)
    outcome = _fetch(store, page)
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, ForeignRecord)
    assert outcome.error.field == "token_ids"


def test_c21_record_of_a_later_format_version_is_refused_by_version() -> None:
    (page, *_) = make_pages(TOKENS)
    later = bytearray(page.record)
    later[8] += 1
    store = MemoryPageStore()
    store.put(page.key, bytes(later), memoryview(b""), TTL_S)
    outcome = _fetch(store, page)
    assert isinstance(outcome, PageDamaged)
    assert isinstance(outcome.error, BadVersion)
    assert "version=2" in str(outcome.error)


def test_c21_equal_format_from_another_start_reuses_every_page() -> None:
    store = MemoryPageStore()
    for page in make_pages(TOKENS):
        page.put(store)
    again = Fingerprint(FormatRecord.of(dict(reversed(FINGERPRINT.format.fields))), FINGERPRINT.numerics)
    outcomes = [_fetch(store, page) for page in make_pages(TOKENS, fingerprint=again)]
    assert [type(outcome) for outcome in outcomes] == [PagePresent] * 4
