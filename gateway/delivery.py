"""From turns to an HTTP answer: wait for the end, or stream, until the reply, a fault, or the client's leave.

One `Delivery` serves one request. It never decides what a reply looks like (`Folder`), nor what becomes of the turns
when the client leaves (`abandon`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import ApiError, TimedOut, Unavailable
from gateway.feed import Arrival, TurnFeed
from gateway.http import Gateway
from gateway.sse import HEARTBEAT, ClientGone, EventStream, Frame, encode, while_connected

logger = logging.getLogger(__name__)

_TICK_S = 1.0
CLIENT_CLOSED_REQUEST = 499


class Folder(Protocol):
    """Turns events into frames."""

    @property
    def is_done(self) -> bool:
        """Whether every turn has ended."""
        ...

    def add(self, arrival: Arrival) -> list[Frame]:
        """Frames of one event that the client does not have yet. Raises ApiError for a turn without a reply."""
        ...

    def closing(self) -> list[bytes]:
        """What follows the last frame of a whole stream."""
        ...

    def fault(self, error: ApiError) -> list[bytes]:
        """What follows when the stream cannot go on."""
        ...


class Delivery:
    """Delivers the reply of a request's turns, which all run on `model`."""

    def __init__(
        self,
        gateway: Gateway,
        tenant: str,
        turn_ids: Sequence[str],
        model: str,
        folder: Folder,
        abandon: Callable[[], None],
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._folder = folder
        self._abandon = abandon
        self._feed = TurnFeed(gateway.turns, tenant, turn_ids)
        self._has_started = False
        self._began_at = time.monotonic()

    async def collect(self, request: Request) -> Response | None:
        """Fold all events; None when the reply is whole, an empty answer when the client has left.

        Raises ApiError for a turn without a reply, a fault of the service, or the gateway's time limit.
        """
        self._gateway.metrics.begin_waiting("whole")
        self._feed.open()
        try:
            await while_connected(request, self._fold_all())
        except ClientGone:
            self._abandon()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ApiError:
            self._abandon()
            raise
        finally:
            self._gateway.metrics.end_waiting("whole")
            await self._feed.close()
        return None

    async def stream(self, request: Request) -> Response:
        """The event stream, once the first event is there or `first_event_s` have passed.

        Raises ApiError when the first event already tells that there will be no reply.
        """
        self._gateway.metrics.begin_waiting("stream")
        self._feed.open()
        try:
            first = await while_connected(request, self._next(self._gateway.settings.first_event_s))
            frames = self._folder.add(first) if first else None
        except (ClientGone, ApiError) as error:
            await self._close()
            self._abandon()
            if isinstance(error, ApiError):
                raise
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            await self._close()
            raise
        return EventStream(self._chunks(frames), self._abandon, self._close)

    async def _close(self) -> None:
        self._gateway.metrics.end_waiting("stream")
        await self._feed.close()

    async def _fold_all(self) -> None:
        give_up_at = time.monotonic() + self._gateway.settings.request_timeout_s
        while not self._folder.is_done:
            arrival = await self._next_or_tick()
            if arrival is not None:
                self._folder.add(arrival)
            if not self._folder.is_done and time.monotonic() > give_up_at:
                raise TimedOut(
                    f"no reply within {self._gateway.settings.request_timeout_s:g} s; use a stream or 'background'",
                    code="timeout",
                )

    async def _next(self, timeout_s: float) -> Arrival | None:
        arrival = await self._feed.next(timeout_s)
        if arrival is not None and not self._has_started:
            self._has_started = True
            self._gateway.metrics.first_event.observe(time.monotonic() - self._began_at)
        return arrival

    async def _next_or_tick(self) -> Arrival | None:
        """The next event, None about every second without one.

        Raises Unavailable when the reply can't go on, or not on this gateway.
        """
        if self._gateway.stopping.is_over:
            raise Unavailable(
                "this gateway stops; a reply that was asked for with an idempotency key can be resumed elsewhere",
                code="gateway_stopping",
            )
        arrival = await self._next(_TICK_S)
        if arrival is None:
            self._gateway.fleet.check_served(self._model, self._has_started)
        return arrival

    async def _chunks(self, first: list[Frame] | None) -> AsyncIterator[bytes]:
        try:
            yield HEARTBEAT if first is None else b"".join(map(encode, first))
            async for chunk in self._rest():
                yield chunk
            for chunk in self._folder.closing():
                yield chunk
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a stream ended by a fault of the gateway")
            fault = error if isinstance(error, ApiError) else ApiError("internal error", code="server_error")
            for chunk in self._folder.fault(fault):
                yield chunk
            self._abandon()

    async def _rest(self) -> AsyncIterator[bytes]:
        heartbeat_at = time.monotonic() + self._gateway.settings.heartbeat_s
        while not self._folder.is_done:
            arrival = await self._next_or_tick()
            if arrival is not None:
                yield b"".join(map(encode, self._folder.add(arrival)))
            elif time.monotonic() >= heartbeat_at:
                yield HEARTBEAT
            else:
                continue
            heartbeat_at = time.monotonic() + self._gateway.settings.heartbeat_s


def leave_running() -> None:
    """For turns that go on without their client: stored responses, background, idempotent requests."""


def cancel_all(gateway: Gateway, tenant: str, turn_ids: Sequence[str]) -> Callable[[], None]:
    """For turns that nobody can ask for any more: cancel them, without keeping the answer waiting for that."""

    def abandon() -> None:
        gateway.metrics.abandoned.inc(len(turn_ids))
        for turn_id in turn_ids:
            gateway.turns.cancel_soon(tenant, turn_id)

    return abandon
