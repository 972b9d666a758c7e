"""The CUDA device of a process: context, streams, memory; released in the reverse order of acquisition."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, Event, EventOptions, Stream, StreamOptions
from numpy.typing import NDArray

from gpu.cuda.architectures import MIN_CAPABILITY, arch_of
from gpu.cuda.kernel import check, device_kernels
from gpu.errors import CapacityError, DeviceFailure, DeviceUnavailable

_OVERLAP_CAPABILITY: Final = (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Device memory. address: of its first byte. num_bytes: its size."""

    address: int
    num_bytes: int


class PinnedBuffer:
    """Host memory that the system keeps in place and the device reads and writes at the same address.

    region: writable view of all bytes, fit for sockets. array: the same, (num_bytes,) u8.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.region = memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")
        self.array: NDArray[np.uint8] = np.frombuffer(self.region, np.uint8)


class CudaDevice:
    """One GPU. Made current on the thread that opens it; other threads call `bind` first.

    compute: the stream of steps. copies: the stream of promotions.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        device.set_current()
        major, minor = device.compute_capability
        self.capability = (major, minor)
        if self.capability < MIN_CAPABILITY:
            raise DeviceUnavailable(f"{device.name} has compute capability {major}.{minor}, at least 7.0 is needed")
        self.arch = arch_of(major, minor)
        self.name = device.name
        self.uuid = device.uuid
        self.num_processors = int(device.properties.multiprocessor_count)
        self._streams: list[Stream] = []
        self._buffers: dict[int, DeviceBuffer] = {}
        self._pinned: dict[int, PinnedBuffer] = {}
        self.compute = self.create_stream()
        self.copies = self.create_stream()
        self.kernels = device_kernels(self.uuid, self.arch, overlap=self.capability >= _OVERLAP_CAPABILITY)

    @classmethod
    def open(cls, selector: str = "0") -> CudaDevice:
        """Open a device by its number or by its UUID, with or without the prefix that `nvidia-smi` writes before it.

        Raises DeviceUnavailable with one sentence that says what is missing.
        """
        try:
            check(driver.cuInit(0))
            count = int(check(driver.cuDeviceGetCount()))
        except (DeviceFailure, RuntimeError, ImportError, OSError) as error:
            raise DeviceUnavailable(f"no CUDA device can be used here: {error}") from error
        devices = [Device(index) for index in range(count)]
        bare = selector.removeprefix("GPU-").removeprefix("MIG-")
        for index, device in enumerate(devices):
            if bare in (str(index), device.uuid):
                return cls(device)
        known = ", ".join(f"{index} ({device.uuid})" for index, device in enumerate(devices))
        raise DeviceUnavailable(f"device={selector!r}: this machine has {known or 'none'}")

    def bind(self) -> None:
        """Make the device current on the calling thread."""
        self._device.set_current()

    def create_stream(self) -> Stream:
        """A stream that does not wait for the default one; closed with the device."""
        stream = self._device.create_stream(options=StreamOptions(nonblocking=True))
        self._streams.append(stream)
        return stream

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        """An event. blocking: a thread that waits for it sleeps instead of spinning."""
        return self._device.create_event(options=EventOptions(timing_enabled=timing, blocking_sync=blocking))

    def allocate(self, num_bytes: int) -> DeviceBuffer:
        """Device memory, not cleared. Raises CapacityError with what is needed and free."""
        status, pointer = driver.cuMemAlloc(max(num_bytes, 16))
        if int(status) != 0:
            free, _ = check(driver.cuMemGetInfo())
            raise CapacityError("bytes of device memory", num_bytes, int(free))
        buffer = DeviceBuffer(int(pointer), num_bytes)
        self._buffers[buffer.address] = buffer
        return buffer

    def free(self, buffer: DeviceBuffer) -> None:
        """Give memory back; no queued work may still use it."""
        del self._buffers[buffer.address]
        check(driver.cuMemFree(buffer.address))

    def pin(self, num_bytes: int) -> PinnedBuffer:
        """Pinned, mapped host memory, not cleared. Raises CapacityError when the system cannot pin that much."""
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        status, pointer = driver.cuMemHostAlloc(num_bytes, flags)
        if int(status) != 0:
            raise CapacityError("bytes of pinned memory", num_bytes, 0)
        buffer = PinnedBuffer(int(pointer), num_bytes)
        self._pinned[buffer.address] = buffer
        return buffer

    def unpin(self, buffer: PinnedBuffer) -> None:
        """Give pinned memory back; its array must not be used any more."""
        del self._pinned[buffer.address]
        check(driver.cuMemFreeHost(buffer.address))

    def upload(self, values: NDArray[Any]) -> DeviceBuffer:
        """A new buffer with a copy of `values`."""
        contiguous = np.ascontiguousarray(values)
        buffer = self.allocate(contiguous.nbytes)
        self.write(buffer, contiguous)
        return buffer

    def write(self, buffer: DeviceBuffer, values: NDArray[Any]) -> None:
        """Copy C-contiguous `values` to the start of a buffer that no queued work uses."""
        if values.nbytes > buffer.num_bytes:
            raise CapacityError("bytes of a buffer", values.nbytes, buffer.num_bytes)
        if values.nbytes:
            check(driver.cuMemcpyHtoD(buffer.address, values.ctypes.data, values.nbytes))
            # It returns when the values are staged; our streams do not wait for the default one that brings them over.
            check(driver.cuStreamSynchronize(0))

    def download(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A copy of device memory, after everything that the compute stream has queued."""
        self.compute.sync()
        values = np.empty(shape, dtype)
        if values.nbytes:
            check(driver.cuMemcpyDtoH(values.ctypes.data, address, values.nbytes))
        return values

    def copy_async(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Queue a copy between any two addresses, device or pinned."""
        check(driver.cuMemcpyAsync(target, source, num_bytes, stream_handle(stream)))

    def clear_async(self, address: int, num_bytes: int, stream: Any) -> None:
        """Queue setting memory to zero. num_bytes: a multiple of 4."""
        check(driver.cuMemsetD32Async(address, 0, num_bytes // 4, stream_handle(stream)))

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = check(driver.cuMemGetInfo())
        return int(free), int(total)

    def close(self) -> None:
        """Wait for queued work, then release memory and streams, newest first. Idempotent."""
        for stream in self._streams:
            stream.sync()
        for pinned in reversed(list(self._pinned.values())):
            self.unpin(pinned)
        for buffer in reversed(list(self._buffers.values())):
            self.free(buffer)
        for stream in reversed(self._streams):
            stream.close()
        self._streams.clear()


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream, or of the stream that a graph builder captures."""
    owner = getattr(stream, "stream", stream)
    return int(owner.handle)
