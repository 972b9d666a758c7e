"""The snapshot index: per branch, how much of it is parked, by whom and under which fingerprint.

A hint for inspection and routing; it holds no digests, since those follow from the transcript. Only a worker that has
committed a turn writes one, and an entry of an earlier turn never replaces that of a later one. (Epochs count the runs
of one turn, so they do not order the turns of a branch; commits do.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

import msgpack
import redis

from snapshot_store.errors import IndexEntryDamaged, StoreUnreachable
from snapshot_store.keys import last_part_of, snapshot_key, snapshot_pattern, tenant_of
from snapshot_store.lua import script

INDEX_VERSION: Final = 1
MAX_INDEX_BYTES: Final = 1 << 16
_NUMERICS: Final = b"numerics:"


@dataclass(frozen=True, slots=True)
class SnapshotIndexEntry:
    """What is parked of one branch.

    branch: conversation id, or the id of the turn that opened it. head_turn_id: the last turn whose pages are meant.
    num_cells, num_pages, num_bytes: parked full pages of the branch, shared ones included. numerics_digest: of those
    that the head turn wrote.
    page_size: cells per page. epoch: of the lease that parked. committed_at: of the head turn, parked_at: of this
    entry, both in unix seconds.
    numerics_cells: cells by numerics digest, of every numerics that the branch was parked under. `write` sets those of
    `numerics_digest` (num_cells where none are given), raises the others to what is given, and keeps the rest.
    """

    tenant: str
    branch: str
    head_turn_id: str
    root_id: str
    model: str
    num_cells: int
    num_pages: int
    num_bytes: int
    page_size: int
    format_digest: bytes
    numerics_digest: bytes
    worker_id: str
    writer_boot_id: bytes
    epoch: int
    committed_at: float
    parked_at: float
    numerics_cells: dict[bytes, int] = field(default_factory=dict)


class SnapshotIndex:
    """Index entries on control."""

    def __init__(self, control: redis.Redis) -> None:
        self._control = control

    def write(self, entry: SnapshotIndexEntry, ttl_s: int) -> bool:
        """Write an entry; False if that of a later commit is there. Raises StoreUnreachable, BadKeyPart."""
        key = snapshot_key(entry.tenant, entry.branch)
        committed = int(entry.committed_at * 1_000_000)
        own = entry.numerics_digest
        values: list[Any] = [committed, encode_index_entry(entry), ttl_s, own.hex()]
        values.append(entry.numerics_cells.get(own, 0) if entry.numerics_cells else entry.num_cells)
        for digest, num_cells in entry.numerics_cells.items():
            values += (digest.hex(), num_cells) if digest != own else ()
        try:
            return bool(self._control.eval(script("write_index").decode(), 1, key, *values))
        except redis.RedisError as error:
            raise StoreUnreachable(f"control: {error}") from error

    def read(self, tenant: str, branch: str) -> SnapshotIndexEntry | None:
        """The entry of a branch, None without one. Raises IndexEntryDamaged, StoreUnreachable, BadKeyPart."""
        try:
            stored = cast("dict[bytes, bytes]", self._control.hgetall(snapshot_key(tenant, branch)))
        except redis.RedisError as error:
            raise StoreUnreachable(f"control: {error}") from error
        return decode_index_entry(tenant, branch, stored) if stored else None

    def branches(self, tenant: str | None = None) -> Iterator[tuple[str, str]]:
        """Tenant and branch of every entry, in no order. Raises StoreUnreachable, BadKeyPart."""
        try:
            for key in self._control.scan_iter(match=snapshot_pattern(tenant), count=1000):
                name = cast("bytes", key).decode()
                yield tenant_of(name), last_part_of(name)
        except redis.RedisError as error:
            raise StoreUnreachable(f"control: {error}") from error

    def delete(self, tenant: str, branch: str) -> None:
        """Delete the entry of a branch; its pages live on until they expire. Raises StoreUnreachable, BadKeyPart."""
        try:
            self._control.delete(snapshot_key(tenant, branch))
        except redis.RedisError as error:
            raise StoreUnreachable(f"control: {error}") from error


_FIELDS: Final[dict[str, type]] = {
    "head_turn_id": str,
    "root_id": str,
    "model": str,
    "num_cells": int,
    "num_pages": int,
    "num_bytes": int,
    "page_size": int,
    "format_digest": bytes,
    "numerics_digest": bytes,
    "worker_id": str,
    "writer_boot_id": bytes,
    "epoch": int,
    "committed_at": float,
    "parked_at": float,
}


def encode_index_entry(entry: SnapshotIndexEntry) -> bytes:
    """Msgpack form of an entry without what the key and the hash's other fields say."""
    document = asdict(entry)
    document |= {"committed_at": float(entry.committed_at), "parked_at": float(entry.parked_at)}
    packed: bytes = msgpack.packb({"v": INDEX_VERSION} | {name: document[name] for name in _FIELDS})
    return packed


def decode_index_entry(tenant: str, branch: str, stored: dict[bytes, bytes]) -> SnapshotIndexEntry:
    """Read the hash of an entry. Raises IndexEntryDamaged that names field, value and limit."""
    raw = stored.get(b"entry", b"")
    if len(raw) > MAX_INDEX_BYTES:
        raise IndexEntryDamaged("entry bytes", len(raw), f"at most {MAX_INDEX_BYTES}")
    try:
        document = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise IndexEntryDamaged("entry", type(error).__name__, "one msgpack map") from error
    if not isinstance(document, dict) or document.keys() != {"v", *_FIELDS} or document.pop("v") != INDEX_VERSION:
        raise IndexEntryDamaged("entry", type(document).__name__, f"the fields of version {INDEX_VERSION}")
    for name, kind in _FIELDS.items():
        if type(document[name]) is not kind:
            raise IndexEntryDamaged(name, type(document[name]).__name__, kind.__name__)
    return SnapshotIndexEntry(tenant=tenant, branch=branch, numerics_cells=_numerics_cells(stored), **document)


def _numerics_cells(stored: dict[bytes, bytes]) -> dict[bytes, int]:
    cells: dict[bytes, int] = {}
    for name, value in stored.items():
        if name.startswith(_NUMERICS):
            try:
                cells[bytes.fromhex(name[len(_NUMERICS) :].decode())] = int(value)
            except ValueError:
                raise IndexEntryDamaged(name.decode("utf-8", "replace"), value, "hex digest and a count") from None
    return cells
