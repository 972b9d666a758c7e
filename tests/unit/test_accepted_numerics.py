"""Whose pages a worker looks for, and under which digests a turn's own pages lie."""

from __future__ import annotations

import pytest

from snapshot_store.chain import PrefixChain
from snapshot_store.errors import BadFingerprint
from snapshot_store.fingerprint import MIXED_DIGEST
from snapshot_store.transcript import CacheScope, TranscriptEntry
from tests.store_transcripts import make_entry
from workers.parking.acceptance import AcceptedNumerics, readable_cells
from workers.parking.resolution import Resolution
from workers.parking.turn_pages import TurnPages
from workers.settings import WorkerSettings

OWN, A, B = b"o" * 32, b"a" * 32, b"b" * 32
SIZE = 4
IDS = tuple(range(100, 118))


def _entry(numerics: bytes, *, shared: int = 0, inputs: int = 0, outputs: int = 0, **foreign: int) -> TranscriptEntry:
    return make_entry(
        "resp_1", numerics_digest=numerics, shared_length=shared, input_ids=(1,) * inputs, output_ids=(2,) * outputs,
        extra={"foreign_pages": foreign} if foreign else {},
    )  # fmt: skip


def _pages(*accepted: bytes) -> TurnPages:
    chain = PrefixChain(b"f" * 32, OWN, b"s" * 32, CacheScope.TENANT, "local", SIZE)
    pages = TurnPages("local", chain, False, 1, accepted)
    pages.cover(IDS)
    return pages


def test_strict_worker_looks_under_nothing_else_whatever_the_history_names() -> None:
    path = [_entry(A), _entry(MIXED_DIGEST, **{A.hex(): 3})]
    assert AcceptedNumerics.parse(OWN, "own").of_turn(path, [B]) == ()


def test_any_looks_under_what_history_and_earlier_runs_name_latest_first_mixed_last() -> None:
    path = [_entry(A), _entry(OWN), _entry(MIXED_DIGEST, **{"mixed": 1, b"c".hex() * 32: 2}), _entry(A)]
    accepted = AcceptedNumerics.parse(OWN, "any")
    assert accepted.of_turn(path, [B]) == (B, A, b"c" * 32, MIXED_DIGEST)
    assert accepted.of_turn([_entry(OWN)], []) == ()
    assert accepted.of_turn([], [A]) == (A, MIXED_DIGEST)
    assert accepted.of_turn([_entry(MIXED_DIGEST)], []) == (MIXED_DIGEST,)


def test_any_looks_under_a_bounded_number_of_numerics() -> None:
    path = [_entry(bytes([number]) * 32) for number in range(50)]
    latest = tuple(bytes([number]) * 32 for number in range(49, 41, -1))
    assert AcceptedNumerics.parse(OWN, "any").of_turn(path, []) == (*latest, MIXED_DIGEST)


def test_listed_numerics_are_looked_under_in_their_order_without_our_own() -> None:
    accepted = AcceptedNumerics.parse(OWN, f"{B.hex()},{OWN.hex()},mixed,{B.hex()}")
    assert accepted.of_turn([_entry(A)], [A]) == (B, MIXED_DIGEST)


def test_history_entry_with_an_unknown_numerics_id_is_read_without_it() -> None:
    path = [_entry(MIXED_DIGEST, **{"of a later version": 1, A.hex(): 1})]
    assert AcceptedNumerics.parse(OWN, "any").of_turn(path, []) == (A, MIXED_DIGEST)


@pytest.mark.parametrize("setting", ["", "all", "own,any", "ab" * 31, f"{A.hex()},", f"{A.hex()};mixed", "Mixed"])
def test_setting_that_names_no_numerics_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="accept_numerics"):
        WorkerSettings(accept_numerics=setting)
    with pytest.raises(BadFingerprint):
        AcceptedNumerics.parse(OWN, setting)


@pytest.mark.parametrize("setting", ["own", "any", "mixed", A.hex(), f"{A.hex()},mixed"])
def test_setting_that_names_numerics_is_taken(setting: str) -> None:
    AcceptedNumerics.parse(OWN, WorkerSettings(accept_numerics=setting).accept_numerics)


def test_readable_cells_end_with_the_last_turn_of_readable_numerics() -> None:
    path = [
        _entry(OWN, inputs=20, outputs=10), _entry(A, shared=30, inputs=5, outputs=5),
        _entry(B, shared=40, inputs=5, outputs=5),
    ]  # fmt: skip
    assert readable_cells(path, 50, {OWN}) == 30
    assert readable_cells(path, 50, {OWN, A}) == 40
    assert readable_cells(path, 50, {OWN, A, B}) == 50
    assert readable_cells(path, 25, {OWN, A, B}) == 25, "the prompt leaves its history there"
    assert readable_cells([path[0], _entry(A, shared=8, inputs=9)], 17, {OWN}) == 8, "the second turn left the first"
    assert readable_cells(path, 50, {b"x" * 32}) == 0


def test_page_behind_a_foreign_one_is_mixed_and_tied_to_all_tokens_before_it() -> None:
    pages = _pages(A, MIXED_DIGEST)
    pages.reuse(OWN, 1)
    pages.reuse(A, 1)
    assert pages.written == MIXED_DIGEST
    digest = pages.seal(2, IDS[8:12], own_numerics=False)
    mixed = pages.chain.under(MIXED_DIGEST)
    assert pages.sources == [OWN, A, MIXED_DIGEST]
    assert digest == mixed.digests(IDS)[2]
    assert pages.parent(2) == mixed.digests(IDS)[1], "no foreign digest is part of it"
    assert pages.digest(1) == pages.chain.under(A).digests(IDS)[1]
    assert pages.digest(0) == pages.chain.digests(IDS)[0]


def test_page_of_a_sequence_without_foreign_pages_has_our_own_digest() -> None:
    pages = _pages(A, MIXED_DIGEST)
    for index in range(4):
        assert pages.seal(index, IDS[4 * index : 4 * index + 4], own_numerics=True) == pages.chain.digests(IDS)[index]
    assert pages.written == OWN
    assert pages.seal(4, (7, 8, 9, 10), own_numerics=True) == pages.chain.digests((*IDS[:16], 7, 8, 9, 10))[4]


def test_next_attempt_forgets_what_the_last_one_reused() -> None:
    pages = _pages(A, MIXED_DIGEST)
    pages.reuse(A, 2)
    pages.cover(IDS)
    assert (pages.sources, pages.written) == ([], OWN)
    assert pages.seal(0, IDS[:4], own_numerics=True) == pages.chain.digests(IDS)[0]


@pytest.mark.parametrize(
    ("counts", "reasons"),
    [((8, 8), {"missing": 5}), ((8, 4), {"missing": 1, "numerics": 4}), ((8, 0), {"numerics": 5}), ((3, 3), {})],
)
def test_recomputed_pages_of_unread_numerics_have_a_reason_of_their_own(
    counts: tuple[int, int], reasons: dict[str, int]
) -> None:
    resolution = Resolution(mirror_pages=3)
    resolution.explain_missing(*counts, "missing")
    assert dict(resolution.reasons) == reasons


def test_recompute_that_has_a_reason_gets_no_other() -> None:
    resolution = Resolution()
    resolution.reasons["unreachable"] = 2
    resolution.explain_missing(4, 0, "missing")
    assert dict(resolution.reasons) == {"unreachable": 2}
