"""All operations of turn control, each a ScriptCall for `control.run(...)` or `await control.run(...)`."""

from workers.turns.accepting import accept
from workers.turns.cancelling import cancel, delete_response
from workers.turns.conversations import (
    add_messages,
    conversation_entries,
    create_conversation,
    delete_conversation,
    get_conversation,
    update_conversation,
)
from workers.turns.history import find_history
from workers.turns.leasing import claim, end_worker_leases, release, renew
from workers.turns.pushing import push_message
from workers.turns.reading import get_turn, get_turn_state
from workers.turns.sweeping import sweep
from workers.turns.writing import append_events, commit, finish, freeze_prompt

__all__ = [
    "accept",
    "add_messages",
    "append_events",
    "cancel",
    "claim",
    "commit",
    "conversation_entries",
    "create_conversation",
    "delete_conversation",
    "delete_response",
    "end_worker_leases",
    "find_history",
    "finish",
    "freeze_prompt",
    "get_conversation",
    "get_turn",
    "get_turn_state",
    "push_message",
    "release",
    "renew",
    "sweep",
    "update_conversation",
]
