"""The asyncio runner: the same calls, many at once, on few connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import LIMITS, request
from workers.turns import calls
from workers.turns.control import MAX_CONNECTIONS, AsyncTurnControl, Patience, connect_async
from workers.turns.errors import ControlUnavailable
from workers.turns.events import TurnState


def test_async_control_runs_many_calls_at_once_on_bounded_connections(
    start_server: Callable[..., ValkeyServer],
) -> None:
    # A server of its own: the shared one also counts connections that other tests have left to the collector.
    server = start_server("control")

    async def story() -> tuple[list[TurnState | None], int]:
        client = connect_async(server.url)
        control = AsyncTurnControl(client)
        await asyncio.gather(*(control.run(calls.accept(request(f"t{n}"), LIMITS)) for n in range(200)))
        states = await asyncio.gather(*(control.run(calls.get_turn_state("local", f"t{n}")) for n in range(200)))
        num_clients = (await client.info("clients"))["connected_clients"]
        await client.aclose()
        return states, num_clients

    states, num_clients = asyncio.run(story())
    assert states == [TurnState.QUEUED] * 200
    assert num_clients <= MAX_CONNECTIONS + 2


def test_async_control_with_flushed_scripts_loads_them_again(control_server: ValkeyServer) -> None:
    async def story() -> TurnState | None:
        client = connect_async(control_server.url)
        control = AsyncTurnControl(client)
        await control.run(calls.accept(request("a"), LIMITS))
        await client.script_flush()
        state = await control.run(calls.get_turn_state("local", "a"))
        await client.aclose()
        return state

    assert asyncio.run(story()) is TurnState.QUEUED


def test_async_control_durable_call_is_confirmed(control_server: ValkeyServer) -> None:
    async def story() -> TurnState | None:
        client = connect_async(control_server.url)
        control = AsyncTurnControl(client)
        await control.run(calls.accept(request("a", durability="host"), LIMITS))
        state = await control.run(calls.get_turn_state("local", "a"))
        await client.aclose()
        return state

    assert asyncio.run(story()) is TurnState.QUEUED


def test_async_control_cancelled_call_leaves_no_reply_for_the_next(control_server: ValkeyServer) -> None:
    async def story() -> TurnState | None:
        client = connect_async(control_server.url)
        control = AsyncTurnControl(client)
        await control.run(calls.accept(request("a"), LIMITS))
        control_server.pause()
        hanging = [asyncio.create_task(control.run(calls.get_turn("local", "a"))) for _ in range(5)]
        await asyncio.sleep(0.1)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        control_server.resume()
        states = [await control.run(calls.get_turn_state("local", "a")) for _ in range(10)]
        await client.aclose()
        return states[0] if len(set(states)) == 1 else None

    assert asyncio.run(asyncio.wait_for(story(), 20)) is TurnState.QUEUED


def test_async_control_outlives_a_restart_and_gives_up_on_a_dead_server(
    start_server: Callable[..., ValkeyServer],
) -> None:
    server = start_server("control")

    async def story() -> TurnState | None:
        client = connect_async(server.url)
        control = AsyncTurnControl(client, Patience(outage_s=0.5))
        await control.run(calls.accept(request("a"), LIMITS))
        await asyncio.to_thread(server.restart)
        state = await control.run(calls.get_turn_state("local", "a"))
        server.kill()
        with pytest.raises(ControlUnavailable):
            await control.run(calls.get_turn_state("local", "a"))
        await client.aclose()
        return state

    assert asyncio.run(asyncio.wait_for(story(), 20)) is TurnState.QUEUED
