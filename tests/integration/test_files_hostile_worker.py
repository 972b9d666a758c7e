"""C59's second half: a worker that is given a hostile model file ends at once and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.services import ValkeyServer
from tests.worker_process import CeleryWorker

KEY_OF_2_63 = "47475546 03000000 0000000000000000 0100000000000000 0000000000000080"


def test_worker_with_a_hostile_model_exits_with_fault_and_path(
    start_worker: Callable[..., CeleryWorker], pages_server: ValkeyServer, tmp_path: Path
) -> None:
    model = tmp_path / "hostile.gguf"
    model.write_bytes(bytes.fromhex(KEY_OF_2_63))
    worker = start_worker("hostile", app="workers.celery_app", model=model, pages_url=pages_server.url)
    assert worker.process.wait(60) != 0
    output = worker.text()
    assert "file short by 5 bytes" in output
    assert f"model: {model}" in output
