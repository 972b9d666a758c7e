"""Where compiled CPU kernels are kept between processes."""

from __future__ import annotations

import hashlib
import os
from importlib import resources
from pathlib import Path

import numba

ENVIRONMENT = "NUMBA_CACHE_DIR"


def use_compile_cache() -> Path:
    """Set Numba's cache folder unless NUMBA_CACHE_DIR names one; returns the folder in force."""
    folder = os.environ.get(ENVIRONMENT)
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = str(Path(base).expanduser() / "kvalet" / "kernels" / sources_digest())
        os.environ[ENVIRONMENT] = folder
        numba.config.CACHE_DIR = folder
    return Path(folder)


def sources_digest() -> str:
    """Hex digest of this package's sources and of Numba's version."""
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    files = (item for item in resources.files("gpu.cpu").iterdir() if item.name.endswith(".py"))
    for file in sorted(files, key=lambda item: item.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
