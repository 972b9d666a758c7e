"""What `kvalet doctor` says on a machine that has a GPU."""

from __future__ import annotations

import pytest

from deploy.doctor.cuda import examine_cuda
from gpu.cuda.device import CudaDevice
from gpu.cuda.machine import find_devices
from tests.gpu.lab import Lab

pytestmark = pytest.mark.gpu


def test_devices_are_told_as_a_context_sees_them(lab: Lab) -> None:
    facts = find_devices()[0]
    device = lab.device
    assert (facts.name, facts.uuid, facts.capability, facts.arch) == (
        device.name, device.uuid, device.capability, device.arch
    )  # fmt: skip
    assert facts.memory_bytes >= device.memory_info()[1]


def test_device_opens_by_the_name_that_nvidia_smi_writes(lab: Lab) -> None:
    opened = CudaDevice.open(f"GPU-{lab.device.uuid}")
    assert opened.uuid == lab.device.uuid
    opened.close()


@pytest.mark.usefixtures("lab")
def test_machine_that_runs_kernels_misses_nothing() -> None:
    findings = {finding.subject: finding for finding in examine_cuda(demanded=True, mirror_bytes=64 << 20)}
    assert [finding for finding in findings.values() if finding.missing] == []
    assert {"CUDA packages", "CUDA driver", "GPU 0", "CUDA kernels", "pinned memory"} <= set(findings)
