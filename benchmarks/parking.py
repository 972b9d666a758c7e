"""What parking a page costs the reply that is decoded meanwhile.

    python -m benchmarks.parking [MODEL] [--threads 2] [--kv k8v4] [--out FILE]

Measured inside single replies: of four pages that the engine seals in turn, two are sent and two are not, in the order
ABBA, then BAAB, so that a context that grows and a machine that drifts cancel out. Each four give one paired
difference, of whole pages (all steps from the one that sealed a page to the next page's) and of the reach of an upload
(the first `REACH` of these steps, far more than an upload lasts; those behind it can only add noise). Medians with a
95 % bootstrap interval. An independent bound: processor time of the upload threads and of the page server, and the time
for which an upload keeps the interpreter from another thread, for each page.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks._fleet import fleet_of
from benchmarks._record import figure, write
from gpu.cache import HoldKind
from gpu.plan import SamplingParams
from snapshot_store.chain import PrefixChain
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PutOutcome
from snapshot_store.transcript import CacheScope
from snapshot_store.wire_pool import WireSettings
from workers.engine.requests import EngineOutput, EngineRequest, EngineTurn, Finished, SealedEvent, Token
from workers.parking.turn_pages import TurnPages
from workers.service import WorkerService
from workers.settings import default_model_path

PROMPT_PAGES = 8
DECODE_S, QUADS = 170, 6
ABBA = (True, False, False, True)
REACH = 8
TTL_S = 3600
PROBED_PAGES, IDLE_S = 12, 1.0
# Seconds without the interpreter that count: a turn of the probe's own loop takes a fraction of a microsecond.
GAP_S = 5e-6


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", default="k8v4", help="format of the cache")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = {"threads": arguments.threads, "kv_format": arguments.kv}
    write("parking", _figures(arguments.model, settings), arguments.out, **settings)


def _figures(model: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Cost of an upload in the steps of a reply, and its bounds."""
    with fleet_of(model, settings, TimedStore) as fleet:
        service = fleet.worker("parks")
        store = service.store
        assert isinstance(store, TimedStore)
        _Reply(service, 0, num_quads=1)
        replies: list[_Reply] = []
        thread_ms, upload_ms = [], []
        end = time.monotonic() + DECODE_S
        while time.monotonic() < end:
            store.seconds.clear()
            thread_s = _upload_threads_s()
            replies.append(_Reply(service, len(replies) + 1, QUADS))
            assert len(store.seconds) == 2 * QUADS, "not exercised"
            thread_ms.append(1000 * (_upload_threads_s() - thread_s) / len(store.seconds))
            upload_ms += [1000 * seconds for seconds in store.seconds]
        held_ms, server_ms = _probe(service, [(event, reply.pages) for reply in replies for event in reply.kept])
        page_bytes = service.engine.cache.layout.page_bytes
    quads = [quad for reply in replies for quad in reply.quads()]
    step_ms = statistics.median(1000 * step for quad in quads for page in quad.kept for step in page)
    page_ms = step_ms * len(quads[0].kept[0])
    busy = [100 * (ms + statistics.median(server_ms)) / page_ms for ms in thread_ms]
    return [
        _steps("decode, page sent", [page for quad in quads for page in quad.sent]),
        _steps("decode, page not sent", [page for quad in quads for page in quad.kept]),
        _interval("cost of parking, whole pages", [quad.cost() for quad in quads]),
        _interval("cost of parking, reach of an upload", [quad.cost(REACH) for quad in quads], reach_steps=REACH),
        figure("one upload", upload_ms, "ms", page_bytes=page_bytes, longest=round(max(upload_ms), 3)),
        figure("processor time of the upload thread", thread_ms, "ms/page"),
        figure("processor time of the page server", server_ms, "ms/page"),
        figure("interpreter kept from another thread", held_ms, "ms/page"),
        figure("both processor times / time of a page", busy, "%", page_ms=round(page_ms, 3)),
    ]


class TimedStore(RedisPageStore):
    """The store of the workers here; remembers how long each upload took."""

    def __init__(self, url: str) -> None:
        super().__init__(WireSettings(url))
        self.seconds: list[float] = []

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        """See PageStore."""
        begun = time.perf_counter()
        outcome = super().put(key, header, body, ttl_s)
        self.seconds.append(time.perf_counter() - begun)
        return outcome


class _Quad:
    """Step seconds of four pages in a row, two sent and two not."""

    def __init__(self, pages: Sequence[tuple[bool, list[float]]]) -> None:
        self.sent = [steps for is_sent, steps in pages if is_sent]
        self.kept = [steps for is_sent, steps in pages if not is_sent]

    def cost(self, num_steps: int | None = None) -> float:
        """Per cent of a page's time that the first `num_steps` (all) of the sent pages took longer."""
        sent, kept = (sum(sum(steps[:num_steps]) for steps in pages) for pages in (self.sent, self.kept))
        return 100 * (sent - kept) / sum(map(sum, self.kept))


