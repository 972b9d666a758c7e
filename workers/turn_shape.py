"""What follows from a claimed turn and its frozen prompt alone: limits, pages, engine request, transcript entry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpu.plan import SamplingParams
from snapshot_store.chain import PrefixChain
from snapshot_store.fingerprint import parse_numerics_id
from snapshot_store.transcript import CacheScope, TranscriptEntry
from workers.conversation import FrozenTurn
from workers.engine.requests import EngineRequest
from workers.errors import ContextOverflow, TurnFailed
from workers.parking.acceptance import readable_cells
from workers.parking.turn_pages import TurnPages
from workers.reply import Reply
from workers.turn_report import TurnReport
from workers.turns.records import ClaimedTurn
from workers.worker_parts import WorkerParts


def reply_limit(parts: WorkerParts, claimed: ClaimedTurn, turn: FrozenTurn) -> int:
    """The reply's limit in tokens: what was asked for, cut to the context. Raises ContextOverflow when nothing fits.

    A request whose prompt and max_tokens fit the context, but not an empty arena, is refused too.
    """
    asked, context, arena = claimed.request.max_tokens, parts.context_length, parts.arena_cells
    num_prompt = len(turn.ids)
    if num_prompt >= context:
        raise ContextOverflow(num_prompt, context)
    if num_prompt >= arena:
        raise ContextOverflow(num_prompt, arena, "KV cache")
    if asked is None:
        return min(context, arena) - num_prompt
    limit = min(asked, context - num_prompt)
    if num_prompt + limit > arena:
        raise ContextOverflow(num_prompt + limit, arena, "KV cache")
    return limit


def scope_id(claimed: ClaimedTurn, turn: FrozenTurn) -> str:
    """What the cache scope names: tenant, API key or root turn."""
    request = claimed.request
    return {CacheScope.TENANT: request.tenant, CacheScope.KEY: request.key_id, CacheScope.CONVERSATION: turn.root_id}[
        request.scope
    ]


def turn_pages(parts: WorkerParts, claimed: ClaimedTurn, turn: FrozenTurn) -> TurnPages:
    """The turn's prefix chains, still without pages."""
    request, identity = claimed.request, parts.identity
    chain = PrefixChain(
        identity.format_digest,
        identity.numerics_digest,
        parts.salt_of(request.tenant),
        request.scope,
        scope_id(claimed, turn),
        parts.page_size,
    )
    accepted = parts.accepted.of_turn(turn.path, map(parse_numerics_id, claimed.earlier_numerics))
    return TurnPages(request.tenant, chain, request.stateless, claimed.lease.epoch, accepted)


def sealed_pages(
    claimed: ClaimedTurn, turn: FrozenTurn, pages: TurnPages, forced_ids: Sequence[int]
) -> tuple[int, int]:
    """Leading pages that earlier runs have sealed, and those of them whose numerics may be reused here.

    forced_ids: output ids that an earlier run of this turn has sampled: it had all cells before them.
    """
    size = pages.chain.page_size
    if not forced_ids:
        num_readable = readable_cells(turn.path, turn.shared_length, pages.numerics)
        return turn.shared_length // size, num_readable // size
    num_sealed = (len(turn.ids) + len(forced_ids)) // size
    if {parse_numerics_id(numerics) for numerics in claimed.earlier_numerics} <= set(pages.numerics):
        return num_sealed, num_sealed
    return num_sealed, readable_cells(turn.path, turn.shared_length, pages.numerics) // size


def engine_request(
    parts: WorkerParts,
    claimed: ClaimedTurn,
    turn: FrozenTurn,
    forced_ids: tuple[int, ...],
    max_tokens: int,
    order: int,
    num_contained: int,
) -> EngineRequest:
    """The turn as the engine sees it. num_contained: steps of this run that failed with this turn among others.

    Raises TurnFailed for a bias on an id that the model does not have.
    """
    request = claimed.request
    _check_biases(request.sampling.get("logit_bias", ()), parts.engine.backend.config.vocab_size)
    end_ids = () if request.ignore_eos else parts.tokenizer.bundle.end_ids
    sampling = SamplingParams(**{**request.sampling, "min_tokens": request.min_tokens, "end_ids": end_ids})
    return EngineRequest(
        turn_id=request.turn_id,
        prompt_ids=turn.ids,
        forced_ids=forced_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        end_ids=frozenset(end_ids),
        priority=request.priority,
        order=order,
        solo=claimed.solo or num_contained > 1,
        wary=num_contained == 1,
    )


def _check_biases(biases: Sequence[Sequence[float]], vocab_size: int) -> None:
    for token_id, _ in biases:
        if not 0 <= token_id < vocab_size:
            limit = f"the model has ids 0 to {vocab_size - 1}"
            raise TurnFailed("invalid_logit_bias", f"logit_bias names token id {int(token_id)}: {limit}")


def transcript_entry(
    parts: WorkerParts,
    claimed: ClaimedTurn,
    turn: FrozenTurn,
    pages: TurnPages,
    reply: Reply,
    report: TurnReport,
    reason: str,
) -> TranscriptEntry:
    """What the turn adds to the transcript."""
    request, lease = claimed.request, claimed.lease
    extra: dict[str, Any] = {
        "usage": report.usage(len(reply.output_ids), parts.page_size, lease.worker_id, claimed.crashes + 1)
    }
    if report.resolution.reasons:
        extra["recompute"] = dict(report.resolution.reasons)
    extra |= report.marks()
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
        scope_id=scope_id(claimed, turn),
        created_at=request.created_at,
        committed_at=time.time(),
        template_time=turn.template_time,
        shared_length=turn.shared_length,
        input_ids=turn.ids[turn.shared_length :],
        output_ids=tuple(reply.output_ids),
        messages=turn.new_messages,
        output_text=reply.text,
        finish_reason=reason,
        format_digest=parts.identity.format_digest,
        numerics_digest=pages.written,
        worker_id=lease.worker_id,
        epoch=lease.epoch,
        cached_tokens=report.cached_tokens(parts.page_size),
        prompt_tokens=len(turn.ids),
        extra=extra,
    )
