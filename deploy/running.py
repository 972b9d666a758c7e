"""Where a running `kvalet up` is: a small file beside its sockets, so that other commands need no addresses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

_NAME = "addresses.json"


def write_addresses(directory: Path, addresses: Mapping[str, str]) -> None:
    """Say what runs on `directory`: values by the environment variable that commands read."""
    path = directory / _NAME
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(addresses)))
    part.chmod(0o600)
    part.replace(path)


def forget_addresses(directory: Path) -> None:
    """The stack on `directory` has ended."""
    (directory / _NAME).unlink(missing_ok=True)


def adopt_addresses(directory: Path) -> None:
    """Take the addresses of the stack on `directory` for every variable that is not set."""
    try:
        addresses = json.loads((directory / _NAME).read_text())
    except (OSError, ValueError):
        return
    for variable, value in addresses.items():
        os.environ.setdefault(variable, value)
