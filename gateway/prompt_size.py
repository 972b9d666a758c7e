"""Counts a prompt's tokens at accept, so that an over-long one is refused before anything is queued.

Only prompts that may be too long are built: a token stands for at least one byte, so few bytes prove that one fits. A
turn whose parent is still open is counted by the worker that claims it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from gateway.errors import InvalidRequest, PromptTooLong
from gateway.turns import TurnService
from snapshot_store.transcript import TranscriptEntry
from workers import registry
from workers.prompt.builder import PromptBuilder
from workers.prompt.bundle import TokenizerBundle
from workers.prompt.errors import PromptError, SandboxFailure, TokenizerError
from workers.prompt.history import committed_messages, split_instructions
from workers.prompt.sandbox import TemplateSandbox
from workers.prompt.tokenizer import Tokenizer
from workers.registry import ModelRecord
from workers.turns.records import TurnRequest

logger = logging.getLogger(__name__)

_TEMPLATE_BYTES = 1024
_TEMPLATE_BYTES_PER_MESSAGE = 64
_MAX_PATH = 4096


class PromptSizer:
    """Checks prompts against their model's context length. Tokenizers are kept by bundle digest."""

    def __init__(self, turns: TurnService) -> None:
        self._turns = turns
        self._sandbox = TemplateSandbox()
        self._builders: dict[str, PromptBuilder] = {}
        self._loading = asyncio.Lock()

    def close(self) -> None:
        """End the template process."""
        self._sandbox.close()

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
        builder = await self._builder(model.bundle_digest)
        if builder is None:
            return
        leading, following = split_instructions(request.messages)
        messages = [*leading, *committed_messages(await self._whole_path(request.tenant, path)), *following]
        num_tokens = await asyncio.to_thread(_count, builder, messages, request, path)
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

    async def _builder(self, digest: str) -> PromptBuilder | None:
        async with self._loading:
            if digest not in self._builders:
                block = await self._turns.run(registry.get_bundle(digest))
                if block is None:
                    return None
                try:
                    self._builders[digest] = await asyncio.to_thread(self._load, block)
                except TokenizerError as error:
                    logger.error("tokenizer bundle %s cannot be used: %s", digest[:16], error)
                    return None
            return self._builders[digest]

    def _load(self, block: bytes) -> PromptBuilder:
        return PromptBuilder(Tokenizer(TokenizerBundle.from_bytes(block)), self._sandbox)


def _most_tokens(request: TurnRequest) -> int:
    contents = sum(len(str(message["content"]).encode()) for message in request.messages)
    return contents + _TEMPLATE_BYTES + _TEMPLATE_BYTES_PER_MESSAGE * (len(request.messages) + 1)


def _count(
    builder: PromptBuilder, messages: list[dict[str, Any]], request: TurnRequest, path: Sequence[TranscriptEntry]
) -> int | None:
    template_time = path[-1].template_time if path else int(request.created_at)
    try:
        built = builder.build(
            messages,
            template_time=template_time,
            tools=request.tools,
            template_kwargs=request.template_kwargs,
        )
    except PromptError as error:
        raise InvalidRequest(str(error)[:400], code="invalid_prompt", param=error.field) from error
    except SandboxFailure as error:
        logger.warning("a prompt was not counted, the worker will: %s", error)
        return None
    return len(built.ids)
