"""The prefix chains of one turn's tokens, growing with them: one per numerics whose pages it may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from snapshot_store.chain import PageDigest, PrefixChain
from snapshot_store.fingerprint import MIXED_DIGEST
from snapshot_store.keys import page_key


@dataclass(slots=True)
class TurnPages:
    """Digests of a turn's full pages.

        page              0        1        2          3
        reused from       own      own      other      -
        sources           own      own      other      mixed      what the turn computes behind a foreign page is mixed

    chain: of this worker's own numerics. accepted: other numerics whose pages it may reuse, best first. stateless: the
    pages belong to no named conversation and live shortly. epoch: of the turn's lease. page_ids: token ids of the pages
    known so far. sources: numerics of the pages that the turn's sequence has, reused ones first. The turn's thread
    fills both with the prompt's pages, then the engine thread appends.
    """

    tenant: str
    chain: PrefixChain
    stateless: bool
    epoch: int
    accepted: tuple[bytes, ...] = ()
    page_ids: list[tuple[int, ...]] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)
    _chains: dict[bytes, _Digests] = field(default_factory=dict)

    @property
    def own(self) -> bytes:
        """This worker's numerics."""
        return self.chain.numerics_digest

    @property
    def numerics(self) -> tuple[bytes, ...]:
        """All numerics whose pages may be reused, own ones first."""
        return (self.own, *self.accepted)

    @property
    def written(self) -> bytes:
        """Numerics of what the turn computes: mixed as soon as it has a page that is not of its own numerics."""
        return self.own if all(source == self.own for source in self.sources) else MIXED_DIGEST

    def cover(self, token_ids: Sequence[int]) -> None:
        """Begin an attempt, which has no pages yet, to compute `token_ids`, the turn's whole list so far."""
        size = self.chain.page_size
        self.sources.clear()
        for index in range(len(self.page_ids), len(token_ids) // size):
            self.page_ids.append(tuple(token_ids[index * size : (index + 1) * size]))

    def reuse(self, numerics: bytes, num_pages: int) -> None:
        """The sequence has got the next `num_pages` pages, which have these numerics."""
        self.sources.extend([numerics] * num_pages)

    def seal(self, page_index: int, page_token_ids: Sequence[int], own_numerics: bool) -> PageDigest:
        """Digest of the page that the sequence has computed next. own_numerics: it has attended to no other ones."""
        if page_index == len(self.page_ids):
            self.page_ids.append(tuple(page_token_ids))
        self.sources.append(self.own if own_numerics else MIXED_DIGEST)
        return self.digest(page_index)

    def digest(self, page_index: int, numerics: bytes | None = None) -> PageDigest:
        """Digest of a page, under the numerics that the sequence has it of unless told otherwise."""
        return self._digests(page_index, numerics).up_to(page_index, self.page_ids)[page_index]

    def parent(self, page_index: int, numerics: bytes | None = None) -> PageDigest:
        """Digest of the page before under the same numerics, the chain's root for the first."""
        digests = self._digests(page_index, numerics)
        return digests.chain.parent_of(digests.up_to(page_index, self.page_ids), page_index)

    def key(self, page_index: int, numerics: bytes | None = None) -> str:
        """Store key of a page."""
        return page_key(self.tenant, self.digest(page_index, numerics))

    def _digests(self, page_index: int, numerics: bytes | None) -> _Digests:
        wanted = self.sources[page_index] if numerics is None else numerics
        if wanted not in self._chains:
            self._chains[wanted] = _Digests(self.chain if wanted == self.own else self.chain.under(wanted))
        return self._chains[wanted]


@dataclass(slots=True)
class _Digests:
    """Digests of the first pages of one chain, computed when they are asked for."""

    chain: PrefixChain
    known: list[PageDigest] = field(default_factory=list)

    def up_to(self, page_index: int, page_ids: Sequence[tuple[int, ...]]) -> list[PageDigest]:
        """Digests of pages 0 .. page_index at least."""
        for index in range(len(self.known), page_index + 1):
            self.known.append(self.chain.page_digest(self.chain.parent_of(self.known, index), page_ids[index]))
        return self.known
