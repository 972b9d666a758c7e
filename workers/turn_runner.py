"""The story of one turn on a worker.

    claim -> freeze the prompt -> [admit -> resolve -> compute and stream]* -> commit -> park what is left

A run that loses its pages to an older turn starts over at `admit` with the ids that it has already sampled: the same
way as a take-over from a dead worker.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Sequence
from typing import Any

from gpu.cache import HoldKind
from snapshot_store.errors import StoreUnreachable
from snapshot_store.fingerprint import numerics_id
from workers.conversation import FrozenTurn, digests_of, with_reply
from workers.engine.requests import EngineOutput, EngineTurn, Failed, Finished, Preempted, SealedEvent, Token
from workers.errors import IntegrityLost, LeaseLost, TurnCancelled, TurnFailed, WorkerDraining, WorkerQuarantined
from workers.live_turns import LiveTurn
from workers.parking.resolution import Resolution
from workers.parking.turn_pages import TurnPages
from workers.prompt.errors import PromptError, SandboxFailure
from workers.reply import Reply
from workers.turn_report import TurnReport
from workers.turn_shape import engine_request, reply_limit, sealed_pages, transcript_entry, turn_pages
from workers.turns.calls import append_events, claim, commit, finish, release
from workers.turns.errors import ControlUnavailable, DurabilityLost, StaleLease, TurnControlError, TurnEnded
from workers.turns.events import TurnEvent, TurnState
from workers.turns.outcomes import Dispatch, EndReply
from workers.turns.records import ClaimedTurn
from workers.turns.script import ScriptCall
from workers.worker_parts import WorkerParts

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_DURABILITY_TRIES = 5


class TurnRunner:
    """Runs turns; `run` is called on as many threads as the engine has slots."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._orders = itertools.count()

    def run(self, turn_id: str) -> None:
        """Run the turn that a message names, or one that goes before it; nothing when there is none to run.

        Blocks until the turn ends here. Raises ControlUnavailable when even the claim was impossible: the sweeper
        sends the message again.
        """
        claimed = self._parts.control.run(claim(turn_id, self._parts.claimant()))
        if claimed is None:
            return
        with self._parts.live.holding(claimed.lease) as live:
            _Run(self._parts, claimed, live, next(self._orders)).run()


