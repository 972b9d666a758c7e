"""Bounded reads of both servers for inspection. Never writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from snapshot_store.errors import BadFingerprint, IndexEntryDamaged, StoreUnreachable, TranscriptDamaged
from snapshot_store.fingerprint import FormatRecord, NumericsRecord
from snapshot_store.index import SnapshotIndex, SnapshotIndexEntry
from snapshot_store.keys import last_part_of, page_pattern, tenant_of, transcript_pattern
from snapshot_store.published import published_format, published_numerics
from snapshot_store.record import MAX_SEGMENTS, MAX_TOKENS, header_bytes
from snapshot_store.salts import existing_salt
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_codec import decode_entry

SCAN_BATCH: Final = 256
HEADER_READ_BYTES: Final = header_bytes(MAX_TOKENS, MAX_SEGMENTS)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page record as the server describes it. header: the first bytes of the value. ttl_s: -1 without expiry."""

    key: str
    num_bytes: int
    ttl_s: int
    header: bytes


@dataclass(frozen=True, slots=True)
class DamagedTranscript:
    """A transcript key whose value is no entry of that turn."""

    tenant: str
    turn_id: str
    error: TranscriptDamaged


class InspectionSource:
    """Both servers, with every lower error mapped to StoreUnreachable that names the server."""

    def __init__(self, control: redis.Redis, pages: redis.Redis) -> None:
        self._control = control
        self._pages = pages
        self._index = SnapshotIndex(control)

    @classmethod
    def connect(cls, control_url: str, pages_url: str, timeout_s: float = 10.0) -> InspectionSource:
        """Open both. Raises StoreUnreachable for a URL that redis-py does not know."""
        return cls(_client("control", control_url, timeout_s), _client("pages", pages_url, timeout_s))

    def transcripts(self, tenant: str | None) -> Iterator[TranscriptEntry | DamagedTranscript]:
        """Every committed entry of a tenant, or of all, in no order. Raises StoreUnreachable."""
        for keys in self._scan(self._control, "control", transcript_pattern(tenant)):
            values = _reach("control", partial(self._control.mget, keys))
            for key, raw in zip(keys, cast("list[bytes | None]", values), strict=True):
                if raw is not None:
                    yield _entry(key, raw)

    def index_entry(self, tenant: str, branch: str) -> SnapshotIndexEntry | None:
        """The snapshot index entry of a branch, None if absent or damaged: it is a hint. Raises StoreUnreachable."""
        try:
            return self._index.read(tenant, branch)
        except IndexEntryDamaged:
            return None

    def salt(self, tenant: str) -> bytes | None:
        """The tenant's salt, None if no worker has drawn it yet. Raises StoreUnreachable."""
        return existing_salt(self._control, tenant)

    def format_record(self, digest: bytes) -> FormatRecord | None:
        """The published format record, None if it is absent or damaged. Raises StoreUnreachable."""
        try:
            return published_format(self._control, digest)
        except BadFingerprint:
            return None

    def numerics_record(self, digest: bytes) -> NumericsRecord | None:
        """The published numerics record, None if it is absent or damaged. Raises StoreUnreachable."""
        try:
            return published_numerics(self._control, digest)
        except BadFingerprint:
            return None

    def stored_pages(self, keys: Sequence[str]) -> dict[str, StoredPage]:
        """Headers of the pages that are present, by key. Raises StoreUnreachable."""
        found: dict[str, StoredPage] = {}
        for start in range(0, len(keys), SCAN_BATCH):
            batch = keys[start : start + SCAN_BATCH]
            with self._pages.pipeline(transaction=False) as pipeline:
                for key in batch:
                    pipeline.strlen(key)
                    pipeline.ttl(key)
                    pipeline.getrange(key, 0, HEADER_READ_BYTES - 1)
                replies = _reach("pages", partial(pipeline.execute, raise_on_error=False))
            for key, size, ttl, header in zip(batch, replies[0::3], replies[1::3], replies[2::3], strict=True):
                if isinstance(size, redis.RedisError):
                    found[key] = StoredPage(key, 0, ttl, b"")
                elif ttl != -2:
                    found[key] = StoredPage(key, size, ttl, header)
        return found

    def page_record(self, key: str) -> bytes | None:
        """A whole record, empty where the key holds another type. Raises StoreUnreachable."""
        try:
            return cast("bytes | None", self._pages.get(key))
        except redis.ResponseError:
            return b""
        except redis.RedisError as error:
            raise StoreUnreachable(f"pages: {error}") from error

    def page_keys(self, tenant: str | None) -> Iterator[str]:
        """Keys of every page record of a tenant, or of all, in no order. Raises StoreUnreachable."""
        for keys in self._scan(self._pages, "pages", page_pattern(tenant)):
            yield from keys

    def _scan(self, server: redis.Redis, name: str, pattern: str) -> Iterator[list[str]]:
        cursor = 0
        while True:
            cursor, raw_keys = cast(
                "tuple[int, list[bytes]]",
                _reach(name, partial(server.scan, cursor, match=pattern, count=SCAN_BATCH)),
            )
            if raw_keys:
                yield sorted({key.decode("utf-8", "replace") for key in raw_keys})
            if cursor == 0:
                return


def _client(name: str, url: str, timeout_s: float) -> redis.Redis:
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )
    except ValueError as error:
        raise StoreUnreachable(f"{name}: {error}") from error


def _reach(name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except redis.RedisError as error:
        raise StoreUnreachable(f"{name}: {error}") from error


def _entry(key: str, raw: bytes) -> TranscriptEntry | DamagedTranscript:
    tenant, turn_id = tenant_of(key), last_part_of(key)
    try:
        entry = decode_entry(raw)
        if (entry.tenant, entry.turn_id) != (tenant, turn_id):
            raise TranscriptDamaged("turn_id", f"{entry.tenant}/{entry.turn_id}", f"{tenant}/{turn_id}")
    except TranscriptDamaged as error:
        return DamagedTranscript(tenant, turn_id, error)
    return entry
