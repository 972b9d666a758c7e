"""GPUs: driver, devices, compiler, and whether kernels compile for them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from deploy.doctor.finding import Finding
from deploy.doctor.pinned_memory import MemoryLimits, memory_limits
from gpu.cuda.architectures import MIN_CAPABILITY, capability
from gpu.errors import DeviceUnavailable, KernelCompileError

if TYPE_CHECKING:
    from gpu.cuda.machine import Compiler, DeviceFacts, Driver

_PACKAGES = 'pip install "kvalet[worker,cuda13]"'
_OLDER_PACKAGES = 'pip install "kvalet[worker,cuda12]"'
_DRIVERS = {12: "525", 13: "580"}
"""The oldest driver that runs cubins of a CUDA line."""


def examine_cuda(*, demanded: bool, mirror_bytes: int) -> list[Finding]:
    """Look at what the `cuda` backend needs. demanded: the settings ask for that backend.

    A machine without a driver gets one finding, unless the backend is demanded.
    """
    driver_found = driver_is_installed()
    remedy = f": install {_DRIVERS[13]} or later" if demanded else ", so workers run on the CPU"
    absent = Finding("GPU", False, f"no NVIDIA driver on this machine{remedy}", demanded)
    if not driver_found and not demanded:
        return [absent]
    try:
        # Imported here: a machine without GPU needs no CUDA packages.
        from gpu.cuda import machine
    except ImportError as error:
        packages = Finding("CUDA packages", False, f"{error.name} is not installed: {_PACKAGES}", demanded)
        return [packages] if driver_found else [absent, packages]
    try:
        compiler = machine.find_compiler()
    except DeviceUnavailable as error:
        return [Finding("CUDA packages", False, f"{error}: {_PACKAGES}", demanded)]
    found = [_compiler(compiler)]
    if not driver_found:
        return [absent, *found]
    try:
        found.append(driver_finding(machine.find_driver(), compiler, demanded))
        devices = machine.find_devices()
    except DeviceUnavailable as error:
        return [*found, Finding("GPU", False, f"{error}; `nvidia-smi` should list it", demanded)]
    if not devices:
        return [*found, Finding("GPU", False, "the driver shows no device to this process", demanded)]
    found += [device_finding(device, compiler, demanded) for device in devices]
    served = sorted({device.arch for device in devices if _is_served(device, compiler)})
    found += [kernel_finding(arch, demanded, compile_smallest) for arch in served]
    return [*found, pinned_finding(memory_limits(), mirror_bytes, demanded)]


def driver_is_installed() -> bool:
    """Whether the driver's library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def driver_finding(driver: Driver, compiler: Compiler, demanded: bool) -> Finding:
    """Whether the driver runs what the compiler makes: it must serve the same CUDA line or a later one."""
    line = compiler.version[0]
    fine = driver.cuda_version[0] >= line
    release = f"{driver.release}, " if driver.release else ""
    detail = f"{release}serves CUDA {_dotted(driver.cuda_version)}"
    if not fine:
        detail += f"; NVRTC {_dotted(compiler.version)} needs {_DRIVERS[line]} or later, or {_OLDER_PACKAGES}"
    return Finding("CUDA driver", fine, detail, demanded)


def device_finding(device: DeviceFacts, compiler: Compiler, demanded: bool) -> Finding:
    """Whether our kernels run on a device."""
    link = device.pci_link or "link not told"
    node = "one NUMA node" if device.numa_node is None else f"NUMA node {device.numa_node}"
    detail = (
        f"{device.name}, {device.uuid}, capability {_dotted(device.capability)}, {device.memory_bytes >> 20} MiB, "
        f"PCIe {device.pci_address} ({link}), {node}"
    )
    if device.capability < MIN_CAPABILITY:
        detail += f"; at least {_dotted(MIN_CAPABILITY)} is needed"
    elif not _is_served(device, compiler):
        older = device.capability < (7, 5)
        remedy = _OLDER_PACKAGES if older else "pip install --upgrade nvidia-cuda-nvrtc"
        detail += f"; NVRTC {_dotted(compiler.version)} does not compile for it: {remedy}"
    facts = {
        "index": device.index, "name": device.name, "uuid": device.uuid, "capability": _dotted(device.capability),
        "arch": device.arch, "memory_bytes": device.memory_bytes, "pci_address": device.pci_address,
        "pci_link": device.pci_link, "numa_node": device.numa_node,
    }  # fmt: skip
    return Finding(f"GPU {device.index}", _is_served(device, compiler), detail, demanded, facts)


def kernel_finding(arch: str, demanded: bool, compile_smallest: Callable[[str], None]) -> Finding:
    """Whether a kernel compiles for an architecture. compile_smallest: compiles one, or raises KernelCompileError."""
    begun = time.monotonic()
    try:
        compile_smallest(arch)
    except KernelCompileError as error:
        return Finding("CUDA kernels", False, str(error), demanded)
    return Finding("CUDA kernels", True, f"compile for {arch} ({time.monotonic() - begun:.1f} s)", demanded)


def pinned_finding(limits: MemoryLimits, mirror_bytes: int, demanded: bool) -> Finding:
    """Whether the mirror, which is pinned, fits into what this process may have."""
    fine = mirror_bytes < (limits.control_group_bytes or limits.physical_bytes)
    group = "no limit" if limits.control_group_bytes is None else f"{limits.control_group_bytes >> 20} MiB"
    locked = "no limit" if limits.locked_bytes is None else f"{limits.locked_bytes >> 20} MiB"
    detail = (
        f"the mirror takes {mirror_bytes >> 20} MiB of {limits.physical_bytes >> 20} MiB; "
        f"control group: {group}; ulimit -l: {locked}"
    )
    return Finding("pinned memory", fine, detail if fine else f"{detail}: set KVALET_MIRROR_MIB lower", demanded)


def _compiler(compiler: Compiler) -> Finding:
    numbers = compiler.capabilities
    detail = f"NVRTC {_dotted(compiler.version)} for sm_{numbers[0]} to sm_{numbers[-1]}; no CUDA headers are needed"
    return Finding("CUDA packages", True, detail, facts={"nvrtc": _dotted(compiler.version)})


def _is_served(device: DeviceFacts, compiler: Compiler) -> bool:
    return device.capability >= MIN_CAPABILITY and capability(device.arch) in compiler.capabilities


def compile_smallest(arch: str) -> None:
    """Compile the smallest kernel anew. Raises KernelCompileError."""
    from gpu.cuda.programs import ProgramCompiler
    from gpu.cuda.rows import PUBLISH

    ProgramCompiler(arch).compile_verbose(PUBLISH, {})


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