class _Run:
    """One run of one claimed turn."""

    def __init__(self, parts: WorkerParts, claimed: ClaimedTurn, live: LiveTurn, order: int) -> None:
        self._parts = parts
        self._claimed = claimed
        self._live = live
        self._order = order
        self._reply = Reply(parts.tokenizer, claimed.request.stop)
        if claimed.started:
            self._reply.replay(claimed.emitted_ids)
        own = numerics_id(parts.identity.numerics_digest)
        forced = tuple(numerics for numerics in claimed.emitted_numerics if numerics != own)
        self._report = TurnReport(time.monotonic(), forced_numerics=forced)
        self._num_contained = 0

    def run(self) -> None:
        """Bring the turn to its end, or leave it to another worker."""
        try:
            self._tell()
        except (StaleLease, TurnEnded, LeaseLost) as error:
            self._report.end = "lost"
            _log.info("left turn %s: %s", self._claimed.lease.turn_id, error)
        except (ControlUnavailable, DurabilityLost, StoreUnreachable, SandboxFailure) as error:
            # Not released: the expiry counts as a crash, so a turn that always ends here does not go round for ever.
            self._report.end = "lost"
            _log.warning("turn %s cannot go on here, its lease will expire: %s", self._turn_id, error)
        except WorkerDraining:
            self._hand_over()
        except WorkerQuarantined as error:
            if self._report.attempts > 1 and self._report.num_sampled and self._parts.engine.misread:
                # What its earlier attempts have read is not known any more.
                self._finish(TurnState.FAILED, IntegrityLost())
                return
            # The lease runs out or is ended by the supervisor, and counts as a crash: this turn may be the cause.
            self._report.end = "quarantined"
            _log.warning("left turn %s to another worker: %s", self._turn_id, error)
        except TurnCancelled:
            self._finish(self._live.stop or TurnState.CANCELLED, None)
        except PromptError as error:
            self._finish(TurnState.FAILED, TurnFailed("invalid_prompt", str(error)))
        except TurnFailed as error:
            self._finish(TurnState.FAILED, error)
        except Exception:
            _log.exception("turn %s failed", self._turn_id)
            self._finish(TurnState.FAILED, TurnFailed("internal_error", "the worker failed to run this turn"))
        finally:
            self._parts.on_turn(self._report)

    def _tell(self) -> None:
        turn = self._parts.conversations.freeze(self._claimed)
        self._report.prompt_tokens = len(turn.ids)
        max_tokens = reply_limit(self._parts, self._claimed, turn)
        pages = turn_pages(self._parts, self._claimed, turn)
        reason = self._generate(turn, pages, max_tokens)
        self._commit(turn, pages, reason)

    # -- the engine --------------------------------------------------------------------------------------------------

    def _generate(self, turn: FrozenTurn, pages: TurnPages, max_tokens: int) -> str:
        """Compute the reply, as often as its pages are taken away; returns the finish reason."""
        while True:
            self._report.attempts += 1
            end = self._attempt(turn, pages, max_tokens)
            if isinstance(end, Finished):
                return end.reason
            if isinstance(end, Failed):
                raise end.error
            if isinstance(end, Preempted):
                self._num_contained += end.solo
            self._leave_if_interrupted()

    def _attempt(self, turn: FrozenTurn, pages: TurnPages, max_tokens: int) -> EngineOutput:
        """Admit, resolve, compute: until the reply ends or the engine gives the turn up."""
        parts = self._parts
        forced_ids = tuple(self._reply.output_ids)
        request = engine_request(parts, self._claimed, turn, forced_ids, max_tokens, self._order, self._num_contained)
        engine_turn = EngineTurn(request, pages, lambda event: self._park(event, pages))
        self._live.watch(engine_turn)
        running = parts.engine.admit(engine_turn)
        try:
            while not engine_turn.admitted.wait(_POLL_S):
                self._leave_if_interrupted()
            self._leave_if_interrupted()
            token_ids = request.known_ids
            pages.cover(token_ids)
            sealed = sealed_pages(self._claimed, turn, pages, forced_ids)
            resolution = parts.restorer.resolve(running, pages, len(token_ids), *sealed)
            self._report.note_attempt(resolution, pages.written)
            begun = time.monotonic()
            parts.engine.start(running)
            if self._reply.next_number == 0:
                # While the engine computes: no token waits for it.
                self._send([self._reply.started({"prompt_tokens": len(turn.ids)})])
            return self._consume(engine_turn, len(token_ids), resolution, begun)
        finally:
            self._live.watch(None)
            parts.engine.discard(running)

    def _park(self, event: SealedEvent, pages: TurnPages) -> None:
        if self._parts.is_parked(pages):
            self._parts.parking.park(event, pages, self._parts.ttl_s(pages))
        else:
            self._parts.engine.cache.release(event.page, HoldKind.UPLOAD)

    def _consume(self, engine_turn: EngineTurn, num_known: int, resolution: Resolution, begun: float) -> EngineOutput:
        """Stream tokens as they come; everything that has arrived travels in one append."""
        first = True
        while True:
            outputs = _take_all(engine_turn.outputs)
            distrusted = next((output for output in outputs if _is_distrust(output)), None)
            if distrusted is not None:
                return distrusted
            num_tokens = sum(isinstance(output, Token) for output in outputs)
            if first and num_tokens:
                computed = num_known - resolution.num_pages * self._parts.page_size
                self._parts.restorer.rates.observe_prefill(computed, time.monotonic() - begun)
                first = False
            self._report.note_tokens(num_tokens)
            end = self._stream(outputs)
            self._leave_if_interrupted()
            if end is not None:
                return end

    def _stream(self, outputs: Sequence[EngineOutput]) -> EngineOutput | None:
        events: list[TurnEvent] = []
        end: EngineOutput | None = None
        for output in outputs:
            if not isinstance(output, Token):
                end = output
                break
            event = self._reply.push(output)
            if event is not None:
                events.append(event)
            if self._reply.stopped:
                end = Finished("stop")
                break
        if events and not self._live.lost:
            self._send(events)
        return end

    def _send(self, events: list[TurnEvent]) -> None:
        answer = self._parts.control.run(append_events(self._claimed.lease, events))
        if answer.stop is not None and self._live.stop is None:
            self._live.interrupt(stop=answer.stop)

    def _leave_if_interrupted(self) -> None:
        if self._live.lost:
            raise LeaseLost(f"the lease of turn {self._turn_id} was lost")
        if self._live.stop is not None:
            raise TurnCancelled(self._live.stop.value)
        if self._live.draining:
            raise WorkerDraining("the worker drains")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _commit(self, turn: FrozenTurn, pages: TurnPages, reason: str) -> None:
        claimed, reply = self._claimed, self._reply
        reply.close()
        if reply.stopped:
            reason = "stop"
        state = TurnState.COMPLETED if reason == "stop" else TurnState.INCOMPLETE
        entry = transcript_entry(self._parts, claimed, turn, pages, reply, self._report, reason)
        terminal = reply.finish(state, reason, self._usage(), {})
        digests = digests_of(claimed, with_reply(turn.history, reply.text)) if claimed.request.stateless else []
        call = commit(
            claimed.lease,
            entry,
            [terminal],
            served_tokens=len(turn.ids) - self._report.cached_tokens(self._parts.page_size) + len(reply.output_ids),
            history_digest=digests[-1] if digests else None,
            ancestors=[ancestor.turn_id for ancestor in turn.path],
            durable=claimed.request.durability == "host",
        )
        self._dispatch(self._confirmed(call).dispatches)
        self._report.end = state.value
        self._parts.on_committed(entry, pages, claimed.lease.branch)

    def _confirmed(self, call: ScriptCall[EndReply]) -> EndReply:
        """Run a commit until the disk has confirmed it: repeating it is answered as the first time."""
        for _ in range(_DURABILITY_TRIES - 1):
            try:
                return self._parts.control.run(call)
            except DurabilityLost as error:
                _log.warning("commit of turn %s is not on disk yet: %s", self._turn_id, error)
        return self._parts.control.run(call)

    def _finish(self, state: TurnState, error: TurnFailed | None) -> None:
        """End the turn without moving the head."""
        described = None if error is None else {"code": error.code, "message": error.message, "param": None}
        terminal = self._reply.finish(state, None, self._usage(), {}, described)
        self._report.end = state.value
        try:
            call = finish(self._claimed.lease, [terminal], served_tokens=self._report.num_sampled)
            self._dispatch(self._parts.control.run(call).dispatches)
        except TurnControlError as failure:
            self._report.end = "lost"
            _log.info("turn %s was not closed: %s", self._turn_id, failure)

    def _hand_over(self) -> None:
        """Give the turn back: another worker goes on where the stream ends."""
        self._report.end = "drained"
        try:
            self._dispatch(self._parts.control.run(release(self._claimed.lease)).dispatches)
        except TurnControlError as failure:
            _log.info("turn %s was not handed over: %s", self._turn_id, failure)

    def _dispatch(self, messages: Sequence[Dispatch]) -> None:
        for message in messages:
            try:
                self._parts.dispatcher.send(message)
            except ControlUnavailable as error:
                _log.info("the sweeper will send turn %s: %s", message.turn_id, error)

    def _usage(self) -> dict[str, Any]:
        num_output, lease = len(self._reply.output_ids), self._claimed.lease
        return self._report.usage(num_output, self._parts.page_size, lease.worker_id, self._claimed.crashes + 1)

    @property
    def _turn_id(self) -> str:
        return self._claimed.lease.turn_id


def _is_distrust(output: EngineOutput) -> bool:
    """Whether the engine ended with a broken rule: tokens that came with this are not sent."""
    return isinstance(output, Failed) and isinstance(output.error, IntegrityLost | WorkerQuarantined)


def _take_all(outputs: queue.SimpleQueue[EngineOutput]) -> list[EngineOutput]:
    """Everything that has arrived, at least one output unless a second passes."""
    taken: list[EngineOutput] = []
    try:
        taken.append(outputs.get(timeout=_POLL_S))
        while True:
            taken.append(outputs.get_nowait())
    except queue.Empty:
        return taken
