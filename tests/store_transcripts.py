"""Transcript entries for tests of the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snapshot_store.transcript import CacheScope, TranscriptEntry
from tests.store_pages import FINGERPRINT

_PLAIN = TranscriptEntry(
    turn_id="resp_1",
    tenant="local",
    model="tiny",
    parent_id=None,
    root_id="resp_1",
    conversation_id=None,
    scope=CacheScope.TENANT,
    scope_id="local",
    created_at=1000.0,
    committed_at=1001.5,
    template_time=1000,
    shared_length=0,
    input_ids=(),
    output_ids=(),
    messages=(),
    output_text="",
    finish_reason="stop",
    format_digest=FINGERPRINT.format_digest,
    numerics_digest=FINGERPRINT.numerics_digest,
    worker_id="worker-1",
    epoch=1,
    cached_tokens=0,
    prompt_tokens=0,
)


def make_entry(turn_id: str, **changes: Any) -> TranscriptEntry:
    """An entry with the given fields and plain values elsewhere."""
    return replace(_PLAIN, turn_id=turn_id, **changes)
