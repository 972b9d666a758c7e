"""Children: their own log, an end within the grace time, and no life beyond ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.process import ChildProcess, ChildSpec, end_leftover

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = """
import sys, time
from pathlib import Path
from deploy.process import ChildProcess, ChildSpec
d = Path(sys.argv[1])
command = (sys.executable, "-c", "import time; time.sleep(60)")
child = ChildProcess(ChildSpec("c", command, {}, d / "log", d / "pid", 1.0))
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., ChildSpec]:
    def make(code: str, grace_s: float = 5.0, **environment: str) -> ChildSpec:
        command = (sys.executable, "-c", code)
        return ChildSpec("child", command, environment, tmp_path / "log", tmp_path / "pid", grace_s)

    return make


@pytest.fixture
def started(spec_of: Callable[..., ChildSpec]) -> Iterator[Callable[..., ChildProcess]]:
    children: list[ChildProcess] = []

    def start(code: str, grace_s: float = 5.0, **environment: str) -> ChildProcess:
        children.append(ChildProcess(spec_of(code, grace_s, **environment)))
        return children[-1]

    yield start
    for child in children:
        child.kill()


def test_child_output_goes_to_its_log(started: Callable[..., ChildProcess]) -> None:
    child = started("import os, sys; print(os.environ['WORD']); print('err', file=sys.stderr)", WORD="hello")
    assert child.wait(5)
    assert set(child.log_tail().split()) == {"hello", "err"}


def test_child_that_ends_reports_its_status(started: Callable[..., ChildProcess]) -> None:
    child = started("raise SystemExit(7)")
    child.wait(5)
    assert child.exit_code() == 7


def test_child_that_ignores_sigterm_is_killed_after_its_grace(started: Callable[..., ChildProcess]) -> None:
    child = started(STUBBORN, grace_s=0.3)
    assert eventually(lambda: "up" in child.log_tail())
    begin = time.monotonic()
    child.stop()
    assert child.exit_code() == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - begin < 3


def test_stop_takes_grandchildren_along(started: Callable[..., ChildProcess]) -> None:
    child = started("import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)")
    assert eventually(lambda: child.log_tail().strip().isdigit())
    grandchild = int(child.log_tail())
    child.stop()
    assert eventually(lambda: not alive(grandchild))


def test_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    assert alive(child_pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not alive(child_pid))


def test_leftover_of_a_dead_run_is_killed(started: Callable[..., ChildProcess]) -> None:
    child = started("import time; time.sleep(60)")
    assert end_leftover(child.spec.pid_file) == child.pid
    assert not alive(child.pid)
    assert not child.spec.pid_file.exists()


def test_leftover_with_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    pid_file.write_text(f"{os.getpid()} 1\n")
    assert end_leftover(pid_file) is None
    assert not pid_file.exists()


def test_leftover_file_with_garbage_is_removed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    pid_file.write_text("not a pid\n")
    assert end_leftover(pid_file) is None
    assert not pid_file.exists()
