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
