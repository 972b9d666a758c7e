"""The whole stack as `kvalet up` runs it, on a tiny model: it serves, survives deaths, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.api import Api
from deploy.conversation import Conversation, default_model
from deploy.errors import BadOption, StackInUse, StartFailed
from deploy.running import adopt_addresses, read_running
from deploy.stack import Stack, StackOptions
from tests.fleet import tiny_model
from workers.registry import list_workers
from workers.turns.control import TurnControl, connect

WORD = "Say something about the sea, please."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder() -> Iterator[Path]:
    # A unix socket path is limited to 107 bytes, which pytest's own tmp_path can exceed.
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


def options_in(folder: Path, model: Path, **changes: object) -> StackOptions:
    environment = {"KVALET_MODEL": str(model), "KVALET_MIRROR_MIB": "64", "KVALET_SLOTS": "2", "KVALET_LEASE_S": "60"}
    values = {"num_workers": 2, "grace_s": 5.0, "pages_mib": 128, "environment": environment, **changes}
    return StackOptions(directory=folder, **values)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def poll_until(stack: Stack, condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stack.poll()
        if condition():
            return True
        time.sleep(0.05)
    return False


def say(conversation: Conversation, **fields: object) -> str:
    return "".join(conversation.say(WORD, max_output_tokens=24, temperature=0, **fields))


def test_stack_moves_a_conversation_and_leaves_nothing_running(folder: Path, model: Path) -> None:
    options = {"kvalet": {"ignore_eos": True}}
    with Stack(options_in(folder, model), lambda _: None) as stack, Api(stack.base_url) as api:
        conversation = Conversation(api, default_model(api), options)
        workers = []
        for worker in stack.worker_ids:
            say(conversation, kvalet={"worker": worker, "ignore_eos": True})
            assert conversation.report is not None
            workers.append(conversation.report.worker)
        pids = stack.pids()
    assert workers == ["w1", "w2"]
    assert [name for name, pid in pids.items() if alive(pid)] == []


def test_worker_killed_in_mid_reply_is_replaced_and_its_turn_goes_on(folder: Path, model: Path) -> None:
    """The lease lasts a minute here: only the supervisor's ending it can make the take-over quick."""
    with Stack(options_in(folder, model), lambda _: None) as stack, Api(stack.base_url) as api:
        conversation = Conversation(api, default_model(api), {"kvalet": {"ignore_eos": True}})
        text = conversation.say(WORD, max_output_tokens=600, temperature=0)
        next(text)
        victim = running_worker(stack)
        killed_at = time.monotonic()
        victim_pid = stack.pids()[victim]
        os.kill(victim_pid, signal.SIGKILL)
        assert poll_until(stack, lambda: stack.pids().get(victim, victim_pid) != victim_pid, timeout_s=20)
        gap_s = longest_gap_s(text, killed_at)
        report = conversation.report
    assert report is not None
    assert (report.worker != victim, report.output_tokens) == (True, 600)
    assert gap_s < 30


def longest_gap_s(text: Iterator[str], since: float) -> float:
    """Read to the end; the longest time without text."""
    longest, last = 0.0, since
    for _ in text:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def running_worker(stack: Stack) -> str:
    workers = TurnControl(connect(stack.control_url)).run(list_workers())
    busy = [worker.worker_id for worker in workers if worker.free < worker.slots]
    assert len(busy) == 1
    return busy[0]


def test_killed_servers_come_back_and_the_conversation_goes_on(folder: Path, model: Path) -> None:
    """Pages lose everything, control nothing: the next turn recomputes and knows its history."""
    with Stack(options_in(folder, model, num_workers=1), lambda _: None) as stack, Api(stack.base_url) as api:
        conversation = Conversation(api, default_model(api), {"kvalet": {"ignore_eos": True}})
        say(conversation)
        assert conversation.report is not None
        first = conversation.report
        for name in ("control", "pages"):
            os.kill(stack.pids()[name], signal.SIGKILL)
        poll_until(stack, lambda: {"control", "pages"} <= set(stack.pids()) and stack.is_ready(), timeout_s=30)
        say(conversation)
        second = conversation.report
    assert second.prompt_tokens > first.prompt_tokens + first.output_tokens


