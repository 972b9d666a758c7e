"""What /metrics and the log tell about control's disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis.asyncio

from tests.gateway_fleet import gateway, wait_until
from tests.services import ValkeyServer

NAME = "kvalet_control_aof_delayed_fsync"


def shown(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{NAME} "))


def test_metrics_delayed_fsyncs_are_those_that_control_counts(control_server: ValkeyServer) -> None:
    with gateway(control_server) as url:
        assert shown(url) == 0


def test_metrics_delayed_fsyncs_are_no_number_without_an_append_only_file(
    start_server: Callable[..., ValkeyServer],
) -> None:
    with gateway(start_server("control", appendonly="no")) as url:
        assert math.isnan(shown(url))


def test_delayed_fsyncs_that_grow_are_shown_and_warned_about_once(
    control_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    delayed = 3
    info = redis.asyncio.Redis.info

    async def slow_disk(client: Any, *sections: str) -> Any:
        return {**await info(client, *sections), "aof_delayed_fsync": delayed}

    monkeypatch.setattr(redis.asyncio.Redis, "info", slow_disk)
    with caplog.at_level(logging.WARNING, "gateway.fleet"), gateway(control_server) as url:
        wait_until(lambda: shown(url) == 3)
        assert "aof_delayed_fsync" not in caplog.text
        delayed = 5
        wait_until(lambda: shown(url) == 5)
        wait_until(lambda: "waited for its disk 2 times" in caplog.text)
        assert caplog.text.count("aof_delayed_fsync = 5") == 1
