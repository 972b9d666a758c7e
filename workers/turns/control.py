"""Runs script calls on control: `TurnControl` blocks (workers), `AsyncTurnControl` awaits (the gateway)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry

from workers.turns.errors import ControlFull, ControlUnavailable, DurabilityLost, TurnControlError
from workers.turns.script import Argument, ScriptCall

T = TypeVar("T")
MAX_CONNECTIONS = 32
_TRANSIENT = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)
# Answers of a server that will take writes again once its disk, its replicas or its new primary are back.
_TRANSIENT_CODES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "TRYAGAIN", "READONLY")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call is repeated while control does not answer.

    Repeating is safe: operations are idempotent. `outage_s` bounds the whole call, each try has the client's own
    socket timeout. `disk_s` bounds the wait for durable writes.
    """

    outage_s: float = 5.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 0.5
    disk_s: float = 2.0

    def pauses(self) -> Iterator[float]:
        """Seconds to sleep before each next try, until the outage is over the limit."""
        deadline = time.monotonic() + self.outage_s
        pause = self.first_pause_s
        while time.monotonic() + pause < deadline:
            yield pause
            pause = min(2 * pause, self.longest_pause_s)


def connect(url: str, *, timeout_s: float = 5.0, max_connections: int = MAX_CONNECTIONS) -> redis.Redis:
    """Open a client of control for short commands. Tries once; `Patience` decides about more.

    Callers beyond `max_connections` wait for a connection instead of opening one more.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=max_connections, timeout=timeout_s, socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0),
    )  # fmt: skip
    return redis.Redis.from_pool(pool)


def open_connections(client: redis.Redis) -> None:
    """Open every connection that the client may have, so that a later coincidence of callers opens none.

    Raises redis.RedisError, for example when the server takes no more clients.
    """
    pool = client.connection_pool
    taken = []
    try:
        for _ in range(pool.max_connections):
            taken.append(pool.get_connection())
    finally:
        for connection in taken:
            pool.release(connection)


def connect_async(url: str, *, timeout_s: float = 5.0) -> redis.asyncio.Redis:
    """Open an asyncio client of control for short commands. Tries once; `Patience` decides about more.

    Callers beyond MAX_CONNECTIONS wait for a connection instead of opening one more.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s, retry=AsyncRetry(NoBackoff(), 0),
    )  # fmt: skip
    return redis.asyncio.Redis.from_pool(pool)


class TurnControl:
    """Turn control over a blocking client. Thread-safe; does not own the client."""

    def __init__(self, client: redis.Redis, patience: Patience | None = None) -> None:
        self.client = client
        self._patience = patience or Patience()

    def run(self, call: ScriptCall[T]) -> T:
        """Run one operation and return its outcome.

        Raises ControlUnavailable, ControlFull, DurabilityLost, and what the operation's own docstring names.
        """
        pauses = self._patience.pauses()
        while True:
            try:
                return call.parse(self._evaluate(call))
            except RedisError as error:
                _raise_unless_transient(error)
                pause = next(pauses, None)
                if pause is None:
                    raise ControlUnavailable(f"{call.script.name}: {error}") from error
                time.sleep(pause)

    def _evaluate(self, call: ScriptCall[T]) -> Any:
        if call.durable:
            return self._evaluate_durable(call)
        try:
            return self.client.execute_command(*_evalsha(call))
        except NoScriptError:
            return self.client.execute_command(*_eval(call))

    def _evaluate_durable(self, call: ScriptCall[T]) -> Any:
        # WAITAOF speaks of the writes of its own connection, so both commands share one.
        pipeline = self.client.pipeline(transaction=False)
        pipeline.execute_command(*_eval(call))
        pipeline.execute_command("WAITAOF", 1, 0, int(self._patience.disk_s * 1000))
        return _confirmed(pipeline.execute())


class AsyncTurnControl:
    """Turn control over an asyncio client. Does not own the client."""

    def __init__(self, client: redis.asyncio.Redis, patience: Patience | None = None) -> None:
        self.client = client
        self._patience = patience or Patience()

    async def run(self, call: ScriptCall[T]) -> T:
        """Run one operation and return its outcome.

        Raises ControlUnavailable, ControlFull, DurabilityLost, and what the operation's own docstring names.
        """
        pauses = self._patience.pauses()
        while True:
            try:
                return call.parse(await self._evaluate(call))
            except RedisError as error:
                _raise_unless_transient(error)
                pause = next(pauses, None)
                if pause is None:
                    raise ControlUnavailable(f"{call.script.name}: {error}") from error
                await asyncio.sleep(pause)

    async def _evaluate(self, call: ScriptCall[T]) -> Any:
        if call.durable:
            pipeline = self.client.pipeline(transaction=False)
            pipeline.execute_command(*_eval(call))
            pipeline.execute_command("WAITAOF", 1, 0, int(self._patience.disk_s * 1000))
            return _confirmed(await pipeline.execute())
        try:
            return await cast("Awaitable[Any]", self.client.execute_command(*_evalsha(call)))
        except NoScriptError:
            return await cast("Awaitable[Any]", self.client.execute_command(*_eval(call)))


def _evalsha(call: ScriptCall[Any]) -> tuple[Argument, ...]:
    return ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)


def _eval(call: ScriptCall[Any]) -> tuple[Argument, ...]:
    return ("EVAL", call.script.source, len(call.keys), *call.keys, *call.args)


def _confirmed(replies: list[Any]) -> Any:
    reply, (num_local, _num_replicas) = replies
    if num_local < 1:
        raise DurabilityLost("the server has not confirmed the write on disk in time")
    return reply


def _raise_unless_transient(error: RedisError) -> None:
    if isinstance(error, _TRANSIENT) or str(error).startswith(_TRANSIENT_CODES):
        return
    if isinstance(error, OutOfMemoryError):
        raise ControlFull(str(error)) from error
    raise TurnControlError(str(error)) from error
