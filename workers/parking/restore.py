"""Find the longest usable prefix of a turn: local mirror first, then the store, else it is recomputed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gpu.cache import FillPage, KVCache, SealedPage
from gpu.errors import InvariantViolation, UnfilledPage
from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreError
from snapshot_store.store import FetchRequest, PageDamaged, PageMissing, PagePresent, PageStore, PageUnreachable
from snapshot_store.ttl import ttls_for_pages
from workers.engine.engine import Engine
from workers.engine.running import Phase, RunningTurn
from workers.parking.identity import WriterIdentity
from workers.parking.rates import Rates
from workers.parking.resolution import Resolution
from workers.parking.turn_pages import TurnPages

_log = logging.getLogger(__name__)
_INFLIGHT_WAIT_S = 30.0
_SHORTEST_LIMIT_S = 0.25
_LOOKUP_S = 2.0


@dataclass(slots=True)
class _Search:
    """One turn's search. end: pages that may be reused, so that one token is left to compute.

    deadline, begun: since the store was first needed. claimed: digest under which this thread alone asks the store.
    present: by numerics, which pages the store has; asked once.
    """

    running: RunningTurn
    pages: TurnPages
    end: int
    result: Resolution = field(default_factory=Resolution)
    deadline: Deadline | None = None
    begun: float = 0.0
    claimed: bytes | None = None
    present: dict[bytes, list[bool]] | None = None

    @property
    def first(self) -> int:
        """The page that comes next."""
        return self.result.num_pages

    @property
    def is_open(self) -> bool:
        """Whether pages are left to look for."""
        return self.first < self.end

    def attach(self, numerics: bytes, sealed: Sequence[SealedPage], cache: KVCache) -> int:
        """Give pages of these numerics to the turn's sequence if it still waits for them. On the engine thread."""
        if not sealed or self.running.phase is not Phase.RESOLVING or self.running.sequence is None:
            return 0
        cache.attach(self.running.sequence, sealed)
        self.pages.reuse(numerics, len(sealed))
        if numerics != self.pages.own:
            self.result.foreign[numerics] += len(sealed)
        return len(sealed)


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
        self, running: RunningTurn, pages: TurnPages, num_tokens: int, num_sealed: int, num_readable: int
    ) -> Resolution:
        """Attach the longest usable prefix of the turn's `num_tokens` tokens to its sequence; one token is left over.

        Pages of our own numerics go first, from mirror and store; where they end, those of accepted numerics follow.
        num_sealed: leading pages that earlier runs have sealed; only for those a recompute needs a reason.
        num_readable: those that were sealed under numerics that may be reused here.
        """
        search = _Search(running, pages, min(len(pages.page_ids), (num_tokens - 1) // pages.chain.page_size))
        try:
            self._attach_local(search, (pages.own,))
            while search.is_open and (self._fetch(search, pages.own) or self._extend_foreign(search)):
                pass
        finally:
            self._release_fetch(search)
        result = search.result
        result.restore_s = time.monotonic() - search.begun if search.begun else 0.0
        reason = "never" if self._mode == "never" else "missing"
        result.explain_missing(min(num_sealed, search.end), num_readable, reason)
        return result

    def _extend_foreign(self, search: _Search) -> bool:
        """Go on with pages of accepted numerics, and of our own behind those; whether there were any."""
        numerics = search.pages.numerics
        if len(numerics) == 1:
            return False
        return self._attach_local(search, numerics) or any(self._fetch(search, other) for other in numerics)

    def _attach_local(self, search: _Search, numerics: Sequence[bytes]) -> bool:
        """Attach what lies in this worker's mirror under the first of these numerics that has the next page."""
        indices = range(search.first, search.end)
        if not indices:
            return False
        chains = {other: [search.pages.digest(index, other) for index in indices] for other in numerics}

        def attach() -> int:
            cache = self._engine.cache
            for other, digests in chains.items():
                found: list[SealedPage] = []
                for digest in digests:
                    page = cache.lookup(digest)
                    if page is None:
                        break
                    found.append(page)
                if found:
                    return search.attach(other, found, cache)
            return 0

        attached = self._engine.call(attach)
        search.result.mirror_pages += attached
        return attached > 0

    def _fetch(self, search: _Search, numerics: bytes) -> bool:
        """Attach what the store has of the next pages under these numerics; whether that was any.

        After a fault, or where reading does not pay, nothing more is read for this turn.
        """
        if self._mode == "never" or search.result.reasons:
            return False
        if search.claimed is None and not self._claim_fetch(search):
            return self._attach_local(search, search.pages.numerics)
        num_present = self._num_present(search, numerics)
        if num_present == 0 or not self._pays(num_present, search):
            return False
        fills = self._begin_fill(search, num_present)
        begun = time.monotonic()
        good, received_s = 0, 0.0
        try:
            good = self._receive(search, numerics, fills)
            received_s = time.monotonic() - begun
        finally:
            attached = self._engine.call(lambda: self._publish(search, numerics, fills[:good], fills[good:]))
        num_bytes = attached * self._engine.cache.layout.page_bytes
        search.result.store_pages += attached
        search.result.store_bytes += num_bytes
        if attached:
            self.rates.observe_store(num_bytes, received_s)
        return attached > 0

    def _claim_fetch(self, search: _Search) -> bool:
        """One fetch in flight per digest: whether this thread may fetch; if not, the other has ended or is late.

        The first time the clock starts: computing the pages instead is what the store has to beat.
        """
        if not search.begun:
            search.begun = time.monotonic()
            search.deadline = self._deadline(search)
        digest = bytes(search.pages.digest(search.first, search.pages.own))
        with self._lock:
            other = self._inflight.get(digest)
            if other is None:
                self._inflight[digest] = threading.Event()
                search.claimed = digest
                return True
        if not other.wait(_time_left(search.deadline, _INFLIGHT_WAIT_S)):
            search.result.reasons["late"] += search.end - search.first
        return False

    def _release_fetch(self, search: _Search) -> None:
        if search.claimed is not None:
            with self._lock:
                self._inflight.pop(search.claimed).set()

    def _deadline(self, search: _Search) -> Deadline | None:
        """When to compute the pages instead: after as long as that takes; None for a restore that is always done."""
        compute_s = self.rates.compute_s((search.end - search.first) * search.pages.chain.page_size)
        if self._mode == "always" or compute_s is None:
            return None
        return Deadline(max(_SHORTEST_LIMIT_S, compute_s))

    def _num_present(self, search: _Search, numerics: bytes) -> int:
        """How many pages the store has from the next one on, without a gap."""
        if search.present is None:
            search.present = self._look_up(search)
        present = search.present.get(numerics, [])[search.first :]
        return next((i for i, found in enumerate(present) if not found), len(present))

    def _look_up(self, search: _Search) -> dict[bytes, list[bool]]:
        """Ask for every page that is left, under all numerics that may be reused, in one trip; extends their lives."""
        pages, first, num_pages = search.pages, search.first, search.end - search.first
        keys = [pages.key(index, other) for other in pages.numerics for index in range(first, search.end)]
        lives = ttls_for_pages(self._ttl_s(pages), first, num_pages) * len(pages.numerics)
        # A look-up is small: a server that does not answer it soon hangs.
        limit = None if search.deadline is None else search.deadline.within(_LOOKUP_S)
        try:
            present = self._store.touch(keys, lives, limit)
        except StoreError as error:
            _log.warning("look-up in the page store failed: %s", error)
            search.result.reasons[_why_unreachable(limit)] += num_pages
            return {}
        return {
            other: [False] * first + list(present[i * num_pages : (i + 1) * num_pages])
            for i, other in enumerate(pages.numerics)
        }

    def _pays(self, num_pages: int, search: _Search) -> bool:
        """Whether reading beats recomputing at the measured rates; yes while one of them is unknown."""
        rates = self.rates
        rates.forget_old(time.monotonic())
        if self._mode == "always" or not rates.store_bytes_per_s or not rates.prefill_tokens_per_s:
            return True
        read_s = num_pages * self._engine.cache.layout.page_bytes / rates.store_bytes_per_s
        compute_s = num_pages * search.pages.chain.page_size / rates.prefill_tokens_per_s
        if read_s > compute_s:
            search.result.reasons["slower"] += num_pages
        return read_s <= compute_s

    def _begin_fill(self, search: _Search, num_pages: int) -> list[FillPage]:
        fills = self._engine.call(lambda: self._engine.promises.begin_fill(search.running, num_pages))
        if len(fills) < num_pages:
            search.result.reasons["no_free_page"] += num_pages - len(fills)
        return fills

    def _receive(self, search: _Search, numerics: bytes, fills: list[FillPage]) -> int:
        """Receive into mirror pages until the first fault or the deadline; returns the number of good pages.

        Poison is set by the threads that read and looked for on this one: it takes a tenth of a millisecond a page and
        more, and the engine has steps to launch.
        """
        pages, result, cache = search.pages, search.result, self._engine.cache
        requests = []
        for index, fill in enumerate(fills, search.first):
            expected = self._identity.expected(pages, index, numerics)
            prepare = partial(self._watched, cache.prepare_fill, fill)
            key = pages.key(index, numerics)
            requests.append(FetchRequest(key, expected, self._identity.segments, fill.buffer, prepare))
        good = 0
        outcomes = self._store.fetch(requests, self._is_quarantined, search.deadline)
        try:
            for outcome in outcomes:
                if isinstance(outcome, PageUnreachable):
                    _log.warning("page %s was not fetched: %s", outcome.key, outcome.reason)
                    result.reasons[_why_unreachable(search.deadline)] += len(fills) - good
                    break
                if not isinstance(outcome, PagePresent):
                    self._explain(outcome, result)
                    break
                self._watched(cache.prove_fill, fills[good])
                good += 1
        except UnfilledPage as error:
            result.reasons["damaged:UnfilledPage"] += 1
            _log.warning("page %d of the chain: %s", search.first + good, error)
        finally:
            close = getattr(outcomes, "close", None)
            if close is not None:
                close()
        return good

    def _watched(self, action: Callable[[FillPage], None], fill: FillPage) -> None:
        """Do something to a page; a rule that proves broken ends the engine."""
        try:
            action(fill)
        except InvariantViolation as error:
            self._engine.alarm(error)

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

    def _publish(self, search: _Search, numerics: bytes, good: list[FillPage], rest: list[FillPage]) -> int:
        """Mint the good pages and attach them; give the rest back. On the engine thread."""
        cache, pages, first = self._engine.cache, search.pages, search.first
        self._engine.promises.end_fill(search.running)
        sealed = [
            cache.fill(fill, pages.digest(index, numerics), own_numerics=numerics == pages.own)
            for index, fill in enumerate(good, first)
        ]
        for fill in rest:
            cache.abandon_fill(fill)
        return search.attach(numerics, sealed, cache)


def _time_left(deadline: Deadline | None, at_most_s: float) -> float:
    if deadline is None:
        return at_most_s
    return 0.0 if deadline.has_passed else min(at_most_s, deadline.remaining())


def _why_unreachable(deadline: Deadline | None) -> str:
    return "late" if deadline is not None and deadline.has_passed else "unreachable"
