"""After a commit: prove that the branch's pages are in the store, send those that are not, write the index entry."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

import redis

from gpu.cache import HoldKind, SealedPage
from snapshot_store.errors import StoreError
from snapshot_store.index import SnapshotIndex, SnapshotIndexEntry
from snapshot_store.store import PageStore
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.ttl import ttls_for_pages
from workers.engine.engine import Engine
from workers.engine.requests import SealedEvent
from workers.parking.identity import WriterIdentity
from workers.parking.park import Parking
from workers.parking.turn_pages import TurnPages

_log = logging.getLogger(__name__)


class Bookkeeping:
    """One thread that follows committed turns. Nothing waits for it."""

    def __init__(
        self,
        engine: Engine,
        store: PageStore,
        parking: Parking,
        identity: WriterIdentity,
        control: redis.Redis,
        ttl_s: Callable[[TurnPages], int],
    ) -> None:
        self._engine = engine
        self._store = store
        self._parking = parking
        self._identity = identity
        self._index = SnapshotIndex(control)
        self._ttl_s = ttl_s
        self._queue: queue.Queue[tuple[TranscriptEntry, TurnPages, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="park-index", daemon=True)
        self._thread.start()

    def after_commit(self, entry: TranscriptEntry, pages: TurnPages, branch: str) -> None:
        """Queue the work for a committed turn. Any thread."""
        self._queue.put((entry, pages, branch))

    def settle(self) -> None:
        """Block until every turn committed so far is parked as far as it can be."""
        self._queue.join()

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            entry, pages, branch = item
            try:
                self._parking.flush()
                num_parked = self._make_present(entry, pages)
                self._write_index(entry, pages, branch, num_parked)
            except StoreError as error:
                _log.warning("turn %s is not wholly parked: %s", entry.turn_id, error)
            except Exception:
                _log.exception("bookkeeping of turn %s failed", entry.turn_id)
            finally:
                self._queue.task_done()

    def _make_present(self, entry: TranscriptEntry, pages: TurnPages) -> int:
        """Extend the life of every page in one trip and send again what is missing; returns the leading pages present.

        A page that is gone from the store and from this worker's mirror is recomputed when it is needed. So is one of
        other numerics: nobody writes in their name but those who have them.
        """
        num_pages = len(pages.sources)
        keys = [pages.key(index) for index in range(num_pages)]
        lives = ttls_for_pages(self._ttl_s(pages), 0, num_pages)
        present = self._store.touch(keys, lives) if keys else []
        missing = [index for index, found in enumerate(present) if not found]
        if missing and self._send_again(pages, missing):
            self._parking.flush()
            present = self._store.touch(keys, lives)
        return next((index for index, found in enumerate(present) if not found), num_pages)

    def _send_again(self, pages: TurnPages, missing: list[int]) -> int:
        held = self._engine.call(lambda: self._hold(pages, missing))
        for index, page in held:
            event = SealedEvent(page, index)
            self._parking.park(event, pages, self._ttl_s(pages))
        return len(held)

    def _hold(self, pages: TurnPages, missing: list[int]) -> list[tuple[int, SealedPage]]:
        cache = self._engine.cache
        held = []
        for index in missing:
            if pages.sources[index] not in (pages.own, pages.written):
                continue
            page = cache.lookup(pages.digest(index))
            if page is not None:
                cache.hold(page, HoldKind.UPLOAD)
                held.append((index, page))
        return held

    def _write_index(self, entry: TranscriptEntry, pages: TurnPages, branch: str, num_pages: int) -> None:
        layout = self._engine.cache.layout
        numerics_cells = {pages.written: 0}
        for numerics, num_parked in Counter(pages.sources[:num_pages]).items():
            numerics_cells[numerics] = num_parked * layout.page_size
        index_entry = SnapshotIndexEntry(
            tenant=entry.tenant,
            branch=branch,
            head_turn_id=entry.turn_id,
            root_id=entry.root_id,
            model=entry.model,
            num_cells=num_pages * layout.page_size,
            num_pages=num_pages,
            num_bytes=num_pages * layout.page_bytes,
            page_size=layout.page_size,
            format_digest=self._identity.format_digest,
            numerics_digest=pages.written,
            worker_id=entry.worker_id,
            writer_boot_id=self._identity.boot_id,
            epoch=pages.epoch,
            committed_at=entry.committed_at,
            parked_at=time.time(),
            numerics_cells=numerics_cells,
        )
        self._index.write(index_entry, self._ttl_s(pages))
