"""What the turns of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snapshot_store.transcript import TranscriptEntry
from workers.conversation import Conversations
from workers.dispatch import Dispatcher
from workers.engine.engine import Engine
from workers.live_turns import LiveTurns
from workers.parking.acceptance import AcceptedNumerics
from workers.parking.identity import WriterIdentity
from workers.parking.park import Parking
from workers.parking.restore import Restorer
from workers.parking.turn_pages import TurnPages
from workers.prompt.tokenizer import Tokenizer
from workers.turn_report import TurnReport
from workers.turns.control import TurnControl
from workers.turns.leasing import Claimant


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
    accepted: AcceptedNumerics
    claimant: Callable[[], Claimant]
    salt_of: Callable[[str], bytes]
    ttl_s: Callable[[TurnPages], int]
    is_parked: Callable[[TurnPages], bool]
    on_committed: Callable[[TranscriptEntry, TurnPages, str], None]
    on_turn: Callable[[TurnReport], None]
    context_length: int
    arena_cells: int

    @property
    def page_size(self) -> int:
        """Cells per page."""
        return self.engine.cache.layout.page_size
