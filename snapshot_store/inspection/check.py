"""`verify`: recompute every chain from the transcripts' tokens, read every record and hold one against the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from snapshot_store.chain import PageDigest
from snapshot_store.errors import BadTokenIds, DamagedRecord, ForeignRecord, OversizedRecord, TruncatedRecord
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.inspection.branches import Branch, page_chains
from snapshot_store.inspection.source import DamagedTranscript, InspectionSource
from snapshot_store.keys import last_part_of
from snapshot_store.record import PageHeader, check_body, damaged_segments, parse_header


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. where: a page key or a turn; owners: branches that it belongs to."""

    where: str
    error: str
    detail: str
    page_index: int | None = None
    owners: tuple[str, ...] = ()


@dataclass(slots=True)
class VerifyReport:
    """What was checked and what is wrong.

    num_pages_missing: evicted or never parked, no damage. num_pages_orphaned: sound, of a named conversation, but no
    transcript that was read leads to them. broken_branches: the transcript itself does not give the tokens.
    """

    num_branches: int = 0
    num_pages_checked: int = 0
    num_pages_missing: int = 0
    num_pages_orphaned: int = 0
    checked_bytes: int = 0
    damaged: list[Finding] = field(default_factory=list)
    broken_branches: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


def verify_branches(source: InspectionSource, branches: Iterable[Branch], report: VerifyReport) -> set[str]:
    """Check all pages that the branches lead to; returns their keys. Mutates `report`. Raises StoreUnreachable."""
    wanted: dict[str, tuple[int, ExpectedPage]] = {}
    owners: dict[str, list[str]] = {}
    for branch in branches:
        report.num_branches += 1
        if branch.broken:
            report.broken_branches.append(Finding(branch.head.turn_id, "TranscriptError", branch.broken))
        for chain in page_chains(source, branch):
            for page in chain.pages:
                wanted[page.key] = (page.page_index, page.expected)
                owners.setdefault(page.key, []).append(branch.name)
    for key, (page_index, expected) in wanted.items():
        raw = source.page_record(key)
        if raw is None:
            report.num_pages_missing += 1
        else:
            check_record(report, key, raw, expected, page_index, tuple(owners[key]))
    return set(wanted)


def verify_strays(source: InspectionSource, tenant: str | None, known: set[str], report: VerifyReport) -> None:
    """Check the records that no branch leads to against themselves. Mutates `report`. Raises StoreUnreachable."""
    for key in source.page_keys(tenant):
        raw = None if key in known else source.page_record(key)
        if raw is None:
            continue
        header = check_record(report, key, raw)
        report.num_pages_orphaned += header is not None and not header.identity.stateless


def report_transcripts(damaged: Iterable[DamagedTranscript], report: VerifyReport) -> None:
    """Count transcript entries that cannot be read as damage. Mutates `report`."""
    for item in damaged:
        report.damaged.append(Finding(f"{item.tenant}/{item.turn_id}", type(item.error).__name__, str(item.error)))


def check_record(
    report: VerifyReport,
    key: str,
    raw: bytes,
    expected: ExpectedPage | None = None,
    page_index: int | None = None,
    owners: tuple[str, ...] = (),
) -> PageHeader | None:
    """Check one record in full; every damaged segment is a finding. Returns its header if that is sound."""
    report.num_pages_checked += 1
    report.checked_bytes += len(raw)
    try:
        header = parse_header(key, memoryview(raw))
        if expected is not None:
            expected.check(header)
        else:
            _check_own_key(key, header)
    except DamagedRecord as error:
        report.damaged.append(_finding(key, error, page_index, owners))
        return None
    body = memoryview(raw)[header.num_bytes - header.body_bytes :]
    faults: list[DamagedRecord] = [*damaged_segments(header, body)]
    try:
        check_body(header, body)
    except (TruncatedRecord, OversizedRecord) as error:
        faults.insert(0, error)
    except DamagedRecord:
        pass
    report.damaged.extend(_finding(key, fault, page_index, owners) for fault in faults)
    return header


def _check_own_key(key: str, header: PageHeader) -> None:
    try:
        named = PageDigest.parse(last_part_of(key))
    except BadTokenIds:
        raise ForeignRecord("key") from None
    if named != header.identity.digest:
        raise ForeignRecord("digest")


def _finding(key: str, error: DamagedRecord, page_index: int | None, owners: tuple[str, ...]) -> Finding:
    return Finding(key, type(error).__name__, str(error), page_index, owners)
