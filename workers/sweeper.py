"""The sweeper: sends again what messages lost, ends what expired, cleans up after dead workers.

Every worker runs one; the scripts see to it that each due message is sent by one of them.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from workers.registry import take_dead_workers
from workers.turns.calls import sweep
from workers.turns.control import TurnControl
from workers.turns.errors import TurnControlError
from workers.turns.outcomes import Dispatch

log = logging.getLogger(__name__)


class MessageSender(Protocol):
    """What the sweeper needs of a dispatcher."""

    def send(self, message: Dispatch) -> None:
        """Send one message. Raises ControlUnavailable."""

    def delete_worker_queue(self, worker_id: str) -> None:
        """Delete the queue of a dead worker. Raises ControlUnavailable."""


class Sweeper:
    """Sweeps every `interval_s` seconds in its own thread until stopped. Outages of control are logged and outlived."""

    def __init__(self, control: TurnControl, sender: MessageSender, *, interval_s: float = 1.0) -> None:
        self._control = control
        self._sender = sender
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._is_down = False
        self._thread = threading.Thread(target=self._run, name="kvalet-sweeper", daemon=True)

    def start(self) -> None:
        """Start sweeping."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop sweeping and wait for the current sweep."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def sweep_once(self) -> int:
        """Sweep and send; returns the number of messages sent. Raises TurnControlError."""
        messages = self._control.run(sweep())
        for worker_id in self._control.run(take_dead_workers()):
            log.warning("worker %s has stopped sending heartbeats", worker_id)
            self._sender.delete_worker_queue(worker_id)
        for message in messages:
            self._sender.send(message)
        return len(messages)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.sweep_once()
            except TurnControlError as error:
                self._note_outage(error)
            else:
                self._is_down = False

    def _note_outage(self, error: TurnControlError) -> None:
        if not self._is_down:
            log.warning("sweep: %s", error)
        self._is_down = True
