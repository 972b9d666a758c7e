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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.cache import HoldKind
from gpu.plan import SamplingParams
from snapshot_store.chain import PrefixChain
from snapshot_store.transcript import CacheScope, TranscriptEntry
from workers.conversation import Conversations, FrozenTurn, digests_of, with_reply
from workers.dispatch import Dispatcher
from workers.engine.engine import Engine
from workers.engine.requests import (
    EngineOutput,
    EngineRequest,
    EngineTurn,
    Failed,
    Finished,
    Preempted,
    SealedEvent,
    Token,
)
from workers.errors import ContextOverflow, LeaseLost, TurnCancelled, TurnFailed, WorkerDraining, WorkerQuarantined
from workers.live_turns import LiveTurn, LiveTurns
from workers.parking.identity import WriterIdentity
from workers.parking.park import Parking
from workers.parking.restore import Resolution, Restorer
from workers.parking.turn_pages import TurnPages
from workers.prompt.errors import PromptError
from workers.prompt.tokenizer import Tokenizer
from workers.reply import Reply
from workers.turn_report import TurnReport
from workers.turns.calls import append_events, claim, commit, finish, release
from workers.turns.control import TurnControl
from workers.turns.errors import ControlUnavailable, StaleLease, TurnControlError, TurnEnded
from workers.turns.events import TurnEvent, TurnState
from workers.turns.leasing import Claimant
from workers.turns.outcomes import Dispatch
from workers.turns.records import ClaimedTurn

