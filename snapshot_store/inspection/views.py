"""What `ls` and `show` tell, as plain values: conversations, turns, pages, sharing, fingerprints in clear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from snapshot_store.errors import DamagedRecord
from snapshot_store.fingerprint import MIXED_DIGEST, FieldValue, FingerprintRecord, diff_records
from snapshot_store.inspection.branches import Branch, ChainedPage, PageChain, page_chains
from snapshot_store.inspection.source import InspectionSource, StoredPage
from snapshot_store.record import parse_header
from snapshot_store.transcript import TranscriptEntry


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One branch in `ls`. num_shared_pages: parked pages that another listed branch has too."""

    tenant: str
    name: str
    head_turn_id: str
    model: str
    worker_id: str
    epoch: int
    committed_at: float
    num_turns: int
    num_tokens: int
    num_full_pages: int
    num_parked_pages: int
    num_shared_pages: int
    parked_bytes: int
    broken: str


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One committed turn.

    recompute: what its worker recorded about pages that had to be recomputed. foreign_pages, forced_numerics: the
    part that other numerics had in it, as the transcript entry says. text: if asked.
    """

    turn_id: str
    parent_id: str | None
    conversation_id: str | None
    worker_id: str
    epoch: int
    committed_at: float
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    format_digest: str
    numerics_digest: str
    recompute: Any
    foreign_pages: Any
    forced_numerics: Any
    text: str | None


@dataclass(frozen=True, slots=True)
class PageRow:
    """One page of a chain. state: parked, missing or damaged; the fields behind it are empty unless it is parked."""

    page_index: int
    digest: str
    state: str
    num_bytes: int = 0
    ttl_s: int = 0
    shared_by: int = 0
    writer_boot_id: str = ""
    epoch: int = 0
    stateless: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChainView:
    """Pages of a branch under one fingerprint, whose records are in clear or None where they were not published."""

    format_digest: str
    numerics_digest: str
    format: dict[str, str | int | float] | None
    numerics: dict[str, str | int | float] | None
    page_size: int
    pages: tuple[PageRow, ...]


@dataclass(frozen=True, slots=True)
class BranchView:
    """Everything that `show` tells of a branch. differences: fields in which its fingerprints differ."""

    row: ConversationRow
    scope: str
    turns: tuple[TurnRow, ...]
    chains: tuple[ChainView, ...]
    differences: tuple[str, ...]


class ParkedBranches:
    """Branches with their chains and what the pages server holds of them, read once."""

    def __init__(self, source: InspectionSource, branches: Sequence[Branch]) -> None:
        """Raises StoreUnreachable."""
        self._source = source
        self.chains = [page_chains(source, branch) for branch in branches]
        self.branches = tuple(branches)
        self._users = Counter(key for chains in self.chains for key in _keys(chains))
        self.stored = source.stored_pages(list(self._users))

    def rows(self) -> list[ConversationRow]:
        """One row per branch."""
        return [self._row(branch, chains) for branch, chains in zip(self.branches, self.chains, strict=True)]

    def view(self, branch: Branch, with_text: bool) -> BranchView:
        """All about one branch, which need not be one of the branches given. Raises StoreUnreachable."""
        chains = page_chains(self._source, branch)
        self.stored |= self._source.stored_pages([key for key in _keys(chains) if key not in self.stored])
        return BranchView(
            row=self._row(branch, chains),
            scope=f"{branch.head.scope.value}:{branch.head.scope_id}",
            turns=tuple(_turn_row(entry, with_text) for entry in branch.path),
            chains=tuple(self._chain_view(chain) for chain in chains),
            differences=self._differences(chains),
        )

    def _row(self, branch: Branch, chains: list[PageChain]) -> ConversationRow:
        parked = [key for key in _keys(chains) if key in self.stored]
        head = branch.head
        return ConversationRow(
            tenant=head.tenant,
            name=branch.name,
            head_turn_id=head.turn_id,
            model=head.model,
            worker_id=head.worker_id,
            epoch=head.epoch,
            committed_at=head.committed_at,
            num_turns=len(branch.path),
            num_tokens=len(branch.token_ids),
            num_full_pages=max((len(branch.token_ids) // c.page_size for c in chains if c.page_size), default=0),
            num_parked_pages=len(parked),
            num_shared_pages=sum(self._users[key] > 1 for key in parked),
            parked_bytes=sum(self.stored[key].num_bytes for key in parked),
            broken=branch.broken,
        )

    def _chain_view(self, chain: PageChain) -> ChainView:
        return ChainView(
            format_digest=chain.format_digest.hex(),
            numerics_digest=chain.numerics_digest.hex(),
            format=_shown(self._source.format_record(chain.format_digest)),
            numerics=_shown(self._source.numerics_record(chain.numerics_digest)),
            page_size=chain.page_size,
            pages=tuple(page_row(page, self.stored.get(page.key), self._users[page.key]) for page in chain.pages),
        )

    def _differences(self, chains: list[PageChain]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        # Mixed numerics say nothing about how cells were computed.
        for newer, older in pairwise(chain for chain in chains if chain.numerics_digest != MIXED_DIGEST):
            formats = [self._source.format_record(chain.format_digest) for chain in (older, newer)]
            numerics = [self._source.numerics_record(chain.numerics_digest) for chain in (older, newer)]
            for left, right in (formats, numerics):
                if left is not None and right is not None:
                    found |= {str(difference): None for difference in diff_records(left, right)}
        return tuple(found)


def page_row(page: ChainedPage, stored: StoredPage | None, shared_by: int) -> PageRow:
    """Describe a page by its header; the body is not read."""
    digest = page.expected.digest.hex()
    if stored is None:
        return PageRow(page.page_index, digest, "missing")
    try:
        header = parse_header(page.key, memoryview(stored.header))
        page.expected.check(header)
    except DamagedRecord as error:
        fault = f"{type(error).__name__}: {error}"
        return PageRow(page.page_index, digest, "damaged", stored.num_bytes, stored.ttl_s, shared_by, error=fault)
    own = header.identity
    return PageRow(
        page.page_index, digest, "parked", stored.num_bytes, stored.ttl_s, shared_by,
        own.writer_boot_id.hex(), own.epoch, own.stateless,
    )  # fmt: skip


def _keys(chains: list[PageChain]) -> list[str]:
    return [page.key for chain in chains for page in chain.pages]


def _turn_row(entry: TranscriptEntry, with_text: bool) -> TurnRow:
    return TurnRow(
        turn_id=entry.turn_id,
        parent_id=entry.parent_id,
        conversation_id=entry.conversation_id,
        worker_id=entry.worker_id,
        epoch=entry.epoch,
        committed_at=entry.committed_at,
        finish_reason=entry.finish_reason,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=len(entry.output_ids),
        format_digest=entry.format_digest.hex(),
        numerics_digest=entry.numerics_digest.hex(),
        recompute=entry.extra.get("recompute"),
        foreign_pages=entry.extra.get("foreign_pages"),
        forced_numerics=entry.extra.get("forced_numerics"),
        text=entry.output_text if with_text else None,
    )


def _shown(record: FingerprintRecord | None) -> dict[str, str | int | float] | None:
    return None if record is None else {name: _plain(value) for name, value in record.fields}


def _plain(value: FieldValue) -> str | int | float:
    return value.hex() if isinstance(value, bytes) else value
