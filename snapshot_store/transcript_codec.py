"""Bytes of a transcript entry: one msgpack map with a version and exactly the fields of TranscriptEntry.

Token ids are u32 little endian in a bin. Size is limited before parsing; an unknown, missing or mistyped field is an
error that names it. Extension types are refused.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, NoReturn

import msgpack

from snapshot_store.chain import pack_token_ids, unpack_token_ids
from snapshot_store.errors import BadTokenIds, TranscriptDamaged
from snapshot_store.transcript import TRANSCRIPT_VERSION, CacheScope, TranscriptEntry

MAX_ENTRY_BYTES: Final = 32 << 20

_STR, _OPTIONAL_STR, _INT, _NUMBER, _BYTES = (str,), (str, type(None)), (int,), (int, float), (bytes,)
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "turn_id": _STR,
    "tenant": _STR,
    "model": _STR,
    "parent_id": _OPTIONAL_STR,
    "root_id": _STR,
    "conversation_id": _OPTIONAL_STR,
    "scope": _STR,
    "scope_id": _STR,
    "created_at": _NUMBER,
    "committed_at": _NUMBER,
    "template_time": _INT,
    "shared_length": _INT,
    "input_ids": _BYTES,
    "output_ids": _BYTES,
    "messages": (list,),
    "output_text": _STR,
    "finish_reason": _STR,
    "format_digest": _BYTES,
    "numerics_digest": _BYTES,
    "worker_id": _STR,
    "epoch": _INT,
    "cached_tokens": _INT,
    "prompt_tokens": _INT,
    "extra": (dict,),
}
_COUNTS: Final = ("shared_length", "epoch", "cached_tokens", "prompt_tokens")


def encode_entry(entry: TranscriptEntry) -> bytes:
    """Bytes of an entry. Raises TranscriptDamaged for values that have no form, or more than 32 MiB."""
    document: dict[str, Any] = {name: getattr(entry, name) for name in _TYPES}
    try:
        document |= {
            "v": TRANSCRIPT_VERSION,
            "scope": entry.scope.value,
            "input_ids": pack_token_ids(entry.input_ids),
            "output_ids": pack_token_ids(entry.output_ids),
            "messages": list(entry.messages),
        }
        raw: bytes = msgpack.packb(document)
    except BadTokenIds as error:
        raise TranscriptDamaged(error.field, error.value, error.limit) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise TranscriptDamaged("entry", entry.turn_id, f"values that msgpack can hold ({error})") from error
    if len(raw) > MAX_ENTRY_BYTES:
        raise TranscriptDamaged("entry bytes", len(raw), f"at most {MAX_ENTRY_BYTES}")
    return raw


def decode_entry(raw: bytes) -> TranscriptEntry:
    """Read an entry. Raises TranscriptDamaged that names field, value and limit."""
    document = _unpack(raw)
    version = document.pop("v", None)
    if version != TRANSCRIPT_VERSION:
        raise TranscriptDamaged("v", version, f"this build reads version {TRANSCRIPT_VERSION}")
    for name in document.keys() ^ _TYPES.keys():
        raise TranscriptDamaged(name, "unknown" if name in document else "absent", "exactly the fields of an entry")
    for name, types in _TYPES.items():
        if type(document[name]) not in types:
            raise TranscriptDamaged(name, type(document[name]).__name__, " or ".join(t.__name__ for t in types))
    for name in _COUNTS:
        if document[name] < 0:
            raise TranscriptDamaged(name, document[name], "not negative")
    return TranscriptEntry(**document | _decoded(document))


def _unpack(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_ENTRY_BYTES:
        raise TranscriptDamaged("entry bytes", len(raw), f"at most {MAX_ENTRY_BYTES}")
    try:
        document = msgpack.unpackb(raw, ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException) as error:
        raise TranscriptDamaged("entry", type(error).__name__, "one msgpack map") from error
    if not isinstance(document, dict):
        raise TranscriptDamaged("entry", type(document).__name__, "one msgpack map")
    if not all(isinstance(name, str) for name in document):
        raise TranscriptDamaged("entry", "a field name that is no text", "exactly the fields of an entry")
    return document


def _decoded(document: dict[str, Any]) -> dict[str, Any]:
    try:
        scope = CacheScope(document["scope"])
    except ValueError:
        raise TranscriptDamaged("scope", document["scope"], f"one of {', '.join(CacheScope)}") from None
    for index, message in enumerate(document["messages"]):
        if not isinstance(message, dict):
            raise TranscriptDamaged(f"messages[{index}]", type(message).__name__, "a map")
    return {
        "scope": scope,
        "input_ids": _token_ids("input_ids", document["input_ids"]),
        "output_ids": _token_ids("output_ids", document["output_ids"]),
        "messages": tuple(document["messages"]),
        "created_at": float(document["created_at"]),
        "committed_at": float(document["committed_at"]),
    }


def _token_ids(name: str, packed: bytes) -> tuple[int, ...]:
    try:
        return unpack_token_ids(packed)
    except BadTokenIds as error:
        raise TranscriptDamaged(name, error.value, error.limit) from error


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


if {field.name for field in fields(TranscriptEntry)} != _TYPES.keys():
    raise TypeError("the transcript codec does not cover TranscriptEntry's fields")
