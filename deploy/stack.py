"""The local all-in-one stack: two servers, the gateway and N workers under one supervisor."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx
import redis

from deploy.compile_progress import CompileProgress
from deploy.configuration import COMMAND_LINE, Given, Setting, gateway_rows, worker_rows
from deploy.embedded import EmbeddedSpec, Role, child_spec, free_port, wait_answering
from deploy.errors import BadOption, StackInUse
from deploy.process import ChildSpec
from deploy.running import forget_running, write_running
from deploy.supervisor import RestartPolicy, Supervisor
from workers.dispatch import Dispatcher
from workers.registry import WorkerRecord, list_workers
from workers.turns.calls import end_worker_leases
from workers.turns.control import Patience, TurnControl, connect
from workers.turns.errors import TurnControlError

_SAVE_TIMEOUT_S = 60.0

Report = Callable[[str], None]
"""Told in a few words what is going on."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to run. Without URLs, servers are embedded. `environment` holds KVALET_* values for every child.

    sources: where host, port and the like come from, by the variable that children get them as, if the user gave them.
    from_file: variables of our environment that a settings file set.
    """

    directory: Path
    num_workers: int = 2
    host: str = "127.0.0.1"
    port: int = 0
    keys_file: Path | None = None
    control_url: str | None = None
    pages_url: str | None = None
    control_mib: int = 512
    pages_mib: int = 2048
    grace_s: float = 20.0
    ready_timeout_s: float = 180.0
    environment: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    from_file: frozenset[str] = frozenset()


class Stack:
    """A running stack. Enter to start, leave to stop; `watch` in between. Use from one thread."""

    def __init__(self, options: StackOptions, report: Report) -> None:
        self.options = options
        self._report = report
        self._supervisor = Supervisor(RestartPolicy(), self._on_reaped)
        self._lock: IO[str] | None = None
        self._settings: list[Setting] = []
        self._sockets = _socket_directory(options.directory)
        self.port = options.port or free_port()
        self.control_url = options.control_url or ""
        self.pages_url = options.pages_url or ""

    @property
    def base_url(self) -> str:
        """Where the API is, for an OpenAI client."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{self.port}/v1"

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Names of the workers, as `kvalet.worker` in a request takes them."""
        return tuple(f"w{index}" for index in range(1, self.options.num_workers + 1))

    def __enter__(self) -> Stack:
        """Start everything and wait until a turn would run. Raises StackInUse, StartFailed, ServerBinaryMissing."""
        self._lock = _locked(self.options.directory)
        try:
            _check_port(self.options.host, self.port)
            self._start_servers()
            self._start_gateway()
            self._start_workers()
            write_running(self.options.directory, self._addresses(), self._settings)
        except BaseException:
            self._supervisor.kill()
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain and park the workers, then end the gateway, then the servers."""
        try:
            wait = f"up to {self.options.grace_s:.0f} s, Ctrl-C again to hurry"
            self._report(f"workers finish and park their conversations ({wait})")
            self._supervisor.stop(self.worker_ids)
            self._report("gateway and servers end")
            self._save_pages()
            self._supervisor.stop()
        finally:
            # A second Ctrl-C lands here: nothing may be left running.
            self._supervisor.kill()
            self._let_go()

    def poll(self) -> None:
        """Restart what has died. Call a few times a second."""
        self._supervisor.poll()

    def is_ready(self) -> bool:
        """Whether every worker is there and a turn accepted now would run."""
        # Without workers of our own (they are started elsewhere) the gateway alone can be waited for.
        probe = "ready" if self.options.num_workers else "health"
        try:
            answer = httpx.get(f"{self.base_url.removesuffix('/v1')}/{probe}", timeout=2.0, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and len(self._live_workers()) >= self.options.num_workers

    def model_names(self) -> tuple[str, ...]:
        """Models that our workers serve now."""
        return tuple(sorted({worker.model for worker in self._live_workers()}))

    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now, by name."""
        return self._supervisor.running()

    def log_of(self, name: str) -> Path:
        """Where a child's output goes."""
        return self.options.directory / "logs" / f"{name}.log"

    def _let_go(self) -> None:
        forget_running(self.options.directory)
        if self._sockets.parent != self.options.directory:
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _start_servers(self) -> None:
        if not self.control_url:
            self.control_url = self._start_server("control", self.options.control_mib)
        if not self.pages_url:
            self.pages_url = self._start_server("pages", self.options.pages_mib)

    def _start_server(self, role: Role, maxmemory_mib: int) -> str:
        self._report(f"starting {role}")
        directory = self.options.directory / role
        directory.mkdir(parents=True, exist_ok=True)
        spec = EmbeddedSpec(
            role, directory, self._sockets / f"{role}.sock", self.log_of(role), self._pid_file(role), maxmemory_mib
        )
        wait_answering(self._supervisor.start(child_spec(spec)), spec.url, timeout_s=60.0)
        return spec.url

    def _save_pages(self) -> None:
        """Let an embedded page server write its pages to disk and end: they are there again at the next start."""
        if self.options.pages_url or "pages" not in self._supervisor.running():
            return
        client = connect(self.pages_url, timeout_s=_SAVE_TIMEOUT_S)
        try:
            client.shutdown(save=True)
        except redis.RedisError as error:
            self._report(f"parked pages were not saved and will be recomputed: {error}")
        finally:
            client.close()

    def _addresses(self) -> dict[str, str]:
        """What other commands may know; addresses that the user gave may hold passwords and stay his."""
        addresses = {"KVALET_BASE_URL": self.base_url}
        if not self.options.control_url:
            addresses["KVALET_CONTROL_URL"] = self.control_url
        if not self.options.pages_url:
            addresses["KVALET_PAGES_URL"] = self.pages_url
        return addresses

    def _start_gateway(self) -> None:
        self._report("starting gateway")
        argv = (sys.executable, "-m", "deploy", "gateway")
        environment = {"KVALET_GATEWAY_HOST": self.options.host, "KVALET_GATEWAY_PORT": str(self.port)}
        if self.options.keys_file is not None:
            environment["KVALET_GATEWAY_KEYS_FILE"] = str(self.options.keys_file.absolute())
        child = self._child("gateway", argv, environment, grace_s=15.0)
        self._settings += gateway_rows("gateway", self._given(child))
        self._supervisor.start(child)

    def _start_workers(self) -> None:
        for worker_id in self.worker_ids:
            self._report(f"starting worker {worker_id}")
            argv = worker_command(worker_id)
            environment = {"KVALET_WORKER_ID": worker_id, "KVALET_DRAIN_GRACE_S": str(self.options.grace_s)}
            # The worker ends itself after its grace time; the kill is for one that hangs.
            child = self._child(worker_id, argv, environment, self.options.grace_s + 10.0)
            self._settings += worker_rows(worker_id, self._given(child))
            self._supervisor.start(child)
        compiling = CompileProgress([self.log_of(worker_id) for worker_id in self.worker_ids], self._report)

        def is_ready() -> bool:
            compiling.tell()
            return self.is_ready()

        self._supervisor.wait_until(is_ready, self.options.ready_timeout_s, interval_s=0.2)

    def _child(self, name: str, argv: tuple[str, ...], environment: Mapping[str, str], grace_s: float) -> ChildSpec:
        shared = {
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "KVALET_CONTROL_URL": self.control_url,
            "KVALET_PAGES_URL": self.pages_url,
        }
        if "KVALET_THREADS" not in os.environ:
            shared["KVALET_THREADS"] = str(_threads_per_worker(self.options.num_workers))
        full = {**shared, **self.options.environment, **environment}
        return ChildSpec(name, argv, full, self.log_of(name), self._pid_file(name), grace_s)

    def _given(self, child: ChildSpec) -> Given:
        """Where a child's settings come from."""
        options = self.options
        sources = {**dict.fromkeys(options.environment, COMMAND_LINE), **options.sources}
        return Given(child.environment, sources, options.from_file)

    def _pid_file(self, name: str) -> Path:
        return self.options.directory / "run" / f"{name}.pid"

    def _live_workers(self) -> tuple[WorkerRecord, ...]:
        """Our workers that have a heartbeat; none while control does not answer."""
        client = connect(self.control_url, timeout_s=2.0)
        try:
            workers = TurnControl(client, Patience(outage_s=1.0)).run(list_workers())
        except TurnControlError:
            return ()
        finally:
            client.close()
        return tuple(worker for worker in workers if worker.worker_id in self.worker_ids)

    def _on_reaped(self, name: str, status: int) -> None:
        again = "" if status == os.EX_CONFIG else ", starting it again"
        self._report(f"{name} ended with status {status}{again}; see {self.log_of(name)}")
        if name in self.worker_ids:
            self._end_leases(name)

    def _end_leases(self, worker_id: str) -> None:
        """Let others take over at once what a dead worker was running; without this its leases would run out."""
        client = connect(self.control_url, timeout_s=2.0)
        dispatcher = Dispatcher(self.control_url)
        try:
            for message in TurnControl(client, Patience(outage_s=1.0)).run(end_worker_leases(worker_id)):
                dispatcher.send(message)
        except TurnControlError as error:
            self._report(f"leases of {worker_id} not ended, they will run out: {error}")
        finally:
            dispatcher.close()
            client.close()


def worker_command(worker_id: str) -> tuple[str, ...]:
    """The Celery worker process; pool, queues and concurrency come from `workers.celery_app`."""
    celery = (sys.executable, "-m", "celery", "-A", "workers.celery_app", "worker")
    return (*celery, "--hostname", f"{worker_id}@%h", "--loglevel", "INFO")


def _check_port(host: str, port: int) -> None:
    """Raises BadOption when somebody listens there already: his answers would be taken for ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadOption("--port", port, f"cannot listen on {host} ({error.strerror})") from None


def _threads_per_worker(num_workers: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))


def _locked(directory: Path) -> IO[str]:
    """Hold `directory` for this process; the kernel lets go when the process ends, however it ends."""
    with _usable(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise StackInUse(directory, int(owner) if owner.isdigit() else None) from None
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _socket_directory(directory: Path) -> Path:
    """A place for unix sockets: below `directory`, or a short temporary one where the path would be too long."""
    place = directory / "run"
    # The longest name is control.sock; a socket address holds 107 bytes.
    if len(os.fsencode(place)) > 90:
        return Path(tempfile.mkdtemp(prefix="kvalet-"))
    # Each by itself: parents of a folder get the default rights, and here lies what people have said.
    with _usable(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        for folder in (directory, place):
            folder.mkdir(exist_ok=True, mode=0o700)
    return place


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Raises BadOption when the block cannot use the data folder."""
    try:
        yield
    except OSError as error:
        raise BadOption("--data", str(directory), f"cannot be used as a folder ({error.strerror})") from None
