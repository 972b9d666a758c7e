"""The ASGI application: parts, routes, and one error shape for everything that goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import chat, conversations, responses, service
from gateway.auth import ApiKeys, load_keys
from gateway.errors import ApiError, NotFound
from gateway.fleet import FleetMonitor
from gateway.http import Gateway, Stopping, new_id
from gateway.metrics import GatewayMetrics
from gateway.prompt_size import PromptSizer
from gateway.settings import GatewaySettings
from gateway.turns import TurnService
from gateway.worker_metrics import WorkerFigures


def create_app(settings: GatewaySettings) -> FastAPI:
    """Build the application. Connections are opened by its lifespan.

    Raises SettingsError for an unusable keys file.
    """
    keys = load_keys(settings.keys_file)
    app = FastAPI(title="Kvalet", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan(settings, keys))
    for router in (chat.router, responses.router, conversations.router, service.router, service.fallback):
        app.include_router(router)
    app.add_middleware(RequestMetrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _internal_error)
    return app


class RequestMetrics:
    """Counts requests and the time to their headers, by route template; gives each an id. Streams pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note its status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", new_id("req_"))
                metrics: GatewayMetrics = scope["app"].state.gateway.metrics
                route = getattr(scope.get("route"), "path", "(none)")
                metrics.requests.labels(scope["method"], route, str(message["status"])).inc()
                metrics.latency.labels(scope["method"], route).observe(time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, noted)


def _lifespan(settings: GatewaySettings, keys: ApiKeys) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        turns = TurnService(settings)
        metrics = GatewayMetrics()
        fleet = FleetMonitor(turns, settings, metrics)
        metrics.registry.register(WorkerFigures(fleet.live_workers))
        sizer = PromptSizer(turns)
        app.state.gateway = Gateway(settings, keys, turns, fleet, sizer, metrics, Stopping(settings.shutdown_grace_s))
        await turns.open()
        await fleet.open()
        try:
            yield
        finally:
            await fleet.close()
            await turns.close()
            await asyncio.to_thread(sizer.close)

    return lifespan


async def _api_error(_: Request, error: Exception) -> Response:
    fault = error if isinstance(error, ApiError) else ApiError("internal error", code="server_error")
    return JSONResponse(fault.body(), status_code=fault.status, headers=fault.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    fault = NotFound(f"{request.method} {request.url.path[:120]} is not served", code="endpoint_not_served")
    return JSONResponse(fault.body(), status_code=status, headers=getattr(error, "headers", None))


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _internal_error(_: Request, __: Exception) -> Response:
    # The server's own error middleware has logged the traceback; none of it reaches the client.
    return JSONResponse(ApiError("internal error", code="server_error").body(), status_code=500)
