"""The prefix chain: one digest per full page that ties its cells to every token before them.

    root      = H(salt; record version, format, numerics, scope, scope id, page size)
    digest[i] = H(salt; digest[i-1] (root for page 0), token ids of page i as u32 little endian)

H is keyed BLAKE2b-128. Equal digests mean equal weights, layout, numerics, tenant, cache scope and token prefix.
A worker computes the chain from its own tokens and never takes a digest from a message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from snapshot_store.errors import BadTokenIds
from snapshot_store.transcript import CacheScope

DIGEST_BYTES: Final = 16
SALT_BYTES: Final = 32
RECORD_VERSION: Final = 1

_ROOT_PERSON: Final = b"kvalet.root"
_PAGE_PERSON: Final = b"kvalet.page"


class PageDigest(bytes):
    """Identity of a page: 16 bytes. Raises BadTokenIds for another length."""

    __slots__ = ()

    def __new__(cls, value: bytes) -> PageDigest:
        """Take 16 bytes. Raises BadTokenIds."""
        if len(value) != DIGEST_BYTES:
            raise BadTokenIds("page_digest", len(value), f"{DIGEST_BYTES} bytes")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> PageDigest:
        """Read a digest from its hex form. Raises BadTokenIds."""
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise BadTokenIds("page_digest", text[:64], f"{2 * DIGEST_BYTES} hex digits") from None


class PrefixChain:
    """Digests of the pages of any token list under one fingerprint, tenant and cache scope. Immutable."""

    __slots__ = ("_format_digest", "_salt", "_scope", "numerics_digest", "page_size", "root")

    def __init__(
        self,
        format_digest: bytes,
        numerics_digest: bytes,
        tenant_salt: bytes,
        scope: CacheScope,
        scope_id: str,
        page_size: int,
    ) -> None:
        """tenant_salt: 32 secret bytes (salts.py). scope_id: what the scope names: tenant, API key id or root turn."""
        if len(tenant_salt) != SALT_BYTES:
            raise BadTokenIds("tenant_salt", len(tenant_salt), f"{SALT_BYTES} bytes")
        if page_size <= 0:
            raise BadTokenIds("page_size", page_size, "must be positive")
        self._format_digest = format_digest
        self._salt = tenant_salt
        self._scope = (scope, scope_id)
        self.numerics_digest = numerics_digest
        self.page_size = page_size
        parts = (
            RECORD_VERSION.to_bytes(4, "little"),
            format_digest,
            numerics_digest,
            scope.value.encode(),
            scope_id.encode(),
            page_size.to_bytes(4, "little"),
        )
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        self.root = self._hash(framed, _ROOT_PERSON)

    def under(self, numerics_digest: bytes) -> PrefixChain:
        """The chain of the same tokens' pages under other numerics: no digest of one is a digest of the other."""
        return PrefixChain(self._format_digest, numerics_digest, self._salt, *self._scope, self.page_size)

    def digests(self, token_ids: Sequence[int]) -> list[PageDigest]:
        """Digests of the full pages of `token_ids`, in order; tail tokens have none. Raises BadTokenIds."""
        return self.extend((), token_ids)

    def extend(self, known: Sequence[PageDigest], token_ids: Sequence[int]) -> list[PageDigest]:
        """Digests of the full pages of the whole list `token_ids` that follow the `known` ones. Raises BadTokenIds."""
        previous = known[-1] if known else self.root
        added: list[PageDigest] = []
        for index in range(len(known), len(token_ids) // self.page_size):
            start = index * self.page_size
            previous = self.page_digest(previous, token_ids[start : start + self.page_size])
            added.append(previous)
        return added

    def page_digest(self, parent: PageDigest, page_token_ids: Sequence[int]) -> PageDigest:
        """Digest of the page with exactly `page_size` token ids that follows `parent`. Raises BadTokenIds."""
        if len(page_token_ids) != self.page_size:
            raise BadTokenIds("page_token_ids", len(page_token_ids), f"exactly {self.page_size} ids")
        return self._hash(parent + pack_token_ids(page_token_ids), _PAGE_PERSON)

    def parent_of(self, digests: Sequence[PageDigest], index: int) -> PageDigest:
        """Parent of page `index` of a list made by `digests`: the page before it, or the root."""
        return digests[index - 1] if index else self.root

    def _hash(self, message: bytes, person: bytes) -> PageDigest:
        return PageDigest(blake2b(message, digest_size=DIGEST_BYTES, key=self._salt, person=person).digest())


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. Raises BadTokenIds that names the first bad id."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not _is_u32(t))
        raise BadTokenIds(f"token_ids[{index}]", bad, "an integer in [0, 2**32)") from None


def unpack_token_ids(packed: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack_token_ids`. Raises BadTokenIds for a length that is no multiple of 4."""
    if len(packed) % 4:
        raise BadTokenIds("packed token ids", len(packed), "a multiple of 4 bytes")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _is_u32(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 32
