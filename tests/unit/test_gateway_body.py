"""Strict JSON bodies."""

import pytest

from gateway.body import parse_object
from gateway.errors import InvalidRequest


def test_body_plain_object_is_parsed() -> None:
    assert parse_object(b'{"a": [1, 2.5, "x"]}') == {"a": [1, 2.5, "x"]}


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"1",
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 1}}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_body_without_one_meaning_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(raw)
    assert caught.value.code in ("invalid_json", "duplicate_key")


def test_body_with_duplicate_key_names_the_key() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(b'{"temperature": 0, "temperature": 1}')
    assert caught.value.param == "temperature"


def test_body_with_a_whole_surrogate_pair_is_parsed() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
