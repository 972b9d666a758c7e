"""Parking and coming back on a CUDA device: from the local mirror, from the store, and what parking costs a decode.

    python -m benchmarks.cuda.parking [--cells 32768] [--json FILE]

8B shape, random weights, int8 KV. "local": two conversations that take turns on device slots for little more than one;
from attaching the sealed pages to the first new token. "store": pages put into an embedded Valkey over a Unix socket, a
fresh cache; from the look-up to the first new token. "parking": gaps between decode steps with and without a thread
that sends sealed pages to the store at the rate at which 32 such conversations would fill them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import _record
from benchmarks.cuda.engine import GREEDY, Bench, bench
from benchmarks.cuda.models import llama_8b
from deploy.embedded import EmbeddedServer, EmbeddedSpec
from gpu.cache import SealedPage, Sequence
from gpu.cuda.weight_packing import PackedStorage
from gpu.plan import PlanEntry, RowKind, StepPlan
from gpu.sampling import TokenHistory
from snapshot_store.chain import PrefixChain
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.keys import page_key
from snapshot_store.record import PageIdentity, build_header
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import FetchRequest, PagePresent
from snapshot_store.transcript import CacheScope
from snapshot_store.wire_pool import WireSettings
from tests.gpu.lab import Lab

BUS_BYTES_PER_S: Final = 51e9
TTL_S: Final = 3600
REPEATS: Final = 6
FORMAT, NUMERICS, BOOT_ID, SALT = b"f" * 32, b"n" * 32, b"b" * 16, b"s" * 32


@dataclass(frozen=True)
class StoredPage:
    """A page as the store knows it."""

    key: str
    identity: PageIdentity

    @classmethod
    def chain(cls, count: int, page_size: int) -> list[StoredPage]:
        """Pages of one token list, each behind the one before it."""
        chain = PrefixChain(FORMAT, NUMERICS, SALT, CacheScope.TENANT, "local", page_size)
        pages, parent = [], chain.root
        for index in range(count):
            ids = tuple(range(index, index + page_size))
            digest = chain.page_digest(parent, ids)
            identity = PageIdentity(parent, digest, index, ids, FORMAT, NUMERICS, BOOT_ID, 1, False)
            pages.append(cls(page_key("local", digest), identity))
            parent = digest
        return pages

    def expected(self) -> ExpectedPage:
        """What a reader of these tokens looks for."""
        own = self.identity
        return ExpectedPage(own.parent, own.digest, own.token_ids, FORMAT, NUMERICS)


@contextmanager
def page_store(megabytes: int) -> Iterator[RedisPageStore]:
    """An embedded page server, and a store with as many connections as a worker has."""
    with tempfile.TemporaryDirectory(prefix="kvalet-bench-") as folder:
        at = Path(folder)
        server = EmbeddedServer(EmbeddedSpec("pages", at, at / "s.sock", at / "log", at / "pid", megabytes))
        server.wait_ready()
        store = RedisPageStore(WireSettings(server.url, operation_timeout_s=60.0))
        try:
            yield store
        finally:
            store.close()
            server.stop()


def segments_of(made: Bench) -> tuple[int, ...]:
    """Plane lengths of a page, in page order."""
    layout = made.layout
    return tuple(layout.plane(layer, is_v).num_bytes for layer in range(layout.num_layers) for is_v in (0, 1))


def first_token(made: Bench, sequence: Sequence) -> None:
    """One more row of a sequence, sampled and read."""
    made.cache.reserve(sequence, sequence.length + 1)
    entry = PlanEntry(sequence, RowKind.PREFILL, (17,), GREEDY, 0, TokenHistory(()))
    made.backend.launch(StepPlan((entry,))).wait()


def sealed_pages(made: Bench, sequence: Sequence) -> list[SealedPage]:
    """The sealed pages of a sequence, in order."""
    return [made.cache.memory.sealed(page) for page in sequence.pages[: sequence.num_sealed]]


def measure_local(cells: int) -> list[dict[str, Any]]:
    """Two conversations whose pages push each other's device copies out."""
    slots = cells * 5 // 4
    with bench(llama_8b(), "int8", PackedStorage.BF16, 3 * cells, 4, device_cells=slots) as made:
        pages = []
        for _ in range(2):
            sequence = made.filled(cells)
            pages.append(sealed_pages(made, sequence))
            made.cache.close(sequence)
        times = []
        for turn in range(2 * REPEATS + 2):
            begun = time.perf_counter()
            sequence = made.cache.open()
            made.cache.attach(sequence, pages[turn % 2])
            first_token(made, sequence)
            times.append(time.perf_counter() - begun)
            made.cache.close(sequence)
        streamed = cells * made.layout.cell_bytes
        floor = streamed / BUS_BYTES_PER_S * 1e3
        facts = {"floor": round(floor, 1), "target": 80.0, "gigabytes": round(streamed / 1e9, 2)}
        millis = [seconds * 1e3 for seconds in times[2:]]
        return [_record.figure(f"local mirror, {cells} cells, to first token", millis, "ms", **facts)]


