"""Lua scripts as values: what to run, with what, and how to read the reply. Performs no input or output itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

from workers.turns.codec import ENDINGS
from workers.turns.keys import LUA_KEYS

T = TypeVar("T")
Argument = bytes | str | int | float


@dataclass(frozen=True, slots=True)
class Script:
    """One script of lua/, with the library and the key names in front of it.

    `allow_oom`: runs even when control is over its memory limit (everything that ends, frees or keeps work).
    """

    name: str
    source: bytes
    sha: str


@dataclass(frozen=True, slots=True)
class ScriptCall(Generic[T]):
    """One operation, ready for a TurnControl or an AsyncTurnControl.

    Every operation may be repeated with the same arguments: a run whose reply was lost changes nothing the second
    time and gets the same answer. `durable` asks for the write to be on disk before the call returns.
    """

    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[Any], T]
    durable: bool = False


@cache
def load_script(name: str, *, flags: str = "allow-oom") -> Script:
    """Read lua/<name>.lua and join it with the library. `flags` are the script flags of Valkey/Redis 7."""
    folder = files("workers.turns") / "lua"
    parts = [f"#!lua flags={flags}" if flags else "#!lua", _lua_constants()]
    parts += [(folder / part).read_text("utf-8") for part in ("library.lua", f"{name}.lua")]
    source = "\n".join(parts).encode()
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


def _lua_constants() -> str:
    keys = ", ".join(f'{name} = "{prefix}"' for name, prefix in LUA_KEYS.items())
    endings = ", ".join(f"{name} = {_lua_string(packed)}" for name, packed in ENDINGS.items())
    return f"local K = {{{keys}}}\nlocal ENDINGS = {{{endings}}}"


def _lua_string(value: bytes) -> str:
    return '"' + "".join(f"\\{byte:03d}" for byte in value) + '"'
