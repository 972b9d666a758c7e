"""Upload sealed pages while their turn goes on. Nothing waits for it: a page that is not stored is recomputed."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import Counter
from dataclasses import dataclass

from gpu.cache import HoldKind, KVCache, SealedPage
from snapshot_store.errors import StoreError
from snapshot_store.keys import page_key
from snapshot_store.record import PageIdentity, build_header
from snapshot_store.store import PageStore, PutStatus
from snapshot_store.ttl import ttl_for_depth
from workers.engine.requests import SealedEvent
from workers.parking.identity import WriterIdentity
from workers.parking.turn_pages import TurnPages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Upload:
    ticket: int
    tenant: str
    identity: PageIdentity
    page: SealedPage
    ttl_s: int


class Parking:
    """A bounded queue of uploads and the threads that send them. Every queued page carries an UPLOAD hold."""

    def __init__(
        self, cache: KVCache, store: PageStore, identity: WriterIdentity, *, queue_bytes: int, num_threads: int = 2
    ) -> None:
        self._cache = cache
        self._store = store
        self._identity = identity
        self._limit = max(1, queue_bytes // cache.layout.page_bytes)
        self._queue: queue.Queue[_Upload | None] = queue.Queue()
        self._tickets = itertools.count()
        self._open: set[int] = set()
        self._settled = threading.Condition()
        self.outcomes: Counter[str] = Counter()
        self.stored_bytes = 0
        self._threads = [threading.Thread(target=self._run, name=f"park-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def park(self, event: SealedEvent, pages: TurnPages, base_ttl_s: int) -> None:
        """Queue a page that carries an UPLOAD hold; beyond the queue's bound it is skipped and counted."""
        if self.backlog >= self._limit:
            self.outcomes["skipped"] += 1
            self._cache.release(event.page, HoldKind.UPLOAD)
            return
        identity = self._identity.page(pages, event.page_index)
        ttl_s = ttl_for_depth(base_ttl_s, event.page_index)
        with self._settled:
            ticket = next(self._tickets)
            self._open.add(ticket)
        self._queue.put(_Upload(ticket, pages.tenant, identity, event.page, ttl_s))

    @property
    def backlog(self) -> int:
        """Pages that wait for their upload or are under way."""
        return len(self._open)

    def flush(self) -> None:
        """Block until everything queued so far has been tried; what is queued meanwhile is not waited for."""
        with self._settled:
            last = max(self._open, default=-1)
            self._settled.wait_for(lambda: min(self._open, default=last + 1) > last)

    def close(self) -> None:
        """Send what is queued, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            upload = self._queue.get()
            try:
                if upload is None:
                    return
                self._send(upload)
            except Exception:
                _log.exception("upload of a page failed")
                self.outcomes["failed"] += 1
            finally:
                if upload is not None:
                    self._cache.release(upload.page, HoldKind.UPLOAD)
                    with self._settled:
                        self._open.discard(upload.ticket)
                        self._settled.notify_all()

    def _send(self, upload: _Upload) -> None:
        key = page_key(upload.tenant, upload.identity.digest)
        body = upload.page.buffer
        try:
            header = build_header(key, upload.identity, body, self._identity.segments)
            outcome = self._store.put(key, header, body, upload.ttl_s)
        except StoreError as error:
            self.outcomes[f"error:{type(error).__name__}"] += 1
            return
        self.outcomes[outcome.status.value] += 1
        if outcome.status is PutStatus.STORED:
            self.stored_bytes += len(body)
        elif outcome.status is PutStatus.REFUSED:
            _log.warning("page store refused %s: %s", key, outcome.reason)
