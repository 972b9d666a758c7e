"""Ends asyncio tasks that speak to control."""

from __future__ import annotations

import asyncio
from typing import Any, Final

PATIENCE_S: Final = 0.5


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until each has ended; what they raised is dropped.

    Once is not enough: redis-py can swallow a cancellation that comes while it takes a connection.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=PATIENCE_S)
    await asyncio.gather(*tasks, return_exceptions=True)
