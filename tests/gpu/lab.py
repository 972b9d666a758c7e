"""A device with helpers for kernel tests and benchmarks: buffers from arrays, variants, timing by graph replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu.cuda.device import CudaDevice, DeviceBuffer
from gpu.cuda.kernel import CudaKernel
from gpu.cuda.kernel_table import KernelSource
from gpu.errors import DeviceUnavailable


def device_missing() -> str:
    """Why there is no device; empty if there is one."""
    try:
        CudaDevice.open().close()
    except DeviceUnavailable as error:
        return str(error)
    return ""


class Lab:
    """Owns a device. `array` and `empty` give buffers, `get` an array back."""

    def __init__(self) -> None:
        self.device = CudaDevice.open()
        self.stream = self.device.compute

    def kernel(self, source: KernelSource, name: str, parameters: Mapping[str, int], *without: str) -> CudaKernel:
        """A kernel; `without` takes levels away, such as KVALET_NO_WGMMA."""
        library = self.device.kernels
        return library.get(source, name, {**parameters, **dict.fromkeys(without, 1)})

    def array(self, values: np.ndarray) -> DeviceBuffer:
        return self.device.upload(values)

    def filled(self, num_bytes: int, byte: int = 0xA5) -> DeviceBuffer:
        return self.device.upload(np.full(num_bytes, byte, np.uint8))

    def get(self, buffer: DeviceBuffer, dtype: Any, shape: tuple[int, ...] = (-1,)) -> np.ndarray:
        raw = self.device.download(buffer.address, (buffer.num_bytes,), np.uint8)
        return raw.view(dtype).reshape(shape)

    def sync(self) -> None:
        self.stream.sync()

    def graph(self, record: Callable[[Any], None]) -> Any:
        """Capture what `record(builder)` launches; launch it with `graph.launch(lab.stream)`."""
        builder = self.stream.create_graph_builder()
        builder.begin_building()
        record(builder)
        return builder.end_building().complete()

    def time_us(self, record: Callable[[Any, int], None], calls: int = 20, replays: int = 15, warmup: int = 5) -> float:
        """Median microseconds of one call: `record(stream, i)` for i in range(calls) in one graph, replayed.

        Give every i buffers of its own where reuse would measure the cache.
        """
        graph = self.graph(lambda builder: [record(builder, index) for index in range(calls)])
        for _ in range(warmup):
            graph.launch(self.stream)
        times = []
        for _ in range(replays):
            begin, end = (self.device.create_event(timing=True) for _ in range(2))
            self.stream.record(begin)
            graph.launch(self.stream)
            self.stream.record(end)
            end.sync()
            times.append((end - begin) * 1e3 / calls)
        return statistics.median(times)

    def copy_bandwidth(self, num_bytes: int = 2 << 30) -> float:
        """Bytes per second of a device-to-device copy, read plus written; not captured, which is slower."""
        source, target = self.device.allocate(num_bytes), self.device.allocate(num_bytes)
        times = []
        for _ in range(12):
            begin, end = (self.device.create_event(timing=True) for _ in range(2))
            self.stream.record(begin)
            for _ in range(4):
                self.device.copy_async(target.address, source.address, num_bytes, self.stream)
            self.stream.record(end)
            end.sync()
            times.append((end - begin) * 1e-3 / 4)
        self.device.free(source)
        self.device.free(target)
        return 2 * num_bytes / statistics.median(times[2:])

    def close(self) -> None:
        self.device.close()
