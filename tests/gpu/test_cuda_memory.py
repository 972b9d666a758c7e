"""What a backend takes it gives back, in order: device memory, pinned memory, descriptors."""

from __future__ import annotations

import gc
import os

import psutil
import pytest

from gpu.cuda.device import CudaDevice
from gpu.errors import CapacityError
from tests.gpu.backend_lab import Talk, cuda_backend, cuda_lab, run_talks
from tests.gpu.lab import device_missing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device")]
LOADS = 1000
SETTLED = 100
alone = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="counts the device's free memory, which the tests beside it use too"
)


@alone
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_loads_leave_nothing_behind() -> None:
    keeper = CudaDevice.open()
    process = psutil.Process()
    after: list[tuple[int, int, int]] = []
    for number in range(LOADS):
        lab = cuda_lab(num_pages=4, step_rows=64, max_sequences=2)
        if number % 250 == 0:
            run_talks(lab, [Talk(lab, [1, 2, 3])], 3)
        lab.backend.close()
        del lab
        if number in (SETTLED, LOADS - 1):
            gc.collect()
            after.append((keeper.memory_info()[0], process.memory_info().rss, process.num_fds()))
    keeper.close()
    (free, rss, fds), (last_free, last_rss, last_fds) = after
    assert last_free >= free - (2 << 20)
    assert last_rss <= rss * 1.05
    assert last_fds <= fds


@alone
def test_a_load_that_fails_gives_back_what_it_took() -> None:
    keeper = CudaDevice.open()
    free = keeper.memory_info()[0]
    with pytest.raises(CapacityError, match="bytes of device memory for pages"):
        cuda_backend(num_pages=64, num_slots=1)
    gc.collect()
    assert keeper.memory_info()[0] >= free - (2 << 20)
    keeper.close()


def test_more_pinned_memory_than_the_system_has_is_refused() -> None:
    device = CudaDevice.open()
    with pytest.raises(CapacityError, match="bytes of pinned memory"):
        device.pin(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4)
    device.close()
