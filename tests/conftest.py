"""Fixtures that every test may use."""

from tests.services import _control_process, _pages_process, control_server, pages_server, start_server

__all__ = ["_control_process", "_pages_process", "control_server", "pages_server", "start_server"]
