"""A file of settings: `KVALET_NAME=value` lines, as `kvalet config` prints them. The environment wins over it."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from pathlib import Path

from deploy.configuration import known_variables
from deploy.errors import BadOption, BadSetting

_LINE = re.compile(r"(KVALET_[A-Z0-9_]+)=(.*?)(?:\s+#.*)?$")


def adopt_settings_file(path: Path, environment: MutableMapping[str, str]) -> frozenset[str]:
    """Set the file's variables that `environment` lacks; returns their names. An empty value leaves the default.

    Raises BadOption when the file cannot be read, BadSetting naming line and variable.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption("--settings", str(path), f"cannot be read ({error})") from None
    adopted = set()
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise BadSetting(f"{path}:{number}: {line[:60]!r}: must be KVALET_NAME=value")
        variable, value = match.groups()
        if variable not in known_variables():
            raise BadSetting(f"{path}:{number}: {variable}: no such setting; `kvalet config` lists all")
        if value and variable not in environment:
            environment[variable] = value
            adopted.add(variable)
    return frozenset(adopted)
