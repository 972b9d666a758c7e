"""Settings in force for every process that the command starts, and where each comes from; checked before the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ValidationError

from deploy.errors import BadOption, BadSetting
from gateway.auth import load_keys
from gateway.settings import OWN_PREFIX, GatewaySettings, SettingsError, load_settings
from workers.setting_checks import masked, refusal_of
from workers.settings import WorkerSettings

PREFIX = "KVALET_"
COMMAND_VARIABLES = frozenset({"KVALET_BASE_URL", "KVALET_API_KEY", "KVALET_SETTINGS_FILE", "KVALET_DATA"})
"""Read by the command itself."""
CACHE_VARIABLES = frozenset({"KVALET_CUDA_CACHE_DIR"})
"""Where compiled kernels are kept: no setting of a worker, since nothing that it computes depends on it."""
COMMAND_LINE, ENVIRONMENT, FILE, SUPERVISOR, DEFAULT = "command line", "environment", "file", "kvalet up", "default"
"""Where a value comes from, the first that has one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force. `source`: command line, environment, file, kvalet up (what it gives a child) or default."""

    process: str
    variable: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Given:
    """What a process is given besides its environment.

    overlay: variables laid over the environment. overlay_sources: where those come from; others are the supervisor's.
    from_file: variables of the environment that were read from a settings file.
    """

    overlay: Mapping[str, str] = field(default_factory=dict)
    overlay_sources: Mapping[str, str] = field(default_factory=dict)
    from_file: frozenset[str] = frozenset()

    def source(self, variable: str) -> str:
        """Where a variable's value comes from."""
        if variable in self.overlay:
            return self.overlay_sources.get(variable, SUPERVISOR)
        if variable in os.environ:
            return FILE if variable in self.from_file else ENVIRONMENT
        return DEFAULT


def settings_in_force(from_file: frozenset[str] = frozenset()) -> list[Setting]:
    """Every setting of worker and gateway. from_file: variables that a settings file set.

    Raises BadOption or BadSetting naming a variable.
    """
    check_names(os.environ)
    given = Given(from_file=from_file)
    return [*worker_rows("worker", given), *gateway_rows("gateway", given)]


def worker_rows(process: str, given: Given) -> list[Setting]:
    """Settings of a worker process. Raises BadOption naming a variable."""
    return _rows(process, PREFIX, worker_settings(given.overlay), given.source)


def worker_settings(overlay: Mapping[str, str]) -> WorkerSettings:
    """A worker's settings under variables laid over the environment. Raises BadOption naming a variable."""
    values = {name: overlay.get(PREFIX + name.upper()) for name in WorkerSettings.model_fields}
    try:
        return WorkerSettings(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        name, value, limit = refusal_of(WorkerSettings, error)
        raise BadOption(PREFIX + name.upper(), value, limit) from error


def gateway_rows(process: str, given: Given) -> list[Setting]:
    """Settings of a gateway process. Raises BadSetting naming a variable."""
    names = [name for name in GatewaySettings.model_fields if name != "control_url"]
    overlay = {name: given.overlay.get(OWN_PREFIX + name.upper()) for name in names}
    settings = gateway_settings(**overlay, control_url=given.overlay.get("KVALET_CONTROL_URL"))
    return _rows(process, OWN_PREFIX, settings, given.source)


def gateway_settings(**overrides: object) -> GatewaySettings:
    """The gateway's settings with these values of the command line. Raises BadSetting."""
    try:
        settings = load_settings(**overrides)
        load_keys(settings.keys_file)
    except SettingsError as error:
        raise BadSetting(str(error)) from error
    return settings


def check_names(environment: Mapping[str, str]) -> None:
    """Raises BadOption for a KVALET_ variable that no process knows, or that is not written in capitals."""
    known = known_variables()
    for variable in sorted(environment):
        if not variable.upper().startswith(PREFIX) or variable in known:
            continue
        capitals = variable.upper()
        limit = f"written {capitals}" if capitals in known else "no such setting; `kvalet config` lists all"
        raise BadOption(variable, environment[variable], limit)


def known_variables() -> frozenset[str]:
    """Every KVALET_ variable that some process reads."""
    worker = {PREFIX + name.upper() for name in WorkerSettings.model_fields}
    gateway = {OWN_PREFIX + name.upper() for name in GatewaySettings.model_fields}
    return COMMAND_VARIABLES | CACHE_VARIABLES | worker | gateway


def _rows(process: str, prefix: str, settings: BaseModel, source: Callable[[str], str]) -> list[Setting]:
    rows = []
    for name in type(settings).model_fields:
        # The server of turns is one for all processes and has one name.
        variable = "KVALET_CONTROL_URL" if name == "control_url" else prefix + name.upper()
        rows.append(Setting(process, variable, shown(getattr(settings, name)), source(variable)))
    return rows


def shown(value: object) -> str:
    """A value as text, without the password of a URL; nothing for None."""
    if value is None:
        return ""
    return masked(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
