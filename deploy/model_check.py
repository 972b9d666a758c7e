"""Looks at a named model before anything is started, so that a slip costs one line and not a start."""

from __future__ import annotations

from pathlib import Path

from deploy.errors import BadOption


def check_model(path: Path) -> None:
    """Read the model's header. Raises BadOption with what is wrong."""
    # Imported here: only commands that start workers have the worker extra and need NumPy.
    from gpu.errors import GpuError
    from gpu.model.load import open_source

    if not path.exists():
        raise BadOption("--model", str(path), "no such file or folder")
    try:
        open_source(path)
    except (GpuError, OSError) as error:
        raise BadOption("--model", str(path), str(error)) from error
