"""Bytes of a transcript entry."""

from __future__ import annotations

from dataclasses import fields

from snapshot_store.transcript import CacheScope, TranscriptEntry
from workers.turns.codec import pack, pack_ids, unpack, unpack_ids


def encode_entry(entry: TranscriptEntry) -> bytes:
    """Pack an entry."""
    body = {field.name: getattr(entry, field.name) for field in fields(entry)}
    body |= {
        "scope": str(entry.scope), "input_ids": pack_ids(entry.input_ids), "output_ids": pack_ids(entry.output_ids)
    }  # fmt: skip
    return pack(body)


def decode_entry(data: bytes) -> TranscriptEntry:
    """Unpack an entry."""
    body = unpack("transcript", data)
    body["scope"] = CacheScope(body["scope"])
    body["input_ids"], body["output_ids"] = unpack_ids(body["input_ids"]), unpack_ids(body["output_ids"])
    body["messages"] = tuple(body["messages"])
    return TranscriptEntry(**body)
