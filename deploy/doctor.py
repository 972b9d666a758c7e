"""Says whether this machine can run Kvalet."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass

from deploy.configuration import check_names
from deploy.embedded import server_binary
from deploy.errors import BadOption, ServerBinaryMissing
from deploy.model_fetch import DEFAULT_MODEL
from workers.settings import default_model_path

_WORKER_PACKAGES = ("numpy", "numba", "gguf", "safetensors", "psutil")
_NEEDED_MIB = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    subject: str
    fine: bool
    detail: str


def examine() -> list[Finding]:
    """Look at the interpreter, the installed extras, the server program, the model, memory and cores."""
    return [_python(), _worker_packages(), _server(), _model(), _memory(), _cores(), _variables()]


def _variables() -> Finding:
    try:
        check_names(os.environ)
    except BadOption as error:
        return Finding("environment", False, str(error))
    return Finding("environment", True, "every KVALET_ variable is known")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", (3, 11) <= sys.version_info[:2] <= (3, 13), f"{version}, needed 3.11 to 3.13")


def _worker_packages() -> Finding:
    missing = [name for name in _WORKER_PACKAGES if importlib.util.find_spec(name) is None]
    detail = f"install kvalet[worker] for {', '.join(missing)}" if missing else "installed"
    return Finding("worker packages", not missing, detail)


def _server() -> Finding:
    try:
        return Finding("embedded server", True, str(server_binary()))
    except ServerBinaryMissing as error:
        return Finding("embedded server", False, str(error))


def _model() -> Finding:
    path = default_model_path()
    fine = path.exists() and path.stat().st_size == DEFAULT_MODEL.size_bytes
    return Finding("default model", fine, str(path) if fine else "run: kvalet model fetch")


def _memory() -> Finding:
    available_mib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return Finding("free memory", available_mib >= _NEEDED_MIB, f"{available_mib} MiB, needed {_NEEDED_MIB} MiB")


def _cores() -> Finding:
    return Finding("cores", True, str(len(os.sched_getaffinity(0))))
