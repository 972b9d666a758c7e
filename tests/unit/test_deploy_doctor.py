"""`kvalet doctor` names what is missing and how to get it, and fails only for what was asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.doctor import cuda
from deploy.doctor.command import print_findings
from deploy.doctor.cuda import device_finding, driver_finding, examine_cuda, kernel_finding, pinned_finding
from deploy.doctor.examination import examine
from deploy.doctor.finding import Finding
from deploy.doctor.pinned_memory import MemoryLimits, memory_limits
from deploy.doctor.servers import examine_servers
from gpu.cuda.machine import Compiler, DeviceFacts, Driver
from gpu.errors import KernelCompileError
from tests.fleet import tiny_model
from tests.services import ValkeyServer
from tests.unit.test_deploy_cli import kvalet

MIB = 1 << 20
NVRTC_12, NVRTC_13 = Compiler((12, 9), (50, 70, 75, 90, 120)), Compiler((13, 5), (75, 80, 90, 120))
DRIVER_12, DRIVER_13 = Driver((12, 4), "550.54.15"), Driver((13, 0), None)


def gpu_of(major: int, minor: int) -> DeviceFacts:
    return DeviceFacts(0, "Some GPU", "uuid", (major, minor), 16 << 30, "0000:1b:00.0", None, 1)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_is_installed", lambda: False)


def test_model_of_the_settings_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finding() -> Finding:
        return next(found for found in examine("cpu") if found.subject == "model")

    monkeypatch.setenv("KVALET_MODEL", str(tmp_path / "tiny.gguf"))
    assert (finding().missing, "tiny.gguf" in finding().detail) == (True, True)
    tiny_model(tmp_path)
    assert (finding().missing, "8192 tokens of context" in finding().detail) == (False, True)
    monkeypatch.setenv("KVALET_CONTEXT", "9000")
    assert (finding().missing, finding().detail.startswith("KVALET_CONTEXT=9000")) == (True, True)
    monkeypatch.delenv("KVALET_MODEL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert finding().detail.endswith("kvalet model fetch")


@pytest.mark.usefixtures("no_driver")
def test_machine_without_gpu_gets_one_sentence_and_fails_nothing() -> None:
    (finding,) = examine_cuda(demanded=False, mirror_bytes=MIB)
    assert (finding.fine, finding.missing) == (False, False)
    assert finding.detail == "no NVIDIA driver on this machine, so workers run on the CPU"


@pytest.mark.usefixtures("no_driver")
def test_machine_without_gpu_fails_when_cuda_is_asked_for() -> None:
    missing = [finding for finding in examine_cuda(demanded=True, mirror_bytes=MIB) if finding.missing]
    assert [finding.detail for finding in missing] == ["no NVIDIA driver on this machine: install 580 or later"]


def test_machine_without_cuda_packages_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_is_installed", lambda: True)
    monkeypatch.delitem(sys.modules, "gpu.cuda.machine")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delattr("gpu.cuda.machine", raising=False)
    (finding,) = examine_cuda(demanded=True, mirror_bytes=MIB)
    assert finding.missing
    assert finding.detail == 'cuda.bindings is not installed: pip install "kvalet[worker,cuda13]"'


@pytest.mark.parametrize(
    ("driver", "compiler", "fine"),
    [
        (DRIVER_13, NVRTC_13, True),
        (DRIVER_13, NVRTC_12, True),
        (DRIVER_12, NVRTC_12, True),
        (DRIVER_12, NVRTC_13, False),
    ],
)
def test_driver_older_than_the_compilers_line_is_refused(driver: Driver, compiler: Compiler, fine: bool) -> None:
    finding = driver_finding(driver, compiler, demanded=True)
    assert finding.fine is fine
    assert ("kvalet[worker,cuda12]" in finding.detail) is not fine


@pytest.mark.parametrize(
    ("capability", "compiler", "remedy"),
    [
        ((9, 0), NVRTC_13, ""),
        ((7, 0), NVRTC_12, ""),
        ((7, 0), NVRTC_13, "kvalet[worker,cuda12]"),
        ((6, 1), NVRTC_12, "at least 7.0 is needed"),
        ((13, 0), NVRTC_13, "--upgrade nvidia-cuda-nvrtc"),
    ],
)
def test_device_that_no_kernel_is_compiled_for_is_refused(
    capability: tuple[int, int], compiler: Compiler, remedy: str
) -> None:
    finding = device_finding(gpu_of(*capability), compiler, demanded=True)
    assert finding.fine is (remedy == "")
    assert (remedy or "NUMA node 1") in finding.detail
    assert finding.facts["capability"] == ".".join(map(str, capability))


def refuse(arch: str) -> None:
    raise KernelCompileError("publish.cu", f"{arch}: no such thing")


@pytest.mark.parametrize(
    ("compile_smallest", "fine", "part"), [(lambda arch: None, True, "sm_80"), (refuse, False, "publish.cu: sm_80")]
)
def test_kernel_that_does_not_compile_is_told(compile_smallest: Callable[[str], None], fine: bool, part: str) -> None:
    finding = kernel_finding("sm_80", demanded=True, compile_smallest=compile_smallest)
    assert (finding.fine, part in finding.detail) == (fine, True)


def test_smallest_kernel_compiles_for_a_device_that_is_not_here() -> None:
    assert kernel_finding("sm_90a", demanded=True, compile_smallest=cuda.compile_smallest).fine


@pytest.mark.parametrize(
    ("limits", "fine"),
    [
        (MemoryLimits(64 << 30, None, None), True),
        (MemoryLimits(64 << 30, 4 << 30, None), False),
        (MemoryLimits(6 << 30, None, 8 * MIB), False),
    ],
)
def test_mirror_that_does_not_fit_into_memory_is_told(limits: MemoryLimits, fine: bool) -> None:
    finding = pinned_finding(limits, 8 << 30, demanded=True)
    assert finding.fine is fine
    assert ("KVALET_MIRROR_MIB" in finding.detail) is not fine


@pytest.mark.parametrize(
    ("groups", "files", "limit_mib"),
    [
        ("0::/a/b\n", {"a/memory.max": str(100 * MIB), "a/b/memory.max": "max"}, 100),
        ("0::/a\n", {"a/memory.max": str(300 * MIB), "memory.max": str(200 * MIB)}, 200),
        ("5:cpu:/x\n4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": str(50 * MIB)}, 50),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
        ("0::/\n", {}, None),
    ],
)
def test_limit_of_the_control_group_is_the_least_on_the_way_up(
    tmp_path: Path, groups: str, files: dict[str, str], limit_mib: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    limit = memory_limits(tmp_path).control_group_bytes
    assert limit == (None if limit_mib is None else limit_mib * MIB)


def test_server_that_answers_is_told_with_its_version(control_server: ValkeyServer) -> None:
    (finding,) = examine_servers({"KVALET_CONTROL_URL": control_server.url})
    assert finding.fine
    assert finding.detail.startswith("Valkey ")


@pytest.mark.parametrize("url", ["redis://user:secret@127.0.0.1:1/0", "nonsense://host"])
def test_server_that_cannot_be_asked_is_missing_without_its_password(url: str) -> None:
    (finding,) = examine_servers({"KVALET_PAGES_URL": url, "HOME": "/"})
    assert finding.missing
    assert "KVALET_PAGES_URL" in finding.detail
    assert "secret" not in finding.detail


def test_findings_are_printed_as_json_on_demand(tmp_path: Path) -> None:
    done = kvalet("doctor", "--json", "--backend", "cud", XDG_STATE_HOME=str(tmp_path))
    told = json.loads(done.stdout)
    settings = [finding for finding in told["findings"] if finding["subject"] == "settings"]
    assert (done.returncode, told["fine"]) == (1, False)
    assert [(finding["fine"], "--backend='cud'" in finding["detail"]) for finding in settings] == [(False, True)]


def test_names_in_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("packages", False, 'pip install "kvalet[worker,cuda13]"')])
    assert capsys.readouterr().out == 'missing packages: pip install "kvalet[worker,cuda13]"\n'
