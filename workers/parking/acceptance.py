"""Whose pages a worker reuses: those of its own numerics, and of the others that it was told to accept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from snapshot_store.fingerprint import MIXED_DIGEST, parse_numerics_id
from snapshot_store.transcript import TranscriptEntry

_MAX_FOREIGN = 8


@dataclass(frozen=True, slots=True)
class AcceptedNumerics:
    """The setting `accept_numerics`. own: numerics of the worker. listed: accepted ones, None for any."""

    own: bytes
    listed: tuple[bytes, ...] | None

    @classmethod
    def parse(cls, own: bytes, setting: str) -> AcceptedNumerics:
        """Read `own`, `any` or numerics ids with commas between. Raises BadFingerprint."""
        if setting == "any":
            return cls(own, None)
        ids = () if setting == "own" else setting.split(",")
        return cls(own, tuple(dict.fromkeys(digest for digest in map(parse_numerics_id, ids) if digest != own)))

    def of_turn(self, path: Sequence[TranscriptEntry], earlier_runs: Iterable[bytes]) -> tuple[bytes, ...]:
        """Other numerics to look under for a turn's pages, best first.

        path: the committed turns that it continues. earlier_runs: numerics of workers that ran it before. `any` means
        the latest of those that these name: the ones under which this very history may be parked.
        """
        if self.listed is not None:
            return self.listed
        named = [numerics for entry in reversed(path) for numerics in entry.numerics]
        foreign = [numerics for numerics in (*earlier_runs, *named) if numerics not in (self.own, MIXED_DIGEST)]
        if not foreign and MIXED_DIGEST not in named:
            return ()
        # Mixed pages lie behind others: they are looked for last.
        return (*list(dict.fromkeys(foreign))[:_MAX_FOREIGN], MIXED_DIGEST)


def readable_cells(path: Sequence[TranscriptEntry], shared_length: int, numerics: Collection[bytes]) -> int:
    """How many leading cells of a prompt some turn of its history has written under one of these numerics.

    path: root first. shared_length: tokens that the prompt has in common with its last turn.
    """
    shared = shared_length
    for entry in reversed(path):
        if entry.numerics_digest in numerics:
            return min(shared, entry.shared_length + len(entry.input_ids) + len(entry.output_ids))
        shared = min(shared, entry.shared_length)
    return 0
