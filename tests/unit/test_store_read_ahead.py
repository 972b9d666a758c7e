"""Reading ahead: closing a fetch waits for a reader that is still writing."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from snapshot_store.read_ahead import ReadAhead
from snapshot_store.store import PageMissing, nobody_quarantined
from tests.store_pages import PAGE_BYTES, make_pages


class DeafConnection:
    """A connection whose reader does not hear an abort at once."""

    def abort(self) -> None:
        return


class OnePool:
    settings = SimpleNamespace(restore_connections=2, operation_timeout_s=5.0)

    @contextmanager
    def lease(self, priority: object, deadline: object) -> Any:
        yield DeafConnection()


def test_close_waits_until_the_last_reader_has_left_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, let_go = threading.Event(), threading.Event()
    first, second = make_pages(list(range(32)))
    into = bytearray(PAGE_BYTES)

    def read_page(connection: object, request: Any, is_quarantined: object, deadline: object) -> PageMissing:
        if request.key == second.key:
            reading.set()
            let_go.wait(10)
            request.into[:] = b"\xff" * PAGE_BYTES
        return PageMissing(request.key)

    monkeypatch.setattr("snapshot_store.read_ahead.read_page", read_page)
    requests = [first.request(bytearray(PAGE_BYTES)), second.request(into)]
    outcomes = ReadAhead(OnePool(), requests, nobody_quarantined).outcomes()  # type: ignore[arg-type]
    next(outcomes)
    assert reading.wait(5)
    closer = threading.Thread(target=outcomes.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive(), "closed while a reader was still writing"
    let_go.set()
    closer.join(5)
    assert not closer.is_alive()
    assert into == b"\xff" * PAGE_BYTES
