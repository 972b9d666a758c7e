"""Loaded kernels and the one way to launch them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cuda.bindings import driver
from cuda.core import Kernel, LaunchConfig, launch

from gpu.cuda.kernel_table import KernelEntry, KernelSource
from gpu.cuda.programs import ProgramCompiler
from gpu.errors import DeviceFailure, KernelCompileError, PlanError

_STATIC_SHARED_LIMIT: Final = 48 << 10

Grid = int | tuple[int, ...]


class CudaKernel:
    """A loaded kernel of the current device.

    overlap: launched as a programmatic dependent of the kernel before it (sm_90 and later; the kernel itself waits
    before it touches anything that others write).
    """

    def __init__(self, kernel: Kernel, entry: KernelEntry, overlap: bool) -> None:
        if kernel.num_arguments != len(entry.arguments):
            raise KernelCompileError(
                entry.name, f"takes {kernel.num_arguments} arguments, the table lists {len(entry.arguments)}"
            )
        self.entry = entry
        self._kernel = kernel
        self._overlap = overlap
        self._shared_bytes = 0

    @property
    def num_registers(self) -> int:
        """Registers of a thread."""
        return int(self._kernel.attributes.num_regs())

    def launch(
        self, stream: Any, grid: Grid, block: int, arguments: tuple[int | float, ...], shared_bytes: int = 0
    ) -> None:
        """Queue the kernel on a stream or a graph builder.

        arguments: addresses and numbers, in the table's order; each is passed with the table's type. shared_bytes:
        dynamic shared memory. Raises PlanError for a wrong number of arguments.
        """
        if len(arguments) != len(self.entry.arguments):
            raise PlanError(f"{self.entry.name} arguments", len(arguments), f"takes {len(self.entry.arguments)}")
        if shared_bytes > max(self._shared_bytes, _STATIC_SHARED_LIMIT):
            self._allow_shared(shared_bytes)
        config = LaunchConfig(
            grid=grid, block=block, shmem_size=shared_bytes, programmatic_stream_serialization=self._overlap
        )
        values = [kind.value(value) for kind, value in zip(self.entry.arguments, arguments, strict=True)]
        launch(stream, config, self._kernel, *values)

    def _allow_shared(self, num_bytes: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle, device = driver.CUkernel(int(self._kernel.handle)), check(driver.cuCtxGetDevice())
        check(driver.cuKernelSetAttribute(attribute, num_bytes, handle, device))
        self._shared_bytes = num_bytes


class KernelLibrary:
    """Kernels of one device, compiled on first use. arch: what NVRTC compiles for. overlap: see `CudaKernel`."""

    def __init__(self, arch: str, *, overlap: bool, folder: Path | None = None) -> None:
        self.arch = arch
        self._compiler = ProgramCompiler(arch, folder)
        self._overlap = overlap
        self._objects: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self._kernels: dict[tuple[str, str, tuple[tuple[str, int], ...]], CudaKernel] = {}

    def get(self, source: KernelSource, name: str, parameters: Mapping[str, int]) -> CudaKernel:
        """A kernel of a variant. Raises KernelCompileError."""
        macros = tuple(sorted(parameters.items()))
        key = (source.file, name, macros)
        if key not in self._kernels:
            variant = (source.file, macros)
            if variant not in self._objects:
                self._objects[variant] = self._compiler.compile(source, parameters)
            kernel = self._objects[variant].get_kernel(name)
            self._kernels[key] = CudaKernel(kernel, source.kernel(name), self._overlap)
        return self._kernels[key]


def device_kernels(uuid: str, arch: str, *, overlap: bool) -> KernelLibrary:
    """The kernels of a device, the same for every backend that the process opens on it.

    They stay loaded: each load and unload of one leaves 26 KB of device memory and 100 KB of host memory with the
    driver (580.159).
    """
    return _LIBRARIES.setdefault(uuid, KernelLibrary(arch, overlap=overlap))


_LIBRARIES: Final[dict[str, KernelLibrary]] = {}


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call. Raises DeviceFailure that names the CUDA error."""
    status, *values = result
    if int(status) != 0:
        raise DeviceFailure(f"CUDA driver: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
