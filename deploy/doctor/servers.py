"""Redis or Valkey servers that the settings name."""

from __future__ import annotations

from collections.abc import Mapping

import redis

from deploy.configuration import shown
from deploy.doctor.finding import Finding
from workers.turns.control import connect

_VARIABLES = {"control": "KVALET_CONTROL_URL", "pages": "KVALET_PAGES_URL"}
_NEEDED = (7, 2)
_TIMEOUT_S = 3.0


def examine_servers(environment: Mapping[str, str]) -> list[Finding]:
    """Ask every server that a variable names; others are embedded ones, or not ours to know."""
    return [_examine(role, environment[name]) for role, name in _VARIABLES.items() if environment.get(name)]


def _examine(role: str, url: str) -> Finding:
    subject = f"{role} server"
    try:
        client = connect(url, timeout_s=_TIMEOUT_S)
        try:
            told = client.info("server")
        finally:
            client.close()
    except (redis.RedisError, ValueError) as error:
        return Finding(
            subject, False, f"{shown(url)} does not answer ({error}): start it, or correct {_VARIABLES[role]}"
        )
    # Valkey tells the Redis version that it is compatible with, and its own.
    version = str(told.get("redis_version", "0"))
    name = f"Valkey {told['valkey_version']}" if "valkey_version" in told else f"Redis {version}"
    fine = tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= _NEEDED
    needed = "" if fine else "; needed Valkey 8 or Redis 7.2"
    return Finding(subject, fine, f"{name} at {shown(url)}{needed}")
