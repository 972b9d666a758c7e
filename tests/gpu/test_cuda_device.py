"""The device itself: memory goes out and comes back, pinned memory has one address, kernels' arguments are checked."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.cuda.device import CudaDevice
from gpu.errors import CapacityError, DeviceUnavailable
from tests.gpu.lab import Lab

pytestmark = pytest.mark.gpu


def test_memory_round_trip(lab: Lab) -> None:
    values = np.random.default_rng(1).integers(0, 256, 100_003, np.uint8)
    buffer = lab.array(values)
    assert np.array_equal(lab.get(buffer, np.uint8), values)
    lab.device.free(buffer)


def test_pinned_memory_is_mapped_at_its_own_address(lab: Lab) -> None:
    pinned = lab.device.pin(1 << 20)
    pinned.array[:] = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8)
    target = lab.filled(1 << 20)
    lab.device.copy_async(target.address, pinned.address, 1 << 20, lab.stream)
    assert np.array_equal(lab.get(target, np.uint8), pinned.array)
    lab.device.unpin(pinned)
    lab.device.free(target)


def test_too_much_memory_is_refused_with_both_numbers(lab: Lab) -> None:
    with pytest.raises(CapacityError, match="bytes of device memory"):
        lab.device.allocate(1 << 50)


def test_unknown_devices_are_refused_with_the_known_ones(lab: Lab) -> None:
    with pytest.raises(DeviceUnavailable, match="this machine has 0"):
        CudaDevice.open("77")


def test_what_was_uploaded_is_there_for_the_next_kernel(lab: Lab) -> None:
    """The copy engine is kept busy, so that an upload that is only staged would come too late."""
    size = 4 << 20
    pinned = lab.device.pin(256 << 20)
    sink, target = lab.filled(256 << 20), lab.filled(size)
    busy = lab.device.create_stream()
    for number in range(20):
        for _ in range(4):
            lab.device.copy_async(sink.address, pinned.address, 256 << 20, busy)
        values = np.full(size, number, np.uint8)
        source = lab.array(values)
        lab.device.copy_async(target.address, source.address, size, lab.stream)
        assert np.array_equal(lab.get(target, np.uint8), values)
        lab.device.free(source)
    busy.sync()
    lab.device.unpin(pinned)
    lab.device.free(sink)
    lab.device.free(target)
