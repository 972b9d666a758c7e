"""One child process: own session, own log, killed by the kernel when we die, found again by its pid file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy import exec_child
from workers.errors import CANNOT_START

_TAIL_BYTES = 4096
_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `environment` is laid over our own; `grace_s` is the time between SIGTERM and SIGKILL."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    pid_file: Path
    grace_s: float


class ChildProcess:
    """A started child. Start it from a thread that outlives it (see `deploy.exec_child`)."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.started_at = time.monotonic()
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        spec.pid_file.parent.mkdir(parents=True, exist_ok=True)
        _rotate(spec.log)
        with spec.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), *spec.argv],
                env={**os.environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An own session: Ctrl-C in the terminal reaches only the supervisor, which stops children in order.
                start_new_session=True,
            )
        spec.pid_file.write_text(f"{self.pid} {start_ticks(self.pid)}\n")

    @property
    def pid(self) -> int:
        """The child's process id, also its process group's."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """The exit status once the child has ended (negative: by that signal), else None."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the child to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the child and everything in its process group at once, and reap it."""
        _kill_group(self.pid)
        self._process.wait()
        self.forget()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False when it did not come in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Ask, wait `grace_s`, then kill; sweeps what the child left in its group."""
        self.terminate()
        self.wait(self.spec.grace_s)
        self.kill()

    def forget(self) -> None:
        """Remove the pid file of an ended child."""
        self.spec.pid_file.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The end of what the child has logged."""
        return log_tail(self.spec.log, self._log_start)

    def last_words(self) -> str:
        """Why a child that has ended could not start, if it said so, else the last line that it logged."""
        lines = [line.strip() for line in self.log_tail().splitlines() if line.strip()]
        refusals = [line.removeprefix(CANNOT_START) for line in lines if line.startswith(CANNOT_START)]
        return (refusals or lines or ["it logged nothing"])[-1]


def _rotate(log: Path) -> None:
    """Keep one older log beside a new one, so that restarts for months don't fill the disk."""
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.replace(log.with_suffix(log.suffix + ".1"))


def log_tail(log: Path, start: int = 0) -> str:
    """The last few KiB of a log from byte `start` on, as text; empty when there is none."""
    try:
        with log.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(start, size - _TAIL_BYTES))
            return f.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def end_leftover(pid_file: Path) -> int | None:
    """Kill the process that a pid file names if it still is that process; removes the file.

    Returns its pid when one was killed. A reused pid is recognized by its start time and left alone.
    """
    try:
        pid, ticks = (int(field) for field in pid_file.read_text().split())
    except (FileNotFoundError, ValueError):
        pid_file.unlink(missing_ok=True)
        return None
    leftover = start_ticks(pid) == ticks
    if leftover:
        _kill_group(pid)
        _wait_gone(pid, ticks)
    pid_file.unlink(missing_ok=True)
    return pid if leftover else None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _wait_gone(pid: int, ticks: int, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while start_ticks(pid) == ticks and time.monotonic() < deadline:
        time.sleep(0.01)


def start_ticks(pid: int) -> int:
    """Start time of a live process in clock ticks since boot; -1 when there is none (a zombie counts as none)."""
    try:
        # The command name may hold spaces and parentheses: fields are counted behind the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])
