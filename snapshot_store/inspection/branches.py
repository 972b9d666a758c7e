"""Branches of the turn tree as transcripts tell them, and the pages that belong to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from snapshot_store.chain import PageDigest, PrefixChain
from snapshot_store.errors import TranscriptDamaged
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.inspection.source import DamagedTranscript, InspectionSource
from snapshot_store.keys import page_key
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_reader import fold_token_ids

PROBED_PAGE_SIZES = (64, 32, 16, 128)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path of committed turns from the root to a leaf.

    token_ids: of the whole path, empty where `broken` says why they cannot be known.
    """

    path: tuple[TranscriptEntry, ...]
    token_ids: tuple[int, ...]
    broken: str = ""

    @property
    def head(self) -> TranscriptEntry:
        """The last turn."""
        return self.path[-1]

    @property
    def name(self) -> str:
        """The conversation's id, or the last turn's where there is none."""
        return self.head.conversation_id or self.head.turn_id


@dataclass(frozen=True, slots=True)
class Transcripts:
    """Everything that control holds of committed turns."""

    branches: tuple[Branch, ...]
    damaged: tuple[DamagedTranscript, ...]


@dataclass(frozen=True, slots=True)
class ChainedPage:
    """A page that the transcript says may be parked: where it would lie and what it must be."""

    key: str
    page_index: int
    expected: ExpectedPage


@dataclass(frozen=True, slots=True)
class PageChain:
    """The pages of one branch under one fingerprint.

    page_size 0: unknown, so no page can be named. pages: empty too where the tenant has no salt yet (nothing was ever
    parked) or the transcript does not give the tokens.
    """

    format_digest: bytes
    numerics_digest: bytes
    page_size: int
    pages: tuple[ChainedPage, ...] = field(default=())


def read_transcripts(source: InspectionSource, tenant: str | None) -> Transcripts:
    """Read all transcripts and arrange them as branches, newest first. Raises StoreUnreachable, BadKeyPart."""
    entries: dict[tuple[str, str], TranscriptEntry] = {}
    damaged: list[DamagedTranscript] = []
    for item in source.transcripts(tenant):
        if isinstance(item, DamagedTranscript):
            damaged.append(item)
        else:
            entries[item.tenant, item.turn_id] = item
    parents = {(entry.tenant, entry.parent_id) for entry in entries.values()}
    leaves = [entry for (owner, turn_id), entry in entries.items() if (owner, turn_id) not in parents]
    leaves.sort(key=lambda entry: (-entry.committed_at, entry.turn_id))
    return Transcripts(tuple(_branch(entries, leaf) for leaf in leaves), tuple(damaged))


def page_chains(source: InspectionSource, branch: Branch) -> list[PageChain]:
    """The chains of a branch under every fingerprint that its turns or its index entry name.

    Raises StoreUnreachable.
    """
    salt = source.salt(branch.head.tenant)
    chains = []
    for format_digest, numerics_digest in _fingerprints(source, branch):
        sizes = _page_sizes(source, branch, format_digest)
        if salt is None or branch.broken:
            candidates = [PageChain(format_digest, numerics_digest, size) for size in sizes]
        else:
            candidates = [_chain(branch, format_digest, numerics_digest, salt, size) for size in sizes]
        chains.append(_first_parked(source, candidates, PageChain(format_digest, numerics_digest, 0)))
    return chains


def find_branches(branches: Iterable[Branch], wanted: str) -> list[Branch]:
    """Branches of a conversation id, or that hold a turn id; a turn inside a branch cuts it there."""
    found = [branch for branch in branches if branch.head.conversation_id == wanted]
    if found:
        return found
    cut: dict[tuple[str, str], Branch] = {}
    for branch in branches:
        for index, entry in enumerate(branch.path):
            if entry.turn_id == wanted:
                path = branch.path[: index + 1]
                cut.setdefault((entry.tenant, entry.turn_id), _folded(path))
    return list(cut.values())


def _branch(entries: dict[tuple[str, str], TranscriptEntry], leaf: TranscriptEntry) -> Branch:
    path = [leaf]
    seen = {leaf.turn_id}
    while (parent_id := path[-1].parent_id) is not None:
        parent = entries.get((leaf.tenant, parent_id))
        if parent is None or parent_id in seen:
            fault = "is its own ancestor" if parent else "has no transcript entry"
            return Branch(tuple(reversed(path)), (), f"turn {parent_id} {fault}")
        seen.add(parent_id)
        path.append(parent)
    return _folded(tuple(reversed(path)))


def _folded(path: tuple[TranscriptEntry, ...]) -> Branch:
    try:
        return Branch(path, fold_token_ids(path))
    except TranscriptDamaged as error:
        return Branch(path, (), str(error))


def _fingerprints(source: InspectionSource, branch: Branch) -> list[tuple[bytes, bytes]]:
    turns = reversed(branch.path)
    pairs = {(turn.format_digest, numerics): None for turn in turns for numerics in turn.numerics}
    entry = source.index_entry(branch.head.tenant, branch.name)
    if entry is not None:
        pairs |= {(entry.format_digest, numerics): None for numerics in entry.numerics_cells}
    return list(pairs)


def _page_sizes(source: InspectionSource, branch: Branch, format_digest: bytes) -> Sequence[int]:
    record = source.format_record(format_digest)
    size = record.as_dict().get("page_size") if record else None
    if isinstance(size, int) and size > 0:
        return (size,)
    entry = source.index_entry(branch.head.tenant, branch.name)
    if entry is not None and entry.format_digest == format_digest and entry.page_size > 0:
        return (entry.page_size,)
    return PROBED_PAGE_SIZES


def _chain(branch: Branch, format_digest: bytes, numerics_digest: bytes, salt: bytes, page_size: int) -> PageChain:
    head, token_ids = branch.head, branch.token_ids
    chain = PrefixChain(format_digest, numerics_digest, salt, head.scope, head.scope_id, page_size)
    digests = chain.digests(token_ids)

    def page(index: int, digest: PageDigest) -> ChainedPage:
        own = token_ids[index * page_size : (index + 1) * page_size]
        expected = ExpectedPage(chain.parent_of(digests, index), digest, own, format_digest, numerics_digest)
        return ChainedPage(page_key(head.tenant, digest), index, expected)

    pages = tuple(page(index, digest) for index, digest in enumerate(digests))
    return PageChain(format_digest, numerics_digest, page_size, pages)


def _first_parked(source: InspectionSource, candidates: list[PageChain], unknown: PageChain) -> PageChain:
    if len(candidates) == 1:
        return candidates[0]
    for candidate in candidates:
        if candidate.pages and source.stored_pages([candidate.pages[0].key]):
            return candidate
    return unknown
