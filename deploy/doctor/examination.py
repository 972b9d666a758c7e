"""All findings of `kvalet doctor`."""

from __future__ import annotations

import os

from deploy.configuration import check_names, gateway_settings
from deploy.doctor.cuda import examine_cuda
from deploy.doctor.finding import Finding
from deploy.doctor.host import WORKER_PACKAGES, examine_host
from deploy.doctor.servers import examine_servers
from deploy.errors import BadOption, BadSetting
from deploy.model_fetch import DEFAULT_MODEL
from deploy.options import worker_environment
from deploy.startable import check_model
from workers.settings import WorkerSettings, default_model_path


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
        _model(settings, can_read=not any(found.missing for found in findings if found.subject == WORKER_PACKAGES)),
        *examine_servers(os.environ),
        *examine_cuda(demanded=settings.backend == "cuda", mirror_bytes=settings.mirror_bytes),
    ]


def _model(settings: WorkerSettings, *, can_read: bool) -> Finding:
    """The model that the settings name: whether it can be read and its pages fit into the mirror."""
    path = settings.model
    if path == default_model_path() and not (path.exists() and path.stat().st_size == DEFAULT_MODEL.size_bytes):
        return Finding("model", False, "the default one is not here: kvalet model fetch")
    if not can_read:
        return Finding("model", path.exists(), f"{path}, not read without the worker packages")
    try:
        return Finding("model", True, check_model(settings))
    except BadOption as error:
        return Finding("model", False, str(error))
