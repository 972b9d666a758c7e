"""Byte parity of append between kernels, and bytes that do not depend on how a token list was cut into steps."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence as Items
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu.formats import F16, INT8, Q4, PlaneFormat
from gpu.kv_kernels import KVKernels, RowTable
from gpu.plan import RowKind, StepPlan
from gpu.reference.codecs import decode, encode
from tests.kv_lab import FORMATS, GREEDY, PlanEntry, chain, kernels_of, layout_of, make_lab, park, rope_table
from tests.kv_vectors import KINDS, hard_vectors


@st.composite
def vectors(draw: st.DrawFn, rows: int = 3, heads: int = 2, dim: int = 64) -> NDArray[np.float32]:
    """f32 vectors of every kind of `tests.kv_vectors`."""
    kind = draw(st.sampled_from(KINDS))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    limits = (2**-30, 2.0**100) if kind == "ties" else (2**-10, 2.0**10)
    return hard_vectors(kind, random, (rows, heads, dim), draw(st.floats(*limits, width=32)))


def store(
    kernels: KVKernels, kv_format: str, k: NDArray[np.float32], v: NDArray[np.float32], first: int
) -> tuple[bytes, bytes, bytes, bytes]:
    """Pages, device page, counts and non-finite counts after storing rows at `first` .. as one sequence."""
    layout = layout_of(kv_format)
    positions = np.arange(first, first + len(k), dtype=np.int64)
    zeros = np.zeros(len(k), np.int64)
    rows = RowTable(positions, zeros, layout.page_bytes * (positions // 16), zeros, positions % 16)
    mirror = np.zeros(4 * layout.page_bytes, np.uint8)
    device = np.zeros(layout.page_bytes, np.uint8)
    counts, nonfinite = np.zeros((layout.num_layers, 1, 2), np.int64), np.zeros(1, np.int64)
    with np.errstate(all="ignore"):
        kernels.store_rows(layout, 1, k, v, rope_table(), rows, mirror, device, counts, nonfinite)
    return mirror.tobytes(), device.tobytes(), counts.tobytes(), nonfinite.tobytes()


@pytest.mark.parametrize("kv_format", FORMATS)
@given(k=vectors(), v=vectors(), first=st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_kv_bytes_numba_store_equals_the_oracle(
    kv_format: str, k: NDArray[np.float32], v: NDArray[np.float32], first: int
) -> None:
    numba = store(kernels_of("numba"), kv_format, k, v, first)
    assert numba == store(kernels_of("reference"), kv_format, k, v, first)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_bytes_nonfinite_vector_is_counted_and_stored_as_zeros(kernels: str, kv_format: str, value: float) -> None:
    k = np.ones((1, 2, 64), np.float32)
    spoiled = k.copy()
    spoiled[0, 1, 5] = value
    zeroed = k.copy()
    zeroed[0, 1] = 0
    *stored, nonfinite = store(kernels_of(kernels), kv_format, k, spoiled, 0)
    *expected, _ = store(kernels_of("reference"), kv_format, k, zeroed, 0)
    assert stored == expected
    assert struct.unpack("q", nonfinite) == (1,)


@pytest.mark.parametrize("fmt", [F16, INT8, Q4], ids=lambda fmt: fmt.name)
@given(x=vectors())
@settings(max_examples=150, deadline=None)
def test_kv_bytes_no_stored_half_is_negative_zero(fmt: PlaneFormat, x: NDArray[np.float32]) -> None:
    codes, scales = encode(fmt, x)
    halves = (scales if fmt.group_size else codes).copy().view(np.uint16)
    assert not (halves == 0x8000).any()


@pytest.mark.parametrize("fmt", [F16, INT8, Q4], ids=lambda fmt: fmt.name)
@given(x=vectors())
@settings(max_examples=150, deadline=None)
def test_kv_bytes_decoded_error_is_within_half_a_step(fmt: PlaneFormat, x: NDArray[np.float32]) -> None:
    x = np.clip(x, -60000, 60000).astype(np.float32)
    error = np.abs(decode(fmt, *encode(fmt, x)).astype(np.float64) - x)
    if fmt is F16:
        allowed = np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)
    else:
        largest = np.abs(x.reshape(3, 2, -1, fmt.group_size)).max(axis=-1, keepdims=True)
        step = largest / (127 if fmt is INT8 else 8) * (1 + 2.0**-10) + 2.0**-24
        # The code of +8 does not exist in q4: the side opposite to the largest value loses a whole step.
        per_group = step * (0.5 if fmt is INT8 else 1.0) + largest * 2.0**-10 + 2.0**-24 * 128
        allowed = np.broadcast_to(per_group, (3, 2, 64 // fmt.group_size, fmt.group_size)).reshape(x.shape)
    assert (error <= allowed).all()


def test_kv_bytes_int8_rounds_half_to_even_and_clamps() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -126.5]
    codes, scales = encode(INT8, x)
    assert scales.view(np.float16).item() == 1.0
    assert codes.view(np.int8)[0, :6].tolist() == [127, 0, 2, 2, 0, -126]


def test_kv_bytes_q4_prefers_the_positive_of_two_largest() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = [-8, 8, 0.5]
    codes, scales = encode(Q4, x)
    assert scales.view(np.float16).item() == -1.0
    assert [codes[0, 0] & 15, codes[0, 0] >> 4, codes[0, 1] & 15, codes[0, 1] >> 4] == [15, 0, 8, 8]


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[str, int]]:
    """A random way to write `length` tokens: (prefill | decode | verify | park, rows)."""
    ways, written = [], 0
    while written < length:
        way = draw(st.sampled_from(["prefill", "decode", "verify", "park"]))
        rows = 1 if way == "decode" else draw(st.integers(1, 24))
        rows = 0 if way == "park" else min(rows, length - written)
        ways.append((way, rows))
        written += rows
    return ways


TOKENS = tuple((11 * i * i + 5 * i + 1) % 128 for i in range(50))


@cache
def whole(kv_format: str, kernels: str) -> dict[bytes, bytes]:
    lab = make_lab(kv_format, backend="cpu", kernels=kernels)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS)
    return park(lab, sequence, TOKENS)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("kv_format", FORMATS)
@given(cuts(len(TOKENS)), st.lists(st.integers(1, 20), max_size=3), st.sampled_from([None, 16]))
@settings(max_examples=12, deadline=None)
def test_kv_bytes_do_not_depend_on_partition_or_neighbours(
    kv_format: str, kernels: str, ways: list[tuple[str, int]], neighbours: Items[int], resident: int | None
) -> None:
    """Prefill, decode, verify with rollback, park and restore with a recomputed tail, random sequences in each step."""
    lab = make_lab(kv_format, kernels=kernels, num_pages=40, resident_cells=resident)
    sequence, stored = lab.cache.open(), {}
    for way, rows in ways:
        if way == "park":
            stored = park(lab, sequence, TOKENS[: sequence.length])
            lab = make_lab(kv_format, kernels=kernels, num_pages=40, resident_cells=resident)
            sequence, length = lab.cache.open(), sequence.length
            lab.cache.attach(sequence, lab.restore(stored, list(stored)))
            if sequence.length < length:
                lab.step(sequence, TOKENS[sequence.length : length])
            continue
        first = sequence.length
        tokens = TOKENS[first : first + rows] + ((3, 4) if way == "verify" else ())
        entries = [PlanEntry(sequence, RowKind(way), tokens, GREEDY, 0, lab.history)]
        for index, other_rows in enumerate(neighbours):
            other = lab.cache.open()
            lab.cache.reserve(other, other_rows)
            entries.insert(index % 2, lab.entry(other, [index] * other_rows))
        lab.cache.reserve(sequence, first + len(tokens))
        lab.backend.launch(StepPlan(tuple(entries))).wait()
        lab.cache.truncate(sequence, first + rows)
        for entry in entries:
            if entry.sequence is not sequence:
                lab.cache.close(entry.sequence)
    assert park(lab, sequence, TOKENS) == whole(kv_format, kernels)
    assert list(whole(kv_format, kernels)) == chain(TOKENS, 16)
