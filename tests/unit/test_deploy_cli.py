"""Slips on the command line cost one line and no start."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version as package_version
from pathlib import Path

import pytest

from deploy.doctor.cuda import driver_is_installed


def kvalet(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "deploy", *words)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVALET_")}
    full = {**inherited, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(Path.cwd()), **environment}
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["missing.gguf", "[bold]missing.gguf", "text.gguf"])
def test_up_with_a_model_that_cannot_be_read_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.gguf").write_text("no model at all, just a line of text")
    done = kvalet("up", "--model", str(tmp_path / name), "--data", str(tmp_path / "data"))
    assert (done.returncode, name in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert not (tmp_path / "data" / "logs").exists()


@pytest.mark.skipif(driver_is_installed(), reason="an NVIDIA driver is here")
def test_up_on_cuda_without_a_gpu_says_so_in_one_line(tmp_path: Path) -> None:
    done = kvalet("up", "--backend", "cuda", "--data", str(tmp_path / "data"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == "kvalet: --backend='cuda': no NVIDIA driver on this machine: install 580 or later"
    assert not (tmp_path / "data" / "logs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("up", "--control", "foo"), "--control='foo': must begin with redis://, rediss://, unix://"),
        (("up", "--control", "redis://127.0.0.1:1"), "--control='redis://127.0.0.1:1': does not answer"),
        (("up", "--pages-mib", "999999999"), "--pages-mib=999999999: "),
        (("up", "--mirror-mib", "999999999"), "--mirror-mib=999999999: "),
        (("worker", "--control", "redis://127.0.0.1:1"), "--control='redis://127.0.0.1:1': does not answer"),
        (("worker", "--mirror-mib", "0"), "--mirror-mib=0: must be at least 1"),
        (("gateway", "--control", "foo"), "KVALET_CONTROL_URL='foo': must begin with"),
        (("chat",), "no `kvalet up` runs on this data folder"),
        (("status",), "no `kvalet up` runs on this data folder"),
        (("snapshot", "ls"), "name the servers with --control and --pages"),
    ],
)
def test_command_that_cannot_work_says_why_in_one_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = kvalet(*words, KVALET_DATA=str(tmp_path / "data"))
    assert done.returncode in (1, 2), done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "data" / "logs").exists()


def test_version_is_printed() -> None:
    done = kvalet("--version")
    assert (done.returncode, done.stdout.strip()) == (0, package_version("kvalet"))


@pytest.mark.parametrize("command", [("up",), ("doctor",)])
def test_unknown_variable_is_named_at_once(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = kvalet(*command, KVALET_KVFORMAT="q4", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "KVALET_KVFORMAT" in done.stderr + done.stdout
    assert not (tmp_path / "kvalet").exists()
