"""A row's bits depend on its own inputs alone: not on neighbours, order, chunking, threads or where pages lie."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.model.tensors import WeightStorage
from gpu.model.tiny import tiny_config, tiny_weights
from tests.kernel_lab import Floats, ModelLab, make_model_lab, matrix_of, product, same_bits
from tests.kv_lab import FORMATS

NUM_TOKENS = 70
CONFIG = tiny_config()


@cache
def whole_product(storage: WeightStorage) -> tuple[Floats, Floats]:
    x = np.random.default_rng(8).standard_normal((24, 160), np.float32)
    return x, product(x, matrix_of(storage, 200, 160))


@pytest.mark.parametrize("storage", list(WeightStorage))
@given(rows=st.lists(st.integers(0, 23), min_size=1, max_size=40), num_threads=st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_kernels_product_of_any_rows_in_any_order_repeats_their_bits(
    storage: WeightStorage, rows: list[int], num_threads: int
) -> None:
    x, expected = whole_product(storage)
    assert same_bits(product(x[rows], matrix_of(storage, 200, 160), num_threads), expected[rows])


@cache
def lab_of(kv_format: str, num_threads: int) -> ModelLab:
    return make_model_lab(CONFIG, tiny_weights(CONFIG, 6, WeightStorage.BF16), kv_format, num_threads, 96)


@cache
def one_prefill(kv_format: str) -> tuple[list[int], Floats, bytes]:
    """Tokens, logits of every position and page bytes of one prefill alone on one thread."""
    lab = lab_of(kv_format, 1)
    tokens = np.random.default_rng(11).integers(0, CONFIG.vocab_size, NUM_TOKENS).tolist()
    sequence = lab.cache.open()
    (logits,) = lab.step((sequence, tokens))
    cells = lab.cell_bytes(sequence)
    lab.cache.close(sequence)
    return tokens, logits, cells


@pytest.mark.parametrize("kv_format", FORMATS)
@given(
    cuts=st.lists(st.integers(1, NUM_TOKENS - 1), max_size=12, unique=True).map(sorted),
    neighbours=st.lists(st.integers(1, 40), max_size=3),
    num_threads=st.sampled_from([1, 2]),
    rejected=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_kernels_cells_and_logits_of_any_partition_equal_one_prefill(
    kv_format: str, cuts: list[int], neighbours: list[int], num_threads: int, rejected: int, data: st.DataObject
) -> None:
    """The token list runs in random pieces among random neighbours; some pieces carry junk rows that are taken back."""
    tokens, expected, expected_cells = one_prefill(kv_format)
    lab = lab_of(kv_format, num_threads)
    sequence, others = lab.cache.open(), [lab.cache.open() for _ in neighbours]
    try:
        for first, end in zip([0, *cuts], [*cuts, NUM_TOKENS], strict=True):
            junk = [255] * rejected if data.draw(st.booleans()) else []
            parts = [(sequence, [*tokens[first:end], *junk])]
            for other, size in zip(others, neighbours, strict=True):
                if other.length + size <= 100:
                    parts.insert(data.draw(st.integers(0, len(parts))), (other, [size] * size))
            logits = lab.step(*parts)[next(i for i, part in enumerate(parts) if part[0] is sequence)]
            lab.cache.truncate(sequence, end)
            assert same_bits(logits[: end - first], expected[first:end])
        assert lab.cell_bytes(sequence) == expected_cells
    finally:
        for opened in (sequence, *others):
            lab.cache.close(opened)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_kernels_rows_beyond_one_segment_repeat_their_bits_when_split(kv_format: str, num_threads: int) -> None:
    """600 cells are three segments: prefill folds them inside one block, few rows take them as separate items."""
    tokens = np.random.default_rng(12).integers(0, CONFIG.vocab_size, 600).tolist()
    lab = lab_of(kv_format, num_threads)
    whole, pieces, beside = lab.cache.open(), lab.cache.open(), lab.cache.open()
    (expected,) = lab.step((whole, tokens))
    got, cuts = [], [0, 255, 257, 258, 500, 503, 511, 512, 513, 598, 599, 600]
    for first, end in pairwise(cuts):
        got.append(lab.step((pieces, tokens[first:end]), (beside, [1]))[0])
    equal_cells = lab.cell_bytes(pieces) == lab.cell_bytes(whole)
    for sequence in (whole, pieces, beside):
        lab.cache.close(sequence)
    assert same_bits(np.concatenate(got), expected)
    assert equal_cells
