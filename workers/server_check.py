"""Looks at the two servers of a worker before anything else is done."""

from __future__ import annotations

from workers.errors import WorkerStartError
from workers.setting_checks import masked
from workers.turns.control import connect


def check_two_servers(control_url: str, pages_url: str) -> None:
    """Raise WorkerStartError unless both answer and are not one: a page transfer would block every script."""
    if server_run_id("control_url", control_url) == server_run_id("pages_url", pages_url):
        raise WorkerStartError("pages_url", masked(pages_url), "is the control server: use two")


def server_run_id(field: str, url: str) -> str:
    """What a server calls its own run. Raises WorkerStartError naming the field when it does not answer."""
    client = connect(url)
    try:
        return str(client.info("server").get("run_id"))
    except Exception as error:
        raise WorkerStartError(field, masked(url), f"does not answer ({error})") from error
    finally:
        client.close()
