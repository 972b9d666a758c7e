"""Tasks that threads share: a row of i64 numbers and addresses, cut into chunks.

A task names its chunk function by address: void(task address, chunk, scratch address), a C function compiled once, so
that the loop that shares chunks need not contain every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba

TASK_FIELDS = 52
CHUNKS, FUNCTION = 0, 1


@cache
def chunk_function(kernel: Callable[[int, int, int], None]) -> int:
    """Compile a chunk kernel, or load it from the disk cache; returns its address."""
    compiled = numba.cfunc("void(int64, int64, int64)", cache=True, boundscheck=False, error_model="numpy")(kernel)
    return int(compiled.address)
