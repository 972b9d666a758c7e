"""Model files are mapped, not read: opening costs the header's pages and nothing else."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from gpu.errors import FileTruncated, ModelFileError


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading. Raises ModelFileError when it can't be read, FileTruncated when it is empty."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FileTruncated("file", 8, 0)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError("model file", str(path), error.strerror or "cannot be read") from error


def release_pages(mapped: mmap.mmap) -> None:
    """Give the memory of pages that were read back to the system; reading them again reads the file again."""
    mapped.madvise(mmap.MADV_DONTNEED)
