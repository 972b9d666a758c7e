"""`kvalet config`: what is in force, where it comes from, and what a running stack gave its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.configuration import Given, Setting, gateway_rows, settings_in_force, worker_rows
from deploy.errors import BadOption, BadSetting
from deploy.running import read_running, write_running
from deploy.settings_file import adopt_settings_file
from tests.unit.test_deploy_cli import kvalet


def by_name(settings: list[Setting]) -> dict[str, tuple[str, str]]:
    return {setting.variable: (setting.value, setting.source) for setting in settings}


def test_child_gets_command_line_before_environment_before_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KVALET_SLOTS": "3", "KVALET_LEASE_S": "9", "KVALET_KV_FORMAT": "q4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KVALET_ATTEST", raising=False)
    overlay = {"KVALET_SLOTS": "5", "KVALET_WORKER_ID": "w1"}
    given = Given(overlay, {"KVALET_SLOTS": "command line"}, frozenset({"KVALET_LEASE_S"}))
    rows = by_name(worker_rows("w1", given))
    assert rows["KVALET_SLOTS"] == ("5", "command line")
    assert rows["KVALET_WORKER_ID"] == ("w1", "kvalet up")
    assert rows["KVALET_LEASE_S"] == ("9.0", "file")
    assert rows["KVALET_KV_FORMAT"] == ("q4", "environment")
    assert rows["KVALET_ATTEST"] == ("sampled", "default")


def test_gateway_of_a_stack_shows_the_port_that_it_was_given() -> None:
    overlay = {"KVALET_GATEWAY_PORT": "4711", "KVALET_CONTROL_URL": "unix:///tmp/c.sock"}
    rows = by_name(gateway_rows("gateway", Given(overlay)))
    assert rows["KVALET_GATEWAY_PORT"] == ("4711", "kvalet up")
    assert rows["KVALET_CONTROL_URL"] == ("unix:///tmp/c.sock", "kvalet up")


def test_settings_file_gives_what_the_environment_lacks(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("# ours\n\nKVALET_SLOTS=5   # environment\nKVALET_THREADS=2\nKVALET_PAGE_SIZE=   # default\n")
    environment = {"KVALET_THREADS": "1"}
    assert adopt_settings_file(file, environment) == {"KVALET_SLOTS"}
    assert environment == {"KVALET_THREADS": "1", "KVALET_SLOTS": "5"}


@pytest.mark.parametrize("line", ["KVALET_SLOTZ=3", "SLOTS=3", "KVALET_SLOTS 3", "KVALET_GATEWAY_CONTROL=3"])
def test_line_of_a_settings_file_that_means_nothing_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "settings"
    file.write_text(f"KVALET_SLOTS=3\n{line}\n")
    with pytest.raises(BadSetting, match=rf"settings:2: .*{line.split('=')[0]}"):
        adopt_settings_file(file, {})


def test_settings_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="--settings"):
        adopt_settings_file(tmp_path / "missing", {})


def test_config_output_is_a_settings_file_with_the_same_result(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    first = kvalet("config", "--data", str(tmp_path), KVALET_SLOTS="3", KVALET_WORKER_ID="me")
    file.write_text(first.stdout)
    second = kvalet("--settings", str(file), "config", "--data", str(tmp_path))
    values = [[line.split(" ")[0] for line in done.stdout.splitlines()] for done in (first, second)]
    assert values[0] == values[1], second.stderr
    assert "KVALET_SLOTS=3 " in second.stdout
    assert {line.rsplit("# ")[-1] for line in second.stdout.splitlines() if "KVALET_SLOTS=" in line} == {"file"}


def test_config_tells_where_a_running_stack_differs(tmp_path: Path) -> None:
    here = settings_in_force()
    running = [*here, Setting("w1", "KVALET_SLOTS", "77", "command line")]
    write_running(tmp_path, {}, running)
    plain = kvalet("config", "--data", str(tmp_path))
    comments = [line for line in plain.stdout.splitlines() if line.startswith("#   w1 ")]
    assert [line.split() for line in comments] == [["#", "w1", "KVALET_SLOTS=77", "#", "command", "line"]]
    whole = kvalet("config", "--running", "--data", str(tmp_path)).stdout.splitlines()
    assert [whole[-2], whole[-1].split()[0]] == ["# w1", "KVALET_SLOTS=77"]


def test_stack_that_was_killed_is_not_taken_for_running(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from deploy.running import write_running; "
        "write_running(pathlib.Path(sys.argv[1]), {'KVALET_BASE_URL': 'http://x'}, [])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) != []
    assert read_running(tmp_path) is None
    refused = kvalet("config", "--running", "--data", str(tmp_path))
    assert (refused.returncode, "no `kvalet up` runs" in refused.stderr) == (2, True)
