"""Keeps a set of child processes running: starts, watches, restarts with back-off, and ends them in order.

The supervisor knows nothing about what its children do. It runs in one thread, the one that starts the children, since
the kernel ties their death to that thread (`deploy.exec_child`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.errors import StartFailed
from deploy.process import ChildProcess, ChildSpec, end_leftover

Reaped = Callable[[str, int], None]
"""Called with (child name, exit status) as soon as a child that should run was reaped."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses of `first_s`, doubled up to `longest_s`; a child that ran `healthy_s` starts again at `first_s`.

    `start_attempts`: how many deaths in a row before `wait_until` gives up on a child that never became ready.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_s: float = 30.0
    start_attempts: int = 2

    def pause_s(self, deaths: int) -> float:
        """Seconds before the next start after `deaths` deaths in a row."""
        return float(min(self.longest_s, self.first_s * 2 ** max(0, deaths - 1)))


@dataclass(slots=True)
class _Watched:
    """A child under watch: its process, or the time of its next start."""

    spec: ChildSpec
    process: ChildProcess | None = None
    deaths: int = 0
    restart_at: float = 0.0
    exit_status: int = 0
    last_words: str = ""


class Supervisor:
    """Children by name, in the order they were added. Use from one thread."""

    def __init__(self, policy: RestartPolicy, reaped: Reaped) -> None:
        self._policy = policy
        self._reaped = reaped
        self._children: dict[str, _Watched] = {}

    def start(self, spec: ChildSpec) -> ChildProcess:
        """Start a child and watch it; ends a leftover of an earlier run first."""
        end_leftover(spec.pid_file)
        process = ChildProcess(spec)
        self._children[spec.name] = _Watched(spec, process)
        return process

    def running(self) -> dict[str, int]:
        """Process ids of the children that run now, by name."""
        return {name: w.process.pid for name, w in self._children.items() if w.process is not None}

    def poll(self) -> None:
        """Reap what has ended and start again what is due."""
        now = time.monotonic()
        for name, watched in self._children.items():
            process = watched.process
            if process is None:
                if now >= watched.restart_at:
                    watched.process = ChildProcess(watched.spec)
            elif (status := process.exit_code()) is not None:
                self._bury(watched, process, status, now)
                self._reaped(name, status)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, interval_s: float = 0.1) -> None:
        """Poll until `ready()`. Raises StartFailed: time is up, or a child keeps dying or says that it cannot start."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.poll()
            self._give_up_on_crash_loops()
            if time.monotonic() > deadline:
                raise StartFailed("service", f"not ready in {timeout_s:.0f} s")
            time.sleep(interval_s)

    def stop(self, names: Sequence[str] | None = None) -> None:
        """End children (all, in reverse order of start; or these, together) within their grace times."""
        groups = [[name] for name in reversed(self._children)] if names is None else [list(names)]
        for group in groups:
            processes = [w.process for name in group if (w := self._children.get(name)) and w.process]
            _stop_together(processes)
            # Forgotten only now: when the wait is interrupted, `kill` must still know them.
            for name in group:
                self._children.pop(name, None)

    def kill(self) -> None:
        """End every child at once."""
        for watched in self._children.values():
            if watched.process is not None:
                watched.process.kill()
        self._children.clear()

    def _bury(self, watched: _Watched, process: ChildProcess, status: int, now: float) -> None:
        # What the child left in its process group must not outlive it.
        process.kill()
        healthy = now - process.started_at >= self._policy.healthy_s
        watched.deaths = 1 if healthy else watched.deaths + 1
        watched.exit_status = status
        watched.last_words = process.last_words()
        watched.restart_at = now + self._policy.pause_s(watched.deaths)
        watched.process = None

    def _give_up_on_crash_loops(self) -> None:
        for name, watched in self._children.items():
            if watched.deaths and watched.exit_status == os.EX_CONFIG:
                raise StartFailed(name, f"cannot start: {watched.last_words}", watched.spec.log)
            if watched.deaths >= self._policy.start_attempts:
                ended = f"ended {watched.deaths} times, last with status {watched.exit_status}"
                raise StartFailed(name, f"{ended}: {watched.last_words}", watched.spec.log)


def _stop_together(processes: Sequence[ChildProcess]) -> None:
    for process in processes:
        process.terminate()
    asked_at = time.monotonic()
    for process in processes:
        process.wait(max(0.0, asked_at + process.spec.grace_s - time.monotonic()))
        process.kill()
