"""Workers of a benchmark's own process. Used by the benchmarks of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.embedded import EmbeddedServer, EmbeddedSpec, Role
from snapshot_store.store import PageStore
from tests.fleet import Fleet


@contextmanager
def fleet_of(
    model: Path, settings: dict[str, Any], make_store: Callable[[str], PageStore] | None = None
) -> Iterator[Fleet]:
    """A fleet on two embedded servers. make_store: of the page server's URL, for each worker."""
    with tempfile.TemporaryDirectory(prefix="kvalet-bench-") as folder:
        servers = []
        roles: tuple[tuple[Role, int], ...] = (("control", 256), ("pages", 1024))
        for role, mib in roles:
            directory = Path(folder) / role
            spec = EmbeddedSpec(
                role, directory, Path(folder) / f"{role}.sock", directory / "log", directory / "pid", mib
            )
            servers.append(EmbeddedServer(spec))
            servers[-1].wait_ready()
        control, pages = servers
        fleet = Fleet(control.url, pages.url, model, make_store, attest="off", mirror_mib=512, **settings)
        try:
            yield fleet
        finally:
            fleet.stop()
            for server in servers:
                server.stop()
