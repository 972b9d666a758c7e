"""Fingerprints: everything that must be equal for cell bytes to be reusable, as two digests over records in clear.

    format    weights, tokenizer, template, architecture, RoPE, plane formats, page size, shard: what bytes mean
    numerics  backend, kernel version, SM family, weight storage, approximations, probe cells: how they were computed

    record    = kind, then the fields sorted by name
    field     = name | type tag | value      each as u32 little-endian length + bytes, the tag one byte

Names are not identity: a model's name or path never belongs in a record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Final, Self

from snapshot_store.errors import BadFingerprint

FieldValue = str | int | float | bytes

FINGERPRINT_BYTES: Final = 32
MAX_FIELDS: Final = 512
MAX_FIELD_BYTES: Final = 1 << 16
MIXED_ID: Final = "mixed"


@dataclass(frozen=True, slots=True)
class FingerprintRecord:
    """Sorted named values with a canonical encoding. Make one with `of`."""

    kind: ClassVar[str]
    fields: tuple[tuple[str, FieldValue], ...]

    @classmethod
    def of(cls, values: Mapping[str, FieldValue]) -> Self:
        """Make a record from plain values; the order does not matter. Raises BadFingerprint."""
        if len(values) > MAX_FIELDS:
            raise BadFingerprint("fields", len(values), f"at most {MAX_FIELDS}")
        record = cls(tuple(sorted(values.items())))
        record.canonical()
        return record

    def canonical(self) -> bytes:
        """The bytes that the digest covers. Raises BadFingerprint."""
        parts = [_framed(self.kind.encode())]
        for name, value in self.fields:
            tag, raw = _encode_value(name, value)
            parts += [_framed(name.encode()), tag, _framed(raw)]
        return b"".join(parts)

    def digest(self) -> bytes:
        """32 bytes that name this record."""
        person = f"kvalet.{self.kind}".encode()[:16]
        return blake2b(self.canonical(), digest_size=FINGERPRINT_BYTES, person=person).digest()

    def as_dict(self) -> dict[str, FieldValue]:
        """The fields by name."""
        return dict(self.fields)


@dataclass(frozen=True, slots=True)
class FormatRecord(FingerprintRecord):
    """What the bytes of a page mean.

    Inspection expects these names when it prints a layout: num_layers, num_kv_heads, head_dim, page_size, k_format,
    v_format. All others are free.
    """

    kind: ClassVar[str] = "format"


@dataclass(frozen=True, slots=True)
class NumericsRecord(FingerprintRecord):
    """How the bytes of a page were computed."""

    kind: ClassVar[str] = "numerics"


MIXED_NUMERICS: Final = NumericsRecord((("numerics", "mixed"),))
"""Numerics of a sequence that reused any page of other numerics; strict workers never read such pages."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two fingerprints differ; None where a side lacks it."""

    record: str
    field: str
    left: FieldValue | None
    right: FieldValue | None

    def __str__(self) -> str:
        return f"{self.record}.{self.field}: {_shown(self.left)} != {_shown(self.right)}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Format and numerics of a worker, or of a page."""

    format: FormatRecord
    numerics: NumericsRecord

    @property
    def format_digest(self) -> bytes:
        """32 bytes that name the format record."""
        return self.format.digest()

    @property
    def numerics_digest(self) -> bytes:
        """32 bytes that name the numerics record."""
        return self.numerics.digest()


def diff(left: Fingerprint, right: Fingerprint) -> list[FieldDifference]:
    """Fields in which two fingerprints differ, format first, by name."""
    return diff_records(left.format, right.format) + diff_records(left.numerics, right.numerics)


def diff_records(left: FingerprintRecord, right: FingerprintRecord) -> list[FieldDifference]:
    """Fields in which two records of one kind differ, by name. Types count: 1 and 1.0 differ."""
    a, b = left.as_dict(), right.as_dict()
    names = sorted(a.keys() | b.keys())
    return [FieldDifference(left.kind, n, a.get(n), b.get(n)) for n in names if not _same(a.get(n), b.get(n))]


def numerics_id(digest: bytes) -> str:
    """The name of numerics in settings, replies and reports: `mixed`, else the digest in hex."""
    return MIXED_ID if digest == MIXED_DIGEST else digest.hex()


def parse_numerics_id(text: str) -> bytes:
    """The digest that an id names. Raises BadFingerprint."""
    if text == MIXED_ID:
        return MIXED_DIGEST
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != FINGERPRINT_BYTES or text != digest.hex():
        raise BadFingerprint("numerics id", text[:80], f"{MIXED_ID} or {2 * FINGERPRINT_BYTES} hex digits")
    return digest


def _same(left: FieldValue | None, right: FieldValue | None) -> bool:
    return type(left) is type(right) and left == right


def _shown(value: FieldValue | None) -> str:
    if value is None:
        return "absent"
    return value.hex() if isinstance(value, bytes) else repr(value)


def _framed(raw: bytes) -> bytes:
    return len(raw).to_bytes(4, "little") + raw


def _encode_value(name: str, value: FieldValue) -> tuple[bytes, bytes]:
    if not name or not name.isascii():
        raise BadFingerprint("field name", name, "non-empty ASCII")
    if isinstance(value, bool):
        tag, raw = b"t", b"1" if value else b"0"
    elif isinstance(value, str):
        tag, raw = b"s", value.encode()
    elif isinstance(value, int):
        tag, raw = b"i", str(value).encode()
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadFingerprint(name, value, "must be finite")
        tag, raw = b"f", struct.pack("<d", value)
    elif isinstance(value, bytes):
        tag, raw = b"b", value
    else:
        raise BadFingerprint(name, value, f"str, int, float or bytes, not {type(value).__name__}")
    if len(raw) > MAX_FIELD_BYTES:
        raise BadFingerprint(name, f"{len(raw)} bytes", f"at most {MAX_FIELD_BYTES} bytes")
    return tag, raw


MIXED_DIGEST: Final = MIXED_NUMERICS.digest()
