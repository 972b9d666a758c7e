"""Settings of a gateway process: environment `KVALET_*`, then defaults. Malformed values stop the start."""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.setting_checks import check_redis_url, refusal_of

OWN_PREFIX = "KVALET_GATEWAY_"
_LONGEST_S = 86_400.0


class SettingsError(Exception):
    """A setting that stops the start. The message names variable, value and limit."""


class GatewaySettings(BaseSettings):
    """One gateway process. Units are in the names; byte and token limits are inclusive.

    `control_url` is shared with the workers (KVALET_CONTROL_URL); the others start with KVALET_GATEWAY_. Without a
    keys file every request belongs to tenant `local`, and only a loopback address may be bound.
    """

    model_config = SettingsConfigDict(env_prefix=OWN_PREFIX, extra="ignore", frozen=True)

    control_url: str = Field(default="redis://127.0.0.1:6379/0", validation_alias="KVALET_CONTROL_URL")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    keys_file: Path | None = None
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_prompt_bytes: int = Field(default=4 << 20, ge=1)
    max_messages: int = Field(default=4096, ge=1)
    max_choices: int = Field(default=8, ge=1, le=64)
    max_queued: int = Field(default=256, ge=1)
    max_queued_per_tenant: int = Field(default=256, ge=1)
    stream_ttl_s: int = Field(default=15 * 60, ge=1)
    retention_s: int = Field(default=30 * 24 * 3600, ge=60)
    max_streams: int = Field(default=1024, ge=1)
    first_event_s: float = Field(default=10.0, gt=0, le=_LONGEST_S)
    heartbeat_s: float = Field(default=5.0, gt=0, le=_LONGEST_S)
    request_timeout_s: float = Field(default=600.0, gt=0, le=_LONGEST_S)
    unserved_s: float = Field(default=8.0, gt=0, le=_LONGEST_S)
    control_timeout_s: float = Field(default=5.0, gt=0, le=_LONGEST_S)
    worker_stale_s: float = Field(default=8.0, gt=0, le=_LONGEST_S)
    shutdown_grace_s: float = Field(default=10.0, ge=0, le=_LONGEST_S)
    durability: Literal["process", "host"] = "process"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("control_url")
    @classmethod
    def _names_a_server(cls, url: str) -> str:
        return check_redis_url(url)


def load_settings(**overrides: object) -> GatewaySettings:
    """Settings from the environment, then `overrides` (command line).

    Raises SettingsError for an unknown KVALET_GATEWAY_ variable, a malformed value, or an open address without keys.
    """
    known = {OWN_PREFIX + name.upper() for name in GatewaySettings.model_fields if name != "control_url"}
    for variable in sorted(os.environ):
        if variable.startswith(OWN_PREFIX) and variable not in known:
            raise SettingsError(f"{variable}: no such setting")
    named = {("KVALET_CONTROL_URL" if k == "control_url" else k): v for k, v in overrides.items() if v is not None}
    try:
        settings = GatewaySettings(**named)  # type: ignore[arg-type]
    except ValidationError as error:
        name, value, limit = refusal_of(GatewaySettings, error)
        variable = name if name.startswith("KVALET_") else OWN_PREFIX + name.upper()
        raise SettingsError(f"{variable}={value!r}: {limit}") from error
    if settings.keys_file is None and not is_loopback(settings.host):
        raise SettingsError(
            f"{OWN_PREFIX}HOST={settings.host!r}: without {OWN_PREFIX}KEYS_FILE only a loopback address may be bound"
        )
    return settings


def is_loopback(host: str) -> bool:
    """Whether an address or `localhost` is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
