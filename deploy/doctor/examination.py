"""All findings of `kvalet doctor`."""

from __future__ import annotations

import os

from deploy.configuration import check_names, gateway_settings
from deploy.doctor.cuda import examine_cuda
from deploy.doctor.finding import Finding
from deploy.doctor.host import examine_host
from deploy.doctor.servers import examine_servers
from deploy.errors import BadOption, BadSetting
from deploy.options import worker_environment
from workers.settings import WorkerSettings


def examine(backend: str | None = None) -> list[Finding]:
    """Look at everything that the settings ask for. backend: instead of the settings' one."""
    findings = examine_host()
    try:
        check_names(os.environ)
        worker_environment(backend=backend)
        gateway_settings()
    except (BadOption, BadSetting) as error:
        return [*findings, Finding("settings", False, str(error))]
    settings = WorkerSettings() if backend is None else WorkerSettings.model_validate({"backend": backend})
    return [
        *findings,
        Finding("settings", True, "every KVALET_ variable is known and allowed"),
        *examine_servers(os.environ),
        *examine_cuda(demanded=settings.backend == "cuda", mirror_bytes=settings.mirror_bytes),
    ]
