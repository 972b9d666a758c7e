"""Fingerprint records in clear on control, each under its digest, so that a mismatch can be named by field."""

from __future__ import annotations

from typing import Final, TypeVar, cast

import msgpack
import redis

from snapshot_store.errors import BadFingerprint, StoreUnreachable
from snapshot_store.fingerprint import Fingerprint, FingerprintRecord, FormatRecord, NumericsRecord
from snapshot_store.keys import fingerprint_key

PUBLISHED_VERSION: Final = 1
MAX_PUBLISHED_BYTES: Final = 1 << 20

R = TypeVar("R", bound=FingerprintRecord)


def publish_fingerprint(control: redis.Redis, fingerprint: Fingerprint, ttl_s: int) -> None:
    """Keep both records in clear for `ttl_s` seconds (a transcript's life at least). Raises StoreUnreachable."""
    try:
        for record in (fingerprint.format, fingerprint.numerics):
            control.set(fingerprint_key(record.digest()), encode_record(record), ex=ttl_s)
    except redis.RedisError as error:
        raise StoreUnreachable(f"control: {error}") from error


def published_format(control: redis.Redis, digest: bytes) -> FormatRecord | None:
    """The format record of that digest, None if it was not published. Raises BadFingerprint, StoreUnreachable."""
    return _published(control, FormatRecord, digest)


def published_numerics(control: redis.Redis, digest: bytes) -> NumericsRecord | None:
    """The numerics record of that digest, None if it was not published. Raises BadFingerprint, StoreUnreachable."""
    return _published(control, NumericsRecord, digest)


def encode_record(record: FingerprintRecord) -> bytes:
    """Msgpack form of a record."""
    packed: bytes = msgpack.packb({"v": PUBLISHED_VERSION, "kind": record.kind, "fields": record.as_dict()})
    return packed


def decode_record(kind: type[R], digest: bytes, raw: bytes) -> R:
    """Read a record and prove that it is the one that `digest` names. Raises BadFingerprint."""
    if len(raw) > MAX_PUBLISHED_BYTES:
        raise BadFingerprint("record bytes", len(raw), f"at most {MAX_PUBLISHED_BYTES}")
    try:
        document = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFingerprint("record", type(error).__name__, "a msgpack map") from None
    if not isinstance(document, dict) or document.keys() != {"v", "kind", "fields"}:
        raise BadFingerprint("record", type(document).__name__, "a map of v, kind and fields")
    if document["v"] != PUBLISHED_VERSION or document["kind"] != kind.kind:
        raise BadFingerprint("kind", (document["v"], document["kind"]), f"version {PUBLISHED_VERSION}, {kind.kind}")
    if not isinstance(document["fields"], dict):
        raise BadFingerprint("fields", type(document["fields"]).__name__, "a map")
    record = kind.of(document["fields"])
    if record.digest() != digest:
        raise BadFingerprint("digest", record.digest().hex(), f"the record named {digest.hex()}")
    return record


def _published(control: redis.Redis, kind: type[R], digest: bytes) -> R | None:
    try:
        raw = cast("bytes | None", control.get(fingerprint_key(digest)))
    except redis.RedisError as error:
        raise StoreUnreachable(f"control: {error}") from error
    return None if raw is None else decode_record(kind, digest, raw)
