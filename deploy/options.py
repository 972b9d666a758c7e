"""Command-line options as the environment that child processes read."""

from __future__ import annotations

from pydantic import ValidationError

from deploy.errors import BadOption
from workers.setting_checks import refusal_of
from workers.settings import WorkerSettings

_FLAGS = {"kv_format": "--kv", "control_url": "--control", "pages_url": "--pages", "worker_id": "--id"}


def worker_environment(**options: object) -> dict[str, str]:
    """KVALET_* variables for the options that were given (None = not given).

    Raises BadOption naming the flag, the value and what is allowed, or a malformed variable of the environment.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        WorkerSettings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        name, value, limit = refusal_of(WorkerSettings, error)
        raise BadOption(flag(name) if name in given else f"KVALET_{name.upper()}", value, limit) from error
    return {f"KVALET_{name.upper()}": str(value) for name, value in given.items()}


def flag(name: str) -> str:
    """The option that stands for a field of the worker's settings."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))
