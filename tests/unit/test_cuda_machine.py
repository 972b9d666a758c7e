"""What a machine has for CUDA, told by a driver that is not there."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu.cuda import device as device_module
from gpu.cuda import machine
from gpu.cuda.architectures import arch_of
from gpu.cuda.device import CudaDevice
from gpu.cuda.kernel import device_kernels
from gpu.cuda.machine import find_compiler, find_devices, find_driver, numa_node, pci_link
from gpu.errors import DeviceUnavailable

UUIDS = ("5fd4a2ab-0c12-11ee-be56-0242ac120002", "6fd4a2ab-0c12-11ee-be56-0242ac120002")
OK = 0


class Failure(IntEnum):
    CUDA_ERROR_NO_DEVICE = 100


class FakeDevice:
    name = "NVIDIA H200"
    compute_capability = (9, 0)
    pci_bus_id = "0000:1B:00.0"

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid = UUIDS[index]


class OpenedDevice(CudaDevice):
    """Remembers which device was chosen, and makes no context."""

    def __init__(self, device: FakeDevice) -> None:
        self.chosen = device.index


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        cuInit=lambda flags: (OK,),
        cuDeviceGetCount=lambda: (OK, len(UUIDS)),
        cuDeviceGet=lambda index: (OK, index),
        cuDeviceTotalMem=lambda handle: (OK, 141 << 30),
        cuDriverGetVersion=lambda: (OK, 13010),
    )
    for module in (machine, device_module):
        monkeypatch.setattr(module, "driver", fake)
        monkeypatch.setattr(module, "Device", FakeDevice)


@pytest.mark.parametrize(
    ("selector", "index"), [("0", 0), ("1", 1), (UUIDS[1], 1), (f"GPU-{UUIDS[1]}", 1), (f"MIG-{UUIDS[0]}", 0)]
)
@pytest.mark.usefixtures("two_devices")
def test_device_is_chosen_by_number_or_uuid(selector: str, index: int) -> None:
    opened = OpenedDevice.open(selector)
    assert isinstance(opened, OpenedDevice)
    assert opened.chosen == index


@pytest.mark.usefixtures("two_devices")
def test_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(DeviceUnavailable, match=rf"device='2': this machine has 0 \({UUIDS[0]}\), 1 \({UUIDS[1]}\)"):
        OpenedDevice.open("2")


@pytest.mark.usefixtures("two_devices")
def test_devices_are_found_with_their_facts() -> None:
    first, second = find_devices()
    assert (first.index, first.uuid, first.arch, first.memory_bytes) == (0, UUIDS[0], "sm_90a", 141 << 30)
    assert (second.index, second.pci_address) == (1, "0000:1b:00.0")


@pytest.mark.usefixtures("two_devices")
def test_driver_tells_its_release_where_the_system_has_it(tmp_path: Path) -> None:
    assert find_driver(tmp_path).release is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13.2.0\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert (find_driver(tmp_path).cuda_version, find_driver(tmp_path).release) == ((13, 1), "580.65.06")


def test_driver_without_devices_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver", SimpleNamespace(cuInit=lambda flags: (Failure.CUDA_ERROR_NO_DEVICE,)))
    with pytest.raises(DeviceUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        find_devices()


def test_compiler_names_what_it_compiles_for() -> None:
    compiler = find_compiler()
    assert compiler.version >= (12, 9)
    assert {80, 90} <= set(compiler.capabilities)


def test_place_and_link_of_a_device_are_read_from_the_system(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    values = {
        "numa_node": "1\n",
        "current_link_width": "16\n",
        "current_link_speed": "2.5 GT/s PCIe\n",
        "max_link_speed": "32.0 GT/s PCIe\n",
    }
    for name, value in values.items():
        (folder / name).write_text(value)
    assert numa_node("0000:1B:00.0", tmp_path) == 1
    assert pci_link("0000:1B:00.0", tmp_path) == "x16, 2.5 GT/s PCIe now, 32.0 GT/s PCIe at most"


@pytest.mark.parametrize("told", ["-1", None])
def test_machine_with_one_node_tells_none(tmp_path: Path, told: str | None) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if told is not None:
        (folder / "numa_node").write_text(told)
    assert numa_node("0000:1b:00.0", tmp_path) is None
    assert pci_link("0000:1b:00.0", tmp_path) is None


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((8, 6), "sm_86"), ((12, 0), "sm_120")])
def test_architecture_follows_from_the_capability(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(*capability) == arch


def test_backends_of_a_process_share_the_kernels_of_their_device() -> None:
    first = device_kernels("uuid-a", "sm_90a", overlap=True)
    assert device_kernels("uuid-a", "sm_90a", overlap=True) is first
    assert device_kernels("uuid-b", "sm_90a", overlap=True) is not first