_log = logging.getLogger(__name__)
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a runner works with; made once by the service."""

    control: TurnControl
    dispatcher: Dispatcher
    live: LiveTurns
    conversations: Conversations
    tokenizer: Tokenizer
    engine: Engine
    restorer: Restorer
    parking: Parking
    identity: WriterIdentity
    claimant: Callable[[], Claimant]
    salt_of: Callable[[str], bytes]
    ttl_s: Callable[[TurnPages], int]
    is_parked: Callable[[TurnPages], bool]
    on_committed: Callable[[TranscriptEntry, TurnPages, str], None]
    on_turn: Callable[[TurnReport], None]
    context_length: int
    arena_cells: int


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
        self._report = TurnReport(time.monotonic())
        self._solo = claimed.solo
        self._sent_number = claimed.next_number
        self._pages: TurnPages | None = None

    def run(self) -> None:
        """Bring the turn to its end, or leave it to another worker."""
        try:
            self._tell()
        except (StaleLease, TurnEnded, LeaseLost) as error:
            self._report.end = "lost"
            _log.info("left turn %s: %s", self._claimed.lease.turn_id, error)
        except ControlUnavailable as error:
            self._report.end = "lost"
            _log.warning("turn %s: control is unavailable, its lease will expire: %s", self._turn_id, error)
        except (WorkerQuarantined, WorkerDraining) as error:
            self._hand_over("drained" if isinstance(error, WorkerDraining) else "quarantined")
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
        max_tokens = self._max_tokens(turn)
        self._send_started(turn)
        self._pages = self._pages_of(turn)
        reason = "stop" if self._reply.stopped else self._generate(turn, max_tokens)
        self._commit(turn, reason)

    # -- before the first step -------------------------------------------------------------------------------------

    def _max_tokens(self, turn: FrozenTurn) -> int:
        """The reply's limit in tokens. Raises ContextOverflow when nothing fits."""
        parts, asked = self._parts, self._claimed.request.max_tokens
        limit = min(parts.context_length, parts.arena_cells)
        if len(turn.ids) >= limit:
            what = "context length" if parts.context_length <= parts.arena_cells else "KV cache"
            raise ContextOverflow(len(turn.ids), limit, what)
        room = limit - len(turn.ids)
        if asked is not None and asked > room and parts.arena_cells < parts.context_length:
            total = len(turn.ids) + min(asked, parts.context_length - len(turn.ids))
            if total > parts.arena_cells:
                raise ContextOverflow(total, parts.arena_cells, "KV cache")
        return room if asked is None else min(asked, room)

    def _send_started(self, turn: FrozenTurn) -> None:
        if not self._claimed.started:
            info = {"prompt_tokens": len(turn.ids)}
            self._send([self._reply.started(info)])

    def _pages_of(self, turn: FrozenTurn) -> TurnPages:
        request, identity = self._claimed.request, self._parts.identity
        scope_id = {
            CacheScope.TENANT: request.tenant,
            CacheScope.KEY: request.key_id,
            CacheScope.CONVERSATION: turn.root_id,
        }[request.scope]
        chain = PrefixChain(
            identity.format_digest,
            identity.numerics_digest,
            self._parts.salt_of(request.tenant),
            request.scope,
            scope_id,
            self._parts.engine.cache.layout.page_size,
        )
        return TurnPages(request.tenant, chain, request.stateless, self._claimed.lease.epoch)

    # -- the engine --------------------------------------------------------------------------------------------------

    def _generate(self, turn: FrozenTurn, max_tokens: int) -> str:
        """Compute the reply, as often as its pages are taken away; returns the finish reason."""
        assert self._pages is not None
        while True:
            self._report.attempts += 1
            end = self._attempt(turn, self._pages, max_tokens)
            if isinstance(end, Finished):
                return end.reason
            if isinstance(end, Failed):
                raise end.error
            if isinstance(end, Preempted):
                self._solo = self._solo or end.solo
            self._leave_if_interrupted()

    def _attempt(self, turn: FrozenTurn, pages: TurnPages, max_tokens: int) -> EngineOutput:
        """Admit, resolve, compute: until the reply ends or the engine gives the turn up."""
        parts = self._parts
        engine_turn = EngineTurn(self._engine_request(turn, max_tokens), pages, self._park)
        self._live.watch(engine_turn)
        running = parts.engine.admit(engine_turn)
        try:
            while not engine_turn.admitted.wait(_POLL_S):
                self._leave_if_interrupted()
            self._leave_if_interrupted()
            token_ids = engine_turn.request.known_ids
            pages.cover(token_ids)
            known = len(token_ids) if self._reply.output_ids else turn.shared_length
            resolution = parts.restorer.resolve(running, pages, token_ids, known // pages.chain.page_size)
            if self._report.attempts == 1:
                self._report.resolution = resolution
            begun = time.monotonic()
            parts.engine.start(running)
            return self._consume(engine_turn, len(token_ids), resolution, begun)
        finally:
            self._live.watch(None)
            parts.engine.discard(running)

    def _engine_request(self, turn: FrozenTurn, max_tokens: int) -> EngineRequest:
        request, bundle = self._claimed.request, self._parts.tokenizer.bundle
        end_ids = () if request.ignore_eos else bundle.end_ids
        sampling = SamplingParams(**{**request.sampling, "min_tokens": request.min_tokens, "end_ids": end_ids})
        return EngineRequest(
            turn_id=request.turn_id,
            prompt_ids=turn.ids,
            forced_ids=tuple(self._reply.output_ids),
            sampling=sampling,
            max_tokens=max_tokens,
            end_ids=frozenset(end_ids),
            priority=request.priority,
            order=self._order,
            solo=self._solo,
        )

    def _park(self, event: SealedEvent) -> None:
        assert self._pages is not None
        if self._parts.is_parked(self._pages):
            self._parts.parking.park(event, self._pages, self._parts.ttl_s(self._pages))
        else:
            self._parts.engine.cache.release(event.page, HoldKind.UPLOAD)

    def _consume(self, engine_turn: EngineTurn, num_known: int, resolution: Resolution, begun: float) -> EngineOutput:
        """Stream tokens as they come; everything that has arrived travels in one append."""
        first = True
        while True:
            outputs = _take_all(engine_turn.outputs)
            num_tokens = sum(isinstance(output, Token) for output in outputs)
            if first and num_tokens:
                computed = num_known - resolution.num_pages * self._page_size
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
        self._sent_number = answer.next_number
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

    def _commit(self, turn: FrozenTurn, reason: str) -> None:
        claimed, reply = self._claimed, self._reply
        reply.close()
        if reply.stopped:
            reason = "stop"
        state = TurnState.COMPLETED if reason == "stop" else TurnState.INCOMPLETE
        entry = self._entry(turn, reason)
        terminal = reply.finish(state, reason, self._usage(), {})
        digests = digests_of(claimed, with_reply(turn.history, reply.text)) if claimed.request.stateless else []
        call = commit(
            claimed.lease,
            entry,
            [terminal],
            served_tokens=len(turn.ids) - self._cached_tokens + len(reply.output_ids),
            history_digest=digests[-1] if digests else None,
            ancestors=[ancestor.turn_id for ancestor in turn.path],
            durable=claimed.request.durability == "host",
        )
        self._dispatch(self._parts.control.run(call).dispatches)
        self._report.end = state.value
        assert self._pages is not None
        self._parts.on_committed(entry, self._pages, claimed.lease.branch)

    def _entry(self, turn: FrozenTurn, reason: str) -> TranscriptEntry:
        request, reply, lease, identity = self._claimed.request, self._reply, self._claimed.lease, self._parts.identity
        assert self._pages is not None
        resolution = self._report.resolution
        extra: dict[str, object] = {"usage": self._usage()}
        if resolution.reasons:
            extra["recompute"] = dict(resolution.reasons)
        if turn.whole_reason is not None:
            extra["tokenized_whole"] = turn.whole_reason
        return TranscriptEntry(
            turn_id=request.turn_id,
            tenant=request.tenant,
            model=request.model,
            parent_id=turn.parent_id,
            root_id=turn.root_id,
            conversation_id=request.conversation_id,
            scope=request.scope,
            scope_id={CacheScope.TENANT: request.tenant, CacheScope.KEY: request.key_id}.get(
                request.scope, turn.root_id
            ),
            created_at=request.created_at,
            committed_at=time.time(),
            template_time=turn.template_time,
            shared_length=turn.shared_length,
            input_ids=turn.ids[turn.shared_length :],
            output_ids=tuple(reply.output_ids),
            messages=turn.new_messages,
            output_text=reply.text,
            finish_reason=reason,
            format_digest=identity.format_digest,
            numerics_digest=identity.numerics_digest,
            worker_id=lease.worker_id,
            epoch=lease.epoch,
            cached_tokens=self._cached_tokens,
            prompt_tokens=len(turn.ids),
            extra=extra,
        )

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

    def _hand_over(self, why: str) -> None:
        """Give the turn back: another worker goes on where the stream ends."""
        self._report.end = why
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
        lease = self._claimed.lease
        num_output = len(self._reply.output_ids)
        return self._report.usage(num_output, self._page_size, lease.worker_id, self._claimed.crashes + 1)

    @property
    def _cached_tokens(self) -> int:
        return self._report.cached_tokens(self._page_size)

    @property
    def _page_size(self) -> int:
        return self._parts.engine.cache.layout.page_size

    @property
    def _turn_id(self) -> str:
        return self._claimed.lease.turn_id


def _take_all(outputs: queue.SimpleQueue[EngineOutput]) -> list[EngineOutput]:
    """Everything that has arrived, at least one output unless a second passes."""
    taken: list[EngineOutput] = []
    try:
        taken.append(outputs.get(timeout=_POLL_S))
        while True:
            taken.append(outputs.get_nowait())
    except queue.Empty:
        return taken
