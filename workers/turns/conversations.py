"""Conversations: named heads of a branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snapshot_store.transcript import CacheScope, TranscriptEntry
from snapshot_store.transcript_codec import decode_entry
from workers.turns.codec import pack, pack_messages, unpack, unpack_messages
from workers.turns.outcomes import ConversationView
from workers.turns.replies import fields_of, maybe_text, text
from workers.turns.script import ScriptCall, load_script

RETENTION_S = 30 * 24 * 3600


def create_conversation(
    tenant: str,
    conversation_id: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
    retention_s: int = RETENTION_S,
) -> ScriptCall[ConversationView | None]:
    """Create a conversation (repeating it changes nothing). messages: items before its first turn.

    None when the id belongs to another tenant or was deleted. It lives `retention_s` after its last change.
    """
    args = (conversation_id, tenant, pack(dict(metadata or {})), pack_messages(messages), retention_s)
    return ScriptCall(load_script("create_conversation", flags=""), (), args, _parse_view)


def get_conversation(tenant: str, conversation_id: str) -> ScriptCall[ConversationView | None]:
    """Read a conversation; None when it is unknown, deleted or another tenant's."""
    return ScriptCall(load_script("get_conversation", flags="no-writes"), (), (conversation_id, tenant), _parse_view)


def update_conversation(
    tenant: str, conversation_id: str, metadata: Mapping[str, Any]
) -> ScriptCall[ConversationView | None]:
    """Replace a conversation's metadata; None as in get_conversation."""
    args = (conversation_id, tenant, "metadata", pack(dict(metadata)), "")
    return ScriptCall(load_script("update_conversation", flags=""), (), args, _parse_view)


def add_messages(
    tenant: str, conversation_id: str, messages: Sequence[Mapping[str, Any]], *, change_id: str
) -> ScriptCall[ConversationView | None]:
    """Add messages by hand; the next accepted turn takes them. change_id makes a repeat harmless."""
    args = (conversation_id, tenant, "messages", pack_messages(messages), change_id)
    return ScriptCall(load_script("update_conversation", flags=""), (), args, _parse_view)


def delete_conversation(tenant: str, conversation_id: str) -> ScriptCall[bool]:
    """Delete a conversation: it is not found any more. Its turns stay readable by their ids until they expire."""
    return ScriptCall(load_script("delete_conversation"), (), (conversation_id, tenant), bool)


def conversation_entries(
    tenant: str, conversation_id: str, start: int = 0, stop: int = -1
) -> ScriptCall[tuple[TranscriptEntry, ...] | None]:
    """Read committed turns `start` to `stop` (inclusive, negative from the end) in order; None as in get_conversation.

    Entries that have expired are left out.
    """

    def parse(reply: Any) -> tuple[TranscriptEntry, ...] | None:
        return None if reply is None else tuple(decode_entry(data) for data in reply if data)

    args = (conversation_id, tenant, start, stop)
    return ScriptCall(load_script("conversation_entries", flags="no-writes"), (), args, parse)


def _parse_view(reply: Any) -> ConversationView | None:
    if reply is None:
        return None
    conversation_id, flat, open_turns, num_turns = reply
    record = fields_of(flat)
    scope = maybe_text(record.get("scope"))
    return ConversationView(
        conversation_id=text(conversation_id),
        tenant=text(record["tenant"]),
        created_at=int(record["created_ms"]) / 1000,
        metadata=unpack("metadata", record["metadata"]),
        head=maybe_text(record.get("head")),
        root_id=maybe_text(record.get("root")),
        scope=CacheScope(scope) if scope else None,
        pending=unpack_messages(record.get("pending", b"")),
        open_turns=tuple(map(text, open_turns)),
        num_turns=int(num_turns),
    )
