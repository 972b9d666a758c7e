"""One blocking read per process for the events of all turns that its clients follow."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from workers.turns.end_tasks import PATIENCE_S, end_tasks
from workers.turns.errors import BadTurnData, ControlUnavailable, TurnControlError
from workers.turns.events import EventKind, TurnEvent
from workers.turns.keys import hub_key, stream_key
from workers.turns.replies import stream_events

BLOCK_MS = 5000
READ_ENTRIES = 64
MAX_BUFFERED_EVENTS = 4096
RECONNECT_PAUSE_S = 0.2
# New subscriptions share a wake-up: a turn says nothing in its first milliseconds, which belong to its worker.
GATHER_S = 0.003


class Subscription:
    """Events of one turn, in order and without gaps, from after a number to the terminal event."""

    def __init__(self, hub: AsyncEventHub, turn_id: str, after: int) -> None:
        self.turn_id = turn_id
        self.after = after
        self.done = False
        self._hub = hub
        self._events: deque[TurnEvent] = deque()
        self._arrived = asyncio.Event()
        self._error: TurnControlError | None = None

    async def next(self, timeout_s: float) -> tuple[TurnEvent, ...]:
        """Wait for events; () when none came in time or when the terminal event has been returned.

        Raises ControlUnavailable when control has not answered for the hub's outage limit, BadTurnData for a stream
        that holds something else than events.
        """
        if not self._events and not self.done:
            await self._wait(timeout_s)
        if self._error is not None and not self._events:
            raise self._error
        events = tuple(self._events)
        was_full = self.is_full
        self._events.clear()
        self._arrived.clear()
        if was_full:
            await self._hub.wake()
        return events

    def __aiter__(self) -> AsyncIterator[TurnEvent]:
        """All events to the terminal one. Raises as `next`."""
        return self._iterate()

    async def close(self) -> None:
        """Stop following the turn."""
        self._hub.forget(self)

    @property
    def is_full(self) -> bool:
        """Whether the client is so slow that the hub waits for it."""
        return len(self._events) >= MAX_BUFFERED_EVENTS

    def push(self, events: tuple[TurnEvent, ...]) -> None:
        """Add what the hub has read; numbers up to `after` were packed into the same entry and are dropped."""
        new = [event for event in events if event.number > self.after]
        if not new:
            return
        self.after = new[-1].number
        self._events.extend(new)
        self.done = self.done or new[-1].kind is EventKind.TERMINAL
        self._arrived.set()

    def fail(self, error: TurnControlError) -> None:
        """Read no further: the stream is damaged. Other turns' streams are not concerned."""
        self._error = error
        self.done = True
        self._arrived.set()

    async def _iterate(self) -> AsyncIterator[TurnEvent]:
        while True:
            for event in await self.next(BLOCK_MS / 1000):
                yield event
                if event.kind is EventKind.TERMINAL:
                    return

    async def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._events and not self.done:
            self._hub.raise_if_down()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._arrived.wait()