@pytest.fixture
def up(folder: Path, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`kvalet up` with one worker, in a process of its own; its output is in folder/output."""
    command = [sys.executable, "-m", "deploy", "up", "--workers", "1", "--model", str(model), "--data", str(folder)]
    with (folder / "output").open("wb") as sink:
        supervisor = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    yield supervisor
    supervisor.kill()
    supervisor.wait()


def output_of(folder: Path) -> str:
    return (folder / "output").read_text()[-2000:]


def wait_until(condition: Callable[[], bool], folder: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, output_of(folder)
        time.sleep(0.05)


def child_pids(folder: Path) -> list[int]:
    return [int(text.split()[0]) for path in (folder / "run").glob("*.pid") if (text := path.read_text())]


def test_folder_that_was_open_gets_no_files_that_others_can_read(folder: Path, up: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: "curl http" in output_of(folder), folder)
    written = [path for path in folder.rglob("*") if path.name != "output" and not path.is_socket()]
    assert any(path.name == "gateway.log" for path in written)
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def test_supervisor_killed_at_once_leaves_no_orphan(folder: Path, up: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(child_pids(folder)) == 4, folder)
    pids = child_pids(folder)
    up.kill()
    up.wait()
    wait_until(lambda: not any(map(alive, pids)), folder, timeout_s=5)


def test_terminated_supervisor_ends_in_order_with_status_zero(folder: Path, up: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: "curl http" in output_of(folder), folder)
    pids = child_pids(folder)
    up.send_signal(signal.SIGTERM)
    up.wait(40)
    assert (len(pids), up.returncode, [pid for pid in pids if alive(pid)]) == (4, 0, []), output_of(folder)


def test_second_stack_on_the_same_folder_is_refused_with_the_owners_pid(folder: Path, model: Path) -> None:
    with Stack(options_in(folder, model, num_workers=0), lambda _: None), pytest.raises(StackInUse) as refused:
        Stack(options_in(folder, model, num_workers=0), lambda _: None).__enter__()
    assert refused.value.pid == os.getpid()


def test_stack_whose_model_cannot_be_loaded_says_why_and_leaves_nothing_running(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    stack = Stack(options_in(folder, broken, num_workers=1), lambda _: None)
    with pytest.raises(StartFailed) as failed:
        stack.__enter__()
    assert re.fullmatch(r"w1: cannot start: .*broken\.gguf.*; see .*w1\.log", str(failed.value)), str(failed.value)
    assert stack.pids() == {}


def test_port_of_another_service_is_refused_before_anything_starts(folder: Path, model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        stack = Stack(options_in(folder, model, port=port), lambda _: None)
        with pytest.raises(BadOption, match=str(port)):
            stack.__enter__()
        assert stack.pids() == {}


def test_pages_parked_before_a_stop_are_there_after_the_next_start(folder: Path, model: Path) -> None:
    text = "Tell me, once more and slowly, of the harbour, the lighthouse and the salt ships of the north. " * 3
    with Stack(options_in(folder, model, num_workers=1), lambda _: None) as stack, Api(stack.base_url) as api:
        conversation = Conversation(api, default_model(api), {"temperature": 0, "max_output_tokens": 24})
        list(conversation.say(text))
    again = options_in(folder, model, num_workers=1)
    environment = {**again.environment, "KVALET_RESTORE": "always"}
    with Stack(replace(again, environment=environment), lambda _: None) as stack, Api(stack.base_url) as api:
        follow = Conversation(api, default_model(api), {"temperature": 0, "max_output_tokens": 8})
        follow.conversation_id = conversation.conversation_id
        list(follow.say("And then?"))
    assert follow.report is not None
    assert follow.report.restored_pages > 0


def test_reader_that_leaves_a_stored_reply_cancels_it(folder: Path, model: Path) -> None:
    with Stack(options_in(folder, model, num_workers=1), lambda _: None) as stack, Api(stack.base_url) as api:
        options = {"max_output_tokens": 7500, "kvalet": {"ignore_eos": True}}
        conversation = Conversation(api, default_model(api), options)
        reply = conversation.say(WORD)
        next(reply)
        reply.close()
        control = TurnControl(connect(stack.control_url))

        def is_free() -> bool:
            return all(worker.free == worker.slots for worker in control.run(list_workers()))

        assert poll_until(stack, is_free, 2.0)


def test_addresses_of_a_running_stack_are_found_and_forgotten(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("KVALET_BASE_URL", "KVALET_CONTROL_URL", "KVALET_PAGES_URL")
    for name in names:
        # Set once, so that afterwards it is what it was before: what is adopted must not reach other tests.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with Stack(options_in(folder, model, num_workers=0), lambda _: None) as stack:
        adopt_addresses(folder)
        assert [os.environ.get(name) for name in names] == [stack.base_url, stack.control_url, stack.pages_url]
    for name in names:
        monkeypatch.delenv(name)
    adopt_addresses(folder)
    assert [os.environ.get(name) for name in names] == [None, None, None]


def test_running_stack_tells_what_it_gave_its_processes_and_why(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVALET_THREADS", "1")
    monkeypatch.setenv("KVALET_SWEEP_S", "2")
    options = options_in(folder, model, num_workers=1, from_file=frozenset({"KVALET_SWEEP_S"}))
    with Stack(options, lambda _: None) as stack:
        running = read_running(folder)
    assert running is not None
    found = {(s.process, s.variable): (s.value, s.source) for s in running.settings}
    assert found["w1", "KVALET_MODEL"] == (str(model), "command line")
    assert found["w1", "KVALET_WORKER_ID"] == ("w1", "kvalet up")
    assert found["w1", "KVALET_THREADS"] == ("1", "environment")
    assert found["w1", "KVALET_SWEEP_S"] == ("2.0", "file")
    assert found["w1", "KVALET_KV_FORMAT"] == ("k8v4", "default")
    assert found["gateway", "KVALET_GATEWAY_PORT"] == (str(stack.port), "kvalet up")
    assert read_running(folder) is None
