"""Sends Celery messages. A message names a turn and nothing else; whoever gets it asks the record what to do.

Celery makes one message at the start; every send fills it in and is one LPUSH. Publishing each through kombu costs
more than all other steps before a worker has the turn.
"""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any
from urllib.parse import urlsplit

import msgpack
from celery import Celery
from kombu.exceptions import OperationalError

from workers.turns.control import Patience, TurnControl, connect
from workers.turns.errors import ControlUnavailable, TurnControlError
from workers.turns.keys import model_queue, worker_queue
from workers.turns.outcomes import Dispatch
from workers.turns.pushing import push_message
from workers.turns.records import QueueMessage

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
    """Celery configuration that senders and workers share: msgpack only, no result backend, no acknowledgements.

    A message is gone once a worker has it, without a copy for a visibility timeout: the record knows which turns run,
    and the sweeper sends again.
    """
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
            "ack_emulation": False,
        },
    }


def queue_of(message: Dispatch) -> str:
    """Celery queue, and list, of a message: its model's or one worker's."""
    return worker_queue(message.worker) if message.worker else model_queue(message.model)


class TurnMessages:
    """Celery messages that name turns, in the bytes that kombu's Redis transport has in its lists. Thread-safe."""

    def __init__(self, app: Celery) -> None:
        """app: whose task protocol and serializer are used."""
        queue = f"kvalet-form-{uuid.uuid4()}"
        with app.connection_for_write("memory://") as connection:
            app.send_task(TASK_NAME, args=("",), queue=queue, connection=connection, declare=[], ignore_result=True)
            self._form: dict[str, Any] = connection.default_channel._get(queue)
        self._body: list[Any] = msgpack.unpackb(base64.b64decode(self._form["body"]))

    def of(self, turn_id: str) -> QueueMessage:
        """A message for the turn, with ids of its own."""
        task_id, form, args = str(uuid.uuid4()), self._form, (turn_id,)
        delivery = {"delivery_tag": str(uuid.uuid4()), "delivery_info": {"exchange": "", "routing_key": task_id}}
        message = {
            **form,
            "body": base64.b64encode(msgpack.packb([args, *self._body[1:]])).decode(),
            "headers": {**form["headers"], "id": task_id, "root_id": task_id, "argsrepr": repr(args)},
            "properties": {**form["properties"], "correlation_id": task_id, **delivery},
        }
        head, _, tail = json.dumps(message).rpartition(json.dumps(task_id))
        return QueueMessage(head.encode(), tail.encode())


def dispatch_app(control_url: str) -> Celery:
    """A Celery app for senders: it has no tasks and opens no connection by itself."""
    app = Celery("kvalet-dispatch", set_as_current=False)
    app.conf.update(celery_options(control_url))
    return app


class Dispatcher:
    """Sends messages for runnable turns. Thread-safe; blocks."""

    def __init__(self, control_url: str) -> None:
        self._app = dispatch_app(control_url)
        self._messages = TurnMessages(self._app)
        self._control = TurnControl(connect(control_url, timeout_s=SOCKET_TIMEOUT_S), Patience(outage_s=0.0))

    def send(self, message: Dispatch) -> None:
        """Send one message. Raises ControlUnavailable; a message that is lost is sent again by the sweeper."""
        queue = queue_of(message)
        try:
            # Workers declare their queues: a sender leaves no binding behind.
            self._control.run(push_message(queue, self._messages.of(message.turn_id).to(queue)))
        except (TurnControlError, OSError) as error:
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
        """Close connections."""
        self._control.client.close()
        self._app.close()
