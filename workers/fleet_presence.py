"""What the fleet sees of a worker: heartbeats, the published model, quarantine, and figures of its turns."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snapshot_store.fingerprint import numerics_id
from workers.registry import ModelRecord, WorkerRecord, beat, publish_model, quarantine, quarantined, retire
from workers.turns.errors import TurnControlError

if TYPE_CHECKING:
    from workers.service import WorkerService
    from workers.turn_report import TurnReport

_log = logging.getLogger(__name__)
_QUARANTINE_REFRESH_S = 5.0


class FleetPresence:
    """Beats every `heartbeat_s`, keeps the set of quarantined writers fresh and reports a broken invariant."""

    def __init__(self, service: WorkerService, on_fatal: Callable[[], None]) -> None:
        self._service = service
        self._on_fatal = on_fatal
        self._started_at = time.time()
        self._stopping = threading.Event()
        self._nudged = threading.Event()
        self._quarantined: frozenset[str] = frozenset()
        self._refreshed_at = 0.0
        self._reported = False
        self._turns: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._restored_pages = 0
        self._foreign_pages: Counter[str] = Counter()
        self._marked_turns = 0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Publish the model, beat once, then keep beating. Raises TurnControlError if control is away."""
        self._publish()
        self._refresh_quarantined()
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop beating and leave the fleet."""
        self._stopping.set()
        self._nudged.set()
        if self._thread.ident is not None:
            self._thread.join()
        settings, boot_id = self._service.settings, self._service.boot_id
        try:
            self._service.control.run(retire(settings.worker_id, boot_id.hex()))
        except TurnControlError as error:
            _log.warning("the worker's record will expire by itself: %s", error)

    def nudge(self) -> None:
        """Beat soon: what the record says has changed."""
        self._nudged.set()

    def is_quarantined(self, boot_id: bytes) -> bool:
        """Whether pages of this writer must not be read."""
        return boot_id.hex() in self._quarantined

    def count_turn(self, report: TurnReport) -> None:
        """Account one run of a turn."""
        self._turns[report.end] += 1
        self._recomputed.update(report.resolution.reasons)
        self._restored_pages += report.resolution.store_pages
        self._foreign_pages.update({numerics_id(numerics): num for numerics, num in report.foreign_pages.items()})
        self._marked_turns += bool(report.marks())

    def figures(self) -> dict[str, Any]:
        """Counters for inspection and metrics: plain numbers, totals since start."""
        service = self._service
        counters, stats = service.engine.counters, service.engine.cache.stats()
        return {
            "turns": dict(self._turns),
            "recomputed_pages": dict(self._recomputed),
            "restored_pages": self._restored_pages,
            "foreign_pages": dict(self._foreign_pages),
            "marked_turns": self._marked_turns,
            "parked_pages": dict(service.parking.outcomes),
            "parked_bytes": service.parking.stored_bytes,
            "park_backlog": service.parking.backlog,
            "steps": counters.steps,
            "prefill_rows": counters.prefill_rows,
            "decode_rows": counters.decode_rows,
            "preemptions": counters.preemptions,
            "drafted_rows": counters.drafted,
            "accepted_rows": counters.accepted,
            "engine_turns": service.engine.num_turns,
            "pages": stats.num_pages,
            "free_pages": stats.free,
            "cached_pages": stats.cached,
            "resident_pages": stats.resident,
            "evictions": stats.evictions,
            "attest": service.settings.attest,
            "draft": service.settings.draft,
            "accept_numerics": service.settings.accept_numerics,
        }

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._nudged.wait(self._service.settings.heartbeat_s)
            self._nudged.clear()
            try:
                self._report_failure()
                self._refresh_quarantined()
                if not self._stopping.is_set():
                    self._beat()
            except TurnControlError as error:
                _log.warning("heartbeat failed: %s", error)

    def _report_failure(self) -> None:
        """An engine that ended ends the process. After a broken rule all that it wrote is suspect: say so first."""
        engine = self._service.engine
        if engine.failure is None or self._reported:
            return
        if engine.quarantine is not None:
            reason = f"{type(engine.quarantine).__name__}: {engine.quarantine}"
            self._service.control.run(quarantine(self._service.boot_id.hex(), reason))
        self._reported = True
        self._on_fatal()

    def _refresh_quarantined(self) -> None:
        if time.monotonic() - self._refreshed_at >= _QUARANTINE_REFRESH_S or not self._refreshed_at:
            self._quarantined = self._service.control.run(quarantined())
            self._refreshed_at = time.monotonic()

    def _publish(self) -> None:
        service = self._service
        source, settings = service.runtime.source, service.settings
        info = {
            "kv_format": settings.kv_format,
            "architecture": source.config.architecture,
            "page_size": service.runtime.layout.page_size,
            "max_cells": service.runtime.arena_cells,
            "draft": settings.draft,
        }
        record = ModelRecord(
            service.model_name, source.bundle.digest.hex(), service.runtime.context_length, time.time(), info
        )
        service.control.run(publish_model(record, source.bundle.to_bytes()))

    def _beat(self) -> None:
        service = self._service
        settings, identity = service.settings, service.identity
        busy = len(service.live.all())
        record = WorkerRecord(
            worker_id=settings.worker_id,
            boot_id=service.boot_id.hex(),
            model=service.model_name,
            slots=settings.slots,
            free=max(0, settings.slots - busy),
            pid=os.getpid(),
            host=socket.gethostname(),
            device=service.runtime.device,
            backend=service.runtime.backend.name,
            kv_format=settings.kv_format,
            format_digest=identity.format_digest.hex(),
            numerics_digest=identity.numerics_digest.hex(),
            context_length=service.runtime.context_length,
            started_at=self._started_at,
            draining=service.draining or service.engine.failure is not None,
            hot_branches=service.hot_branches(),
            info=self.figures(),
        )
        service.control.run(beat(record))
