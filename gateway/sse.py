"""Server-sent events: frames, heartbeats, and the end when the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.turns.end_tasks import end_tasks

HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection; handled where the turn's fate is decided."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One event. frame_id resumes after it; None keeps the id of the frame before."""

    data: dict[str, Any]
    event: str | None = None
    frame_id: str | None = None


def encode(frame: Frame) -> bytes:
    """The frame's bytes. JSON is pure ASCII, so that no client splits it at a Unicode line separator."""
    lines = []
    if frame.frame_id is not None:
        lines.append(f"id: {frame.frame_id}")
    if frame.event is not None:
        lines.append(f"event: {frame.event}")
    lines.append("data: " + json.dumps(frame.data, ensure_ascii=True, allow_nan=False, separators=(",", ":")))
    return ("\n".join(lines) + "\n\n").encode("ascii")


class EventStream(Response):
    """Sends chunks as they come. `on_gone` is called when the client leaves first, `on_end` in every case, last."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], on_gone: Callable[[], None], on_end: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_gone = on_gone
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the chunks end or the client is gone."""
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            else:
                self._on_gone()
        except OSError:
            self._on_gone()
        finally:
            await end_tasks(pump, watch)
            await self._on_end()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work` unless the client leaves first.

    The body must have been read before. Raises ClientGone; then `work` has been cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await end_tasks(task, watch)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
