"""A worker opens its connections to control at its start: later coincidences of its threads open none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fleet import Fleet
from tests.services import ValkeyServer
from workers.errors import WorkerStartError
from workers.service import WorkerService

SLOTS = 3
StartServer = Callable[..., ValkeyServer]


def client_ids(server: ValkeyServer) -> set[str]:
    with server.client() as client:
        own = str(client.client_id())
        return {entry["id"] for entry in client.client_list()} - {own}


def speak_at_once(service: WorkerService) -> None:
    """Every thread that may speak to control does, all in the same moment."""
    client = service.control.client
    waits = [threading.Thread(target=client.blpop, args=("nothing", 0.5)) for _ in range(SLOTS + 3)]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join()


def test_worker_whose_threads_speak_at_once_opens_no_connection_after_its_start(
    start_server: StartServer, pages_server: ValkeyServer, tiny_gguf: Path
) -> None:
    control = start_server("control")
    fleet = Fleet(control.url, pages_server.url, tiny_gguf)
    try:
        service = fleet.worker("a", slots=SLOTS, heartbeat_s=60)
        fleet.say("a", "Hello.")
        fleet.settle()
        before = client_ids(control)
        speak_at_once(service)
        assert client_ids(control) == before
    finally:
        fleet.stop()


def test_worker_with_more_speakers_than_connections_makes_them_wait(
    start_server: StartServer, pages_server: ValkeyServer, tiny_gguf: Path
) -> None:
    control = start_server("control")
    fleet = Fleet(control.url, pages_server.url, tiny_gguf)
    try:
        service = fleet.worker("a", slots=1, heartbeat_s=60)
        before = client_ids(control)
        speak_at_once(service)
        assert client_ids(control) == before
    finally:
        fleet.stop()


def test_worker_at_a_control_that_takes_no_more_clients_is_refused_by_name(
    start_server: StartServer, pages_server: ValkeyServer, tiny_gguf: Path
) -> None:
    control = start_server("control", maxclients="8")
    fleet = Fleet(control.url, pages_server.url, tiny_gguf)
    with pytest.raises(WorkerStartError, match=r"control_url.*refuses 35 connections"):
        fleet.worker("a", slots=32)
