"""Tables for people: nothing is cut or folded, on whatever they are printed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from snapshot_store.inspection.text import print_table


@pytest.mark.parametrize("width", [20, 80, 300])
@pytest.mark.parametrize("terminal", [False, True])
def test_table_keeps_every_cell_whole(width: int, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    table = Table("ID", "MODEL", "BYTES", box=None, pad_edge=False)
    cells = ("resp_" + "0123456789abcdef" * 4, "a model with spaces in its name " * 3 + "end", "1.5 GiB")
    table.add_row(*cells)
    print_table(console, table)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert all(cell in lines[1] for cell in cells)
    assert console.width == width
