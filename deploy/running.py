"""What a running `kvalet up` is: a small file beside its sockets, so that other commands need no addresses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.configuration import Setting
from deploy.errors import BadOption
from deploy.process import start_ticks

_NAME = "running.json"


@dataclass(frozen=True, slots=True)
class RunningStack:
    """pid: of the supervisor. addresses: by the environment variable that commands read. settings: of its children."""

    pid: int
    addresses: Mapping[str, str]
    settings: tuple[Setting, ...]


def default_directory() -> Path:
    """Where a stack keeps control's data, logs and pid files unless told otherwise."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "kvalet"


def write_running(directory: Path, addresses: Mapping[str, str], settings: Sequence[Setting]) -> None:
    """Say that this process runs a stack on `directory`."""
    path = directory / _NAME
    part = path.with_suffix(".part")
    content = {
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "addresses": dict(addresses),
        "settings": [asdict(setting) for setting in settings],
    }
    part.write_text(json.dumps(content))
    part.chmod(0o600)
    part.replace(path)


def forget_running(directory: Path) -> None:
    """The stack on `directory` has ended."""
    (directory / _NAME).unlink(missing_ok=True)


def read_running(directory: Path) -> RunningStack | None:
    """The stack on `directory`; None when there is none, or only what a killed one left behind."""
    try:
        content = json.loads((directory / _NAME).read_text())
        if start_ticks(content["pid"]) != content["start_ticks"]:
            return None
        settings = tuple(Setting(**setting) for setting in content["settings"])
        return RunningStack(content["pid"], content["addresses"], settings)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def service_url(url: str | None, data: Path | None) -> str:
    """Base URL of a service: `url`, or that of the stack on a data folder. Raises BadOption when none runs there."""
    if url is None:
        directory = data or default_directory()
        running = read_running(directory)
        if running is None:
            limit = "no `kvalet up` runs on this data folder; name a service with --url, or another folder"
            raise BadOption("--data", str(directory), limit)
        url = running.addresses["KVALET_BASE_URL"]
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def adopt_addresses(directory: Path) -> None:
    """Take the addresses of the stack on `directory` for every variable that is not set."""
    running = read_running(directory)
    for variable, value in running.addresses.items() if running else ():
        os.environ.setdefault(variable, value)
