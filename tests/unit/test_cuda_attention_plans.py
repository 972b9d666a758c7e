"""Plans of decode attention: sizes, division into chunks, what is refused. No device is needed."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest

from gpu.cuda.attention import DecodeAttention, choose_chunks, num_sub_splits
from gpu.cuda.attention_rings import BLOCK_CELLS, choose_ring
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.programs import ProgramCompiler
from gpu.errors import LayoutError, PlanError
from gpu.formats import CACHE_FORMATS
from gpu.layout import KVLayout
from tests.kernel_sweep import ptxas_complaints, side_by_side


class _Library:
    def __init__(self, arch: str) -> None:
        self.arch = arch


def _attention(num_heads: int = 32, kv_format: str = "k8v4", arch: str = "sm_90a") -> DecodeAttention:
    chosen = CACHE_FORMATS[kv_format]
    layout = KVLayout(2, 8, 128, 64, chosen.k, chosen.v)
    return DecodeAttention(cast(KernelLibrary, _Library(arch)), layout, num_heads, 132)


def test_sub_splits_hold_one_two_and_four_blocks() -> None:
    blocks = [1] * 16 + [2] * 24 + [4] * 50
    ends = [sum(blocks[: i + 1]) * BLOCK_CELLS for i in range(len(blocks))]
    for index, end in enumerate(ends):
        assert num_sub_splits(end) == index + 1
        assert num_sub_splits(end + 1) == index + 2
    assert num_sub_splits(1) == 1


@pytest.mark.parametrize("pairs", [1, 8, 64, 256, 4096])
@pytest.mark.parametrize("blocks", [1, 16, 64, 513, 2048])
def test_chunks_are_no_more_than_sub_splits(pairs: int, blocks: int) -> None:
    assert 1 <= choose_chunks(pairs, blocks, 132, resident=4) <= num_sub_splits(blocks * BLOCK_CELLS)


def test_one_long_sequence_fills_the_device_and_many_do_not_split_further() -> None:
    assert 8 * choose_chunks(8, 2048, 132, resident=4) >= 0.9 * 4 * 132
    assert choose_chunks(4096, 16, 132, resident=4) == 1


@pytest.mark.parametrize("kv_format", CACHE_FORMATS)
@pytest.mark.parametrize(
    ("arch", "limit_kib"), [("sm_75", 64), ("sm_70", 96), ("sm_86", 99), ("sm_80", 163), ("sm_90a", 227)]
)
@pytest.mark.parametrize("query_tiles", [1, 2])
def test_rings_fit_into_shared_memory(kv_format: str, arch: str, limit_kib: int, query_tiles: int) -> None:
    attention = _attention(kv_format=kv_format, arch=arch)
    ring = choose_ring(attention.layout, arch, query_tiles)
    taken = attention.decode_variant(query_tiles)["SHARED_BYTES"]
    assert ring.shared_bytes(attention.layout, query_tiles) <= taken <= limit_kib << 10
    # The chosen number of CTAs fits on a processor, and no more; beside a small ring there is room for the fold.
    whole = (limit_kib + 1) << 10
    assert ring.resident * (taken + 1024) <= whole < (ring.resident + 1) * (taken + 1024)
    if taken > ring.shared_bytes(attention.layout, query_tiles):
        assert whole - ring.resident * (taken + 1024) >= 8 << 10


def test_bulk_copies_fill_slots_of_v_without_padding() -> None:
    layout = _attention().layout
    assert [choose_ring(layout, arch, 1).parameters(1)["VALUE_PADDING"] for arch in ("sm_80", "sm_90a")] == [32, 0]


def test_scratch_has_rows_of_the_step_or_of_the_tiles_whichever_are_fewer() -> None:
    attention = _attention()
    decode = attention.plan(32, 32, 4096, tile_rows=1)
    assert (decode.scratch_rows, decode.tile_stride) == (32, 0)
    assert attention.scratch_bytes(decode) == 32 * 32 * 40 * (128 + 2) * 4
    mixed = attention.plan(2048, 3, 4096)
    assert (mixed.scratch_rows, mixed.tile_stride) == (12, 4)


def test_columns_of_the_products_hold_the_rows_of_a_tile() -> None:
    attention = _attention()
    assert [attention.plan(rows, 1, 4096).query_tiles for rows in (1, 2, 3, 4, 9)] == [1, 1, 2, 2, 2]
    assert attention.plan(64, 64, 4096, tile_rows=1).query_tiles == 1
    assert _attention(num_heads=64).plan(2, 1, 4096).query_tiles == 2


def test_sizes_that_kernels_do_not_take_are_refused() -> None:
    with pytest.raises(PlanError, match=r"attention\.num_tiles"):
        _attention().plan(1, 0, 64)
    with pytest.raises(PlanError, match="too many sub-splits"):
        _attention().plan(1 << 20, 1 << 20, 1 << 20)
    with pytest.raises(LayoutError, match="1 to 8 times 8 KV heads"):
        _attention(num_heads=72)
    with pytest.raises(LayoutError, match="1 to 8 times 8 KV heads"):
        _attention(num_heads=12)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100", "sm_120"])
def test_chosen_rings_leave_enough_registers(arch: str) -> None:
    def complaints(case: tuple[str, int]) -> list[str]:
        kv_format, query_tiles = case
        attention = _attention(kv_format=kv_format, arch=arch)
        variant = attention.decode_variant(query_tiles)
        _, notes = ProgramCompiler(arch).compile_verbose(attention.decode_source(), variant)
        return [f"{case}: {complaint}" for complaint in ptxas_complaints(notes)]

    assert side_by_side(complaints, product(CACHE_FORMATS, (1, 2))) == []
