"""One worker process: the engine, its turns, and its face to the fleet. Assembled here, from settings."""

from __future__ import annotations

import collections
import functools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import redis

from snapshot_store.errors import StoreError
from snapshot_store.fingerprint import MIXED_NUMERICS, numerics_id
from snapshot_store.published import publish_fingerprint
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.salts import tenant_salt
from snapshot_store.store import PageStore
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.wire_pool import WireSettings
from workers.conversation import Conversations
from workers.dispatch import Dispatcher
from workers.engine.drafting import DraftSettings
from workers.engine.engine import Engine
from workers.errors import WorkerStartError
from workers.fleet_presence import FleetPresence
from workers.live_turns import LiveTurns
from workers.model_runtime import ModelRuntime, load_runtime
from workers.parking.acceptance import AcceptedNumerics
from workers.parking.bookkeeping import Bookkeeping
from workers.parking.identity import WriterIdentity
from workers.parking.park import Parking
from workers.parking.restore import Restorer
from workers.parking.turn_pages import TurnPages
from workers.prompt.builder import PromptBuilder
from workers.prompt.sandbox import TemplateSandbox
from workers.server_check import check_two_servers
from workers.setting_checks import masked
from workers.settings import WorkerSettings
from workers.turn_runner import TurnRunner
from workers.turns.calls import end_worker_leases
from workers.turns.control import TurnControl, connect, open_connections
from workers.turns.leasing import Claimant
from workers.worker_parts import WorkerParts

_log = logging.getLogger(__name__)
_FINGERPRINT_TTL_S = 30 * 24 * 3600
_HOT_BRANCHES = 64
_STALL_S = 10.0
_DRAIN_POLL_S = 0.1
# Beside the turns these speak to control: heartbeat, leases, bookkeeping.
_NUM_OWN_SPEAKERS = 3


