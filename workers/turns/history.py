"""Stateless chat: control remembers which turn's reply ends a message history, so that resent history finds its ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from snapshot_store.transcript import CacheScope
from workers.turns.keys import tenant_key
from workers.turns.replies import text
from workers.turns.script import ScriptCall, load_script


def history_digests(
    messages: Sequence[Mapping[str, Any]], *, tenant: str, model: str, scope: CacheScope, key_id: str
) -> list[bytes]:
    """Digest of messages[:n] for every n from 0 to all of them (each builds on the one before).

    A history is found again only by the same tenant, for the same model and scope (by the same API key with scope
    `key`).
    """
    owner = [tenant, model, str(scope), key_id if scope is CacheScope.KEY else ""]
    digest = _hash(b"", json.dumps(owner).encode())
    digests = [digest]
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "token_ids"}
        canonical = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain)
        digest = _hash(digest, canonical.encode("utf-8", "surrogatepass"))
        digests.append(digest)
    return digests


def find_history(tenant: str, digests: Sequence[bytes]) -> ScriptCall[tuple[int, str] | None]:
    """Find the longest known history: (index into `digests`, turn id whose reply ends it), or None.

    Only turns whose transcript still exists are answered.
    """

    def parse(reply: Any) -> tuple[int, str] | None:
        return (int(reply[0]), text(reply[1])) if reply else None

    keys = tuple(tenant_key(tenant, "history", digest.hex()) for digest in digests)
    return ScriptCall(load_script("find_history"), keys, (tenant,), parse)


def _hash(previous: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(previous + data, digest_size=16, person=b"kvalet.history").digest()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"a message holds a {type(value).__name__}")
