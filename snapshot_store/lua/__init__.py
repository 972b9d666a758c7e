"""Lua scripts of this package; the key schema of each stands at its top."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def script(name: str) -> bytes:
    """Source of the script `name`.lua."""
    return files(__name__).joinpath(f"{name}.lua").read_bytes()
