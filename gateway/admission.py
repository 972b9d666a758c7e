"""From a checked request to an accepted turn: ids, tenant, limits, prompt size, then one accept."""

from __future__ import annotations

import time
from typing import Any

from gateway.auth import Principal
from gateway.chat_request import ChatRequest
from gateway.errors import InvalidRequest, InvalidValue, NotFound, PermissionRefused, UnsupportedField
from gateway.http import Gateway, is_id, new_id, no_such
from gateway.responses_request import ResponsesRequest
from gateway.sampling_fields import Generation
from gateway.turns import Idempotency
from snapshot_store.transcript import CacheScope
from workers.prompt.history import marked
from workers.turns.records import TurnRequest


async def admit_chat(
    gateway: Gateway, principal: Principal, chat: ChatRequest, key: Idempotency | None
) -> tuple[tuple[str, ...], float]:
    """Accept one stateless turn per choice; returns their ids (the first is the completion's) and the first's time.

    Raises NotFound (model), and what `TurnService.submit` raises. When a later choice is refused, the
    earlier ones are cancelled.
    """
    first = _request(
        gateway,
        principal,
        chat.generation,
        turn_id=new_id("chatcmpl-"),
        model=chat.body.model,
        messages=chat.messages,
        stateless=True,
        store=False,
        max_tokens=chat.max_tokens,
        stop=chat.stops,
        display={"kind": "chat"},
    )
    await _check_size(gateway, first, "messages", chat.max_tokens, "max_tokens")
    submitted = await gateway.turns.submit(first, key)
    turn_ids = [submitted.turn_id]
    try:
        for choice in range(1, chat.num_choices):
            choice_key = Idempotency(f"{key.key}\n{choice}", key.body_digest) if key else None
            sibling = _sibling(first, f"{first.turn_id}-{choice}", choice)
            turn_ids.append((await gateway.turns.submit(sibling, choice_key)).turn_id)
    except Exception:
        for turn_id in turn_ids:
            await gateway.turns.cancel(principal.tenant, turn_id)
        raise
    return tuple(turn_ids), submitted.created_at


async def admit_response(
    gateway: Gateway, principal: Principal, asked: ResponsesRequest, key: Idempotency | None
) -> str:
    """Accept the turn of a response; returns its id.

    Raises NotFound (model, parent, conversation), and what `TurnService.submit` raises.
    """
    _check_parent(asked)
    body = asked.body
    instructions = marked([{"role": "system", "content": body.instructions}] if body.instructions else [])
    request = _request(
        gateway,
        principal,
        asked.generation,
        turn_id=new_id("resp_"),
        model=body.model,
        messages=(*instructions, *asked.messages),
        parent_id=asked.parent_id,
        conversation_id=asked.conversation_id,
        store=asked.store,
        max_tokens=body.max_output_tokens,
        stop=asked.stops,
        display={
            "kind": "response",
            "background": asked.background,
            "instructions": body.instructions,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "metadata": dict(body.metadata or {}),
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        },
    )
    await _check_size(gateway, request, "input", body.max_output_tokens, "max_output_tokens")
    return (await gateway.turns.submit(request, key)).turn_id


def _request(gateway: Gateway, principal: Principal, generation: Generation, **fields: Any) -> TurnRequest:
    options = generation.options
    if options.worker is not None and not principal.is_admin:
        raise PermissionRefused("'kvalet.worker' needs an admin key", code="admin_required", param="kvalet.worker")
    if options.durability == "host" and not gateway.fleet.has_host_durability:
        raise UnsupportedField("kvalet.durability", "host", "this service's control server does not sync every write")
    now = time.time()
    request = TurnRequest(
        tenant=principal.tenant,
        key_id=principal.key_id,
        created_at=now,
        sampling=generation.sampling,
        scope=CacheScope(options.scope or CacheScope.TENANT),
        min_tokens=generation.min_tokens,
        ignore_eos=generation.ignore_eos,
        template_kwargs=generation.template_kwargs,
        priority=options.priority,
        deadline=now + options.deadline_s if options.deadline_s is not None else None,
        durability=options.durability or gateway.settings.durability,
        worker=options.worker,
        **fields,
    )
    _check_bytes(gateway, request)
    return request


def _sibling(first: TurnRequest, turn_id: str, choice: int) -> TurnRequest:
    fields = {name: getattr(first, name) for name in TurnRequest.__slots__}
    return TurnRequest(**{**fields, "turn_id": turn_id, "sampling": {**first.sampling, "choice": choice}})


def _check_parent(asked: ResponsesRequest) -> None:
    if asked.parent_id is not None and not is_id(asked.parent_id, "resp_"):
        raise no_such("Response", asked.parent_id, "previous_response_id")
    if asked.conversation_id is not None and not is_id(asked.conversation_id, "conv_"):
        raise no_such("Conversation", asked.conversation_id, "conversation")


def _check_bytes(gateway: Gateway, request: TurnRequest) -> None:
    size = sum(len(str(message["content"]).encode()) for message in request.messages)
    if size > gateway.settings.max_prompt_bytes:
        raise InvalidRequest(
            f"the messages have {size} bytes, the limit is {gateway.settings.max_prompt_bytes}",
            code="prompt_too_large",
            param="messages" if request.stateless else "input",
        )


async def _check_size(
    gateway: Gateway, request: TurnRequest, prompt_param: str, max_tokens: int | None, limit_param: str
) -> None:
    """Refuse an unknown model, a prompt beyond its context, and a max_tokens that no prompt could leave room for."""
    model = gateway.fleet.model(request.model)
    if model is None:
        raise NotFound(f"the model '{request.model[:80]}' does not exist", code="model_not_found", param="model")
    if max_tokens is not None and max_tokens > model.context_length:
        raise InvalidValue(
            limit_param, f"'{limit_param}' = {max_tokens} is more than the context length of {model.context_length}"
        )
    await gateway.sizer.check(request, model, prompt_param)
