"""The machine without its GPUs: interpreter, packages, processor, memory, model, server program."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version

from deploy.doctor.finding import Finding
from deploy.embedded import server_binary
from deploy.errors import ServerBinaryMissing

WORKER_PACKAGES = "worker packages"
_PACKAGES = ("numpy", "numba", "gguf", "safetensors", "psutil")
_NEEDED_MIB = 1024
_VECTOR_FEATURES = ("neon", "sve", "avx2", "fma", "f16c", "avx512f", "avx512bf16", "avx512vnni", "amx-tile")


def examine_host() -> list[Finding]:
    """Look at everything that a worker on the CPU needs."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    detail = f'{", ".join(missing)}: pip install "kvalet[worker]"' if missing else "installed"
    packages = Finding(WORKER_PACKAGES, not missing, detail)
    compiler = [] if missing else [_compiler()]
    return [_python(), packages, *compiler, _server(), _memory(), _cores()]


def _python() -> Finding:
    running = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", (3, 11) <= sys.version_info[:2] <= (3, 13), f"{running}, needed 3.11 to 3.13")


def _compiler() -> Finding:
    # Imported here: a gateway's installation has neither.
    from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

    features = get_host_cpu_features()
    vectors = [name for name in _VECTOR_FEATURES if features.get(name)]
    name = get_host_cpu_name()
    detail = f"Numba {version('numba')} for {name} ({', '.join(vectors) or 'no vector units known'})"
    return Finding("CPU kernels", True, detail, facts={"processor": name, "features": vectors})


def _server() -> Finding:
    try:
        return Finding("embedded server", True, str(server_binary()))
    except ServerBinaryMissing as error:
        return Finding("embedded server", False, str(error))


def _memory() -> Finding:
    available_mib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return Finding("free memory", available_mib >= _NEEDED_MIB, f"{available_mib} MiB, needed {_NEEDED_MIB} MiB")


def _cores() -> Finding:
    return Finding("cores", True, str(len(os.sched_getaffinity(0))))
