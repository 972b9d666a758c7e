"""Runs the gateway under uvicorn."""

from __future__ import annotations

import uvicorn

from gateway.app import create_app
from gateway.settings import GatewaySettings


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; open replies get `shutdown_grace_s` to end.

    Raises SettingsError for an unusable keys file.
    """
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
        server_header=False,
    )
