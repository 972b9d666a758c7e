"""Runs the gateway under uvicorn: `python -m gateway.server`, or `serve(settings)`."""

from __future__ import annotations

import sys

import uvicorn

from gateway.app import create_app
from gateway.settings import GatewaySettings, SettingsError, load_settings


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


def main() -> int:
    """Entry point. Exits 2 with the variable's name when a setting is wrong."""
    try:
        serve(load_settings())
    except SettingsError as error:
        print(f"kvalet gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
