"""`kvalet doctor` as a command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deploy.arguments import Backend
from deploy.doctor.examination import examine
from deploy.doctor.finding import Finding


def doctor(
    backend: Backend = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether this machine can run Kvalet, what is missing and how to get it. Exits 1 when something is.

    GPUs are needed only when the settings or --backend ask for them.
    """
    findings = examine(backend)
    if as_json:
        _write_json(findings)
    else:
        print_findings(findings)
    if any(finding.missing for finding in findings):
        raise typer.Exit(1)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding on one line."""
    console = Console()
    for finding in findings:
        mark = "[green]ok[/]     " if finding.fine else "[red]missing[/]" if finding.needed else "[yellow]none[/]   "
        console.print(f"{mark} {finding.subject}: {escape(finding.detail)}", highlight=False, soft_wrap=True)


def _write_json(findings: Sequence[Finding]) -> None:
    fine = not any(finding.missing for finding in findings)
    rows = [
        {"subject": f.subject, "fine": f.fine, "needed": f.needed, "detail": f.detail, "facts": dict(f.facts)}
        for f in findings
    ]
    sys.stdout.write(json.dumps({"fine": fine, "findings": rows}, indent=2) + "\n")
