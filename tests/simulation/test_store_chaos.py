"""Many readers and writers over a relay that cuts, stalls and fragments connections at random, from one seed.

Whatever happens on the wire: a page that is present has exactly its bytes, nothing but an outcome comes out, and no
buffer changes once its fetch is closed.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from snapshot_store.errors import StoreUnreachable
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PageDamaged, PageMissing, PagePresent
from snapshot_store.wire_pool import WireSettings
from tests.services import ValkeyServer
from tests.store_pages import Page, make_pages

SEGMENTS = (20_000, 10_000, 20_000, 10_000)
SIZE = sum(SEGMENTS)
ROUNDS = 12


class ChaosRelay:
    """Passes bytes on; each connection has a budget after which it is cut, and sometimes stalls."""

    def __init__(self, port: int, seed: int) -> None:
        self._target = port
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                inbound, _ = self._listener.accept()
            except OSError:
                return
            outbound = socket.create_connection(("127.0.0.1", self._target))
            for source, target in ((inbound, outbound), (outbound, inbound)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        budget = self._random.choice((2_000, 70_000, 400_000, 1 << 40))
        try:
            while data := source.recv(self._random.choice((1_000, 9_000, 60_000))):
                if self._random.random() < 0.01:
                    time.sleep(0.05)
                budget -= len(data)
                if budget < 0:
                    self.num_cuts += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Customer(threading.Thread):
    """Puts and fetches its own pages and closes early now and then; collects everything that must not happen."""

    def __init__(self, store: RedisPageStore, pages: list[Page], seed: int) -> None:
        super().__init__(daemon=True)
        self._store = store
        self._pages = pages
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        try:
            for _ in range(ROUNDS):
                self._round()
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _round(self) -> None:
        for page in self._pages:
            self.seen[self._store.put(page.key, page.header, memoryview(page.body), 600).status] += 1
        try:
            self._store.touch([page.key for page in self._pages], 600)
        except StoreUnreachable:
            self.seen["touch failed"] += 1
        buffers = [bytearray(SIZE) for _ in self._pages]
        stop_after = self._random.choice((1, 3, len(self._pages)))
        requests = [page.request(into) for page, into in zip(self._pages, buffers, strict=True)]
        with closing(self._store.fetch(requests)) as outcomes:
            for index, outcome in zip(range(stop_after), outcomes, strict=False):
                self.seen[type(outcome).__name__] += 1
                if isinstance(outcome, PagePresent) and bytes(buffers[index]) != self._pages[index].body:
                    self.wrong.append(f"page {index} has other bytes")
                if isinstance(outcome, PageDamaged):
                    self.wrong.append(f"page {index}: {outcome.error}")
                if isinstance(outcome, PageMissing) and outcome.quarantined:
                    self.wrong.append(f"page {index} is quarantined")
        at_close = [bytes(into) for into in buffers]
        time.sleep(0.002)
        if [bytes(into) for into in buffers] != at_close:
            self.wrong.append("a buffer changed after its fetch was closed")


@pytest.fixture(params=[1, 2])
def relay(request: pytest.FixtureRequest, pages_server: ValkeyServer) -> Iterator[ChaosRelay]:
    made = ChaosRelay(pages_server.port, request.param)
    yield made
    made.close()


def test_store_over_a_wire_in_chaos_gives_right_bytes_or_a_reason(relay: ChaosRelay) -> None:
    settings = WireSettings(f"redis://127.0.0.1:{relay.port}/0", max_connections=6, operation_timeout_s=1.0)
    store = RedisPageStore(settings)
    groups = [make_pages(list(range(n * 1000, n * 1000 + 16 * 6)), segments=SEGMENTS) for n in range(4)]
    customers = [Customer(store, pages, seed) for seed, pages in enumerate(groups)]
    for customer in customers:
        customer.start()
    for customer in customers:
        customer.join(60)
    store.close()
    seen = sum((customer.seen for customer in customers), Counter())
    assert [wrong for customer in customers for wrong in customer.wrong] == []
    assert not any(customer.is_alive() for customer in customers)
    assert relay.num_cuts > 20, "not exercised"
    assert seen["PagePresent"] > 20, f"not exercised: {seen}"
    assert seen["PageUnreachable"] > 5, f"not exercised: {seen}"
