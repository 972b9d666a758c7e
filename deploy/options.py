"""Command-line options as the environment that child processes read."""

from __future__ import annotations

from pydantic import ValidationError

from deploy.errors import BadOption
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
        first = error.errors()[0]
        name = str(first["loc"][0])
        field = _flag(name) if name in given else f"KVALET_{name.upper()}"
        raise BadOption(field, first["input"], first["msg"]) from error
    return {f"KVALET_{name.upper()}": str(value) for name, value in given.items()}


def _flag(name: str) -> str:
    return _FLAGS.get(name, "--" + name.replace("_", "-"))
