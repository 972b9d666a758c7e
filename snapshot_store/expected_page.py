"""What a reader knows about a page before it reads it, from its own tokens and fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from snapshot_store.chain import PageDigest
from snapshot_store.errors import ForeignRecord
from snapshot_store.record import PageHeader


@dataclass(frozen=True, slots=True)
class ExpectedPage:
    """Identity of the page that the reader wants; any difference makes a record foreign."""

    parent: PageDigest
    digest: PageDigest
    token_ids: tuple[int, ...]
    format_digest: bytes
    numerics_digest: bytes

    def check(self, header: PageHeader) -> None:
        """Raise ForeignRecord that names the first field in which `header` is of something else."""
        found = header.identity
        for field, ours, theirs in (
            ("format_digest", self.format_digest, found.format_digest),
            ("numerics_digest", self.numerics_digest, found.numerics_digest),
            ("parent", self.parent, found.parent),
            ("digest", self.digest, found.digest),
            ("token_ids", self.token_ids, found.token_ids),
        ):
            if ours != theirs:
                raise ForeignRecord(field)