class _Reply:
    """One reply, decoded by the worker's engine: the time of each step, and which sealed pages were sent."""

    def __init__(self, service: WorkerService, number: int, num_quads: int) -> None:
        self._service = service
        self._sealed_at: list[int] = []
        self._pattern = [s ^ bool(quad % 2) for quad in range(num_quads) for s in ABBA]
        self._outputs = _Stamps()
        self.kept: list[SealedEvent] = []
        identity, page_size = service.identity, service.engine.cache.layout.page_size
        # A scope of its own: no page of an earlier reply is known.
        scope = (CacheScope.CONVERSATION, f"reply{number}")
        chain = PrefixChain(identity.format_digest, identity.numerics_digest, bytes(32), *scope, page_size)
        self.pages = TurnPages("local", chain, False, epoch=1)
        vocab_size = service.runtime.source.config.vocab_size
        prompt = np.random.default_rng(number).integers(0, vocab_size, PROMPT_PAGES * page_size + 1).tolist()
        self._run(tuple(prompt), (len(self._pattern) + 1) * page_size)

    def quads(self) -> Iterator[_Quad]:
        """The steps of each four pages: those of a page begin with the one that sealed it."""
        steps = np.diff(self._outputs.stamps)
        pages = [
            (is_sent, steps[begin - 1 : end - 1].tolist())
            for is_sent, (begin, end) in zip(self._pattern, pairwise(self._sealed_at), strict=True)
        ]
        for first in range(0, len(pages), len(ABBA)):
            yield _Quad(pages[first : first + len(ABBA)])

    def _run(self, prompt: tuple[int, ...], num_tokens: int) -> None:
        engine = self._service.engine
        request = EngineRequest("reply", prompt, (), SamplingParams(0.0), num_tokens, frozenset(), 0, 0)
        turn = EngineTurn(request, self.pages, self._sealed, outputs=self._outputs)
        running = engine.admit(turn)
        turn.admitted.wait()
        self.pages.cover(prompt)
        engine.start(running)
        while isinstance(output := self._outputs.get(), Token):
            pass
        assert isinstance(output, Finished), output
        engine.discard(running)
        self._service.parking.flush()

    def _sealed(self, event: SealedEvent) -> None:
        """On the engine thread: pages of the reply are sent in the order of the pattern, all others let go."""
        if event.page_index >= PROMPT_PAGES:
            place = len(self._sealed_at)
            self._sealed_at.append(len(self._outputs.stamps))
            if place < len(self._pattern) and self._pattern[place]:
                self._service.parking.park(event, self.pages, TTL_S)
                return
            self.kept.append(event)
        self._service.engine.cache.release(event.page, HoldKind.UPLOAD)


class _Stamps(queue.SimpleQueue[EngineOutput]):
    """Outputs of the engine, with the time at which each token was delivered. Stamped on the engine thread."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, item: EngineOutput, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, Token):
            self.stamps.append(time.perf_counter())
        super().put(item)


def _probe(service: WorkerService, unsent: list[tuple[SealedEvent, TurnPages]]) -> tuple[list[float], list[float]]:
    """Send pages while a thread wants nothing but the interpreter.

    Returns milliseconds per page for which it did not have it (less those without uploads), and milliseconds of
    processor time per page that the page server took, the latter for each `PROBED_PAGES` pages.
    """
    end = time.perf_counter() + IDLE_S
    idle_share = _kept_from_interpreter_s(lambda: time.perf_counter() > end) / IDLE_S
    held_ms, server_ms = [], []
    for first in range(0, len(unsent) - PROBED_PAGES + 1, PROBED_PAGES):
        server_s = _server_s(service.settings.pages_url)
        for event, pages in unsent[first : first + PROBED_PAGES]:
            service.engine.call(partial(service.engine.cache.hold, event.page, HoldKind.UPLOAD))
            service.parking.park(event, pages, TTL_S)
            begun = time.perf_counter()
            held_s = _kept_from_interpreter_s(lambda: service.parking.backlog == 0)
            held_ms.append(1000 * (held_s - idle_share * (time.perf_counter() - begun)))
        server_ms.append(1000 * (_server_s(service.settings.pages_url) - server_s) / PROBED_PAGES)
    return held_ms, server_ms


def _kept_from_interpreter_s(done: Callable[[], bool]) -> float:
    kept_s, last = 0.0, time.perf_counter()
    while not done():
        now = time.perf_counter()
        if now - last > GAP_S:
            kept_s += now - last
        last = now
    return kept_s


def _upload_threads_s() -> float:
    """Processor seconds of the upload threads so far."""
    names = {f"park-{index}" for index in range(threading.active_count())}
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def _server_s(url: str) -> float:
    """Processor seconds of a server so far."""
    with redis.Redis.from_url(url) as client:
        cpu: dict[str, float] = client.info("cpu")
    return cpu["used_cpu_sys"] + cpu["used_cpu_user"]


def _steps(name: str, pages: Sequence[list[float]]) -> dict[str, Any]:
    """A figure of the mean step of each page; p99 of all single steps beside it."""
    p99_ms = 1000 * float(np.percentile(np.concatenate(pages), 99))
    return figure(name, [1000 * statistics.mean(steps) for steps in pages], "ms/token", step_p99_ms=round(p99_ms, 3))


def _interval(name: str, percent: Sequence[float], **facts: Any) -> dict[str, Any]:
    """A figure of paired differences with the bootstrap interval of its median."""
    draws = np.random.default_rng(0).choice(np.asarray(percent), (10_000, len(percent)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    interval = {"low_95": round(float(low), 3), "high_95": round(float(high), 3)}
    return figure(name, percent, "%", mean=round(statistics.mean(percent), 3), **interval, **facts)


if __name__ == "__main__":
    main()
