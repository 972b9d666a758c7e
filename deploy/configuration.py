"""Settings in force for every process that the command starts: from the environment, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ValidationError

from deploy.errors import BadOption, BadSetting
from gateway.auth import load_keys
from gateway.settings import OWN_PREFIX, GatewaySettings, SettingsError, load_settings
from workers.settings import WorkerSettings

PREFIX = "KVALET_"
CLIENT_VARIABLES = frozenset({"KVALET_BASE_URL", "KVALET_API_KEY"})
"""Read by commands that talk to a running service."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force. `source`: environment or default."""

    process: str
    variable: str
    value: str
    source: str


def settings_in_force() -> list[Setting]:
    """Every setting of worker and gateway. Raises BadOption or BadSetting naming a variable."""
    check_names(os.environ)
    try:
        worker = WorkerSettings()
    except ValidationError as error:
        raise _bad_value(error) from error
    gateway = gateway_settings()
    return [*_rows("worker", PREFIX, worker), *_rows("gateway", OWN_PREFIX, gateway)]


def gateway_settings(**overrides: object) -> GatewaySettings:
    """The gateway's settings with these values of the command line. Raises BadSetting."""
    try:
        settings = load_settings(**overrides)
        load_keys(settings.keys_file)
    except SettingsError as error:
        raise BadSetting(str(error)) from error
    return settings


def check_names(environment: Mapping[str, str]) -> None:
    """Raises BadOption for a KVALET_ variable that no process knows."""
    known = CLIENT_VARIABLES | {PREFIX + name.upper() for name in WorkerSettings.model_fields}
    known |= {OWN_PREFIX + name.upper() for name in GatewaySettings.model_fields}
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in known:
            raise BadOption(variable, environment[variable], "no such setting; `kvalet config` lists all")


def _rows(process: str, prefix: str, settings: BaseModel) -> list[Setting]:
    rows = []
    for name in type(settings).model_fields:
        # The server of turns is one for all processes and has one name.
        variable = "KVALET_CONTROL_URL" if name == "control_url" else prefix + name.upper()
        source = "environment" if variable in os.environ else "default"
        rows.append(Setting(process, variable, _shown(getattr(settings, name)), source))
    return rows


def _shown(value: object) -> str:
    """A value as text, without the password of a URL; nothing for None."""
    if value is None:
        return ""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if "://" not in text or "@" not in text:
        return text
    parts = urlsplit(text)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"***@{host}"))


def _bad_value(error: ValidationError) -> BadOption:
    first = error.errors()[0]
    return BadOption(PREFIX + str(first["loc"][0]).upper(), first["input"], first["msg"])
