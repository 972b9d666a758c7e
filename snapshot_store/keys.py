"""Every key that this package reads or writes; nobody spells one elsewhere.

    pages server (string values, always with a TTL; no hash tags: a cluster spreads pages evenly)
        kvalet:<tenant>:page:<digest hex>            one page record (record.py)

    control server
        kvalet:<tenant>:transcript:<turn id>         string, msgpack transcript entry (transcript.py); written by commit
        kvalet:<tenant>:snapshot:<branch>            hash, snapshot index entry (index.py)
        kvalet:<tenant>:salt                         string, 32 random bytes, written once (salts.py)
        kvalet:-:fingerprint:<digest hex>            string, msgpack fingerprint record in clear (published.py)

`-` stands where a key belongs to the fleet and to no tenant; no tenant can have that name.
"""

from __future__ import annotations

import re
from typing import Final

from snapshot_store.chain import PageDigest
from snapshot_store.errors import BadKeyPart

PREFIX: Final = "kvalet"
FLEET: Final = "-"
MAX_PART_CHARS: Final = 128

_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*", re.ASCII)
_BRANCH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-:]*", re.ASCII)


def check_part(field: str, value: str) -> str:
    """Return `value` if it can be one part of a key. Raises BadKeyPart."""
    if len(value) > MAX_PART_CHARS:
        raise BadKeyPart(field, value[:MAX_PART_CHARS], f"at most {MAX_PART_CHARS} characters")
    if _PART.fullmatch(value) is None:
        raise BadKeyPart(field, value, "letters, digits, '_', '.', '-', beginning with a letter or digit")
    return value


def page_key(tenant: str, digest: PageDigest) -> str:
    """Key of a page record on the pages server. Raises BadKeyPart."""
    return f"{PREFIX}:{check_part('tenant', tenant)}:page:{digest.hex()}"


def page_pattern(tenant: str | None) -> str:
    """SCAN pattern of the page records of one tenant, or of all. Raises BadKeyPart."""
    return f"{PREFIX}:{_tenant_or_any(tenant)}:page:*"


def transcript_key(tenant: str, turn_id: str) -> str:
    """Key of a committed transcript entry on control. Raises BadKeyPart."""
    return f"{PREFIX}:{check_part('tenant', tenant)}:transcript:{check_part('turn_id', turn_id)}"


def transcript_pattern(tenant: str | None) -> str:
    """SCAN pattern of the transcript entries of one tenant, or of all. Raises BadKeyPart."""
    return f"{PREFIX}:{_tenant_or_any(tenant)}:transcript:*"


def snapshot_key(tenant: str, branch: str) -> str:
    """Key of a snapshot index entry on control. A branch id may hold ':'. Raises BadKeyPart."""
    if len(branch) > MAX_PART_CHARS or _BRANCH.fullmatch(branch) is None:
        raise BadKeyPart("branch", branch[:MAX_PART_CHARS], f"at most {MAX_PART_CHARS} of letters, digits, '_.-:'")
    return f"{PREFIX}:{check_part('tenant', tenant)}:snapshot:{branch}"


def snapshot_pattern(tenant: str | None) -> str:
    """SCAN pattern of the snapshot index entries of one tenant, or of all. Raises BadKeyPart."""
    return f"{PREFIX}:{_tenant_or_any(tenant)}:snapshot:*"


def salt_key(tenant: str) -> str:
    """Key of a tenant's salt on control. Raises BadKeyPart."""
    return f"{PREFIX}:{check_part('tenant', tenant)}:salt"


def fingerprint_key(digest: bytes) -> str:
    """Key of a fingerprint record, kept in clear on control under its digest."""
    return f"{PREFIX}:{FLEET}:fingerprint:{digest.hex()}"


def tenant_of(key: str) -> str:
    """The tenant part of a key. Raises BadKeyPart for a key of another schema."""
    return _parts(key)[1]


def last_part_of(key: str) -> str:
    """What follows the kind in a key: a digest in hex, a turn id or a branch. Raises BadKeyPart."""
    return _parts(key)[3]


def _parts(key: str) -> list[str]:
    parts = key.split(":", 3)
    if len(parts) != 4 or parts[0] != PREFIX:
        raise BadKeyPart("key", key, f"{PREFIX}:<tenant>:<kind>:<id>")
    return parts


def _tenant_or_any(tenant: str | None) -> str:
    return "*" if tenant is None else check_part("tenant", tenant)
