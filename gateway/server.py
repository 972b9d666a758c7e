"""Runs the gateway under uvicorn."""

from __future__ import annotations

import resource
import socket

import uvicorn

from gateway.app import create_app
from gateway.http import Gateway
from gateway.settings import GatewaySettings

_SHUTDOWN_SLACK_S = 3


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; open replies get `shutdown_grace_s` to end, then an error frame.

    Raises SettingsError for an unusable keys file.
    """
    _raise_descriptor_limit()
    GatewayServer(settings).run()


class GatewayServer(uvicorn.Server):
    """A uvicorn server that tells its replies when it is asked to stop."""

    def __init__(self, settings: GatewaySettings) -> None:
        config = uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            log_level=settings.log_level,
            access_log=settings.log_level == "debug",
            timeout_graceful_shutdown=int(settings.shutdown_grace_s) + _SHUTDOWN_SLACK_S,
            server_header=False,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to stop, then wait for replies as uvicorn does."""
        gateway: Gateway = self.config.app.state.gateway  # type: ignore[union-attr]
        gateway.stopping.begin()
        await super().shutdown(sockets)


def _raise_descriptor_limit() -> None:
    """Each waiting client holds a descriptor; the usual soft limit is far below what the process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
