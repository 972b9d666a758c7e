"""Fixtures that every test may use."""

from tests.fleet_fixtures import fp16_gguf, local_fleet, make_fleet, tiny_gguf
from tests.services import _control_process, _pages_process, control_server, pages_server, start_server
from tests.worker_process import fleet, start_worker

__all__ = [
    "_control_process",
    "_pages_process",
    "control_server",
    "fleet",
    "fp16_gguf",
    "local_fleet",
    "make_fleet",
    "pages_server",
    "start_server",
    "start_worker",
    "tiny_gguf",
]
