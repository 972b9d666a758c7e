"""Many reads on a few threads, their outcomes in order, and a way out that leaves no buffer in use."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreRefused, StoreUnreachable, WireDesync
from snapshot_store.page_read import read_page
from snapshot_store.store import FetchOutcome, FetchRequest, IsQuarantined, PageUnreachable
from snapshot_store.wire import WireConnection
from snapshot_store.wire_pool import Priority, WirePool


class ReadAhead:
    """One fetch: each thread leases a connection for one page at a time, in request order.

    deadline: for all pages together; each page also has the pool's operation timeout.
    """

    def __init__(
        self,
        pool: WirePool,
        requests: Sequence[FetchRequest],
        is_quarantined: IsQuarantined,
        deadline: Deadline | None = None,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._is_quarantined = is_quarantined
        self._deadline = deadline
        self._changed = threading.Condition()
        self._outcomes: list[FetchOutcome | Exception | None] = [None] * len(requests)
        self._next = 0
        self._stopped = False
        self._in_use: set[WireConnection] = set()

    def outcomes(self) -> Generator[FetchOutcome, None, None]:
        """Start the threads and yield outcomes in request order; once closed, no buffer is in use."""
        num_threads = min(self._pool.settings.restore_connections, len(self._requests))
        threads = [
            threading.Thread(target=self._work, name=f"kvalet-fetch-{n}", daemon=True) for n in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for index in range(len(self._requests)):
                yield self._wait_for(index)
        finally:
            self._stop()

    def _work(self) -> None:
        while (index := self._take()) is not None:
            outcome = self._read_or_error(self._requests[index])
            with self._changed:
                self._outcomes[index] = outcome
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if self._stopped or self._next == len(self._requests):
                return None
            self._next += 1
            return self._next - 1

    def _read_or_error(self, request: FetchRequest) -> FetchOutcome | Exception:
        # Not about the page: the caller's own predicate, or a fault of ours. It is raised where the outcome is due.
        try:
            return self._read(request)
        except Exception as error:
            return error

    def _read(self, request: FetchRequest) -> FetchOutcome:
        limit_s = self._pool.settings.operation_timeout_s
        deadline = Deadline(limit_s) if self._deadline is None else self._deadline.within(limit_s)
        try:
            with self._pool.lease(Priority.RESTORE, deadline) as connection:
                self._enter(connection)
                try:
                    return read_page(connection, request, self._is_quarantined, deadline)
                finally:
                    self._leave(connection)
        except (StoreUnreachable, StoreRefused, WireDesync) as error:
            return PageUnreachable(request.key, str(error))

    def _enter(self, connection: WireConnection) -> None:
        with self._changed:
            if self._stopped:
                raise StoreUnreachable("the reader gave up")
            self._in_use.add(connection)

    def _leave(self, connection: WireConnection) -> None:
        with self._changed:
            self._in_use.discard(connection)
            self._changed.notify_all()

    def _wait_for(self, index: int) -> FetchOutcome:
        with self._changed:
            while (outcome := self._outcomes[index]) is None:
                try:
                    self._changed.wait(None if self._deadline is None else self._deadline.remaining())
                except StoreUnreachable as error:
                    return PageUnreachable(self._requests[index].key, str(error))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _stop(self) -> None:
        """Wake the readers and wait until each has left its buffer; threads still without a connection end later."""
        with self._changed:
            self._stopped = True
            for connection in self._in_use:
                connection.abort()
            while self._in_use:
                self._changed.wait()
