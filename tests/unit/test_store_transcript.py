"""The transcript codec and the fold from entries to token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from snapshot_store.errors import TranscriptDamaged
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_codec import MAX_ENTRY_BYTES, decode_entry, encode_entry
from snapshot_store.transcript_reader import fold_token_ids
from tests.store_transcripts import make_entry

ENTRY = make_entry(
    "resp_2",
    parent_id="resp_1",
    input_ids=(1, 2, 4_294_967_295),
    output_ids=(7,),
    messages=({"role": "user", "content": "läuft 👋", "parts": [1, None, {"x": b"\x00"}]},),
    extra={"recompute": [{"page": 0, "reason": "damaged"}]},
)


def _changed(**changes: Any) -> bytes:
    document = msgpack.unpackb(encode_entry(ENTRY)) | changes
    return bytes(msgpack.packb({name: value for name, value in document.items() if value != "<absent>"}))


def test_entry_read_back_is_equal() -> None:
    assert decode_entry(encode_entry(ENTRY)) == ENTRY


def test_entry_bytes_do_not_depend_on_the_call() -> None:
    assert encode_entry(ENTRY) == encode_entry(decode_entry(encode_entry(ENTRY)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"v": 2}, "v"),
        ({"v": "<absent>"}, "v"),
        ({"turn_id": "<absent>"}, "turn_id"),
        ({"surprise": 1}, "surprise"),
        ({"turn_id": 5}, "turn_id"),
        ({"parent_id": b"resp_1"}, "parent_id"),
        ({"scope": "planet"}, "scope"),
        ({"input_ids": [1, 2]}, "input_ids"),
        ({"input_ids": b"\x00" * 5}, "input_ids"),
        ({"output_ids": b"\x00"}, "output_ids"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": {}}, "messages"),
        ({"extra": []}, "extra"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"shared_length": -5}, "shared_length"),
        ({"created_at": "now"}, "created_at"),
    ],
)
def test_entry_with_a_bad_field_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(TranscriptDamaged) as caught:
        decode_entry(_changed(**changes))
    assert caught.value.field == field


NO_ENTRIES = {
    "empty": b"",
    "empty map": b"\x80",
    "nil": b"\xc0",
    "list": b"\x93\x01\x02\x03",
    "reserved": b"\xc1",
    "bytes key": b"\x81\xc4\x01a\x01",
    "pickle": b"\x80\x04\x95\x00.",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "cut": encode_entry(ENTRY)[:-1],
    "longer": encode_entry(ENTRY) + b"\x00",
    "deep": b"\x91" * 5000,
}


@pytest.mark.parametrize("raw", NO_ENTRIES.values(), ids=NO_ENTRIES.keys())
def test_bytes_that_are_no_entry_are_refused(raw: bytes) -> None:
    with pytest.raises(TranscriptDamaged):
        decode_entry(raw)


def test_bytes_beyond_the_limit_are_refused_before_parsing() -> None:
    with pytest.raises(TranscriptDamaged, match="entry bytes"):
        decode_entry(bytes(MAX_ENTRY_BYTES + 1))


def test_entry_with_an_extension_type_is_refused() -> None:
    with pytest.raises(TranscriptDamaged):
        decode_entry(_changed(extra={"x": msgpack.ExtType(5, b"code")}))


def test_encode_of_a_bad_token_id_names_it() -> None:
    with pytest.raises(TranscriptDamaged, match=r"token_ids\[1\]=-1"):
        encode_entry(replace(ENTRY, output_ids=(1, -1)))


def test_encode_of_a_value_that_msgpack_cannot_hold_is_refused() -> None:
    with pytest.raises(TranscriptDamaged, match="entry"):
        encode_entry(replace(ENTRY, extra={"x": object()}))


def _path(*turns: tuple[int, tuple[int, ...], tuple[int, ...]]) -> list[TranscriptEntry]:
    return [
        make_entry(f"resp_{n}", shared_length=shared, input_ids=inputs, output_ids=outputs)
        for n, (shared, inputs, outputs) in enumerate(turns)
    ]


def test_fold_of_turns_keeps_the_shared_ids_and_adds_their_own() -> None:
    path = _path((0, (1, 2), (3, 4)), (3, (5,), (6,)))
    assert fold_token_ids(path) == (1, 2, 3, 5, 6)


def test_fold_of_nothing_is_empty() -> None:
    assert fold_token_ids([]) == ()


def test_fold_of_a_turn_that_shares_more_than_its_parent_has_is_refused() -> None:
    with pytest.raises(TranscriptDamaged, match="shared_length=5"):
        fold_token_ids(_path((0, (1, 2), (3, 4)), (5, (), ())))
