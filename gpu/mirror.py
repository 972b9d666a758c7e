"""The mirror arena: host memory that holds every page. For the CUDA backend it is pinned; nothing else differs."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from gpu.errors import LayoutError


class MirrorArena:
    """One page-aligned range of memory of explicit size.

    region: writable bytes. array: the same, (num_bytes,) u8; kernels and socket reads address it by byte offset.
    """

    def __init__(self, region: mmap.mmap | memoryview) -> None:
        self._region = region
        self.array: NDArray[np.uint8] = np.frombuffer(region, dtype=np.uint8)

    @classmethod
    def allocate(cls, num_bytes: int) -> MirrorArena:
        """Map `num_bytes` of memory; the kernel commits it as it is touched.

        Raises LayoutError for an empty arena, or one that the system has no room for.
        """
        if num_bytes <= 0:
            raise LayoutError("mirror_bytes", num_bytes, "must be positive")
        try:
            return cls(mmap.mmap(-1, num_bytes))
        except OSError as error:
            raise LayoutError("mirror_bytes", num_bytes, f"the system has no room for it ({error.strerror})") from None

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return int(self.array.shape[0])

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """A writable view of bytes offset .. offset + num_bytes - 1, fit for `recv_into` and `sendmsg`."""
        return memoryview(self._region)[offset : offset + num_bytes]
