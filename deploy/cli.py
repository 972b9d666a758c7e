"""The `kvalet` command."""

from __future__ import annotations

from importlib.metadata import version as package_version

import typer

app = typer.Typer(
    name="kvalet",
    help="Parks LLM conversations and brings them back on any worker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Parks LLM conversations and brings them back on any worker."""


@app.command()
def version() -> None:
    """Print the installed version."""
    typer.echo(package_version("kvalet"))
