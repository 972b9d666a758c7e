"""Compiles kernel sources with NVRTC and keeps the cubins on disk."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Final

from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache

from gpu.cuda.kernel_table import KernelSource
from gpu.errors import KernelCompileError

_INCLUDE: Final = re.compile(r'^#include "([\w./]+)"\n', re.MULTILINE)
_CACHE_LIMIT: Final = 512 << 20


def source_text(file: str) -> str:
    """A kernel source with its own headers put in place, each once. Raises FileNotFoundError."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        text = resources.files("gpu.kernels").joinpath(name).read_text(encoding="utf-8").replace("#pragma once\n", "")

        def include(match: re.Match[str]) -> str:
            if match[1] in seen:
                return ""
            seen.add(match[1])
            return expand(match[1])

        return _INCLUDE.sub(include, text)

    return expand(file)


def cache_folder() -> Path:
    """Where cubins are kept: KVALET_CUDA_CACHE_DIR, or kvalet/cubins in the user's cache folder."""
    if folder := os.environ.get("KVALET_CUDA_CACHE_DIR"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvalet" / "cubins"


class ProgramCompiler:
    """Compiles variants for one architecture ("sm_90a", ...). Any thread; no GPU is needed.

    The cache's key holds source with headers, options, architecture and compiler version; entries appear atomically,
    so several processes may share the folder. cached=False compiles anew and returns the compiler's notes.
    """

    def __init__(self, arch: str, folder: Path | None = None) -> None:
        self.arch = arch
        self._folder = folder
        self._cache: FileStreamProgramCache | None = None
        self._lock = Lock()

    def compile(self, source: KernelSource, parameters: Mapping[str, int]) -> ObjectCode:
        """The cubin of a variant, from the cache if it is there.

        Raises KernelCompileError with the compiler's log.
        """
        return self._compile(source, parameters, (), None, self._open_cache())

    def compile_verbose(self, source: KernelSource, parameters: Mapping[str, int]) -> tuple[ObjectCode, str]:
        """Compile anew; the cubin and what ptxas says of registers, stack and spills."""
        notes = io.StringIO()
        return self._compile(source, parameters, ("-v",), notes, None), notes.getvalue()

    def _compile(
        self,
        source: KernelSource,
        parameters: Mapping[str, int],
        ptxas_options: tuple[str, ...],
        notes: io.StringIO | None,
        store: FileStreamProgramCache | None,
    ) -> ObjectCode:
        if missing := set(source.parameters) - set(parameters):
            raise KernelCompileError(source.file, f"parameters {sorted(missing)} have no value")
        options = ProgramOptions(
            arch=self.arch,
            std="c++17",
            define_macro=[(name, str(value)) for name, value in sorted(parameters.items())] or None,
            ptxas_options=list(ptxas_options) or None,
        )
        try:
            program = Program(_text(source.file), "c++", options)
            return program.compile("cubin", logs=notes, cache=store)
        except Exception as error:  # NVRTC's own errors derive from Exception alone
            raise KernelCompileError(source.file, f"{self.arch} {dict(parameters)}: {error}") from error

    def _open_cache(self) -> FileStreamProgramCache:
        with self._lock:
            if self._cache is None:
                self._cache = FileStreamProgramCache(self._folder or cache_folder(), max_size_bytes=_CACHE_LIMIT)
            return self._cache


_text = cache(source_text)
