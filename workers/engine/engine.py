"""The engine thread. It alone touches the backend and the cache; other threads submit and wait.

one turn of the loop:  commands -> admit -> schedule -> launch -> read the oldest step -> seal its pages
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from gpu.backend import Backend, StepHandle
from gpu.cache import HoldKind
from gpu.errors import CapacityError, DeviceFailure, InvariantViolation, MirrorDivergence
from gpu.plan import EntryResult, PlanEntry, RowKind, StepPlan, TokenLogprobs
from workers.engine.counters import EngineCounters
from workers.engine.drafting import DraftCosts, Drafter, DraftSettings, num_agreeing, reply_part
from workers.engine.promises import PagePromises
from workers.engine.requests import EngineOutput, EngineTurn, Failed, Finished, Preempted, SealedEvent, Token
from workers.engine.running import Phase, RunningTurn
from workers.engine.scheduler import schedule, without_draft
from workers.errors import EngineFault, IntegrityLost, WorkerQuarantined

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDLE_WAIT_S = 0.2
_BLOCKED_WAIT_S = 0.003
_Launched = tuple[list[tuple[RunningTurn, PlanEntry]], StepHandle, float]
"""What a step computes for whom, the step, when its launch began."""


class Engine:
    """Runs turns on a backend. Thread-safe: `admit`, `start`, `discard`, `call` and `wake`.

    promises: the only way to pages of the cache. Touched on the engine thread, as `cache` is (`call`).
    """

    def __init__(self, backend: Backend, *, step_rows: int, drafting: DraftSettings | None = None) -> None:
        self.backend = backend
        self.cache = backend.cache
        self.promises = PagePromises(self.cache)
        self.counters = EngineCounters()
        self.failure: Exception | None = None
        self._max_rows = min(step_rows, backend.max_rows)
        self._drafting = drafting
        self._draft_costs = DraftCosts()
        self._turns: list[RunningTurn] = []
        self._leaving: set[str] = set()
        self._pending: collections.deque[_Launched] = collections.deque()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._progress_at = time.monotonic()
        # New pages of the largest step; a quarter of the arena, so that restores find pages too.
        self._pages_ahead = min(-(-self._max_rows // self.cache.layout.page_size), self.cache.num_pages // 4)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- other threads ------------------------------------------------------------------------------------------

    @property
    def quarantine(self) -> InvariantViolation | None:
        """The broken rule that ended the engine: everything that this process wrote is suspect."""
        return self.failure if isinstance(self.failure, InvariantViolation) else None

    @property
    def misread(self) -> bool:
        """Whether the engine ended with a divergence of pages that steps may have read in the mirror."""
        error = self.failure
        return isinstance(error, MirrorDivergence) and self.cache.memory.is_from_mirror(error.page_indices)

    def launch_thread(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step in flight; turns that still run get `Preempted`. Closes the backend."""
        self._stopping.set()
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Make the engine look at cancellations now."""
        self._commands.put(None)

    def call(self, action: Callable[[], _T]) -> _T:
        """Run `action` on the engine thread between two steps and return its result or raise its error."""
        if threading.current_thread() is self._thread:
            return action()
        future: Future[_T] = Future()
        self._commands.put((action, future))
        while True:
            try:
                return future.result(timeout=1.0)
            except InvariantViolation as error:
                raise WorkerQuarantined(str(error)) from error
            except TimeoutError:
                if future.done():
                    return future.result()
                self._check_alive()

    def alarm(self, error: InvariantViolation) -> None:
        """End the engine because of a broken rule that another thread has found. Raises WorkerQuarantined."""

        def fail() -> NoReturn:
            raise error

        self.call(fail)

    def admit(self, turn: EngineTurn) -> RunningTurn:
        """Queue a turn; it may resolve its prefix once `turn.admitted` is set. Order: priority, then arrival."""
        drafter = None if self._drafting is None else Drafter(self._drafting, self._draft_costs)
        running = RunningTurn.of(turn, drafter)
        self.call(lambda: self._enqueue(running))
        return running

    def start(self, running: RunningTurn) -> None:
        """Begin to compute what the attached prefix lacks."""
        self.call(lambda: self._begin(running))

    def discard(self, running: RunningTurn) -> None:
        """Forget a turn in any phase and drop its sequence. Idempotent; an engine that has ended knows no turns."""
        if self._thread.is_alive():
            with contextlib.suppress(WorkerQuarantined):
                self.call(lambda: self._forget(running))

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since the engine last finished a step or was idle."""
        return time.monotonic() - self._progress_at

    @property
    def num_turns(self) -> int:
        """Turns in any phase."""
        return len(self._turns)

    # -- engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.backend.bind_thread()
            worked = True
            while not self._stopping.is_set():
                self._run_commands(self._patience_s(worked))
                self._drop_cancelled()
                self._admit_waiting()
                worked = launched = self._launch_next()
                while self._pending and (not launched or len(self._pending) > self.backend.pipeline_depth):
                    self._finish_oldest()
                    worked = launched = True
                self._progress_at = time.monotonic()
        except InvariantViolation as error:
            _log.critical("quarantined: %s: %s", type(error).__name__, error)
            self.failure = error
        except Exception as error:
            _log.critical("the engine thread failed", exc_info=error)
            self.failure = error
        finally:
            self._shut_down()

    def _patience_s(self, worked: bool) -> float:
        """How long to wait for commands: pages that others hold come free without a command, so then only briefly."""
        if self._pending or (worked and self._has_work()):
            return 0.0
        return _BLOCKED_WAIT_S if self._has_work() else _IDLE_WAIT_S

    def _run_commands(self, patience_s: float) -> None:
        while patience_s == _IDLE_WAIT_S and self._commands.empty() and self.cache.poison_ahead(self._pages_ahead):
            pass
        try:
            command = self._commands.get(timeout=patience_s) if patience_s else self._commands.get_nowait()
            while True:
                if command is not None:
                    _execute(*command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _has_work(self) -> bool:
        return any(t.phase in (Phase.RUNNING, Phase.WAITING) for t in self._turns)

    def _enqueue(self, running: RunningTurn) -> None:
        self._turns.append(running)
        self._turns.sort(key=lambda turn: turn.age)

    def _drop_cancelled(self) -> None:
        for running in [t for t in self._turns if t.turn.cancelled.is_set()]:
            self._end(running)

    def _admit_waiting(self) -> None:
        """Promise pages for prompt and first output page to waiting turns while they last; one turn always gets in."""
        for running in [t for t in self._turns if t.phase is Phase.WAITING]:
            active = [t for t in self._turns if t.phase in (Phase.RESOLVING, Phase.RUNNING)]
            if active and (running.turn.request.solo or any(t.turn.request.solo for t in active)):
                return
            if not self.promises.make(running):
                return
            running.sequence = self.cache.open()
            running.phase = Phase.RESOLVING
            running.turn.admitted.set()

    def _begin(self, running: RunningTurn) -> None:
        if running.phase is not Phase.RESOLVING or running.sequence is None:
            return
        running.num_sealed = len(running.sequence.pages)
        running.phase = Phase.RUNNING
        if not running.wants_more:
            self._finish(running, "length")

    def _launch_next(self) -> bool:
        chosen = schedule(self._turns, self._max_rows, self.backend.pipeline_depth)
        chosen = self._reserve_pages(chosen)
        if not chosen:
            return False
        plan = StepPlan(tuple(entry for _, entry in chosen))
        begun = time.monotonic()
        try:
            handle = self.backend.launch(plan)
        except (InvariantViolation, DeviceFailure):
            raise
        except Exception as error:  # any fault of a step is contained: alone it fails its turn, else all run alone
            self._contain([running for running, _ in chosen], error)
            return False
        for running, entry in chosen:
            running.unread += 1 if entry.sampling is not None else 0
        self._pending.append((chosen, handle, begun))
        self.counters.count_launch(plan, time.monotonic() - begun)
        return True

    def _reserve_pages(self, chosen: list[tuple[RunningTurn, PlanEntry]]) -> list[tuple[RunningTurn, PlanEntry]]:
        """Reserve pages entry by entry, oldest turn first; on exhaustion the youngest turn gives way.

        Pages of a victim can stay held for a moment by a launched step or by its own restore. Nobody else gives way
        before they are free: the rows that lack pages wait for a later pass.
        """
        kept: list[tuple[RunningTurn, PlanEntry]] = []
        for running, wanted in sorted(chosen, key=lambda pair: pair[0].age):
            entry = wanted
            if running.phase is not Phase.RUNNING:
                continue
            if entry.kind is RowKind.VERIFY and not self._reserve(running, entry):
                entry = without_draft(entry)
            if not self._reserve(running, entry) and not (self._preempt_youngest() and self._reserve(running, entry)):
                break
            kept.append((running, entry))
        return [pair for pair in kept if pair[0].phase is Phase.RUNNING]

    def _reserve(self, running: RunningTurn, entry: PlanEntry) -> bool:
        if running.phase is not Phase.RUNNING:
            return False
        with contextlib.suppress(CapacityError):
            self.promises.reserve(running, running.loaded.length + entry.num_rows)
            return True
        return False

    def _preempt_youngest(self) -> bool:
        """Take the pages of the youngest, least important turn, unless others are about to come free."""
        holders = [t for t in self._turns if t.phase in (Phase.RESOLVING, Phase.RUNNING)]
        if len(holders) < 2 or self._pending or self._leaving:
            return False
        victim = holders[-1]
        self.counters.preemptions += 1
        self._end(victim)
        victim.turn.outputs.put(Preempted())
        return True

    def _finish_oldest(self) -> None:
        chosen, handle, launched_at = self._pending.popleft()
        begun = time.monotonic()
        while not handle.done() and self.cache.poison_ahead(self._pages_ahead):
            pass
        result = handle.wait()
        now = time.monotonic()
        self.counters.step_s += now - begun
        self._draft_costs.note({entry.kind for _, entry in chosen}, launched_at, now)
        for (running, entry), entry_result in zip(chosen, result.entries, strict=True):
            if running.phase is Phase.RUNNING:
                self._take_result(running, entry, entry_result)

    def _take_result(self, running: RunningTurn, entry: PlanEntry, result: EntryResult) -> None:
        if result.error is not None:
            self._fail(running, EngineFault("the model produced a value that is not finite"))
            return
        running.solo = running.turn.request.solo
        drawn: tuple[int, ...] = ()
        if entry.sampling is not None:
            running.unread -= 1
            drawn = result.token_ids
            if entry.kind is RowKind.VERIFY:
                drawn = self._accept(running, entry, result)
            running.ids.extend(drawn)
        self._seal_full_pages(running)
        if drawn:
            self._deliver(running, drawn, result.logprobs)

    def _accept(self, running: RunningTurn, entry: PlanEntry, result: EntryResult) -> tuple[int, ...]:
        """Take back what a window's rows hold beyond the reply; the drawn ids that belong to it."""
        request, sequence = running.turn.request, running.loaded
        agreeing = num_agreeing(entry.tokens[1:], result.token_ids)
        drawn = reply_part(result.token_ids[: agreeing + 1], request.end_ids, request.max_tokens - running.num_output)
        running.history.extend(drawn)
        self.cache.truncate(sequence, sequence.length - entry.num_rows + len(drawn))
        self.counters.accepted += agreeing
        if running.drafter is not None:
            running.drafter.note(agreeing, len(running.ids) + len(drawn))
        return drawn

    def _deliver(self, running: RunningTurn, drawn: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
        request = running.turn.request
        for index, token_id in enumerate(drawn):
            if token_id in request.end_ids:
                self._finish(running, "stop")
                return
            running.turn.outputs.put(Token(token_id, logprobs[index] if logprobs else None))
        if running.num_output >= request.max_tokens:
            self._finish(running, "length")

    def _seal_full_pages(self, running: RunningTurn) -> None:
        """Mint every page that has become full and proven, and hand it to parking with an UPLOAD hold."""
        sequence, pages, page_size = running.loaded, running.turn.pages, self.cache.layout.page_size
        while running.num_sealed in self.cache.sealable(sequence):
            index = running.num_sealed
            token_ids = tuple(running.ids[index * page_size : (index + 1) * page_size])
            page = self.cache.seal(sequence, index, pages.seal(index, token_ids, sequence.own_numerics))
            running.num_sealed += 1
            self.cache.hold(page, HoldKind.UPLOAD)
            running.turn.on_sealed(SealedEvent(page, index))

    def _contain(self, turns: list[RunningTurn], error: Exception) -> None:
        _log.error("step of %d turns raised %s", len(turns), type(error).__name__, exc_info=error)
        for running in turns:
            self._end(running)
            alone = len(turns) == 1
            running.turn.outputs.put(Failed(EngineFault("the step failed")) if alone else Preempted(solo=True))

    def _finish(self, running: RunningTurn, reason: str) -> None:
        self._end(running)
        running.turn.outputs.put(Finished(reason))

    def _fail(self, running: RunningTurn, error: Exception) -> None:
        self._end(running)
        running.turn.outputs.put(Failed(error))

    def _forget(self, running: RunningTurn) -> None:
        self._end(running)
        self._leaving.discard(running.turn.request.turn_id)

    def _end(self, running: RunningTurn) -> None:
        if running.phase is Phase.ENDED:
            return
        if running.phase is Phase.RESOLVING:
            # Its thread may be filling pages; it gives them back before it discards the turn.
            self._leaving.add(running.turn.request.turn_id)
        running.phase = Phase.ENDED
        self.promises.end(running)
        self._turns.remove(running)
        if running.sequence is not None:
            self.cache.close(running.sequence)

    def _check_alive(self) -> None:
        if not self._thread.is_alive():
            raise WorkerQuarantined(str(self.failure or "the engine has stopped"))

    def _shut_down(self) -> None:
        for running in list(self._turns):
            running.phase = Phase.ENDED
            running.turn.outputs.put(self._last_output(running))
            running.turn.admitted.set()
        self._turns.clear()
        self._pending.clear()
        self.backend.close()
        with contextlib.suppress(queue.Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command[1].set_exception(WorkerQuarantined(str(self.failure or "the engine has stopped")))

    def _last_output(self, running: RunningTurn) -> EngineOutput:
        """What a turn hears when the engine ends: after a divergence, one that may have read such a page is over."""
        if self.failure is None:
            return Preempted()
        sequence, error = running.sequence, self.failure
        has_read = self.cache.memory.may_have_read
        if isinstance(error, MirrorDivergence) and sequence is not None and has_read(sequence, error.page_indices):
            return Failed(IntegrityLost())
        return Failed(WorkerQuarantined(str(error)))


def _execute(action: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(action())
    except InvariantViolation as error:
        future.set_exception(error)
        raise
    except Exception as error:
        future.set_exception(error)
