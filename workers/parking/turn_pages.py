"""The prefix chain of one turn's tokens, growing with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from snapshot_store.chain import PageDigest, PrefixChain
from snapshot_store.keys import page_key


@dataclass(slots=True)
class TurnPages:
    """Digests of a turn's full pages.

    digests, page_ids: of the pages known so far; the turn's thread fills them with the prompt's, then the engine
    thread appends.
    stateless: the pages belong to no named conversation and live shortly. epoch: of the turn's lease.
    """

    tenant: str
    chain: PrefixChain
    stateless: bool
    epoch: int
    digests: list[PageDigest] = field(default_factory=list)
    page_ids: list[tuple[int, ...]] = field(default_factory=list)

    def cover(self, token_ids: Sequence[int]) -> None:
        """Add the digests of the full pages of `token_ids`, the turn's whole list so far."""
        size = self.chain.page_size
        self.digests.extend(self.chain.extend(self.digests, token_ids))
        for index in range(len(self.page_ids), len(self.digests)):
            self.page_ids.append(tuple(token_ids[index * size : (index + 1) * size]))

    def digest_of(self, page_index: int, page_token_ids: Sequence[int]) -> PageDigest:
        """Digest of a page whose predecessors are all known; adds it if it is the next one."""
        if page_index == len(self.digests):
            self.digests.append(self.chain.page_digest(self.parent_of(page_index), page_token_ids))
            self.page_ids.append(tuple(page_token_ids))
        return self.digests[page_index]

    def token_ids_of(self, page_index: int) -> tuple[int, ...]:
        """Token ids of a page."""
        return self.page_ids[page_index]

    def parent_of(self, page_index: int) -> PageDigest:
        """Digest of the page before, the chain's root for the first."""
        return self.chain.parent_of(self.digests, page_index)

    def key_of(self, page_index: int) -> str:
        """Store key of a page."""
        return page_key(self.tenant, self.digests[page_index])
