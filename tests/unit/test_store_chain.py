"""The prefix chain: equal only for equal everything, incremental, from our own tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from snapshot_store.chain import PageDigest, PrefixChain, pack_token_ids, unpack_token_ids
from snapshot_store.errors import BadTokenIds
from snapshot_store.transcript import CacheScope

FORMAT, NUMERICS, SALT = b"f" * 32, b"n" * 32, b"s" * 32
TOKENS = list(range(1000, 1000 + 70))


def _chain(**changes: object) -> PrefixChain:
    arguments: dict[str, object] = {
        "format_digest": FORMAT, "numerics_digest": NUMERICS, "tenant_salt": SALT,
        "scope": CacheScope.TENANT, "scope_id": "local", "page_size": 16,
    }  # fmt: skip
    return PrefixChain(**(arguments | changes))  # type: ignore[arg-type]


def test_digests_cover_full_pages_only() -> None:
    assert [len(_chain().digests(TOKENS[:count])) for count in (0, 15, 16, 31, 32, 70)] == [0, 0, 1, 1, 2, 4]


def test_chain_under_other_numerics_shares_no_digest_and_differs_in_nothing_else() -> None:
    other = _chain().under(b"m" * 32)
    assert not set(other.digests(TOKENS)) & set(_chain().digests(TOKENS))
    assert other.root != _chain().root
    assert other.digests(TOKENS) == _chain(numerics_digest=b"m" * 32).digests(TOKENS)
    assert other.under(NUMERICS).digests(TOKENS) == _chain().digests(TOKENS)


def test_digests_of_a_longer_list_begin_with_those_of_its_prefix() -> None:
    assert _chain().digests(TOKENS)[:2] == _chain().digests(TOKENS[:32])


def test_digest_changes_behind_a_changed_token_and_not_before() -> None:
    changed = TOKENS.copy()
    changed[20] += 1
    same = [a == b for a, b in zip(_chain().digests(TOKENS), _chain().digests(changed), strict=True)]
    assert same == [True, False, False, False]


def test_extend_from_known_digests_equals_the_whole() -> None:
    whole = _chain().digests(TOKENS)
    assert _chain().extend(whole[:1], TOKENS) == whole[1:]


def test_page_digest_from_its_parent_equals_the_chain() -> None:
    chain = _chain()
    digests = chain.digests(TOKENS)
    assert chain.page_digest(chain.parent_of(digests, 2), TOKENS[32:48]) == digests[2]


def test_parent_of_the_first_page_is_the_root() -> None:
    chain = _chain()
    assert chain.parent_of(chain.digests(TOKENS), 0) == chain.root


@pytest.mark.parametrize(
    "change",
    [
        {"format_digest": b"F" * 32},
        {"numerics_digest": b"N" * 32},
        {"tenant_salt": b"S" * 32},
        {"scope": CacheScope.KEY},
        {"scope": CacheScope.CONVERSATION},
        {"scope_id": "other"},
        {"page_size": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_digests_under_another_identity_share_nothing(change: dict[str, object]) -> None:
    assert not set(_chain().digests(TOKENS)) & set(_chain(**change).digests(TOKENS))


def test_root_when_bytes_move_between_fields_differs() -> None:
    left = _chain(format_digest=b"ab", numerics_digest=b"c")
    assert left.root != _chain(format_digest=b"a", numerics_digest=b"bc").root


def test_digests_do_not_depend_on_the_process() -> None:
    program = (
        "from snapshot_store.chain import PrefixChain\n"
        "from snapshot_store.transcript import CacheScope\n"
        f"chain = PrefixChain({FORMAT!r}, {NUMERICS!r}, {SALT!r}, CacheScope.TENANT, 'local', 16)\n"
        f"print(chain.digests({TOKENS!r})[-1].hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20, env={"PYTHONPATH": "."}
    )
    assert printed.stdout.strip() == _chain().digests(TOKENS)[-1].hex()


@pytest.mark.parametrize("bad", [-1, 1 << 32, "7", 1.5, None])
def test_digests_with_a_bad_token_id_name_it(bad: object) -> None:
    tokens: list[object] = [1, 2, *TOKENS]
    tokens[5] = bad
    with pytest.raises(BadTokenIds) as caught:
        _chain().digests(tokens)  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == ("token_ids[5]", bad)


def test_page_digest_of_another_count_is_refused() -> None:
    chain = _chain()
    with pytest.raises(BadTokenIds, match="exactly 16"):
        chain.page_digest(chain.root, TOKENS[:15])


@pytest.mark.parametrize("change", [{"tenant_salt": b""}, {"tenant_salt": b"s" * 31}, {"page_size": 0}])
def test_chain_with_a_bad_salt_or_page_size_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadTokenIds):
        _chain(**change)


def test_page_digest_parsed_from_hex_is_equal() -> None:
    digest = _chain().digests(TOKENS)[0]
    assert PageDigest.parse(digest.hex()) == digest


@pytest.mark.parametrize("text", ["", "00", "zz" * 16, "00" * 17])
def test_page_digest_from_bad_hex_is_refused(text: str) -> None:
    with pytest.raises(BadTokenIds):
        PageDigest.parse(text)


def test_packed_token_ids_are_little_endian_u32() -> None:
    assert pack_token_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


def test_unpack_of_a_length_that_is_no_multiple_of_four_is_refused() -> None:
    with pytest.raises(BadTokenIds, match="multiple of 4"):
        unpack_token_ids(b"\0" * 7)
