"""Fingerprints: canonical whatever the order, different whatever the field, readable in clear."""

from __future__ import annotations

import math

import pytest

from snapshot_store.errors import BadFingerprint
from snapshot_store.fingerprint import (
    MIXED_DIGEST,
    MIXED_NUMERICS,
    Fingerprint,
    FormatRecord,
    NumericsRecord,
    diff,
    numerics_id,
    parse_numerics_id,
)
from snapshot_store.published import decode_record, encode_record

VALUES = {"page_size": 16, "k_format": "int8", "rope_theta": 10000.0, "weights": b"\x01" * 32, "tied": True}


def test_digest_of_fields_in_another_order_is_equal() -> None:
    assert FormatRecord.of(VALUES).digest() == FormatRecord.of(dict(reversed(VALUES.items()))).digest()


def test_digest_of_equal_fields_differs_between_format_and_numerics() -> None:
    assert FormatRecord.of(VALUES).digest() != NumericsRecord.of(VALUES).digest()


@pytest.mark.parametrize("name", sorted(VALUES))
def test_digest_without_one_field_differs(name: str) -> None:
    fewer = {field: value for field, value in VALUES.items() if field != name}
    assert FormatRecord.of(fewer).digest() != FormatRecord.of(VALUES).digest()


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (1, True), (1, "1"), ("a", b"a"), (0.0, -0.0), (0, False)])
def test_digest_of_values_that_only_look_alike_differs(left: object, right: object) -> None:
    records = [FormatRecord.of({"field": value}) for value in (left, right)]  # type: ignore[dict-item]
    assert records[0].digest() != records[1].digest()


def test_digest_when_a_value_moves_into_the_next_field_differs() -> None:
    assert FormatRecord.of({"a": "xy", "b": ""}).digest() != FormatRecord.of({"a": "x", "b": "y"}).digest()


def test_digest_is_the_same_in_every_version_of_this_build() -> None:
    record = FormatRecord.of({"page_size": 16, "weights": b"\x00\xff"})
    assert record.canonical().hex() == (
        "06000000" + b"format".hex()
        + "09000000" + b"page_size".hex() + b"i".hex() + "02000000" + b"16".hex()
        + "07000000" + b"weights".hex() + b"b".hex() + "02000000" + "00ff"
    )  # fmt: skip


@pytest.mark.parametrize("digest", [MIXED_DIGEST, NumericsRecord.of({"backend": "cpu"}).digest()])
def test_numerics_id_names_its_digest(digest: bytes) -> None:
    assert parse_numerics_id(numerics_id(digest)) == digest


@pytest.mark.parametrize("text", ["", "any", "Mixed", "ab" * 31, "AB" * 32, "zz" * 32, "ab " * 32])
def test_numerics_id_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadFingerprint, match="numerics id"):
        parse_numerics_id(text)


def test_mixed_numerics_equals_no_worker_record() -> None:
    assert MIXED_NUMERICS.digest() != NumericsRecord.of({"backend": "cpu"}).digest()


@pytest.mark.parametrize("value", [math.nan, math.inf, None, [1], 2 + 1j, b"x" * 70_000])
def test_record_with_a_value_without_canonical_form_is_refused_by_name(value: object) -> None:
    with pytest.raises(BadFingerprint) as caught:
        FormatRecord.of({"rope_theta": value})  # type: ignore[dict-item]
    assert caught.value.field == "rope_theta"


@pytest.mark.parametrize("name", ["", "läufer"])
def test_record_with_a_bad_field_name_is_refused(name: str) -> None:
    with pytest.raises(BadFingerprint, match="field name"):
        FormatRecord.of({name: 1})


def test_record_with_too_many_fields_is_refused() -> None:
    with pytest.raises(BadFingerprint, match="fields=513"):
        FormatRecord.of({f"f{n}": n for n in range(513)})


def test_diff_names_each_field_once_format_first() -> None:
    left = Fingerprint(FormatRecord.of(VALUES), NumericsRecord.of({"backend": "cpu"}))
    right = Fingerprint(
        FormatRecord.of(VALUES | {"k_format": "q4", "extra": 1}), NumericsRecord.of({"backend": "cuda"})
    )
    assert [str(difference) for difference in diff(left, right)] == [
        "format.extra: absent != 1",
        "format.k_format: 'int8' != 'q4'",
        "numerics.backend: 'cpu' != 'cuda'",
    ]


def test_diff_of_equal_fingerprints_is_empty() -> None:
    fingerprint = Fingerprint(FormatRecord.of(VALUES), MIXED_NUMERICS)
    assert diff(fingerprint, fingerprint) == []


def test_published_record_read_back_is_equal() -> None:
    record = FormatRecord.of(VALUES)
    assert decode_record(FormatRecord, record.digest(), encode_record(record)) == record


def test_published_record_under_another_digest_is_refused() -> None:
    record = FormatRecord.of(VALUES)
    with pytest.raises(BadFingerprint, match="digest"):
        decode_record(FormatRecord, FormatRecord.of(VALUES | {"page_size": 32}).digest(), encode_record(record))


@pytest.mark.parametrize(
    "raw", [b"", b"\x80", b"\xc1", b"\x80\x04\x95", encode_record(MIXED_NUMERICS), b"x" * 2_000_000]
)
def test_published_bytes_that_are_no_format_record_are_refused(raw: bytes) -> None:
    with pytest.raises(BadFingerprint):
        decode_record(FormatRecord, bytes(32), raw)
