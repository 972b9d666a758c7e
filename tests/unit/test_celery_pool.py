"""The worker's thread pool."""

from __future__ import annotations

import threading

from workers.celery_pool import TurnPool


def test_pool_that_has_started_starts_no_thread_for_tasks_that_meet() -> None:
    pool = TurnPool(limit=3)
    pool.start()
    try:
        threads = set(pool.executor._threads)
        assert len(threads) == 3
        meeting = threading.Barrier(3)
        for task in [pool.executor.submit(meeting.wait, 10) for _ in range(3)]:
            task.result(10)
        assert set(pool.executor._threads) == threads
    finally:
        pool.stop()
