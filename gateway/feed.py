"""The events of one request's turns in arrival order, with time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import ApiError, Unavailable
from gateway.turns import TurnService
from workers.turns.end_tasks import end_tasks
from workers.turns.events import EventKind, TurnEvent


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event of the turn at `index`."""

    index: int
    event: TurnEvent


class TurnFeed:
    """Reads several turns' streams at once, from their first events. Use as an async context manager."""

    def __init__(self, turns: TurnService, tenant: str, turn_ids: Sequence[str]) -> None:
        self._turns = turns
        self._tenant = tenant
        self._turn_ids = tuple(turn_ids)
        self._arrivals: asyncio.Queue[Arrival | ApiError] = asyncio.Queue(maxsize=256)
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Start one reader per turn."""
        self._tasks = [asyncio.create_task(self._read(i, turn_id)) for i, turn_id in enumerate(self._turn_ids)]

    async def close(self) -> None:
        """End the readers; idempotent."""
        await end_tasks(*self._tasks)

    async def next(self, timeout_s: float) -> Arrival | None:
        """The next event, None after `timeout_s` without one.

        Raises the ApiError that ended a reader.
        """
        try:
            # Not wait_for, which hands every event to one more task.
            async with asyncio.timeout(timeout_s):
                arrival = await self._arrivals.get()
        except TimeoutError:
            return None
        if isinstance(arrival, ApiError):
            raise arrival
        return arrival

    async def _read(self, index: int, turn_id: str) -> None:
        try:
            async for event in self._turns.events(self._tenant, turn_id):
                await self._arrivals.put(Arrival(index, event))
                if event.kind is EventKind.TERMINAL:
                    return
            await self._arrivals.put(Unavailable("the event stream ended early", code="control_unavailable"))
        except ApiError as error:
            await self._arrivals.put(error)