class WorkerService:
    """Everything behind the Celery task. `run_turn` is called on as many threads as there are slots."""

    def __init__(
        self,
        settings: WorkerSettings,
        runtime: ModelRuntime,
        store: PageStore,
        on_fatal: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.runtime = runtime
        self.store = store
        self.boot_id = secrets.token_bytes(16)
        self.control = TurnControl(connect(settings.control_url, max_connections=settings.slots + _NUM_OWN_SPEAKERS))
        self.dispatcher = Dispatcher(settings.control_url)
        drafting = None if settings.draft == "off" else DraftSettings(settings.draft_rows, settings.suffix_min_match)
        self.engine = Engine(runtime.backend, step_rows=settings.max_step_rows, drafting=drafting)
        self.identity = WriterIdentity.of(runtime.fingerprint, self.boot_id, runtime.layout)
        self.parking = Parking(self.engine.cache, store, self.identity, queue_bytes=settings.park_queue_mib << 20)
        self.live = LiveTurns(
            self.control, connect(settings.control_url), settings.worker_id, settings.lease_s, self._is_healthy
        )
        self.presence = FleetPresence(self, on_fatal)
        self.restorer = Restorer(
            self.engine, store, self.identity, settings.restore, self._ttl_s, self.presence.is_quarantined,
            runtime.warm_up_rows_per_s,
        )  # fmt: skip
        self.bookkeeping = Bookkeeping(
            self.engine, store, self.parking, self.identity, self.control.client, self._ttl_s
        )
        self.sandbox = TemplateSandbox()
        self.runner = TurnRunner(self._parts())
        self.draining = False
        self._num_entered = 0
        self._entry_lock = threading.Lock()
        self._hot: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._hot_lock = threading.Lock()

    @classmethod
    def start(cls, settings: WorkerSettings) -> WorkerService:
        """Load the model, join the fleet and return a worker that takes turns. Raises WorkerStartError and GpuError.

        The servers are looked at first, since a model takes its time.
        """
        check_two_servers(settings.control_url, settings.pages_url)
        store = RedisPageStore(WireSettings(settings.pages_url, restore_connections=settings.wire_connections))
        try:
            store.open_connections()
        except StoreError as error:
            _log.warning("the page store is away, its connections are opened when it is back: %s", error)
        service = cls(settings, load_runtime(settings), store, _end_process)
        service.join()
        return service

    def join(self) -> None:
        """Start threads and announce the worker. Raises WorkerStartError when control refuses its connections."""
        self._open_connections()
        self.sandbox.start()
        self.engine.launch_thread()
        self.live.start()
        published = [self.runtime.fingerprint]
        if self.settings.accept_numerics != "own":
            published.append(replace(self.runtime.fingerprint, numerics=MIXED_NUMERICS))
        for fingerprint in published:
            publish_fingerprint(self.control.client, fingerprint, _FINGERPRINT_TTL_S)
        for message in self.control.run(end_worker_leases(self.settings.worker_id, except_boot_id=self.boot_id.hex())):
            self.dispatcher.send(message)
        self.presence.start()
        _log.info("worker %s serves %s", self.settings.worker_id, self.model_name)

    @property
    def model_name(self) -> str:
        """Name of the served model."""
        return self.settings.model_name or self.runtime.source.name

    def run_turn(self, turn_id: str) -> None:
        """Claim this turn, or one that goes before it, and run it to its end here. While draining, do nothing."""
        with self._entry_lock:
            if self.draining or self.engine.failure is not None:
                return
            self._num_entered += 1
        try:
            self.runner.run(turn_id)
        finally:
            # Only now: a beat at the start would delay the turn's first token, and claim itself counts the slot.
            self.presence.nudge()
            with self._entry_lock:
                self._num_entered -= 1

    def drain(self, grace_s: float) -> None:
        """Claim nothing more, let turns end within `grace_s`, hand the rest over. Returns when no turn runs."""
        with self._entry_lock:
            self.draining = True
        self.presence.nudge()
        deadline = time.monotonic() + grace_s
        while self._num_entered and time.monotonic() < deadline:
            time.sleep(_DRAIN_POLL_S)
        while self._num_entered:
            # Again each time: a claim that was under way may only now have become a turn.
            self.live.interrupt_all(draining=True)
            time.sleep(_DRAIN_POLL_S)
        self.parking.flush()

    def stop(self) -> None:
        """Free the engine and everything else. Pages that wait for their upload are sent first."""
        self.draining = True
        self.presence.stop()
        self.live.stop()
        self.bookkeeping.close()
        self.parking.close()
        self.engine.stop()
        self.runtime.close()
        self.sandbox.close()
        self.store.close()
        self.dispatcher.close()
        self.control.client.close()

    def hot_branches(self) -> tuple[str, ...]:
        """Branches whose last turns ran here, latest first."""
        with self._hot_lock:
            return tuple(reversed(self._hot))

    def _open_connections(self) -> None:
        """One connection to control for each thread that speaks to it: all turns of a step do so at once."""
        try:
            open_connections(self.control.client)
        except redis.RedisError as error:
            num = self.control.client.connection_pool.max_connections
            url = masked(self.settings.control_url)
            raise WorkerStartError("control_url", url, f"refuses {num} connections of one worker ({error})") from error

    def _claimant(self) -> Claimant:
        return Claimant(
            worker_id=self.settings.worker_id,
            boot_id=self.boot_id.hex(),
            models=(self.model_name,),
            hot_branches=self.hot_branches(),
            lease_s=self.settings.lease_s,
            numerics=numerics_id(self.identity.numerics_digest),
        )

    def _parts(self) -> WorkerParts:
        source = self.runtime.source
        return WorkerParts(
            control=self.control,
            dispatcher=self.dispatcher,
            live=self.live,
            conversations=Conversations(self.control, PromptBuilder(source.tokenizer, self.sandbox)),
            tokenizer=source.tokenizer,
            engine=self.engine,
            restorer=self.restorer,
            parking=self.parking,
            identity=self.identity,
            accepted=AcceptedNumerics.parse(self.identity.numerics_digest, self.settings.accept_numerics),
            claimant=self._claimant,
            salt_of=functools.cache(functools.partial(tenant_salt, self.control.client)),
            ttl_s=self._ttl_s,
            is_parked=self._is_parked,
            on_committed=self._committed,
            on_turn=self.presence.count_turn,
            context_length=self.runtime.context_length,
            arena_cells=self.runtime.arena_cells,
        )

    def _committed(self, entry: TranscriptEntry, pages: TurnPages, branch: str) -> None:
        with self._hot_lock:
            self._hot[branch] = None
            self._hot.move_to_end(branch)
            while len(self._hot) > _HOT_BRANCHES:
                self._hot.popitem(last=False)
        if self._is_parked(pages):
            self.bookkeeping.after_commit(entry, pages, branch)

    def _ttl_s(self, pages: TurnPages) -> int:
        return self.settings.park_stateless_ttl_s if pages.stateless else self.settings.park_ttl_s

    def _is_parked(self, pages: TurnPages) -> bool:
        return not pages.stateless or self.settings.park_stateless == "eager"

    def _is_healthy(self) -> bool:
        return self.engine.failure is None and self.engine.seconds_without_progress < _STALL_S


def _end_process() -> None:
    """Ask Celery for a warm shutdown; the supervisor starts a new process."""
    _log.critical("worker on %s ends after a broken invariant", socket.gethostname())
    os.kill(os.getpid(), signal.SIGTERM)
