"""What is known of an architecture from its name alone, without a device."""

from __future__ import annotations

from typing import Final

MIN_CAPABILITY: Final = (7, 0)
WARPGROUP_ARCH: Final = "sm_90a"
"""The one architecture with warpgroup products: its instructions exist under this name alone."""

_SHARED_KIB: Final = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory that a CTA may have, by architecture; others are taken for the least."""


def shared_bytes(arch: str) -> int:
    """Shared memory that a CTA may have on an architecture such as "sm_90a"."""
    return _SHARED_KIB.get(capability(arch), min(_SHARED_KIB.values())) << 10


def capability(arch: str) -> int:
    """90 of "sm_90a"."""
    return int("".join(digit for digit in arch if digit.isdigit()))


def arch_of(major: int, minor: int) -> str:
    """What NVRTC compiles for, for a device of this compute capability."""
    return WARPGROUP_ARCH if (major, minor) == (9, 0) else f"sm_{major}{minor}"
