"""The servers that other tests stand on."""

from collections.abc import Callable

import pytest
import redis

from tests.services import ValkeyServer


def test_control_server_after_kill_and_start_keeps_data(control_server: ValkeyServer) -> None:
    with control_server.client() as client:
        client.set("a", "1")
        client.execute_command("WAITAOF", 1, 0, 2000)
    control_server.kill()
    control_server.start()
    with control_server.client() as client:
        assert client.get("a") == b"1"


def test_control_server_in_next_test_is_empty(control_server: ValkeyServer) -> None:
    with control_server.client() as client:
        assert client.dbsize() == 0


def test_pages_server_has_volatile_ttl_and_cap(pages_server: ValkeyServer) -> None:
    with pages_server.client() as client:
        config = client.config_get("maxmemory*")
    assert (config["maxmemory"], config["maxmemory-policy"]) == (str(256 << 20), "volatile-ttl")


def test_own_server_killed_refuses_connections(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("control")
    server.kill()
    with server.client() as client, pytest.raises(redis.exceptions.ConnectionError):
        client.ping()
