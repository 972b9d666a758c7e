"""Who asks. API keys are kept as SHA-256 digests in a keys file; each belongs to a tenant.

A line of the keys file: `<sha256 hex of the key> <tenant> [key id] [admin]`; `#` starts a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from gateway.errors import AuthenticationFailed
from gateway.settings import SettingsError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant and key that a request acts for. is_admin: may force a worker and see the fleet."""

    tenant: str
    key_id: str
    is_admin: bool


LOCAL = Principal(tenant="local", key_id="local", is_admin=True)


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Known keys by digest. With none at all every request is the local tenant's."""

    by_digest: tuple[tuple[str, Principal], ...]

    def principal(self, authorization: str | None) -> Principal:
        """The owner of the key in an Authorization header.

        Raises AuthenticationFailed. Compares with every known digest, in constant time each.
        """
        if not self.by_digest:
            return LOCAL
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationFailed("no API key: send 'Authorization: Bearer KEY'", code="missing_api_key")
        digest = hash_key(key.strip())
        found = [principal for known, principal in self.by_digest if hmac.compare_digest(known, digest)]
        if not found:
            raise AuthenticationFailed("incorrect API key", code="invalid_api_key")
        return found[0]


def hash_key(key: str) -> str:
    """The digest under which a key is stored, as lower-case hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def load_keys(path: Path | None) -> ApiKeys:
    """Read a keys file; None means no keys.

    Raises SettingsError naming file and line.
    """
    if path is None:
        return ApiKeys(())
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"KVALET_GATEWAY_KEYS_FILE={str(path)!r}: cannot be read ({type(error).__name__})"
        ) from error
    entries: dict[str, Principal] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if words:
            digest, principal = _parse_line(words, f"{path.name}:{number}")
            if digest in entries:
                raise SettingsError(f"{path.name}:{number}: the key occurs twice")
            entries[digest] = principal
    if not entries:
        raise SettingsError(f"KVALET_GATEWAY_KEYS_FILE={str(path)!r}: holds no key")
    return ApiKeys(tuple(entries.items()))


def _parse_line(words: list[str], where: str) -> tuple[str, Principal]:
    digest, *rest = words
    if not _DIGEST.fullmatch(digest):
        raise SettingsError(f"{where}: the first word must be a SHA-256 digest in lower-case hex, 64 digits")
    is_admin = rest[-1:] == ["admin"] and len(rest) > 1
    names = rest[:-1] if is_admin else rest
    if not 1 <= len(names) <= 2 or not all(_NAME.fullmatch(name) for name in names):
        raise SettingsError(
            f"{where}: expected '<sha256> <tenant> [key id] [admin]', names of 1 to 64 of A-Z a-z 0-9 . _ -"
        )
    return digest, Principal(tenant=names[0], key_id=names[1] if len(names) == 2 else digest[:12], is_admin=is_admin)
