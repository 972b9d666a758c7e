"""The reports as text for people. Never prints token ids or contents unless the report carries them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from snapshot_store.inspection.check import Finding, VerifyReport
from snapshot_store.inspection.views import BranchView, ChainView, ConversationRow, PageRow, TurnRow

SHORT_DIGEST = 12
_WIDEST = 10_000


def print_rows(console: Console, rows: Iterable[ConversationRow]) -> None:
    """Print the table of `ls`."""
    table = Table(box=None, pad_edge=False)
    for name in ("TENANT", "CONVERSATION", "MODEL", "LAST WORKER", "AGE"):
        table.add_column(name)
    for name in ("TURNS", "TOKENS", "PAGES", "PARKED", "SHARED", "BYTES"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (row.num_turns, row.num_tokens, row.num_full_pages, row.num_parked_pages, row.num_shared_pages)
        note = f"  ({row.broken})" if row.broken else ""
        names = (row.tenant, row.name + note, row.model, row.worker_id, age(row.committed_at))
        table.add_row(*map(escape, names), *map(str, counts), size(row.parked_bytes))
    print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """Print a table with every cell on one line, however narrow the terminal: a folded id cannot be copied."""
    widest = console.options.update(width=_WIDEST, max_width=_WIDEST)
    needed = Measurement.get(console, widest, table).maximum
    terminal = console.width
    try:
        console.width = max(terminal, needed)
        console.print(table, crop=False)
    finally:
        console.width = terminal


def print_branch(console: Console, view: BranchView, with_pages: bool) -> None:
    """Print what `show` tells of one branch."""
    row = view.row
    console.print(f"{row.name}  tenant {row.tenant}  model {row.model}  scope {view.scope}", markup=False)
    parked = f"{row.num_parked_pages} of {row.num_full_pages} full pages parked, {row.num_shared_pages} shared"
    console.print(f"{row.num_tokens} tokens, {parked}, {size(row.parked_bytes)}", markup=False)
    if row.broken:
        console.print(f"transcript: {row.broken}", markup=False)
    print_table(console, _turn_table(view.turns))
    for turn in view.turns:
        _print_turn_notes(console, turn)
    for chain in view.chains:
        _print_chain(console, chain, with_pages)
    for difference in view.differences:
        console.print(f"fingerprints differ in {difference}", markup=False)


def print_verify(console: Console, report: VerifyReport) -> None:
    """Print what `verify` found, damage last."""
    for finding in report.broken_branches:
        console.print(f"not verifiable: {_located(finding)}", markup=False)
    for finding in report.damaged:
        console.print(f"damaged: {_located(finding)}", markup=False)
    checked = f"{report.num_pages_checked} pages checked ({size(report.checked_bytes)})"
    others = f"{report.num_pages_missing} not parked, {report.num_pages_orphaned} orphaned"
    summary = f"{report.num_branches} conversations, {checked}, {others}, {len(report.damaged)} damaged"
    console.print(summary, markup=False)


def size(num_bytes: int) -> str:
    """Bytes in binary units."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def age(at: float) -> str:
    """Time since `at` (unix seconds) in its largest unit."""
    seconds = max(0, int(time.time() - at))
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def page_runs(pages: Iterable[PageRow]) -> Iterator[tuple[int, int, str]]:
    """First page, last page and state of each run of pages in the same state."""
    for state, run in groupby(pages, key=lambda page: page.state):
        members = list(run)
        yield members[0].page_index, members[-1].page_index, state


def _turn_table(turns: Iterable[TurnRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("TURN", "WORKER", "FINISH"):
        table.add_column(name)
    for name in ("EPOCH", "PROMPT", "CACHED", "OUTPUT"):
        table.add_column(name, justify="right")
    for turn in turns:
        numbers = (turn.epoch, turn.prompt_tokens, turn.cached_tokens, turn.output_tokens)
        table.add_row(*map(escape, (turn.turn_id, turn.worker_id, turn.finish_reason)), *map(str, numbers))
    return table


def _print_turn_notes(console: Console, turn: TurnRow) -> None:
    if turn.recompute:
        console.print(f"{turn.turn_id} recomputed: {json.dumps(turn.recompute, sort_keys=True)}", markup=False)
    if turn.foreign_pages:
        reused = json.dumps(turn.foreign_pages, sort_keys=True)
        console.print(f"{turn.turn_id} reused pages of other numerics: {reused}", markup=False, soft_wrap=True)
    if turn.forced_numerics:
        sampled = ", ".join(turn.forced_numerics)
        console.print(f"{turn.turn_id} goes on with a reply of other numerics: {sampled}", markup=False, soft_wrap=True)
    if turn.text is not None:
        console.print(f"{turn.turn_id} text: {turn.text}", markup=False)


def _print_chain(console: Console, chain: ChainView, with_pages: bool) -> None:
    for name, digest, record in (
        ("format", chain.format_digest, chain.format),
        ("numerics", chain.numerics_digest, chain.numerics),
    ):
        fields = "not published" if record is None else " ".join(f"{key}={value}" for key, value in record.items())
        console.print(f"{name} {digest[:SHORT_DIGEST]}: {fields}", markup=False, soft_wrap=True)
    if chain.page_size == 0:
        console.print("  page size unknown: no record is parked and none was published", markup=False)
    for first, last, state in page_runs(chain.pages):
        console.print(f"  pages {first}-{last}: {state}", markup=False)
    for page in chain.pages:
        if with_pages or page.error:
            console.print(f"  {_page_line(page)}", markup=False, soft_wrap=True)


def _page_line(page: PageRow) -> str:
    line = f"page {page.page_index} {page.digest} {page.state}"
    if page.error:
        return f"{line}: {page.error}"
    if page.state == "missing":
        return line
    kind = "stateless" if page.stateless else "named"
    facts = f"{size(page.num_bytes)} ttl {page.ttl_s} s, in {page.shared_by} conversations, {kind}"
    return f"{line} {facts}, writer {page.writer_boot_id} epoch {page.epoch}"


def _located(finding: Finding) -> str:
    page = "" if finding.page_index is None else f" page {finding.page_index}"
    owners = f" of {', '.join(finding.owners)}" if finding.owners else ""
    return f"{finding.where}{page}{owners}: {finding.error}: {finding.detail}"
