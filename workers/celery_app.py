"""The Celery app of a worker. `celery -A workers.celery_app worker` is a full worker.

    settings (KVALET_*) -> configuration -> service step: engine, queues of its model and of itself, sweeper
    SIGTERM -> stop taking messages -> drain in a thread -> stop the service

The pool is threads: one task per slot, each blocked until its turn ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from celery import Celery, bootsteps, signals
from celery.worker.consumer import Consumer
from pydantic import ValidationError

from gpu.errors import DeviceUnavailable, LayoutError, ModelFileError
from workers import broker
from workers.dead_letters import DeadLetter, add_dead_letter
from workers.dispatch import TASK_NAME, Dispatcher, celery_options
from workers.errors import CANNOT_START, WorkerStartError
from workers.prompt.errors import TokenizerError
from workers.setting_checks import refusal_of
from workers.settings import WorkerSettings
from workers.sweeper import Sweeper
from workers.turns.control import TurnControl, connect
from workers.turns.errors import TurnControlError
from workers.turns.keys import model_queue, worker_queue

log = logging.getLogger(__name__)
MAX_TURN_ID_CHARS = 128


class Service(Protocol):
    """What a worker process runs turns with."""

    @property
    def model_name(self) -> str:
        """Name of the served model."""

    def run_turn(self, turn_id: str) -> None:
        """Claim this turn, or one that goes before it, and run it to its end; returns when nothing is left to do."""

    def drain(self, grace_s: float) -> None:
        """Claim nothing more, let turns end within `grace_s`, hand the rest over. Returns when no turn runs."""

    def stop(self) -> None:
        """Free the engine and everything else."""


StartService = Callable[[WorkerSettings], Service]


def create_app(start_service: StartService) -> Celery:
    """Build the Celery app of a worker process whose turns are run by what `start_service` returns.

    Settings are read when Celery first needs its configuration; a malformed one stops the start there.
    """
    broker.install()
    app = Celery("kvalet", set_as_current=False)
    worker = _WorkerProcess(start_service)
    app.add_defaults(worker.celery_options)
    app.steps["worker"].add(_service_step(worker))

    @app.task(name=TASK_NAME, ignore_result=True, acks_late=False, shared=False)
    def run_turn(turn_id: str) -> None:
        worker.run_turn(turn_id)

    signals.worker_shutting_down.connect(worker.begin_drain, weak=False)
    return app


class DeadLetterConsumer(Consumer):  # type: ignore[misc]
    """A consumer that keeps what it cannot read, acknowledges it and goes on."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Keep a message whose content type is refused or whose body is damaged."""
        self._keep(message, exc)
        super().on_decode_error(message, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Keep a message that is no task."""
        self._keep(message, ValueError("not a task message"))
        super().on_unknown_message(body, message)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Keep a message that names another task."""
        self._keep(message, exc)
        super().on_unknown_task(body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Keep a message with wrong arguments."""
        self._keep(message, exc)
        super().on_invalid_task(body, message, exc)

    def _keep(self, message: Any, exc: Exception) -> None:
        raw = message.body if isinstance(message.body, bytes) else repr(message.body).encode()
        letter = DeadLetter(str(message.content_type), type(exc).__name__, raw)
        try:
            self.app.conf["kvalet_control"]().run(add_dead_letter(letter))
        except TurnControlError as error:
            log.error("dead letter lost: %s", error)


class _WorkerProcess:
    """The one service of this process, from settings to stop."""

    def __init__(self, start_service: StartService) -> None:
        self._start_service = start_service
        self._settings: WorkerSettings | None = None
        self._service: Service | None = None
        self._sweeper: Sweeper | None = None
        self._dispatcher: Dispatcher | None = None
        self._drain: threading.Thread | None = None

    @property
    def settings(self) -> WorkerSettings:
        if self._settings is None:
            try:
                self._settings = WorkerSettings()
            except ValidationError as error:
                name, value, limit = refusal_of(WorkerSettings, error)
                raise _refused(f"KVALET_{name.upper()}={value!r}: {limit}") from None
        return self._settings

    def celery_options(self) -> dict[str, Any]:
        return {
            **celery_options(self.settings.control_url),
            "worker_pool": "workers.celery_pool:TurnPool",
            "worker_concurrency": self.settings.slots,
            "worker_prefetch_multiplier": 1,
            "worker_disable_prefetch": True,
            "worker_consumer": DeadLetterConsumer,
            "worker_redirect_stdouts": False,
            "worker_cancel_long_running_tasks_on_connection_loss": False,
            "kvalet_control": self.control,
        }

    def control(self) -> TurnControl:
        return TurnControl(connect(self.settings.control_url))

    def start(self, app: Celery) -> None:
        # A line for every message before its turn runs would delay the first token; the one at its end stays.
        logging.getLogger("celery.worker.strategy").setLevel(logging.WARNING)
        try:
            self._service = self._start_service(self.settings)
        except (ModelFileError, TokenizerError) as error:
            raise _refused(f"{self.settings.model}: {error}") from None
        except (WorkerStartError, DeviceUnavailable, LayoutError) as error:
            raise _refused(str(error)) from None
        if not app.amqp.queues._consume_from:
            app.amqp.queues.select([model_queue(self._service.model_name), worker_queue(self.settings.worker_id)])
        self._dispatcher = Dispatcher(self.settings.control_url)
        self._sweeper = Sweeper(self.control(), self._dispatcher, interval_s=self.settings.sweep_s)
        self._sweeper.start()

    def run_turn(self, turn_id: object) -> None:
        if not isinstance(turn_id, str) or not 0 < len(turn_id) <= MAX_TURN_ID_CHARS:
            log.error("a message names no turn: %.80r", turn_id)
            return
        if self._service is None:
            log.error("turn %s came before the service was started; the sweeper sends it again", turn_id)
            return
        self._service.run_turn(turn_id)

    def begin_drain(self, **_: object) -> None:
        if self._service is None or self._drain is not None:
            return
        arguments = (self.settings.drain_grace_s,)
        self._drain = threading.Thread(target=self._service.drain, args=arguments, name="kvalet-drain", daemon=True)
        self._drain.start()

    def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.stop()
        if self._service is None:
            return
        self.begin_drain()
        if self._drain is not None:
            self._drain.join()
        self._service.stop()
        self._service = None
        if self._dispatcher is not None:
            self._dispatcher.close()


def _refused(reason: str) -> SystemExit:
    """The end of a process that cannot work, told in one line; Celery makes it the worker's exit status."""
    sys.stderr.write(f"{CANNOT_START}{' '.join(reason.split())}\n")
    return SystemExit(os.EX_CONFIG)


def _service_step(process: _WorkerProcess) -> type[bootsteps.StartStopStep]:
    class ServiceStep(bootsteps.StartStopStep):  # type: ignore[misc]
        """Starts the service before the consumer and stops it when the pool's turns have ended or moved on."""

        requires = ("celery.worker.components:Pool",)

        def __init__(self, worker: Any, **options: Any) -> None:
            # Workers don't talk to each other: control knows everything.
            worker.options.update(without_gossip=True, without_mingle=True)
            super().__init__(worker, **options)

        def start(self, worker: Any) -> None:
            process.start(worker.app)

        def stop(self, worker: Any) -> None:
            process.stop()

        def terminate(self, worker: Any) -> None:
            process.stop()

    return ServiceStep


def _start_worker_service(settings: WorkerSettings) -> Service:
    # Imported here: `celery inspect` and monitors load this module too, and need no engine.
    from workers.service import WorkerService

    return WorkerService.start(settings)


app = create_app(_start_worker_service)
