"""What describes a CUDA kernel: name, source file, template parameters, argument types. `sources.py` lists all.

A *variant* is a source file with values for its parameters (macros); it compiles to one cubin, which holds all kernels
of that file. Kernels are `extern "C"` and have the same name in every variant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np

from gpu.cuda.architectures import WARPGROUP_ARCH


class Arg(Enum):
    """Type of a kernel argument; the value makes what cuda.core passes."""

    POINTER = int
    I32 = np.int32
    U32 = np.uint32
    I64 = np.int64
    U64 = np.uint64
    F32 = np.float32


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel. name: its symbol. arguments: in order."""

    name: str
    arguments: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A source file of `gpu/kernels` and its kernels.

    parameters: macros that a variant must define. features: the level it needs: "" for all architectures, "wgmma" for
    sm_90a. samples: parameter values that the compile test uses.
    """

    file: str
    kernels: tuple[KernelEntry, ...]
    parameters: tuple[str, ...] = ()
    features: Literal["", "wgmma"] = ""
    samples: tuple[dict[str, int], ...] = field(default=({},))

    def serves(self, arch: str) -> bool:
        """Whether there are kernels of this source for an architecture such as "sm_90a"."""
        return not self.features or arch == WARPGROUP_ARCH

    def kernel(self, name: str) -> KernelEntry:
        """The entry with this name."""
        return next(entry for entry in self.kernels if entry.name == name)
