"""cancel and delete_response: what a client may do to its own turns."""

from __future__ import annotations

from typing import Any

from workers.turns.events import TurnState
from workers.turns.outcomes import CancelKind, CancelOutcome
from workers.turns.replies import dispatches, maybe_text, text
from workers.turns.script import ScriptCall, load_script


def cancel(tenant: str, turn_id: str) -> ScriptCall[CancelOutcome]:
    """Cancel a turn: at once when no worker holds it, else its worker is told and ends it within one step.

    A turn that has ended stays as it is; a tenant's call never finds another tenant's turn.
    """

    return ScriptCall(load_script("cancel"), (), (turn_id, tenant), _parse)


def delete_response(tenant: str, turn_id: str) -> ScriptCall[CancelOutcome]:
    """Hide a turn from clients (cancelling it when open); its data goes once no later turn continues it.

    Answers NOT_FOUND for an unknown, foreign or already deleted turn.
    """

    return ScriptCall(load_script("delete_response"), (), (turn_id, tenant), _parse)


def _parse(reply: Any) -> CancelOutcome:
    kind, state, sends = reply
    name = maybe_text(state)
    return CancelOutcome(CancelKind(text(kind)), TurnState(name) if name else None, dispatches(sends))
