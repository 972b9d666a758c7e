"""A Celery worker whose service cannot start. `celery -A tests.failing_worker_app worker`."""

from __future__ import annotations

from workers.celery_app import Service, create_app
from workers.errors import WorkerStartError
from workers.settings import WorkerSettings


def start(_: WorkerSettings) -> Service:
    """Fail as a service with a damaged model does."""
    raise WorkerStartError("model", "x.gguf", "is damaged")


app = create_app(start)
