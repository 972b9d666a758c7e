"""Reading committed transcripts from control: one turn, its path from the root, its token ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import redis

from snapshot_store.errors import StoreUnreachable, TranscriptDamaged, TranscriptMissing
from snapshot_store.keys import transcript_key
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_codec import decode_entry

MAX_PATH_TURNS: Final = 10_000


class TranscriptReader:
    """Transcripts of one tenant. Entries are immutable, so nothing here can be stale."""

    def __init__(self, control: redis.Redis, tenant: str) -> None:
        self._control = control
        self._tenant = tenant

    def entry(self, turn_id: str) -> TranscriptEntry:
        """The entry of a committed turn. Raises TranscriptMissing, TranscriptDamaged, StoreUnreachable, BadKeyPart."""
        try:
            raw = cast("bytes | None", self._control.get(transcript_key(self._tenant, turn_id)))
        except redis.RedisError as error:
            raise StoreUnreachable(f"control: {error}") from error
        if raw is None:
            raise TranscriptMissing(turn_id)
        entry = decode_entry(raw)
        if (entry.tenant, entry.turn_id) != (self._tenant, turn_id):
            raise TranscriptDamaged("turn_id", f"{entry.tenant}/{entry.turn_id}", f"{self._tenant}/{turn_id}")
        return entry

    def path(self, turn_id: str) -> tuple[TranscriptEntry, ...]:
        """Entries from the tree's root to this turn. Raises like `entry`, also for a loop or more than 10,000 turns."""
        entries: dict[str, TranscriptEntry] = {}
        wanted: str | None = turn_id
        while wanted is not None:
            if wanted in entries:
                raise TranscriptDamaged("parent_id", wanted, "a turn that is not its own ancestor")
            if len(entries) == MAX_PATH_TURNS:
                raise TranscriptDamaged("path", turn_id, f"at most {MAX_PATH_TURNS} turns")
            entries[wanted] = self.entry(wanted)
            wanted = entries[wanted].parent_id
        return tuple(reversed(entries.values()))

    def token_ids(self, turn_id: str) -> tuple[int, ...]:
        """Prompt and output ids of the conversation through this turn. Raises like `path`."""
        return fold_token_ids(self.path(turn_id))


def fold_token_ids(path: Iterable[TranscriptEntry]) -> tuple[int, ...]:
    """Token ids of a path from the root: each turn keeps `shared_length` ids of its parent and adds its own.

    Raises TranscriptDamaged where a turn keeps more than its parent has.
    """
    token_ids: tuple[int, ...] = ()
    for entry in path:
        if entry.shared_length > len(token_ids):
            raise TranscriptDamaged("shared_length", entry.shared_length, f"at most the parent's {len(token_ids)} ids")
        token_ids = token_ids[: entry.shared_length] + entry.input_ids + entry.output_ids
    return token_ids
