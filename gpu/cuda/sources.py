"""All kernel sources of the backend, from the modules that launch them."""

from __future__ import annotations

from typing import Final

from gpu.cuda import attention, prefill_attention, products, rows, sampling
from gpu.cuda.kernel_table import KernelSource

SOURCES: Final[tuple[KernelSource, ...]] = (
    *products.SOURCES,
    *attention.SOURCES,
    *prefill_attention.SOURCES,
    *rows.SOURCES,
    *sampling.SOURCES,
)