def measure_store(cells: int) -> list[dict[str, Any]]:
    """Put pages, restore them into a cache that lacks them, compute one token."""
    figures = []
    with bench(llama_8b(), "int8", PackedStorage.BF16, 2 * cells, 4) as made:
        total = cells * made.layout.cell_bytes
        segments, page_size = segments_of(made), made.layout.page_size
        known = StoredPage.chain(cells // page_size, page_size)
        with page_store(total // (1 << 20) * 3 // 2 + 512) as store:
            origin = made.filled(cells)
            for page, sealed in zip(known, sealed_pages(made, origin), strict=True):
                store.put(
                    page.key, build_header(page.key, page.identity, sealed.buffer, segments), sealed.buffer, TTL_S
                )
            made.drop(origin)
            times, fetches = [], []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                sequence = restored(made, store, known, segments)
                fetches.append(time.perf_counter() - begun)
                first_token(made, sequence)
                times.append(time.perf_counter() - begun)
                made.drop(sequence)
            rate = total / statistics.median(fetches) / 1e9
            facts = {"target": 600.0, "wire_gb_s": round(rate, 2), "gigabytes": round(total / 1e9, 2)}
            millis = [seconds * 1e3 for seconds in times]
            figures.append(_record.figure(f"store, {cells} cells, to first token", millis, "ms", **facts))
            figures += _parking(made, store, segments)
    return figures


def restored(made: Bench, store: RedisPageStore, known: list[StoredPage], segments: tuple[int, ...]) -> Sequence:
    """A sequence whose pages came from the store, each filled as it arrived."""
    cache = made.cache
    fills = cache.begin_fill(len(known))
    requests = [
        FetchRequest(page.key, page.expected(), segments, fill.buffer, partial(cache.prepare_fill, fill))
        for page, fill in zip(known, fills, strict=True)
    ]
    sealed = []
    with closing(store.fetch(requests)) as outcomes:
        for outcome, fill, page in zip(outcomes, fills, known, strict=True):
            if not isinstance(outcome, PagePresent):
                raise SystemExit(f"a page did not come back: {outcome}")
            cache.prove_fill(fill)
            sealed.append(cache.fill(fill, page.identity.digest))
    sequence = cache.open()
    cache.attach(sequence, sealed)
    return sequence


def _parking(made: Bench, store: RedisPageStore, segments: tuple[int, ...]) -> list[dict[str, Any]]:
    """Decode in blocks, with and without a thread that sends pages, in turn (ABBA)."""
    sequence = made.filled(8192)
    body = sealed_pages(made, sequence)[0].buffer
    fresh = iter(StoredPage.chain(4096, made.layout.page_size))
    pages_per_s = 32 * 200 / made.layout.page_size  # 32 conversations of 200 tokens a second
    made.decode([sequence], 50)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    sent = 0
    for parking in (False, True, True, False, False, True, True, False):
        stop = threading.Event()
        counted: list[int] = []
        thread = threading.Thread(target=_send, args=(store, fresh, body, segments, pages_per_s, stop, counted))
        if parking:
            thread.start()
        gaps[parking] += made.decode([sequence], 120)
        stop.set()
        if parking:
            thread.join()
        sent += len(counted)
    quiet, busy = statistics.median(gaps[False]), statistics.median(gaps[True])
    tail = {kept: sorted(gaps[kept])[int(len(gaps[kept]) * 0.99)] * 1e3 for kept in gaps}
    facts = {"target": 3.0, "pages_sent": sent, "p99_ms": round(tail[True], 3), "p99_quiet_ms": round(tail[False], 3)}
    made.drop(sequence)
    return [_record.figure("parking while decoding, longer steps", [100 * (busy / quiet - 1)], "%", **facts)]


def _send(
    store: RedisPageStore,
    pages: Iterator[StoredPage],
    body: memoryview,
    segments: tuple[int, ...],
    pages_per_s: float,
    stop: threading.Event,
    counted: list[int],
) -> None:
    while not stop.wait(1 / pages_per_s):
        page = next(pages)
        store.put(page.key, build_header(page.key, page.identity, body, segments), body, 60)
        counted.append(1)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=32 * 1024)
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_parking.json")
    arguments = parser.parse_args()
    lab = Lab()
    name, arch = lab.device.name, lab.device.arch
    lab.close()
    figures = measure_local(arguments.cells) + measure_store(arguments.cells)
    _record.write("cuda.parking", figures, arguments.json, device=name, arch=arch)


if __name__ == "__main__":
    main()
