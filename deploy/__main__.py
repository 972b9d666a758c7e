"""`python -m deploy`: the `kvalet` command."""

from __future__ import annotations

from deploy.cli import run

run()
