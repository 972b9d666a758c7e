"""The committed transcript: one immutable entry per turn, the truth from which every snapshot can be recomputed.

Token ids of a turn = parent's (prompt + output)[:shared_length] + input_ids + output_ids. Text is for display only.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from snapshot_store.errors import BadFingerprint
from snapshot_store.fingerprint import parse_numerics_id

TRANSCRIPT_VERSION = 1


class CacheScope(StrEnum):
    """Who may share pages: the tenant's conversations, those of one API key, or one conversation tree."""

    TENANT = "tenant"
    KEY = "key"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """What one committed turn added.

    shared_length: tokens taken over from the parent's prompt + output. input_ids: the prompt's ids after them.
    output_ids: every sampled id through the one that completed a stop string, without a final end token.
    messages: the request's new messages, for display and for rebuilding prompts ({"role", "content", ...}).
    output_text: the reply's text as the client saw it. root_id: the tree's first turn. created_at: unix seconds of
    accept; template_time: that of the tree's first turn, the time that templates see.
    page_digests are never stored: they follow from the ids, the fingerprint, the tenant's salt and the scope.
    numerics_digest: of the pages that the turn wrote. extra["foreign_pages"]: pages of other numerics that it reused,
    by numerics id. extra["forced_numerics"]: ids of other numerics under which earlier runs sampled part of the reply.
    """

    turn_id: str
    tenant: str
    model: str
    parent_id: str | None
    root_id: str
    conversation_id: str | None
    scope: CacheScope
    scope_id: str
    created_at: float
    committed_at: float
    template_time: int
    shared_length: int
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    output_text: str
    finish_reason: str
    format_digest: bytes
    numerics_digest: bytes
    worker_id: str
    epoch: int
    cached_tokens: int
    prompt_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def numerics(self) -> tuple[bytes, ...]:
        """Numerics under which the turn's pages are parked: of those that it wrote, then of those that it reused."""
        named = [self.numerics_digest]
        for name in self.extra.get("foreign_pages", ()):
            with suppress(BadFingerprint):
                named.append(parse_numerics_id(name))
        return tuple(dict.fromkeys(named))
