"""Compiles the variants that the kernel table samples, and says what is wrong with them.

Also a program, for an environment with another CUDA line: `python -m tests.kernel_sweep ARCH ...` prints the problems,
one a line, and exits 1 when there are any.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cuda.bindings import driver

import gpu.cuda
from gpu.cuda.kernel_table import KernelSource
from gpu.cuda.programs import ProgramCompiler
from gpu.cuda.sources import SOURCES
from gpu.errors import KernelCompileError

_T = TypeVar("_T")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# ptxas gives up the overlap of warpgroup products, or setmaxnreg.
_SERIALIZED = re.compile(r".*\bC75\d\d\b.*")
_DRIVER_NAME = re.compile(r"\bdriver\.(\w+)")


def compile_problems(
    source: KernelSource, samples: Sequence[Mapping[str, int]], arch: str, *, in_registers: bool = False
) -> list[str]:
    """What hinders these variants of a source from being cubins with all its kernels.

    in_registers: ptxas must not complain either; then nothing comes from the cache, which keeps no notes.
    """
    compiler = ProgramCompiler(arch)

    def problems_of(parameters: Mapping[str, int]) -> list[str]:
        try:
            if in_registers:
                cubin, notes = compiler.compile_verbose(source, parameters)
            else:
                cubin, notes = compiler.compile(source, parameters), ""
        except KernelCompileError as error:
            return [str(error)]
        code = bytes(cubin.code)
        faults = [f"no kernel {kernel.name}" for kernel in source.kernels if _symbol(kernel.name) not in code]
        faults += ptxas_complaints(notes)
        return [f"{source.file}: {arch} {parameters}: {fault}" for fault in faults]

    return side_by_side(problems_of, samples if source.serves(arch) else ())


def side_by_side(look: Callable[[_T], list[str]], items: Iterable[_T]) -> list[str]:
    """What `look` finds at each item, in their order; the compiler runs without the interpreter, so on every core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [found for part in pool.map(look, items) for found in part]


def ptxas_complaints(notes: str) -> Iterator[str]:
    """What ptxas's notes hold that costs speed: stack frames, spilled registers, serialized warpgroup products."""
    for match in _STACK.finditer(notes):
        if any(int(number) for number in match.groups()):
            yield match[0]
    for match in _SERIALIZED.finditer(notes):
        yield match[0]


def unknown_driver_names() -> list[str]:
    """Names of the driver's bindings that the backend uses and the installed line lacks."""
    (folder,) = gpu.cuda.__path__
    used = {name for path in Path(folder).glob("*.py") for name in _DRIVER_NAME.findall(path.read_text())}
    return [f"cuda.bindings.driver has no {name}" for name in sorted(used) if not hasattr(driver, name)]


def _symbol(kernel: str) -> bytes:
    return f".text.{kernel}\0".encode()


def main(words: list[str]) -> int:
    """Look at everything for some architectures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, help="of each source, the first so many")
    parser.add_argument("archs", nargs="+", metavar="ARCH")
    options = parser.parse_args(words)
    problems = unknown_driver_names()
    for arch in options.archs:
        for source in SOURCES:
            problems += compile_problems(source, source.samples[: options.samples], arch)
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
