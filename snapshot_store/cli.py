"""`kvalet snapshot`: ls, show and verify what is parked. Reads control and pages only and changes nothing.

Exit codes: 0 fine, 1 a server cannot be read or an option is wrong, 3 something is damaged, 4 not found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from snapshot_store.errors import StoreError
from snapshot_store.inspection.branches import Branch, find_branches, read_transcripts
from snapshot_store.inspection.check import VerifyReport, report_transcripts, verify_branches, verify_strays
from snapshot_store.inspection.source import InspectionSource
from snapshot_store.inspection.text import print_branch, print_rows, print_verify
from snapshot_store.inspection.views import ParkedBranches

EXIT_ERROR = 1
EXIT_DAMAGED = 3
EXIT_NOT_FOUND = 4

app = typer.Typer(help="Inspect parked conversations.", no_args_is_help=True, pretty_exceptions_enable=False)

Control = Annotated[
    str, typer.Option("--control", envvar="KVALET_CONTROL_URL", help="URL of the control server.", show_envvar=True)
]
Pages = Annotated[
    str, typer.Option("--pages", envvar="KVALET_PAGES_URL", help="URL of the pages server.", show_envvar=True)
]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wanted = Annotated[str, typer.Argument(metavar="ID", help="A conversation id or a turn id.")]

DEFAULT_CONTROL = "redis://127.0.0.1:6379/0"
DEFAULT_PAGES = "redis://127.0.0.1:6380/0"


@app.command("ls")
def list_conversations(
    control: Control = DEFAULT_CONTROL,
    pages: Pages = DEFAULT_PAGES,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """List conversations and open branches with what is parked of each."""
    with _errors_end_the_command(control):
        source = InspectionSource.connect(control, pages)
        transcripts = read_transcripts(source, tenant)
        rows = ParkedBranches(source, transcripts.branches).rows()
        if as_json:
            _print_json({"conversations": rows})
        else:
            print_rows(Console(), rows)
        for item in transcripts.damaged:
            typer.echo(f"damaged transcript {item.tenant}/{item.turn_id}: {item.error}", err=True)


@app.command("show")
def show_conversation(
    wanted: Wanted,
    control: Control = DEFAULT_CONTROL,
    pages: Pages = DEFAULT_PAGES,
    tenant: Tenant = None,
    as_json: AsJson = False,
    with_pages: Annotated[bool, typer.Option("--each-page", help="List every page.")] = False,
    with_text: Annotated[bool, typer.Option("--text", help="Print the replies' text.")] = False,
) -> None:
    """Show one conversation or turn: turns, pages, fingerprint in clear, why pages were recomputed."""
    with _errors_end_the_command(control):
        source = InspectionSource.connect(control, pages)
        transcripts = read_transcripts(source, tenant)
        found = _found(transcripts.branches, wanted)
        parked = ParkedBranches(source, transcripts.branches)
        views = [parked.view(branch, with_text) for branch in found]
        if as_json:
            _print_json({"conversations": views})
        else:
            for view in views:
                print_branch(Console(), view, with_pages)
        if any(page.state == "damaged" for view in views for chain in view.chains for page in chain.pages):
            raise typer.Exit(EXIT_DAMAGED)


@app.command("verify")
def verify(
    wanted: Annotated[str | None, typer.Argument(metavar="[ID]", help="A conversation or turn; default: all.")] = None,
    control: Control = DEFAULT_CONTROL,
    pages: Pages = DEFAULT_PAGES,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Recompute chains from the transcripts and check every byte of the records; exit 3 if something is damaged."""
    with _errors_end_the_command(control):
        source = InspectionSource.connect(control, pages)
        transcripts = read_transcripts(source, tenant)
        report = VerifyReport()
        if wanted is None:
            report_transcripts(transcripts.damaged, report)
            known = verify_branches(source, transcripts.branches, report)
            verify_strays(source, tenant, known, report)
        else:
            report_transcripts([item for item in transcripts.damaged if item.turn_id == wanted], report)
            if report.is_sound:
                verify_branches(source, _found(transcripts.branches, wanted), report)
        if as_json:
            _print_json(report)
        else:
            print_verify(Console(soft_wrap=True), report)
        if not report.is_sound:
            raise typer.Exit(EXIT_DAMAGED)


def _found(branches: Sequence[Branch], wanted: str) -> list[Branch]:
    found = find_branches(branches, wanted)
    if not found:
        typer.echo(f"{wanted}: no such conversation or turn", err=True)
        raise typer.Exit(EXIT_NOT_FOUND)
    return found


@contextmanager
def _errors_end_the_command(control: str) -> Iterator[None]:
    """End with one line for a server that cannot be read. control: its URL, that of nobody in particular by default."""
    try:
        yield
    except StoreError as error:
        hint = "; name the servers with --control and --pages" if control == DEFAULT_CONTROL else ""
        typer.echo(f"error: {error}{hint}", err=True)
        raise typer.Exit(EXIT_ERROR) from error


def _print_json(value: Any) -> None:
    json.dump(_plain(value), sys.stdout, indent=2, sort_keys=True, default=repr)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
