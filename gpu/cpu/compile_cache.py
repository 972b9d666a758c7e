"""Where compiled CPU kernels are kept between processes, and who compiles them."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import llvmlite.binding
import numba

from gpu.warm_up import COMPILED

ENVIRONMENT = "NUMBA_CACHE_DIR"
_PROGRESS_S = 5.0
_log = logging.getLogger(__name__)


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


@contextmanager
def compiling(variant: str) -> Iterator[None]:
    """Let one process at a time run the block that compiles the kernels of `variant`; later ones find them on disk.

    Once a block has run to its end nobody waits any more. variant: what decides which kernels are needed, as part of
    a file name. The kernel drops the lock of a process that dies.
    """
    folder = use_compile_cache()
    compiled = folder / f"{variant}-{_processor()}.compiled"
    if compiled.exists():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process compiles the kernels, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with _progress_told(folder):
            yield
        compiled.touch()


@contextmanager
def _progress_told(folder: Path) -> Iterator[None]:
    """Log how many kernels were compiled, at once that it is none, then as often as that changes."""
    done = threading.Event()

    def tell() -> None:
        before = _num_kernels(folder)
        told = 0
        _log.info("%s %d", COMPILED, told)
        while not done.wait(_PROGRESS_S):
            if (now := _num_kernels(folder) - before) != told:
                _log.info("%s %d", COMPILED, now)
                told = now

    thread = threading.Thread(target=tell, name="kvalet-compile-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _num_kernels(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.nbc"))


def _processor() -> str:
    """Digest of what Numba compiles for."""
    features = llvmlite.binding.get_host_cpu_features().flatten()
    return hashlib.blake2b(f"{llvmlite.binding.get_host_cpu_name()} {features}".encode(), digest_size=8).hexdigest()
