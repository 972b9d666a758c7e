"""Page transfers of the store against redis-py on one embedded page server: GB/s and CPU seconds per GB.

    python -m benchmarks.store [--megabytes 256] [--out results/store.json]

Each figure is the median of the repeats of one run; redis-py, with its default parser, moves the same bytes in the same
run as the thing to compare with. `floor` is a bare socket pair between two processes: what the machine allows.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from benchmarks._record import figure, write
from deploy.embedded import EmbeddedServer, EmbeddedSpec
from snapshot_store.chain import PrefixChain
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.keys import page_key
from snapshot_store.record import PageIdentity, build_header
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import FetchRequest, PagePresent, PutStatus
from snapshot_store.transcript import CacheScope
from snapshot_store.wire_pool import WireSettings

PAGE_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
CONNECTIONS = (1, 2, 4)
NUM_SEGMENTS = 64
PAGE_SIZE = 16
REPEATS = 3
TTL_S = 3600
FORMAT, NUMERICS, BOOT_ID = b"f" * 32, b"n" * 32, b"b" * 16


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="bytes moved per sample")
    parser.add_argument("--out", type=Path, help="default: results/store.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvalet-bench-") as folder:
        server = _server(Path(folder), 2 * arguments.megabytes + 256)
        try:
            samples = _measure(server.url, arguments.megabytes << 20)
        finally:
            server.stop()
    write("store", samples, arguments.out, redis_py=redis.__version__)


def _server(folder: Path, maxmemory_mib: int) -> EmbeddedServer:
    spec = EmbeddedSpec("pages", folder, folder / "s.sock", folder / "log", folder / "pid", maxmemory_mib)
    server = EmbeddedServer(spec)
    server.wait_ready()
    return server


def _measure(url: str, total_bytes: int) -> list[dict[str, Any]]:
    samples = [_sample("floor", "socket-pair", 4 << 20, 1, total_bytes, lambda: _socket_pair(total_bytes))]
    for page_bytes in PAGE_BYTES:
        num_pages = max(1, total_bytes // page_bytes)
        samples += _measure_redis_py(url, page_bytes, num_pages)
        for connections in CONNECTIONS:
            samples += _measure_store(url, page_bytes, num_pages, connections)
    return samples


def _measure_store(url: str, page_bytes: int, num_pages: int, connections: int) -> list[dict[str, Any]]:
    store = RedisPageStore(WireSettings(url, restore_connections=connections, operation_timeout_s=60.0))
    pages = [_Page(page_bytes, index) for index in range(num_pages)]
    buffers = [bytearray(page_bytes) for _ in pages]
    client = redis.Redis.from_url(url)

    def put() -> None:
        for page in pages:
            outcome = store.put(page.key, page.header(), page.body, TTL_S)
            assert outcome.status is PutStatus.STORED, outcome

    def fetch() -> None:
        requests = [page.request(buffer) for page, buffer in zip(pages, buffers, strict=True)]
        assert all(isinstance(outcome, PagePresent) for outcome in store.fetch(requests))

    moved = num_pages * page_bytes
    samples = []
    if connections == 1:
        samples.append(_sample("put", "store", page_bytes, 1, moved, put, client.flushall))
    else:
        client.flushall()
        put()
    samples.append(_sample("fetch", "store", page_bytes, connections, moved, fetch))
    store.close()
    return samples


def _measure_redis_py(url: str, page_bytes: int, num_pages: int) -> list[dict[str, Any]]:
    client = redis.Redis.from_url(url)
    page = _Page(page_bytes, 0)
    value = page.header() + bytes(page.body)

    def put() -> None:
        for index in range(num_pages):
            client.set(f"plain:{index}", value, nx=True, ex=TTL_S)

    def fetch() -> None:
        for index in range(num_pages):
            assert client.get(f"plain:{index}") is not None

    moved = num_pages * page_bytes
    put_sample = _sample("put", "redis-py", page_bytes, 1, moved, put, client.flushall)
    return [put_sample, _sample("fetch", "redis-py", page_bytes, 1, moved, fetch)]


class _Page:
    """A page of random bytes; all pages share one body, since only lengths and checksums cost time."""

    _bodies: dict[int, bytes] = {}  # noqa: RUF012

    def __init__(self, page_bytes: int, index: int) -> None:
        self.body = memoryview(self._bodies.setdefault(page_bytes, os.urandom(page_bytes)))
        self.segments = (page_bytes // NUM_SEGMENTS,) * NUM_SEGMENTS
        chain = PrefixChain(FORMAT, NUMERICS, b"s" * 32, CacheScope.TENANT, "local", PAGE_SIZE)
        token_ids = tuple(range(index, index + PAGE_SIZE))
        digest = chain.page_digest(chain.root, token_ids)
        self.identity = PageIdentity(
            chain.root, digest, index, token_ids, FORMAT, NUMERICS, BOOT_ID, 1, False
        )  # fmt: skip
        self.key = page_key("local", digest)

    def header(self) -> bytes:
        return build_header(self.key, self.identity, self.body, self.segments)

    def request(self, into: bytearray) -> FetchRequest:
        own = self.identity
        expected = ExpectedPage(own.parent, own.digest, own.token_ids, FORMAT, NUMERICS)
        return FetchRequest(self.key, expected, self.segments, memoryview(into))


def _sample(
    operation: str,
    client: str,
    page_bytes: int,
    connections: int,
    moved: int,
    work: Callable[[], None],
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    seconds, cpu_seconds = [], []
    for _ in range(REPEATS):
        before()
        used, started = _cpu_seconds(), time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(_cpu_seconds() - used)
    gigabytes = moved / 1e9
    return figure(
        f"{operation}_{client}_{page_bytes >> 20}MiB_x{connections}",
        [gigabytes / value for value in seconds],
        "GB/s",
        cpu_s_per_gb=round(statistics.median(cpu_seconds) / gigabytes, 3),
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _socket_pair(total_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        payload = memoryview(bytes(4 << 20))
        for _ in range(total_bytes // len(payload)):
            theirs.sendall(payload)
        os._exit(0)
    theirs.close()
    buffer = memoryview(bytearray(4 << 20))
    while ours.recv_into(buffer):
        pass
    ours.close()
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
