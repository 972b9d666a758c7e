"""C59's second half: a worker that is given a hostile model file ends at once and says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.services import ValkeyServer
from tests.worker_process import CeleryWorker
from workers.errors import CANNOT_START

KEY_OF_2_63 = "47475546 03000000 0000000000000000 0100000000000000 0000000000000080"


def test_worker_with_a_hostile_model_exits_with_fault_and_path(
    start_worker: Callable[..., CeleryWorker], pages_server: ValkeyServer, tmp_path: Path
) -> None:
    model = tmp_path / "hostile.gguf"
    model.write_bytes(bytes.fromhex(KEY_OF_2_63))
    worker = start_worker("hostile", app="workers.celery_app", model=model, pages_url=pages_server.url)
    assert worker.process.wait(60) == os.EX_CONFIG
    assert f"{CANNOT_START}{model}: end of metadata count=37: file short by 5 bytes\n" in worker.text()
