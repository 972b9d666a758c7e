"""A bounded set of connections to the page server, handed out by priority: look-up, then restore, then park."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum

import redis
from redis.connection import ConnectionPool

from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreRefused, StoreUnreachable
from snapshot_store.wire import WireConnection


class Priority(IntEnum):
    """Whose turn it is when connections are short; the lower goes first."""

    LOOKUP = 0
    RESTORE = 1
    PARK = 2


@dataclass(frozen=True, slots=True)
class WireSettings:
    """Where the page server is and how long it may take.

    url: redis://, rediss:// or unix://, with user, password and database as redis-py reads them.
    park_connections: of max_connections, how many parking may hold at once.
    operation_timeout_s: for one page, or one batch of small commands, waiting for a connection included.
    """

    url: str
    max_connections: int = 8
    restore_connections: int = 4
    park_connections: int = 2
    connect_timeout_s: float = 2.0
    operation_timeout_s: float = 10.0


class WirePool:
    """Thread-safe. A connection that failed is closed and its place is free again."""

    def __init__(self, settings: WireSettings) -> None:
        self.settings = settings
        self._factory = ConnectionPool.from_url(
            settings.url,
            protocol=2,
            decode_responses=False,
            socket_timeout=settings.connect_timeout_s,
            socket_connect_timeout=settings.connect_timeout_s,
            health_check_interval=0,
            retry=None,
            client_name="kvalet-pages",
            maint_notifications_config=None,
        )
        self._changed = threading.Condition()
        self._idle: list[WireConnection] = []
        self._leased: Counter[Priority] = Counter()
        self._waiting: Counter[Priority] = Counter()
        self._closed = False

    @contextmanager
    def lease(self, priority: Priority, deadline: Deadline) -> Iterator[WireConnection]:
        """Hold a connection for one operation. Raises StoreUnreachable, StoreRefused (authentication), WireDesync."""
        self._wait_for_place(priority, deadline)
        connection: WireConnection | None = None
        try:
            connection = self._take_idle() or self._connect(deadline)
            yield connection
        except StoreRefused:
            raise
        except BaseException:
            # Whatever else went wrong may have left half a reply behind.
            if connection is not None:
                connection.close()
            raise
        finally:
            self._give_back(priority, connection)

    def open_connections(self, deadline: Deadline) -> None:
        """Make every connection that is allowed. Raises StoreUnreachable, StoreRefused (authentication), WireDesync."""
        with ExitStack() as leases:
            for _ in range(self.settings.max_connections):
                leases.enter_context(self.lease(Priority.LOOKUP, deadline))

    def close(self) -> None:
        """Close idle connections and refuse new leases; leased ones are closed when they come back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def _wait_for_place(self, priority: Priority, deadline: Deadline) -> None:
        with self._changed:
            self._waiting[priority] += 1
            try:
                while not self._may_lease(priority):
                    self._changed.wait(deadline.remaining())
                self._leased[priority] += 1
            finally:
                self._waiting[priority] -= 1
                self._changed.notify_all()

    def _may_lease(self, priority: Priority) -> bool:
        if self._closed:
            raise StoreUnreachable("the page store is closed")
        if self._leased.total() >= self.settings.max_connections:
            return False
        if priority is Priority.PARK and self._leased[Priority.PARK] >= self.settings.park_connections:
            return False
        return not any(self._waiting[other] for other in Priority if other < priority)

    def _take_idle(self) -> WireConnection | None:
        while True:
            with self._changed:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.is_quiet():
                return connection
            connection.close()

    def _connect(self, deadline: Deadline) -> WireConnection:
        limit_s = min(self.settings.connect_timeout_s, deadline.remaining())
        limits = {"socket_timeout": limit_s, "socket_connect_timeout": limit_s}
        try:
            connection = self._factory.connection_class(**{**self._factory.connection_kwargs, **limits})
        except (redis.RedisError, OSError) as error:
            raise StoreUnreachable(f"connect: {error}") from error
        return WireConnection(connection, deadline)

    def _give_back(self, priority: Priority, connection: WireConnection | None) -> None:
        with self._changed:
            self._leased[priority] -= 1
            keep = connection is not None and connection.is_open and not self._closed
            if connection is not None and keep:
                self._idle.append(connection)
            self._changed.notify_all()
        if connection is not None and not keep:
            connection.close()
