"""Turns that this process runs: their leases are renewed here, and stop notes reach them here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from workers.engine.requests import EngineTurn, Interrupted
from workers.turns.calls import renew
from workers.turns.control import TurnControl
from workers.turns.errors import TurnControlError
from workers.turns.events import TurnState
from workers.turns.keys import control_stream_key
from workers.turns.records import Lease

_log = logging.getLogger(__name__)
_NOTE_BLOCK_MS = 1000
_RENEWALS_PER_LEASE = 3


@dataclass(slots=True)
class LiveTurn:
    """A claimed turn. stop: how it should end, once asked to. lost: the lease is gone. draining: hand it over."""

    lease: Lease
    engine_turn: EngineTurn | None = None
    stop: TurnState | None = None
    lost: bool = False
    draining: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def interrupted(self) -> bool:
        """Whether the turn must leave the engine."""
        return self.lost or self.draining or self.stop is not None

    def watch(self, engine_turn: EngineTurn | None) -> None:
        """Name the engine turn that an interruption must wake; wakes it at once when one is due."""
        with self._lock:
            self.engine_turn = engine_turn
            due = engine_turn is not None and self.interrupted
        if due:
            self._wake()

    def interrupt(self, *, stop: TurnState | None = None, lost: bool = False, draining: bool = False) -> None:
        """Make the turn end. The first stop state wins."""
        with self._lock:
            self.stop = self.stop or stop
            self.lost = self.lost or lost
            self.draining = self.draining or draining
        self._wake()

    def _wake(self) -> None:
        engine_turn = self.engine_turn
        if engine_turn is not None:
            engine_turn.cancelled.set()
            engine_turn.admitted.set()
            engine_turn.outputs.put(Interrupted())


class LiveTurns:
    """Renews leases three times per lease while the engine is healthy, and listens on the worker's control stream."""

    def __init__(
        self,
        control: TurnControl,
        notes: redis.Redis,
        worker_id: str,
        lease_s: float,
        is_healthy: Callable[[], bool],
    ) -> None:
        """notes: a client of its own for blocking reads, whose socket timeout exceeds a second."""
        self._control = control
        self._notes = notes
        self._worker_id = worker_id
        self._interval_s = lease_s / _RENEWALS_PER_LEASE
        self._lease_s = lease_s
        self._is_healthy = is_healthy
        self._live: dict[str, LiveTurn] = {}
        self._renewed_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._renew_loop, "leases"), (self._note_loop, "control-notes"))
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; leases are no longer renewed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[LiveTurn]:
        """Keep a lease alive for the length of the block."""
        live = LiveTurn(lease)
        with self._lock:
            self._live[lease.turn_id] = live
            self._renewed_at[lease.turn_id] = time.monotonic()
        try:
            yield live
        finally:
            with self._lock:
                # A later run of the same turn may have taken this entry's place: its lease must stay alive.
                if self._live.get(lease.turn_id) is live:
                    del self._live[lease.turn_id]
                    del self._renewed_at[lease.turn_id]

    def interrupt_all(self, *, draining: bool) -> None:
        """Make every turn leave the engine, to be handed over."""
        for live in self.all():
            live.interrupt(draining=draining)

    def all(self) -> list[LiveTurn]:
        """Turns that run now."""
        with self._lock:
            return list(self._live.values())

    def _renew_loop(self) -> None:
        while not self._stopping.wait(self._interval_s):
            live = self.all()
            if live and self._is_healthy():
                self._renew(live)
            self._give_up_expired()

    def _renew(self, live: list[LiveTurn]) -> None:
        asked_at = time.monotonic()
        try:
            reply = self._control.run(renew([turn.lease for turn in live]))
        except TurnControlError as error:
            _log.warning("leases were not renewed: %s", error)
            return
        for turn in live:
            turn_id = turn.lease.turn_id
            if turn_id in reply.lost:
                turn.interrupt(lost=True)
            elif turn_id in reply.kept:
                with self._lock:
                    if turn_id in self._renewed_at:
                        self._renewed_at[turn_id] = asked_at
            if turn_id in reply.stop:
                turn.interrupt(stop=reply.stop[turn_id])

    def _give_up_expired(self) -> None:
        """A lease that could not be renewed for its whole life is over, whatever control would say."""
        now = time.monotonic()
        for turn in self.all():
            with self._lock:
                renewed_at = self._renewed_at.get(turn.lease.turn_id, now)
            if now - renewed_at > self._lease_s and not turn.lost:
                turn.interrupt(lost=True)

    def _note_loop(self) -> None:
        key, last = control_stream_key(self._worker_id), ""
        while not self._stopping.is_set():
            try:
                last = last or self._last_note(key)
                reply = cast("Any", self._notes.xread({key: last}, block=_NOTE_BLOCK_MS, count=100))
            except redis.RedisError:
                self._stopping.wait(1.0)
                continue
            for _stream, entries in reply or ():
                for entry_id, fields in entries:
                    last = entry_id.decode()
                    self._deliver(fields)

    def _last_note(self, key: str) -> str:
        """Id of the newest note: older ones are of earlier turns, and from here on none is missed between two reads."""
        newest = cast("Any", self._notes.xrevrange(key, count=1))
        return newest[0][0].decode() if newest else "0-0"

    def _deliver(self, fields: dict[bytes, bytes]) -> None:
        turn_id, state = fields.get(b"turn", b"").decode(), fields.get(b"stop", b"").decode()
        with self._lock:
            live = self._live.get(turn_id)
        if live is not None and state in {TurnState.CANCELLED.value, TurnState.EXPIRED.value}:
            live.interrupt(stop=TurnState(state))
