"""The wire client over TLS: a relay ends TLS in front of a real server."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PagePresent, PageUnreachable, PutStatus
from snapshot_store.wire_pool import WireSettings
from tests.services import ValkeyServer
from tests.store_pages import make_pages

CERTIFICATE = Path(__file__).parents[1] / "certificates" / "localhost.pem"
SEGMENTS = (1 << 20, 1 << 19)


class TlsRelay:
    """Accepts TLS on a loopback port and passes everything on to a plain port."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(CERTIFICATE)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            secure = self._context.wrap_socket(raw, server_side=True)
        except OSError:
            return
        plain = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=_copy, args=(secure, plain), daemon=True).start()
        _copy(plain, secure)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        return


@pytest.fixture
def relay(pages_server: ValkeyServer) -> Iterator[TlsRelay]:
    made = TlsRelay(pages_server.port)
    yield made
    made.close()


def _store(relay: TlsRelay, **query: str) -> RedisPageStore:
    options = "&".join(f"{name}={value}" for name, value in query.items())
    return RedisPageStore(WireSettings(f"rediss://localhost:{relay.port}/0?{options}", restore_connections=1))


def test_store_over_tls_puts_and_fetches_large_pages_on_one_connection(relay: TlsRelay) -> None:
    store = _store(relay, ssl_ca_certs=str(CERTIFICATE))
    pages = make_pages(list(range(64)), segments=SEGMENTS)
    assert [page.put(store).status for page in pages] == [PutStatus.STORED] * 4
    buffers = [bytearray(sum(SEGMENTS)) for _ in pages]
    outcomes = list(store.fetch([page.request(into) for page, into in zip(pages, buffers, strict=True)]))
    assert all(isinstance(outcome, PagePresent) for outcome in outcomes), outcomes
    assert [bytes(into) for into in buffers] == [page.body for page in pages]
    assert relay.num_connections == 1
    store.close()


def test_store_over_tls_with_a_certificate_that_nobody_vouches_for_is_unreachable(relay: TlsRelay) -> None:
    (page,) = make_pages(list(range(16)), segments=SEGMENTS)
    (outcome,) = _store(relay).fetch([page.request(bytearray(sum(SEGMENTS)))])
    assert isinstance(outcome, PageUnreachable)
    assert "certificate" in outcome.reason.lower()
