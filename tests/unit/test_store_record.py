"""The page record's format: one byte layout, limits before parsing, one error per way to be wrong."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from snapshot_store.chain import RECORD_VERSION
from snapshot_store.errors import (
    BadMagic,
    BadPage,
    BadVersion,
    DamagedRecord,
    HeaderMismatch,
    LayoutMismatch,
    OversizedRecord,
    SegmentMismatch,
    TruncatedRecord,
)
from snapshot_store.record import (
    FIXED_BYTES,
    build_header,
    check_body,
    check_field_of,
    check_layout,
    damaged_segments,
    header_bytes,
    header_length,
    parse_header,
    segment_name,
)
from tests.store_pages import PAGE_BYTES, PAGE_SIZE, SEGMENTS, Page, make_pages

PAGE = make_pages(list(range(PAGE_SIZE)))[0]
HEADER = PAGE.header


def _patched(offset: int, layout: str, value: int) -> memoryview:
    """A header with one number changed and its checksum left as it was."""
    raw = bytearray(HEADER)
    struct.pack_into(layout, raw, offset, value)
    return memoryview(raw)


def test_header_read_back_holds_what_was_written() -> None:
    header = parse_header(PAGE.key, memoryview(HEADER))
    assert header.identity == PAGE.identity
    assert header.segment_lengths == SEGMENTS
    assert header.num_bytes == len(PAGE.record)


def test_header_begins_with_magic_version_and_length() -> None:
    assert HEADER[:8] == b"KVLTPAGE"
    assert struct.unpack_from("<HHI", HEADER, 8) == (RECORD_VERSION, 0, header_bytes(PAGE_SIZE, len(SEGMENTS)))


def test_header_of_a_stateless_page_says_so() -> None:
    (page,) = make_pages(list(range(PAGE_SIZE)), stateless=True)
    assert parse_header(page.key, memoryview(page.header)).identity.stateless


def test_header_with_bytes_behind_it_is_read() -> None:
    assert parse_header(PAGE.key, memoryview(PAGE.record)).identity == PAGE.identity


def test_header_under_another_key_is_a_mismatch() -> None:
    with pytest.raises(HeaderMismatch):
        parse_header(PAGE.key[:-1] + "0", memoryview(HEADER))


@pytest.mark.parametrize("size", [0, 1, FIXED_BYTES - 1, FIXED_BYTES, len(HEADER) - 1])
def test_header_cut_short_is_truncated(size: int) -> None:
    with pytest.raises(TruncatedRecord):
        parse_header(PAGE.key, memoryview(HEADER)[:size])


def test_header_with_any_byte_flipped_is_damaged() -> None:
    for offset in range(len(HEADER)):
        raw = bytearray(HEADER)
        raw[offset] ^= 1
        with pytest.raises(DamagedRecord):
            parse_header(PAGE.key, memoryview(raw))


@pytest.mark.parametrize(
    ("offset", "layout", "value", "error"),
    [
        (0, "<Q", 0, BadMagic),
        (8, "<H", RECORD_VERSION + 1, BadVersion),
        (12, "<I", 1 << 31, LayoutMismatch),
        (12, "<I", 0, LayoutMismatch),
        (32, "<Q", (1 << 64) - 1, OversizedRecord),
        (40, "<I", (1 << 32) - 1, OversizedRecord),
        (40, "<I", 129, OversizedRecord),
        (44, "<I", (1 << 32) - 1, OversizedRecord),
        (44, "<I", 2049, OversizedRecord),
        (44, "<I", 4, LayoutMismatch),
    ],
)
def test_header_length_with_a_hostile_number_is_refused_before_anything_is_sized(
    offset: int, layout: str, value: int, error: type[DamagedRecord]
) -> None:
    with pytest.raises(error):
        header_length(_patched(offset, layout, value))


def test_header_with_unknown_flags_and_a_right_checksum_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="flags"):
        parse_header(PAGE.key, _resealed(10, "<H", 2))


def test_header_whose_lengths_do_not_sum_to_the_body_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="body bytes"):
        parse_header(PAGE.key, _resealed(32, "<Q", PAGE_BYTES + 1))


def test_layout_with_another_number_of_segments_is_a_mismatch() -> None:
    header = parse_header(PAGE.key, memoryview(HEADER))
    with pytest.raises(LayoutMismatch, match="segments: 6, expected 4"):
        check_layout(header, SEGMENTS[:4])


def test_layout_with_another_length_names_layer_and_plane() -> None:
    header = parse_header(PAGE.key, memoryview(HEADER))
    with pytest.raises(LayoutMismatch, match="layer 1 plane V"):
        check_layout(header, (*SEGMENTS[:3], SEGMENTS[3] + 16, *SEGMENTS[4:]))


def test_body_as_written_is_accepted() -> None:
    check_body(parse_header(PAGE.key, memoryview(HEADER)), memoryview(PAGE.body))


def test_body_with_two_equal_long_segments_swapped_is_a_mismatch() -> None:
    header = parse_header(PAGE.key, memoryview(HEADER))
    layer = SEGMENTS[0] + SEGMENTS[1]
    swapped = PAGE.body[layer : 2 * layer] + PAGE.body[:layer] + PAGE.body[2 * layer :]
    with pytest.raises(SegmentMismatch):
        check_body(header, memoryview(swapped))


def test_checksums_of_equal_segments_differ_by_place() -> None:
    page = Page(PAGE.key, PAGE.identity, bytes(PAGE_BYTES))
    checksums = parse_header(page.key, memoryview(page.header)).segment_checksums
    assert len(set(checksums)) == len(SEGMENTS)


def test_damaged_segments_lists_each_of_them() -> None:
    body = bytearray(PAGE.body)
    body[0] ^= 1
    body[-1] ^= 1
    found = damaged_segments(parse_header(PAGE.key, memoryview(HEADER)), memoryview(body))
    assert [(error.layer, error.plane) for error in found] == [(0, "K"), (2, "V")]


def test_segment_name_counts_planes_by_layer() -> None:
    assert [segment_name(index) for index in range(4)] == [(0, "K"), (0, "V"), (1, "K"), (1, "V")]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": tuple(range(129))}, "token_ids"),
        ({"epoch": -1}, "epoch"),
        ({"page_index": 1 << 32}, "page_index"),
        ({"writer_boot_id": b"short"}, "writer_boot_id"),
        ({"format_digest": b""}, "format_digest"),
        ({"numerics_digest": bytes(33)}, "numerics_digest"),
    ],
)
def test_build_with_a_bad_identity_names_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(BadPage) as caught:
        build_header(PAGE.key, replace(PAGE.identity, **change), memoryview(PAGE.body), SEGMENTS)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("segments", [(), SEGMENTS[:-1], (*SEGMENTS, 1)])
def test_build_with_segments_that_do_not_sum_to_the_body_is_refused(segments: tuple[int, ...]) -> None:
    with pytest.raises(BadPage, match="segments"):
        build_header(PAGE.key, PAGE.identity, memoryview(PAGE.body), segments)


def test_build_of_bytes_that_are_not_contiguous_is_refused() -> None:
    strided = memoryview(PAGE.body * 2)[::2]
    with pytest.raises(BadPage, match="contiguous"):
        build_header(PAGE.key, PAGE.identity, strided, SEGMENTS)


def test_check_field_of_a_header_is_where_the_parser_reads_it() -> None:
    assert check_field_of(HEADER) == parse_header(PAGE.key, memoryview(HEADER)).check


def _resealed(offset: int, layout: str, value: int) -> memoryview:
    """A header with one number changed and the checksum made right again, as a faulty writer would."""
    from xxhash import xxh3_128

    raw = bytearray(_patched(offset, layout, value))
    raw[16:32] = xxh3_128(PAGE.key.encode() + bytes(raw[:16]) + bytes(raw[32:])).digest()
    return memoryview(raw)
