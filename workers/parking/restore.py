"""Find the longest usable prefix of a turn: local mirror first, then the store, else it is recomputed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu.cache import FillPage, SealedPage
from gpu.errors import UnfilledPage
from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreError
from snapshot_store.store import FetchRequest, PageDamaged, PageMissing, PagePresent, PageStore, PageUnreachable
from snapshot_store.ttl import ttls_for_pages
from workers.engine.engine import Engine
from workers.engine.running import Phase, RunningTurn
from workers.parking.identity import WriterIdentity
from workers.parking.turn_pages import TurnPages

_log = logging.getLogger(__name__)
_INFLIGHT_WAIT_S = 30.0
_RATE_LIFE_S = 60.0
_SHORTEST_LIMIT_S = 0.25
_LOOKUP_S = 2.0


@dataclass(slots=True)
class Resolution:
    """What a turn reuses. reasons: why pages that earlier turns had sealed are recomputed, with their number.

    restore_s: time spent on the store, also when nothing came of it.
    """

    mirror_pages: int = 0
    store_pages: int = 0
    store_bytes: int = 0
    restore_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def num_pages(self) -> int:
        """Pages that need no computation."""
        return self.mirror_pages + self.store_pages


@dataclass(slots=True)
class Rates:
    """Measured speeds, moving averages; 0 = not measured yet.

    warm_up_tokens_per_s: what a few rows reached at the start, a lower bound of the prefill rate. The store's rate is
    forgotten after a minute without a restore: a slow one must not end all later ones.
    """

    store_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    warm_up_tokens_per_s: float = 0.0
    _store_measured_at: float = 0.0

    def observe_store(self, num_bytes: int, seconds: float) -> None:
        """Account a restore."""
        self.forget_old(time.monotonic())
        self.store_bytes_per_s = _average(self.store_bytes_per_s, num_bytes / max(seconds, 1e-6))
        self._store_measured_at = time.monotonic()

    def forget_old(self, now: float) -> None:
        """Drop what is too old to decide by. now: on the monotonic clock."""
        if now - self._store_measured_at > _RATE_LIFE_S:
            self.store_bytes_per_s = 0.0

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds that computing a prompt takes, rather too many than too few; None while that is unknown."""
        rate = self.prefill_tokens_per_s or self.warm_up_tokens_per_s
        return num_tokens / rate if rate else None

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Account the computation of a prompt."""
        self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, num_tokens / max(seconds, 1e-6))


class Restorer:
    """Resolves prefixes on the turns' own threads.

    `mode`: always, never, or auto (skip what recomputing beats, and give up when it would have been done by now).
    """

    def __init__(
        self,
        engine: Engine,
        store: PageStore,
        identity: WriterIdentity,
        mode: str,
        ttl_s: Callable[[TurnPages], int],
        is_quarantined: Callable[[bytes], bool],
        warm_up_tokens_per_s: float,
    ) -> None:
        self._engine = engine
        self._store = store
        self._identity = identity
        self._mode = mode
        self._ttl_s = ttl_s
        self._is_quarantined = is_quarantined
        self.rates = Rates(warm_up_tokens_per_s=warm_up_tokens_per_s)
        self._inflight: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def resolve(
        self, running: RunningTurn, pages: TurnPages, token_ids: Sequence[int], num_expected: int
    ) -> Resolution:
        """Attach the longest usable prefix of `token_ids` to the turn's sequence; at least one token is left over.

        num_expected: leading pages that earlier runs have sealed; only for those a recompute needs a reason.
        """
        result = Resolution()
        num_usable = min(len(pages.digests), (len(token_ids) - 1) // pages.chain.page_size)
        result.mirror_pages = self._attach_local(running, pages, 0, num_usable)
        deadline = self._deadline(num_usable - result.num_pages, pages)
        begun = time.monotonic()
        while result.num_pages < num_usable and self._mode != "never":
            wait_for = self._claim_fetch(pages, result.num_pages)
            if wait_for is not None:
                is_over = wait_for.wait(_time_left(deadline, _INFLIGHT_WAIT_S))
                attached = self._attach_local(running, pages, result.num_pages, num_usable)
                result.mirror_pages += attached
                if attached:
                    continue
                if not is_over:
                    result.reasons["late"] += num_usable - result.num_pages
                break
            try:
                self._fetch(running, pages, token_ids, num_usable, result, deadline)
            finally:
                self._release_fetch(pages, result)
            break
        result.restore_s = time.monotonic() - begun
        missing = min(num_expected, num_usable) - result.num_pages
        if missing > 0 and not result.reasons:
            result.reasons["never" if self._mode == "never" else "missing"] += missing
        return result

    def _deadline(self, num_pages: int, pages: TurnPages) -> Deadline | None:
        """When to compute the pages instead: after as long as that takes; None for a restore that is always done."""
        compute_s = self.rates.compute_s(num_pages * pages.chain.page_size)
        if self._mode == "always" or compute_s is None:
            return None
        return Deadline(max(_SHORTEST_LIMIT_S, compute_s))

    def _attach_local(self, running: RunningTurn, pages: TurnPages, first: int, end: int) -> int:
        """Attach pages that lie in this worker's mirror; returns how many."""
        if first >= end:
            return 0

        def attach() -> int:
            cache = self._engine.cache
            found: list[SealedPage] = []
            for digest in pages.digests[first:end]:
                page = cache.lookup(digest)
                if page is None:
                    break
                found.append(page)
            if found and running.phase is Phase.RESOLVING and running.sequence is not None:
                cache.attach(running.sequence, found)
                return len(found)
            return 0

        return self._engine.call(attach)

    def _claim_fetch(self, pages: TurnPages, page_index: int) -> threading.Event | None:
        """One fetch in flight per digest: None if this thread may fetch, else the event of the one that does."""
        digest = bytes(pages.digests[page_index])
        with self._lock:
            other = self._inflight.get(digest)
            if other is None:
                self._inflight[digest] = threading.Event()
            return other

    def _release_fetch(self, pages: TurnPages, result: Resolution) -> None:
        with self._lock:
            digest = bytes(pages.digests[result.mirror_pages])
            event = self._inflight.pop(digest, None)
        if event is not None:
            event.set()

    def _fetch(
        self,
        running: RunningTurn,
        pages: TurnPages,
        token_ids: Sequence[int],
        end: int,
        result: Resolution,
        deadline: Deadline | None,
    ) -> None:
        first = result.num_pages
        num_present = self._count_present(pages, first, end, result, deadline)
        if num_present == 0 or not self._pays(num_present, pages, result):
            return
        fills = self._begin_fill(running, num_present, result)
        begun = time.monotonic()
        good, received_s = 0, 0.0
        try:
            good = self._receive(pages, token_ids, first, fills, result, deadline)
            received_s = time.monotonic() - begun
        finally:
            attached = self._engine.call(
                lambda: self._publish(running, pages, first, fills[:good], fills[good:], result)
            )
        result.store_pages = attached
        result.store_bytes = attached * self._engine.cache.layout.page_bytes
        if attached:
            self.rates.observe_store(result.store_bytes, received_s)

    def _count_present(
        self, pages: TurnPages, first: int, end: int, result: Resolution, deadline: Deadline | None
    ) -> int:
        keys = [pages.key_of(index) for index in range(first, end)]
        # A look-up is small: a server that does not answer it soon hangs.
        limit = None if deadline is None else deadline.within(_LOOKUP_S)
        try:
            present = self._store.touch(keys, ttls_for_pages(self._ttl_s(pages), first, len(keys)), limit)
        except StoreError as error:
            _log.warning("look-up in the page store failed: %s", error)
            result.reasons[_why_unreachable(limit)] += end - first
            return 0
        return next((i for i, found in enumerate(present) if not found), len(present))

    def _pays(self, num_pages: int, pages: TurnPages, result: Resolution) -> bool:
        """Whether reading beats recomputing at the measured rates; yes while one of them is unknown."""
        rates = self.rates
        rates.forget_old(time.monotonic())
        if self._mode == "always" or not rates.store_bytes_per_s or not rates.prefill_tokens_per_s:
            return True
        read_s = num_pages * self._engine.cache.layout.page_bytes / rates.store_bytes_per_s
        compute_s = num_pages * pages.chain.page_size / rates.prefill_tokens_per_s
        if read_s > compute_s:
            result.reasons["slower"] += num_pages
        return read_s <= compute_s

    def _begin_fill(self, running: RunningTurn, num_pages: int, result: Resolution) -> list[FillPage]:
        fills = self._engine.call(lambda: self._engine.promises.begin_fill(running, num_pages))
        if len(fills) < num_pages:
            result.reasons["no_free_page"] += num_pages - len(fills)
        return fills

    def _receive(
        self,
        pages: TurnPages,
        token_ids: Sequence[int],
        first: int,
        fills: list[FillPage],
        result: Resolution,
        deadline: Deadline | None,
    ) -> int:
        """Receive into mirror pages until the first fault or the deadline; returns the number of good pages."""
        size = pages.chain.page_size
        requests = []
        for offset, fill in enumerate(fills):
            index = first + offset
            ids = tuple(token_ids[index * size : (index + 1) * size])
            expected = self._identity.expected(pages, index, ids)
            requests.append(FetchRequest(pages.key_of(index), expected, self._identity.segments, fill.buffer))
        good = 0
        outcomes = self._store.fetch(requests, self._is_quarantined, deadline)
        try:
            for outcome in outcomes:
                if isinstance(outcome, PageUnreachable):
                    _log.warning("page %s was not fetched: %s", outcome.key, outcome.reason)
                    result.reasons[_why_unreachable(deadline)] += len(fills) - good
                    break
                if not isinstance(outcome, PagePresent):
                    self._explain(outcome, result)
                    break
                good += 1
        finally:
            close = getattr(outcomes, "close", None)
            if close is not None:
                close()
        return good

    def _explain(self, outcome: PageDamaged | PageMissing, result: Resolution) -> None:
        """Count why a page is no use, and delete a damaged one so that the recomputed page can take its place."""
        if isinstance(outcome, PageDamaged):
            result.reasons[f"damaged:{type(outcome.error).__name__}"] += 1
            _log.warning("damaged page %s: %s", outcome.key, outcome.error)
            self._delete(outcome.key, outcome.check)
            return
        result.reasons["quarantined_writer" if outcome.quarantined else "missing"] += 1
        if outcome.quarantined:
            self._delete(outcome.key, outcome.check)

    def _delete(self, key: str, check: bytes) -> None:
        try:
            self._store.delete_if(key, check)
        except StoreError as error:
            _log.warning("could not delete %s: %s", key, error)

    def _publish(
        self,
        running: RunningTurn,
        pages: TurnPages,
        first: int,
        good: list[FillPage],
        rest: list[FillPage],
        result: Resolution,
    ) -> int:
        """Mint the good pages and attach them; give the rest back. On the engine thread."""
        cache = self._engine.cache
        self._engine.promises.end_fill(running)
        sealed: list[SealedPage] = []
        try:
            for index, fill in enumerate(good, first):
                sealed.append(cache.fill(fill, pages.digests[index]))
        except UnfilledPage as error:
            result.reasons["damaged:UnfilledPage"] += 1
            _log.warning("page %d of the chain: %s", first + len(sealed), error)
        for fill in (*good[len(sealed) :], *rest):
            cache.abandon_fill(fill)
        if not sealed or running.phase is not Phase.RESOLVING or running.sequence is None:
            return 0
        cache.attach(running.sequence, sealed)
        return len(sealed)


def _time_left(deadline: Deadline | None, at_most_s: float) -> float:
    if deadline is None:
        return at_most_s
    return 0.0 if deadline.has_passed else min(at_most_s, deadline.remaining())


def _why_unreachable(deadline: Deadline | None) -> str:
    return "late" if deadline is not None and deadline.has_passed else "unreachable"


def _average(previous: float, sample: float) -> float:
    return sample if previous == 0.0 else 0.7 * previous + 0.3 * sample
