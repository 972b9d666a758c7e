"""Counts a prompt's tokens at accept, so that an over-long one is refused before anything is queued.

Only prompts that may be too long are built: a token stands for at least one byte, so few bytes prove that one fits. A
turn whose parent is still open is counted by the worker that claims it. Vocabularies are loaded and prompts built in a
process of their own: a large vocabulary would hold this one's interpreter, and every reply with it, for a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from gateway.errors import InvalidRequest, PromptTooLong
from gateway.turns import TurnService
from snapshot_store.transcript import TranscriptEntry
from workers import registry
from workers.prompt.counting import PromptCounter
from workers.prompt.errors import BundleNeeded, PromptError, SandboxFailure, TokenizerError
from workers.prompt.history import committed_messages, split_instructions
from workers.registry import ModelRecord
from workers.turns.records import TurnRequest

logger = logging.getLogger(__name__)

_TEMPLATE_BYTES = 1024
_TEMPLATE_BYTES_PER_MESSAGE = 64
_MAX_PATH = 4096


class PromptSizer:
    """Checks prompts against their model's context length."""

    def __init__(self, turns: TurnService) -> None:
        self._turns = turns
        self._counter = PromptCounter()
        # One at a time: prompts that wait for the counter must not take the threads that others need.
        self._counting = asyncio.Lock()

    def close(self) -> None:
        """End the counting process."""
        self._counter.close()

    async def check(self, request: TurnRequest, model: ModelRecord, param: str) -> None:
        """Refuse a prompt that leaves no room for a reply; `param` is the request field to blame.

        Raises PromptTooLong with both counts, InvalidRequest for messages that the template refuses.
        """
        path = await self._path(request)
        if path is None:
            return
        known = path[-1].prompt_tokens + len(path[-1].output_ids) if path else 0
        if known + _most_tokens(request) < model.context_length:
            return
        leading, following = split_instructions(request.messages)
        messages = [*leading, *committed_messages(await self._whole_path(request.tenant, path)), *following]
        num_tokens = await self._count(model.bundle_digest, messages, request, path)
        if num_tokens is not None and num_tokens >= model.context_length:
            raise PromptTooLong(num_tokens, model.context_length, param)

    async def _path(self, request: TurnRequest) -> list[TranscriptEntry] | None:
        """The committed turn that this one continues, in a list; empty for a first turn, None when it is still open."""
        if request.conversation_id is not None:
            conversation = await self._turns.conversation(request.tenant, request.conversation_id)
            if conversation is None or conversation.open_turns or conversation.pending:
                return None
            parent_id = conversation.head
        else:
            parent_id = request.parent_id
        if parent_id is None:
            return []
        entry = await self._entry(request.tenant, parent_id)
        return None if entry is None else [entry]

    async def _whole_path(self, tenant: str, path: list[TranscriptEntry]) -> list[TranscriptEntry]:
        """The path down to its root, root first; what has expired is left out."""
        whole = list(path)
        while whole and whole[0].parent_id is not None and len(whole) < _MAX_PATH:
            entry = await self._entry(tenant, whole[0].parent_id)
            if entry is None:
                break
            whole.insert(0, entry)
        return whole

    async def _entry(self, tenant: str, turn_id: str) -> TranscriptEntry | None:
        turn = await self._turns.view(tenant, turn_id)
        return None if turn is None else turn.transcript

    async def _count(
        self, digest: str, messages: list[dict[str, Any]], request: TurnRequest, path: Sequence[TranscriptEntry]
    ) -> int | None:
        """The prompt's tokens; None when only a worker can tell."""
        count = partial(
            self._counter.count,
            digest,
            messages,
            template_time=path[-1].template_time if path else int(request.created_at),
            tools=request.tools,
            template_kwargs=request.template_kwargs,
        )
        async with self._counting:
            try:
                try:
                    return await asyncio.to_thread(count)
                except BundleNeeded:
                    block = await self._turns.run(registry.get_bundle(digest))
                    return None if block is None else await asyncio.to_thread(count, block=block)
            except PromptError as error:
                raise InvalidRequest(str(error)[:400], code="invalid_prompt", param=error.field) from error
            except TokenizerError as error:
                logger.error("tokenizer bundle %s cannot be used: %s", digest[:16], error)
            except (SandboxFailure, BundleNeeded) as error:
                logger.warning("a prompt was not counted, the worker will: %s", error)
        return None


def _most_tokens(request: TurnRequest) -> int:
    contents = sum(len(str(message["content"]).encode()) for message in request.messages)
    return contents + _TEMPLATE_BYTES + _TEMPLATE_BYTES_PER_MESSAGE * (len(request.messages) + 1)
