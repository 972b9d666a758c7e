"""Properties of the chain, the page record and the transcript codec over generated input."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot_store.chain import pack_token_ids, unpack_token_ids
from snapshot_store.errors import DamagedRecord, TranscriptDamaged
from snapshot_store.fingerprint import FormatRecord
from snapshot_store.memory import MemoryPageStore
from snapshot_store.record import header_length, parse_header
from snapshot_store.store import PagePresent
from snapshot_store.transcript import CacheScope
from snapshot_store.transcript_codec import decode_entry, encode_entry
from tests.store_pages import PAGE_BYTES, PAGE_SIZE, TTL_S, chain, make_pages
from tests.store_transcripts import make_entry

patient = partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])
text = st.text("aé👋\n\0 ", max_size=12)
token_ids = st.integers(0, 2**32 - 1)
token_lists = st.lists(token_ids, max_size=5 * PAGE_SIZE)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
field_values = text | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.binary()
fields = st.dictionaries(
    st.sampled_from(["a", "ab", "b"]), field_values | st.sampled_from([0, 1, "1", b"1", 1.0]), max_size=3
)

PAGE = make_pages(list(range(PAGE_SIZE)))[0]


@patient()
@given(token_lists, token_lists)
def test_chains_of_two_lists_share_exactly_their_common_full_pages(left: list[int], right: list[int]) -> None:
    common = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        common += 1
    ours, theirs = chain().digests(left), chain().digests(right)
    assert len(set(ours) & set(theirs)) == common // PAGE_SIZE


@patient()
@given(token_lists, st.lists(st.integers(0, 5 * PAGE_SIZE), max_size=4))
def test_chain_grown_in_any_steps_equals_the_whole(tokens: list[int], stops: list[int]) -> None:
    grown: list[Any] = []
    for stop in [*sorted(stops), len(tokens)]:
        grown += chain().extend(grown, tokens[:stop])
    assert grown == chain().digests(tokens)


@patient()
@given(st.lists(token_ids, max_size=200))
def test_packed_token_ids_read_back_are_equal(tokens: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(tokens)) == tuple(tokens)


@patient()
@given(fields, fields)
def test_fingerprint_canonical_bytes_are_equal_only_for_equal_fields(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    def typed(values: dict[str, Any]) -> dict[str, tuple[type, str]]:
        return {name: (type(value), repr(value)) for name, value in values.items()}

    same = FormatRecord.of(left).canonical() == FormatRecord.of(right).canonical()
    assert same == (typed(left) == typed(right))


@patient(max_examples=300)
@given(st.integers(0, 8 * len(PAGE.record) - 1))
def test_record_with_any_bit_flipped_is_never_present(bit: int) -> None:
    flipped = bytearray(PAGE.record)
    flipped[bit // 8] ^= 1 << bit % 8
    store = MemoryPageStore()
    store.put(PAGE.key, bytes(flipped), memoryview(b""), TTL_S)
    (outcome,) = store.fetch([PAGE.request(bytearray(PAGE_BYTES))])
    assert not isinstance(outcome, PagePresent)


@patient(max_examples=300)
@given(st.integers(0, len(PAGE.record)), st.binary(max_size=64))
def test_record_cut_anywhere_and_continued_with_anything_is_present_only_if_it_is_the_same(
    cut: int, tail: bytes
) -> None:
    record = PAGE.record[:cut] + tail
    store = MemoryPageStore()
    store.put(PAGE.key, record, memoryview(b""), TTL_S)
    (outcome,) = store.fetch([PAGE.request(bytearray(PAGE_BYTES))])
    assert isinstance(outcome, PagePresent) == (record == PAGE.record)


@patient()
@given(st.binary(max_size=400))
def test_header_parser_on_any_bytes_raises_damage_and_nothing_else(raw: bytes) -> None:
    for start in (b"", b"KVLTPAGE", b"KVLTPAGE\x01\x00"):
        try:
            parse_header(PAGE.key, memoryview(start + raw))
        except DamagedRecord:
            continue
        raise AssertionError("bytes that nobody wrote were accepted")


@patient()
@given(st.binary(min_size=200, max_size=200))
def test_header_length_of_any_numbers_is_bounded(raw: bytes) -> None:
    try:
        length = header_length(memoryview(b"KVLTPAGE\x01\x00" + raw))
    except DamagedRecord:
        return
    assert length <= 208 + 4 * 128 + 12 * 2048


@patient()
@given(
    st.lists(token_ids, max_size=50), st.lists(token_ids, max_size=50),
    st.lists(st.dictionaries(text, plain, max_size=3), max_size=2),
    st.dictionaries(text, plain, max_size=4), text, st.sampled_from(CacheScope), st.integers(0, 2**53),
)  # fmt: skip
def test_transcript_entry_read_back_is_equal(
    inputs: list[int],
    outputs: list[int],
    messages: list[dict[str, Any]],
    extra: dict[str, Any],
    text: str,
    scope: CacheScope,
    epoch: int,
) -> None:
    entry = replace(
        make_entry("resp_1"), input_ids=tuple(inputs), output_ids=tuple(outputs), messages=tuple(messages),
        extra=extra, output_text=text, scope=scope, epoch=epoch,
    )  # fmt: skip
    assert decode_entry(encode_entry(entry)) == entry


@patient()
@given(st.integers(0, 10_000), st.binary(max_size=8))
def test_transcript_bytes_changed_anywhere_give_an_entry_or_damage(at: int, patch: bytes) -> None:
    raw = bytearray(encode_entry(make_entry("resp_1", input_ids=(1, 2), messages=({"role": "user", "content": "hi"},))))
    at %= len(raw)
    raw[at : at + len(patch)] = patch
    with suppress(TranscriptDamaged):
        decode_entry(bytes(raw))
