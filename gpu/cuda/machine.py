"""What a machine has for CUDA: the compiler, the driver and the devices. No context is made, nothing is allocated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cuda.bindings import driver, nvrtc
from cuda.core import Device

from gpu.cuda.architectures import arch_of
from gpu.cuda.kernel import check
from gpu.errors import DeviceFailure, DeviceUnavailable

_RELEASE: Final = re.compile(r"\s(\d{3,}(?:\.\d+)+)\s")


@dataclass(frozen=True, slots=True)
class Compiler:
    """NVRTC. version: major and minor. capabilities: what it compiles for, such as 90."""

    version: tuple[int, int]
    capabilities: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver. cuda_version: the newest CUDA that it serves. release: such as "580.65.06"; None when not told."""

    cuda_version: tuple[int, int]
    release: str | None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device.

    pci_address: such as "0000:1b:00.0". pci_link: width and speed as the system tells them. numa_node: the node whose
    memory is near. Both are None where the system does not tell.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int
    pci_address: str
    pci_link: str | None
    numa_node: int | None

    @property
    def arch(self) -> str:
        """What NVRTC compiles for."""
        return arch_of(*self.capability)


def find_compiler() -> Compiler:
    """The installed NVRTC. Raises DeviceUnavailable."""
    try:
        major, minor = check(nvrtc.nvrtcVersion())
        capabilities = check(nvrtc.nvrtcGetSupportedArchs())
    except (DeviceFailure, RuntimeError, OSError) as error:
        raise DeviceUnavailable(f"NVRTC cannot be loaded: {error}") from error
    return Compiler((int(major), int(minor)), tuple(int(number) for number in capabilities))


def find_driver(system: Path = Path("/")) -> Driver:
    """The driver that is loaded. system: where proc is mounted. Raises DeviceUnavailable."""
    try:
        version = int(check(driver.cuDriverGetVersion()))
    except (DeviceFailure, RuntimeError, OSError) as error:
        raise DeviceUnavailable(f"the driver cannot be loaded: {error}") from error
    release = _RELEASE.search(_read(system / "proc/driver/nvidia/version") or "")
    return Driver((version // 1000, version % 1000 // 10), release[1] if release else None)


def find_devices() -> tuple[DeviceFacts, ...]:
    """All devices that this process may use. Raises DeviceUnavailable."""
    try:
        check(driver.cuInit(0))
        count = int(check(driver.cuDeviceGetCount()))
    except (DeviceFailure, RuntimeError, OSError) as error:
        raise DeviceUnavailable(f"no device can be used: {error}") from error
    return tuple(_facts(index) for index in range(count))


def pci_link(address: str, system: Path = Path("/")) -> str | None:
    """Width and speed of a device's link, now and at most: an idle device slows it down."""
    folder = system / "sys/bus/pci/devices" / address.lower()
    width, now, most = (_read(folder / name) for name in ("current_link_width", "current_link_speed", "max_link_speed"))
    return f"x{width}, {now} now, {most} at most" if width and now and most else None


def numa_node(address: str, system: Path = Path("/")) -> int | None:
    """The memory node that a device is near to; None on a machine with one node, or where it is not told."""
    text = _read(system / "sys/bus/pci/devices" / address.lower() / "numa_node")
    return int(text) if text is not None and text.isdigit() else None


def _facts(index: int) -> DeviceFacts:
    device = Device(index)
    major, minor = device.compute_capability
    memory_bytes = int(check(driver.cuDeviceTotalMem(check(driver.cuDeviceGet(index)))))
    address = device.pci_bus_id.lower()
    return DeviceFacts(
        index, device.name, device.uuid, (major, minor), memory_bytes, address, pci_link(address), numa_node(address)
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
