"""One contract for all backends, kernels, formats and ways to append: the bytes of a token list are its own alone."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from gpu.cache import Sequence
from gpu.plan import RowKind
from tests.kv_lab import FORMATS, Lab, make_lab, park

TOKENS = tuple((7 * i * i + 3 * i) % 128 for i in range(45))
PARK_AT = 35
PAGE = 16
SETUPS = (("cpu", None), ("simulated", None), ("simulated", 0), ("simulated", PAGE))


def write(lab: Lab, sequence: Sequence, tokens: tuple[int, ...], way: str) -> None:
    """Append tokens to a sequence: by single rows, small batches, one chunk, or verify rows with rollback."""
    start = sequence.length
    if way == "row":
        for token in tokens[start:]:
            lab.step(sequence, [token], RowKind.DECODE)
    elif way == "rows":
        for first in range(start, len(tokens), 3):
            lab.step(sequence, tokens[first : first + 3])
            lab.seal_all(sequence, tokens)
    elif way == "chunk":
        lab.step(sequence, tokens[start:])
    else:
        while sequence.length < len(tokens):
            first = sequence.length
            right = tokens[first : first + 2]
            lab.step(sequence, (*right, 1, 2, 3), RowKind.VERIFY)
            lab.cache.truncate(sequence, first + len(right))
            lab.seal_all(sequence, tokens)


@cache
def expected_pages(kv_format: str, kernels: str) -> dict[bytes, bytes]:
    """Page bytes of the whole token list, written as one chunk on the host."""
    lab = make_lab(kv_format, backend="cpu", kernels=kernels)
    sequence = lab.cache.open()
    write(lab, sequence, TOKENS, "chunk")
    return park(lab, sequence, TOKENS)


@pytest.mark.parametrize("parking", ["stay", "park"])
@pytest.mark.parametrize("setup", SETUPS, ids=["cpu", "resident", "streamed", "mixed"])
@pytest.mark.parametrize("way", ["row", "rows", "chunk", "verify"])
@pytest.mark.parametrize(("kernels", "kv_format"), list(product(("reference", "numba"), FORMATS)))
def test_kv_contract_any_way_gives_equal_page_bytes(
    kernels: str, kv_format: str, way: str, setup: tuple[str, int | None], parking: str
) -> None:
    backend, resident_cells = setup
    lab = make_lab(kv_format, backend=backend, kernels=kernels, resident_cells=resident_cells)
    sequence = lab.cache.open()
    write(lab, sequence, TOKENS[:PARK_AT], way)
    if parking == "park":
        stored = park(lab, sequence, TOKENS[:PARK_AT])
        lab = make_lab(kv_format, backend=backend, kernels=kernels, resident_cells=resident_cells)
        sequence = lab.cache.open()
        lab.cache.attach(sequence, lab.restore(stored, list(stored)))
        assert sequence.length == 32
    write(lab, sequence, TOKENS, way)
    assert park(lab, sequence, TOKENS) == expected_pages(kv_format, kernels)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_contract_numba_page_bytes_of_first_layer_equal_the_oracle(kv_format: str) -> None:
    """Layer 0 has the same f32 input under both kernels, so its bytes are the same; later layers see attention."""
    layer_bytes = make_lab(kv_format).layout.layer_bytes
    numba, oracle = expected_pages(kv_format, "numba"), expected_pages(kv_format, "reference")
    assert [page[:layer_bytes] for page in numba.values()] == [page[:layer_bytes] for page in oracle.values()]
