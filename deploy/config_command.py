"""`kvalet config` as a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from deploy.arguments import Data
from deploy.configuration import Setting, settings_in_force
from deploy.errors import BadOption
from deploy.running import RunningStack, default_directory, read_running

_out = Console()


def config(
    call: typer.Context,
    data: Data = None,
    running: Annotated[bool, typer.Option("--running", help="Those of the running `kvalet up` instead.")] = False,
) -> None:
    """Print the settings in force and where each comes from, as lines that a settings file takes.

    When `kvalet up` runs, comments at the end say where the settings that it gave its processes differ.
    """
    directory = data or default_directory()
    stack = read_running(directory)
    if running and stack is None:
        raise BadOption("--running", str(directory), "no `kvalet up` runs on this data folder")
    here = settings_in_force(call.obj)
    _print_settings(stack.settings if running and stack else here)
    if stack is not None and not running:
        _print_differences(stack, here)


def _print_settings(settings: Sequence[Setting]) -> None:
    process = ""
    for setting in settings:
        if setting.process != process:
            process = setting.process
            _out.print(f"# {process}", highlight=False)
        line = f"{setting.variable}={setting.value}"
        _out.print(f"{line:<60} # {setting.source}", highlight=False, markup=False, soft_wrap=True)


def _print_differences(stack: RunningStack, here: Sequence[Setting]) -> None:
    values = {setting.variable: setting.value for setting in here}
    _out.print(f"# running: `kvalet up`, process {stack.pid}; `kvalet config --running` prints all", highlight=False)
    for setting in stack.settings:
        if values.get(setting.variable) != setting.value:
            line = f"#   {setting.process} {setting.variable}={setting.value}"
            _out.print(f"{line:<60} # {setting.source}", highlight=False, markup=False, soft_wrap=True)
