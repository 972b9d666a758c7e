"""A whole Celery worker that may take no more memory while it computes the chunk of a long prompt.

`celery -A tests.limited_worker_app worker`. RLIMIT_AS is lowered to what the process uses around every step with at
least LONG_ROWS rows, so that an allocation in the prefill fails as it does on a host that is full.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.celery_app import Service, create_app
from workers.settings import WorkerSettings

LONG_ROWS = 1000


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Let no allocation of this process grow its address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def start(settings: WorkerSettings) -> Service:
    """The real service, whose backend launches long steps without memory to spare."""
    from workers.service import WorkerService

    service = WorkerService.start(settings)
    backend: Any = service.runtime.backend
    launch = backend.launch

    def launch_limited(plan: Any) -> Any:
        if plan.num_rows < LONG_ROWS:
            return launch(plan)
        with no_more_memory():
            return launch(plan)

    backend.launch = launch_limited
    return service


app = create_app(start)
