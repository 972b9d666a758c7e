"""How much memory a process may have and pin."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """physical_bytes: of the machine. control_group_bytes, locked_bytes (ulimit -l): None for no limit."""

    physical_bytes: int
    control_group_bytes: int | None
    locked_bytes: int | None


def memory_limits(system: Path = Path("/")) -> MemoryLimits:
    """Limits of this process. system: where proc and sys are mounted."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in _group_limits(system) if limit < physical]
    return MemoryLimits(physical, min(limits, default=None), None if soft == resource.RLIM_INFINITY else soft)


def _group_limits(system: Path) -> Iterator[int]:
    """Limits of this process's control group and of those around it, of both versions of control groups."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, file = system / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, file = system / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _limit(folder / file)


def _limit(path: Path) -> Iterator[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return
    if text.isdigit():
        yield int(text)
