"""A Celery worker whose service writes numbered tokens instead of running a model.

`celery -A tests.fake_worker_app worker`. What a turn does stands in its request's `display`:

    tokens    deltas to write (default 2)      pause_s   seconds between them (default 0)
    die       "once" | "always": SIGKILL to the own process before the first delta (once: only in the first epoch)
    error     "memory": MemoryError inside run_turn before anything is written

Every run appends `<worker> <turn> <epoch>` to the file named by FAKE_WORKER_LOG.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from tests.turn_factory import MODEL, entry, started
from workers.celery_app import create_app
from workers.dispatch import Dispatcher
from workers.registry import WorkerRecord, beat, retire
from workers.settings import WorkerSettings
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.errors import StaleLease, TurnControlError, TurnEnded
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.leasing import Claimant
from workers.turns.outcomes import Dispatch
from workers.turns.records import ClaimedTurn


class FakeService:
    """Runs turns by writing token 100 + n as event n."""

    model_name = MODEL

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._control = TurnControl(connect(settings.control_url))
        self._dispatcher = Dispatcher(settings.control_url)
        self._claimant = Claimant(settings.worker_id, f"boot-{os.getpid()}", (MODEL,), lease_s=settings.lease_s)
        self._held: dict[str, ClaimedTurn] = {}
        self._draining = threading.Event()
        self._stopped = threading.Event()
        self._log = Path(os.environ["FAKE_WORKER_LOG"])
        self._control.run(calls.end_worker_leases(settings.worker_id, except_boot_id=self._claimant.boot_id))
        self._beat()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def run_turn(self, turn_id: str) -> None:
        if self._draining.is_set():
            return
        with contextlib.suppress(StaleLease, TurnEnded):
            turn = self._control.run(calls.claim(turn_id, self._claimant))
            if turn is None:
                return
            self._held[turn.request.turn_id] = turn
            with self._log.open("a") as log:
                log.write(f"{self._settings.worker_id} {turn.request.turn_id} {turn.lease.epoch}\n")
            try:
                self._send(self._tokens(turn))
            finally:
                self._held.pop(turn.request.turn_id, None)

    def drain(self, grace_s: float) -> None:
        self._draining.set()
        deadline = time.monotonic() + grace_s
        while self._held and time.monotonic() < deadline:
            time.sleep(0.02)
        for turn in list(self._held.values()):
            with contextlib.suppress(StaleLease, TurnEnded):
                self._send(self._control.run(calls.release(turn.lease)).dispatches)

    def stop(self) -> None:
        self._stopped.set()
        self._control.run(retire(self._settings.worker_id, self._claimant.boot_id))

    def _tokens(self, turn: ClaimedTurn) -> tuple[Dispatch, ...]:
        orders = turn.request.display
        if orders.get("die") == "always" or (orders.get("die") == "once" and turn.lease.epoch == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if orders.get("error") == "memory":
            self._end(turn, turn.next_number, TurnState.FAILED)
            raise MemoryError
        if not turn.started:
            self._control.run(calls.append_events(turn.lease, [started()]))
        for number in range(max(1, turn.next_number), 1 + orders.get("tokens", 2)):
            time.sleep(orders.get("pause_s", 0))
            event = TurnEvent(number, EventKind.DELTA, (100 + number,), f"t{number} ")
            reply = self._control.run(calls.append_events(turn.lease, [event]))
            if reply.stop is not None:
                return self._end(turn, number + 1, reply.stop)
        last = TurnEvent(1 + orders.get("tokens", 2), EventKind.TERMINAL, state=TurnState.COMPLETED)
        return self._control.run(calls.commit(turn.lease, entry(turn), [last])).dispatches

    def _end(self, turn: ClaimedTurn, number: int, state: TurnState) -> tuple[Dispatch, ...]:
        end = TurnEvent(number, EventKind.TERMINAL, state=state, finish_reason="error")
        return self._control.run(calls.finish(turn.lease, [end])).dispatches

    def _send(self, messages: tuple[Dispatch, ...]) -> None:
        for message in messages:
            self._dispatcher.send(message)

    def _keep_alive(self) -> None:
        while not self._stopped.wait(self._settings.lease_s / 3):
            with contextlib.suppress(TurnControlError):
                if held := list(self._held.values()):
                    self._control.run(calls.renew([turn.lease for turn in held]))
                self._beat()

    def _beat(self) -> None:
        slots = self._settings.slots
        record = WorkerRecord(
            self._settings.worker_id, self._claimant.boot_id, MODEL, slots, slots - len(self._held), pid=os.getpid()
        )
        self._control.run(beat(record))


app = create_app(FakeService)
