"""The supervisor: restarts what dies, pauses longer each time, gives up on a start that can't work."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.errors import StartFailed
from deploy.process import ChildProcess, ChildSpec
from deploy.supervisor import RestartPolicy, Supervisor
from workers.errors import CANNOT_START

SLEEP = "import time; time.sleep(60)"
FAST = RestartPolicy(first_s=0.05, longest_s=0.4, healthy_s=30.0, start_attempts=3)


class Deaths(list[tuple[str, int]]):
    def __call__(self, name: str, status: int) -> None:
        self.append((name, status))


@pytest.fixture
def deaths() -> Deaths:
    return Deaths()


@pytest.fixture
def supervisor(deaths: Deaths) -> Iterator[Supervisor]:
    supervisor = Supervisor(FAST, deaths)
    yield supervisor
    supervisor.kill()


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., ChildSpec]:
    def make(name: str, code: str) -> ChildSpec:
        folder = tmp_path / name
        return ChildSpec(name, (sys.executable, "-c", code), {}, folder / "log", folder / "pid", 5.0)

    return make


def poll_until(supervisor: Supervisor, condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        supervisor.poll()
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_killed_child_is_reported_and_started_again(
    supervisor: Supervisor, deaths: Deaths, spec_of: Callable[..., ChildSpec]
) -> None:
    first = supervisor.start(spec_of("a", SLEEP))
    first.kill()
    assert poll_until(supervisor, lambda: supervisor.running().get("a", first.pid) != first.pid)
    assert deaths == [("a", -9)]


def test_death_of_one_child_leaves_the_other_alone(supervisor: Supervisor, spec_of: Callable[..., ChildSpec]) -> None:
    victim, other = supervisor.start(spec_of("a", SLEEP)), supervisor.start(spec_of("b", SLEEP))
    victim.kill()
    poll_until(supervisor, lambda: supervisor.running().get("a", victim.pid) != victim.pid)
    assert supervisor.running()["b"] == other.pid


def test_pause_doubles_with_every_death_up_to_the_longest() -> None:
    assert [FAST.pause_s(deaths) for deaths in range(1, 6)] == [0.05, 0.1, 0.2, 0.4, 0.4]


def test_child_that_cannot_start_fails_the_start_at_once_with_its_own_reason(
    supervisor: Supervisor, spec_of: Callable[..., ChildSpec], deaths: Deaths
) -> None:
    spec = spec_of(
        "a", f"import sys; print('{CANNOT_START}model: gone'); print('later words'); sys.exit({os.EX_CONFIG})"
    )
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    spec.log.write_text(f"{CANNOT_START}of an earlier start\n")
    supervisor.start(spec)
    with pytest.raises(StartFailed) as failed:
        supervisor.wait_until(lambda: False, timeout_s=20, interval_s=0.01)
    assert (failed.value.reason, deaths) == ("cannot start: model: gone", [("a", os.EX_CONFIG)])


def test_child_that_keeps_dying_fails_the_start_with_its_last_words(
    supervisor: Supervisor, spec_of: Callable[..., ChildSpec]
) -> None:
    supervisor.start(spec_of("a", "raise SystemExit('no such model')"))
    with pytest.raises(StartFailed) as failed:
        supervisor.wait_until(lambda: False, timeout_s=20, interval_s=0.01)
    assert failed.value.name == "a"
    assert failed.value.reason == "ended 3 times, last with status 1: no such model"
    assert str(failed.value).endswith(f"; see {failed.value.log}")


def test_start_that_takes_too_long_fails(supervisor: Supervisor, spec_of: Callable[..., ChildSpec]) -> None:
    supervisor.start(spec_of("a", SLEEP))
    with pytest.raises(StartFailed, match="not ready in"):
        supervisor.wait_until(lambda: False, timeout_s=0.1, interval_s=0.01)


def test_stop_ends_every_child_and_removes_its_pid_file(
    supervisor: Supervisor, spec_of: Callable[..., ChildSpec]
) -> None:
    children = [supervisor.start(spec_of(name, SLEEP)) for name in ("a", "b")]
    supervisor.stop()
    assert [child.exit_code() for child in children] == [-15, -15]
    assert not any(child.spec.pid_file.exists() for child in children)


def test_stopped_child_is_not_started_again(
    supervisor: Supervisor, deaths: Deaths, spec_of: Callable[..., ChildSpec]
) -> None:
    supervisor.start(spec_of("a", SLEEP))
    supervisor.stop(["a"])
    assert not poll_until(supervisor, lambda: bool(supervisor.running() or deaths), timeout_s=0.3)


def test_leftover_of_an_earlier_run_is_ended_before_the_start(
    supervisor: Supervisor, spec_of: Callable[..., ChildSpec], deaths: Deaths
) -> None:
    earlier = Supervisor(FAST, deaths).start(spec_of("a", SLEEP))
    supervisor.start(spec_of("a", SLEEP))
    assert earlier.wait(5)


def test_interrupted_stop_leaves_the_rest_to_kill(
    supervisor: Supervisor, spec_of: Callable[..., ChildSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = supervisor.start(spec_of("a", SLEEP))

    def interrupted(self: ChildProcess, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "terminate", lambda self: None)
    monkeypatch.setattr(ChildProcess, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervisor.stop()
    supervisor.kill()
    assert child.exit_code() == -9
