"""Tasks end even if they miss a cancellation, as those that wait for a connection can."""

from __future__ import annotations

import asyncio

from gateway.fleet import FleetMonitor
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from gateway.turns import TurnService
from workers.turns.end_tasks import end_tasks


async def deaf(times: int, heard: list[int]) -> None:
    """Swallow some cancellations."""
    for number in range(times):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            heard.append(number)
    await asyncio.sleep(60)


def test_task_that_swallows_cancellations_ends() -> None:
    async def story() -> list[int]:
        heard: list[int] = []
        task = asyncio.create_task(deaf(2, heard))
        await asyncio.sleep(0)
        await asyncio.wait_for(end_tasks(task), 10)
        assert task.cancelled()
        return heard

    assert asyncio.run(story()) == [0, 1]


def test_tasks_that_have_failed_are_no_obstacle() -> None:
    async def story() -> None:
        async def fails() -> None:
            raise LookupError

        task = asyncio.create_task(fails())
        await asyncio.sleep(0.01)
        await asyncio.wait_for(end_tasks(task, asyncio.create_task(deaf(0, []))), 10)
        await end_tasks()

    asyncio.run(story())


def test_fleet_monitor_closes_though_a_look_swallows_the_cancellation() -> None:
    async def story() -> None:
        settings = GatewaySettings(KVALET_CONTROL_URL="redis://127.0.0.1:1/0")
        fleet = FleetMonitor(TurnService(settings), settings, GatewayMetrics())
        looking = asyncio.Event()

        async def look() -> None:
            looking.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return

        fleet._look = look  # type: ignore[method-assign]
        await fleet.open()
        looking.clear()
        await asyncio.wait_for(looking.wait(), 10)
        await asyncio.wait_for(fleet.close(), 10)

    asyncio.run(story())
