"""Sends Celery messages. A message names a turn and nothing else; whoever gets it asks the record what to do."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from kombu.exceptions import OperationalError

from workers.turns.errors import ControlUnavailable
from workers.turns.keys import model_queue, worker_queue
from workers.turns.outcomes import Dispatch

TASK_NAME = "kvalet.run_turn"
SOCKET_TIMEOUT_S = 5.0


def broker_url(control_url: str) -> str:
    """The Celery broker URL of a redis URL: redis:// and rediss:// as they are, unix:// in Celery's spelling."""
    parts = urlsplit(control_url)
    if parts.scheme != "unix":
        return control_url
    credentials = f"{parts.netloc.rsplit('@', 1)[0]}@" if "@" in parts.netloc else ""
    database = parts.query.removeprefix("db=") if parts.query.startswith("db=") else "0"
    return f"redis+socket://{credentials}{parts.path}?virtual_host={database}"


def celery_options(control_url: str) -> dict[str, Any]:
    """Celery configuration that senders and workers share: msgpack only, early acknowledgement, no result backend."""
    return {
        "broker_url": broker_url(control_url),
        "result_backend": None,
        "task_ignore_result": True,
        "task_serializer": "msgpack",
        "accept_content": ["msgpack"],
        "result_accept_content": ["msgpack"],
        "task_acks_late": False,
        "task_create_missing_queues": True,
        "task_default_queue": model_queue("-"),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": SOCKET_TIMEOUT_S,
            "socket_keepalive": True,
            "visibility_timeout": 3600,
        },
    }


class Dispatcher:
    """Sends messages for runnable turns. Thread-safe; blocks, so the gateway calls it in a thread."""

    def __init__(self, control_url: str) -> None:
        self._app = Celery("kvalet-dispatch", set_as_current=False)
        self._app.conf.update(celery_options(control_url))

    def send(self, message: Dispatch) -> None:
        """Send one message. Raises ControlUnavailable; a message that is lost is sent again by the sweeper."""
        queue = worker_queue(message.worker) if message.worker else model_queue(message.model)
        try:
            # Workers declare their queues: without `declare` a send is one LPUSH and leaves no binding behind.
            self._app.send_task(TASK_NAME, args=(message.turn_id,), queue=queue, declare=[], retry=False)
        except (OperationalError, OSError) as error:
            raise ControlUnavailable(f"dispatch of {message.turn_id}: {error}") from error

    def delete_worker_queue(self, worker_id: str) -> None:
        """Delete the queue of a dead worker with what is left in it. Raises ControlUnavailable."""
        queue = worker_queue(worker_id)
        try:
            with self._app.connection_for_write() as connection:
                channel = connection.default_channel
                channel.queue_purge(queue)
                # kombu deletes a queue's binding only in the process that declared it.
                channel.client.delete(channel.keyprefix_queue % queue)
        except (OperationalError, OSError) as error:
            raise ControlUnavailable(f"deleting the queue of {worker_id}: {error}") from error

    def close(self) -> None:
        """Close pooled connections."""
        self._app.close()
