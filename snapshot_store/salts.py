"""Tenant salts: the secret that keys a tenant's prefix chain, so that digests of two tenants never meet."""

from __future__ import annotations

import secrets

import redis

from snapshot_store.chain import SALT_BYTES
from snapshot_store.errors import BadKeyPart, StoreUnreachable
from snapshot_store.keys import salt_key
from snapshot_store.lua import script

_ALLOW_OOM = "#!lua flags=allow-oom\n"


def tenant_salt(control: redis.Redis, tenant: str) -> bytes:
    """The tenant's 32-byte salt, drawn and kept on control at the first call. Raises BadKeyPart, StoreUnreachable."""
    key, drawn = salt_key(tenant), secrets.token_bytes(SALT_BYTES)
    try:
        return _checked(key, control.eval(_ALLOW_OOM + script("tenant_salt").decode(), 1, key, drawn))
    except redis.RedisError as error:
        raise StoreUnreachable(f"control: {error}") from error


def existing_salt(control: redis.Redis, tenant: str) -> bytes | None:
    """The tenant's salt if it was ever drawn; writes nothing. Raises BadKeyPart, StoreUnreachable."""
    key = salt_key(tenant)
    try:
        salt = control.get(key)
    except redis.RedisError as error:
        raise StoreUnreachable(f"control: {error}") from error
    return None if salt is None else _checked(key, salt)


def _checked(key: str, salt: object) -> bytes:
    if not isinstance(salt, bytes) or len(salt) != SALT_BYTES:
        raise BadKeyPart(key, salt if salt is None else type(salt).__name__, f"{SALT_BYTES} bytes")
    return salt