class AsyncEventHub:
    """Reads the streams of all subscribed turns with one connection.

    `async with AsyncEventHub(url) as hub: async with hub.subscribe(turn_id, after) as events: ...`
    outage_s: how long control may be away before subscribers are told.
    """

    def __init__(self, url: str, *, outage_s: float = 8.0) -> None:
        # The read blocks up to BLOCK_MS: the socket must be more patient than that.
        self._reader = redis.asyncio.Redis.from_url(
            url, socket_timeout=BLOCK_MS / 1000 + 5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
        )
        self._waker = redis.asyncio.Redis.from_url(
            url, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
        )
        self._outage_s = outage_s
        self._wake_key = hub_key(secrets.token_hex(8))
        self._wake_id = "0-0"
        self._subscriptions: dict[str, list[Subscription]] = {}
        self._down_since: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake_planned = False
        self._wakers: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> AsyncEventHub:
        self._task = asyncio.create_task(self._run(), name="kvalet-event-hub")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake(), PATIENCE_S)
        if self._task is not None:
            # A server that does not answer the wake-up is asked to let go.
            await asyncio.wait({self._task}, timeout=PATIENCE_S)
            await end_tasks(self._task)
        # A cancelled read leaves its reply in the socket: the connection must not be used again.
        await self._reader.connection_pool.disconnect()
        await self._reader.aclose()
        await end_tasks(*self._wakers)
        await self._waker.aclose()

    @contextlib.asynccontextmanager
    async def subscribe(self, turn_id: str, after: int = -1) -> AsyncIterator[Subscription]:
        """Follow a turn from the event after number `after` (-1: from the start).

        A number beyond the stream's end waits until the stream passes it. Raises ControlUnavailable.
        """
        subscription = Subscription(self, turn_id, after)
        self._subscriptions.setdefault(turn_id, []).append(subscription)
        try:
            self._wake_soon()
            yield subscription
        finally:
            self.forget(subscription)

    @property
    def num_subscriptions(self) -> int:
        """Followed turns, counted per follower."""
        return sum(map(len, self._subscriptions.values()))

    @property
    def is_down(self) -> bool:
        """Whether control has been away for longer than the outage limit."""
        return self._down_since is not None and time.monotonic() - self._down_since > self._outage_s

    def raise_if_down(self) -> None:
        """Raise ControlUnavailable when `is_down`."""
        if self.is_down:
            raise ControlUnavailable(f"no events from control for {self._outage_s} s")

    def forget(self, subscription: Subscription) -> None:
        """Drop a subscription; nothing happens if it is gone."""
        followers = self._subscriptions.get(subscription.turn_id, [])
        if subscription in followers:
            followers.remove(subscription)
        if not followers:
            self._subscriptions.pop(subscription.turn_id, None)

    async def wake(self) -> None:
        """Make the blocked read return, so that it starts again with the current subscriptions."""
        try:
            pipeline = self._waker.pipeline(transaction=False)
            pipeline.xadd(self._wake_key, {"w": "1"}, maxlen=1, approximate=False)
            pipeline.expire(self._wake_key, 60)
            await pipeline.execute()
        except (RedisError, OSError):
            # The reader notices the same outage, reconnects and then reads with all subscriptions.
            return

    def _wake_soon(self) -> None:
        if not self._wake_planned:
            self._wake_planned = True
            waker = asyncio.create_task(self._wake_later())
            self._wakers.add(waker)
            waker.add_done_callback(self._wakers.discard)

    async def _wake_later(self) -> None:
        await asyncio.sleep(GATHER_S)
        # A subscription that comes from here on needs a wake-up of its own.
        self._wake_planned = False
        await self.wake()

    async def _run(self) -> None:
        while not self._closing:
            try:
                reply = await self._reader.execute_command(*self._read_command())
                self._down_since = None
                self._deliver(reply or [])
            except (RedisError, OSError):
                self._down_since = self._down_since or time.monotonic()
                await self._reader.connection_pool.disconnect()
                await asyncio.sleep(RECONNECT_PAUSE_S)

    def _read_command(self) -> tuple[Any, ...]:
        names: list[str] = [self._wake_key]
        ids: list[str] = [self._wake_id]
        for turn_id, followers in self._subscriptions.items():
            waiting = [follower.after for follower in followers if not (follower.done or follower.is_full)]
            if waiting:
                names.append(stream_key(turn_id))
                ids.append(f"{min(waiting) + 1}-0")
        return ("XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", *names, *ids)

    def _deliver(self, reply: Any) -> None:
        streams = reply.items() if isinstance(reply, dict) else reply
        for name, entries in streams:
            if name.decode() == self._wake_key:
                self._wake_id = entries[-1][0].decode()
                continue
            turn_id = name.decode().removeprefix(stream_key(""))
            try:
                events = stream_events(entries)
            except (BadTurnData, KeyError, ValueError) as error:
                for follower in self._subscriptions.get(turn_id, ()):
                    follower.fail(BadTurnData("stream", turn_id, f"entries of events ({type(error).__name__})"))
                continue
            for follower in self._subscriptions.get(turn_id, ()):
                if not follower.is_full:
                    follower.push(events)
