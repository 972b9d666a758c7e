"""The page store on a Redis-type server, over the wire client."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreRefused, StoreUnreachable, WireDesync
from snapshot_store.lua import script
from snapshot_store.read_ahead import ReadAhead
from snapshot_store.record import CHECK_BYTES, CHECK_OFFSET
from snapshot_store.store import (
    FetchOutcome,
    FetchRequest,
    IsQuarantined,
    PutOutcome,
    PutStatus,
    check_requests,
    check_ttls,
    nobody_quarantined,
)
from snapshot_store.wire import Reply, WireConnection, packed_command
from snapshot_store.wire_pool import Priority, WirePool, WireSettings

TOUCH_BATCH = 512


class RedisPageStore:
    """A PageStore. Connections are made when first needed, so constructing one never fails on a server that is away."""

    def __init__(self, settings: WireSettings) -> None:
        self._pool = WirePool(settings)
        self._timeout_s = settings.operation_timeout_s

    def open_connections(self) -> None:
        """Make all connections now, so that no later coincidence of callers makes one.

        Raises StoreUnreachable, StoreRefused (authentication), WireDesync; then they are made when needed.
        """
        self._pool.open_connections(Deadline(self._timeout_s))

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        """See PageStore."""
        (ttl,) = check_ttls([key], ttl_s)
        size = len(header) + len(body)
        raw_key = key.encode()
        head = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(raw_key), raw_key, size)
        tail = b"\r\n$2\r\nNX\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl)), ttl)
        parts = [memoryview(head), memoryview(header), body, memoryview(tail)]
        deadline = Deadline(self._timeout_s)
        try:
            with self._pool.lease(Priority.PARK, deadline) as connection:
                connection.begin(deadline)
                connection.send(parts, deadline)
                stored = connection.read_reply(deadline) is not None
        except (StoreUnreachable, StoreRefused, WireDesync) as error:
            return PutOutcome(PutStatus.REFUSED, str(error))
        return PutOutcome(PutStatus.STORED if stored else PutStatus.PRESENT)

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        is_quarantined: IsQuarantined = nobody_quarantined,
        deadline: Deadline | None = None,
    ) -> Generator[FetchOutcome, None, None]:
        """See PageStore."""
        check_requests(requests)
        return ReadAhead(self._pool, requests, is_quarantined, deadline).outcomes()

    def touch(self, keys: Sequence[str], ttl_s: int | Sequence[int], deadline: Deadline | None = None) -> list[bool]:
        """See PageStore."""
        ttls = check_ttls(keys, ttl_s)
        deadline = Deadline(self._timeout_s) if deadline is None else deadline.within(self._timeout_s)
        present: list[bool] = []
        try:
            with self._pool.lease(Priority.LOOKUP, deadline) as connection:
                for start in range(0, len(keys), TOUCH_BATCH):
                    batch = slice(start, start + TOUCH_BATCH)
                    present += _touch_batch(connection, keys[batch], ttls[batch], deadline)
        except (StoreRefused, WireDesync) as error:
            raise StoreUnreachable(str(error)) from error
        return present

    def delete_if(self, key: str, check: bytes) -> bool:
        """See PageStore."""
        deadline = Deadline(self._timeout_s)
        span = (b"%d" % CHECK_OFFSET, b"%d" % (CHECK_OFFSET + CHECK_BYTES - 1))
        command = (b"EVAL", script("delete_if"), b"1", key.encode(), check, *span)
        try:
            with self._pool.lease(Priority.LOOKUP, deadline) as connection:
                return connection.command(*command, deadline=deadline) == 1
        except (StoreRefused, WireDesync) as error:
            raise StoreUnreachable(str(error)) from error

    def close(self) -> None:
        """See PageStore."""
        self._pool.close()


def _touch_batch(
    connection: WireConnection, keys: Sequence[str], ttls: Sequence[int], deadline: Deadline
) -> list[bool]:
    packed = bytearray()
    for key, ttl in zip(keys, ttls, strict=True):
        packed += packed_command([b"EXPIRE", key.encode(), b"%d" % ttl, b"GT"])
        packed += packed_command([b"EXISTS", key.encode()])
    connection.begin(deadline)
    connection.send([memoryview(packed)], deadline)
    replies = [_reply_or_refusal(connection, deadline) for _ in range(2 * len(keys))]
    for reply in replies:
        if isinstance(reply, StoreRefused):
            raise reply
    return [reply == 1 for reply in replies[1::2]]


def _reply_or_refusal(connection: WireConnection, deadline: Deadline) -> Reply | StoreRefused:
    # A refusal inside a batch must not leave the replies behind it unread.
    try:
        return connection.read_reply(deadline)
    except StoreRefused as refusal:
        return refusal
