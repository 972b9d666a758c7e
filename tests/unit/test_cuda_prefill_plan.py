"""Prefill attention without a device: shapes that are refused, rows of a tile, shared memory as the kernel has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import shared_bytes
from gpu.cuda.attention import AttentionTables
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import KernelSource
from gpu.cuda.prefill_attention import PREFILL, PrefillAttention, PrefillRing, PrefillRound
from gpu.cuda.programs import ProgramCompiler, source_text
from gpu.errors import KernelCompileError, LayoutError, PlanError
from gpu.formats import CACHE_FORMATS
from gpu.layout import KVLayout
from tests.kernel_sweep import ptxas_complaints, side_by_side


def _layout(kv_format: str = "f16", head_dim: int = 128, page_size: int = 64) -> KVLayout:
    chosen = CACHE_FORMATS[kv_format]
    return KVLayout(2, 2, head_dim, page_size, chosen.k, chosen.v)


def _attention(
    layout: KVLayout, group: int = 4, arch: str = "sm_90a", *without: str, **limits: Any
) -> PrefillAttention:
    limits = {"max_cells": 8192, **limits}
    return PrefillAttention(KernelLibrary(arch, overlap=False), layout, 2 * group, 132, without=without, **limits)


def test_shapes_that_the_kernel_is_not_made_for_are_refused_with_field_and_limit() -> None:
    with pytest.raises(LayoutError, match=r"head_dim=96: must be 64 or 128"):
        _attention(_layout(head_dim=96))
    with pytest.raises(LayoutError, match=r"page_size=48: must be one of"):
        _attention(_layout(page_size=48))
    with pytest.raises(LayoutError, match=r"num_heads=18: must be 1 to 8 times 2"):
        _attention(_layout(), group=9)
    with pytest.raises(PlanError, match=r"attention.tiles=0: at least one"):
        _attention(_layout()).plan([])
    with pytest.raises(PlanError, match=r"attention.cells=201: at most 192 cells of a sequence"):
        _attention(_layout(), max_cells=150, block_limit=1).plan([(0, 0, 1, 200)])


BLOCK = 2 * 64 * 128 * 2
"""Bytes of a block of one KV head at head_dim 128."""


def test_what_fits_goes_in_one_round_in_the_order_given() -> None:
    tiles = [(3, 40, 32, 300), (1, 8, 32, 100), (3, 8, 32, 268), (1, 0, 8, 92)]
    attention = _attention(_layout())
    assert attention.scratch_bytes == 2 * 128 * BLOCK
    plan = attention.plan(tiles)
    assert plan.tiles.tolist() == [list(tile) for tile in tiles]
    assert plan.sequences.tolist() == [[3, 332, 0, 0], [1, 132, 6, 0]]
    assert plan.rounds == (PrefillRound(0, 4, 0, 2, 9, 0, 2),)


def test_blocks_beyond_the_limit_go_in_rounds_over_heads_then_over_sequences() -> None:
    attention = _attention(_layout(), block_limit=1)
    assert attention.scratch_bytes == 128 * BLOCK
    far, near, small = (0, 0, 32, 8000), (1, 32, 32, 6000), (2, 64, 32, 0)
    plan = attention.plan([far, near, small, (0, 96, 8, 7000)])
    assert plan.rounds == (
        PrefillRound(0, 2, 0, 1, 126, 0, 1),
        PrefillRound(0, 2, 0, 1, 126, 1, 1),
        PrefillRound(2, 2, 1, 2, 96, 0, 1),
        PrefillRound(2, 2, 1, 2, 96, 1, 1),
    )
    assert plan.tiles.tolist() == [list(row) for row in (far, (0, 96, 8, 7000), near, small)]
    assert plan.sequences.tolist() == [[0, 8032, 0, 0], [1, 6032, 0, 0], [2, 32, 95, 0]]


class _Recorder:
    """A library whose kernels note what they are launched with, by the names of the kernels' parameters."""

    arch = "sm_90a"

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any, dict[str, Any]]] = []

    def get(self, source: KernelSource, name: str, variant: dict[str, int]) -> Any:
        assert set(source.parameters) == set(variant)
        text = source_text(source.file)
        declared = text[text.index(f"{name}(") + len(name) + 1 :].split(")")[0]
        names = [parameter.split()[-1] for parameter in declared.split(",")]

        def launch(stream: Any, grid: Any, threads: int, arguments: tuple[int, ...], shared: int) -> None:
            self.launches.append((name, grid, dict(zip(names, arguments, strict=True))))

        return SimpleNamespace(launch=launch)


def test_every_round_converts_its_blocks_and_then_attends_them() -> None:
    library = _Recorder()
    attention = PrefillAttention(cast(KernelLibrary, library), _layout(), 8, 5, 8192, block_limit=1)
    plan = attention.plan([(0, 0, 32, 8000), (1, 32, 32, 6000), (2, 64, 32, 0), (0, 96, 8, 7000)])
    attention.launch(
        None, 1, plan, AttentionTables(tiles=1000, page_table=2000, max_pages=128, sequences=3000), queries=4000,
        activations=5000, activation_layout=ActivationLayout.TILE, scratch=6000,
    )  # fmt: skip
    expected: list[tuple[str, Any, dict[str, Any]]] = []
    shared = {"page_table": 2000, "blocks": 6000, "layer": 1, "max_pages": 128}
    for tiles, sequences, num_sequences, blocks, head in (
        (1000, 3000, 1, 126, 0), (1000, 3000, 1, 126, 1), (1032, 3016, 2, 96, 0), (1032, 3016, 2, 96, 1),
    ):  # fmt: skip
        common = {**shared, "sequences": sequences, "first_head": head}
        expected.append(("attention_tiles", (blocks, 1), {**common, "num_sequences": num_sequences}))
        of_tiles = {"queries": 4000, "tiles": tiles, "activation": 5000}
        counts = {"num_tiles": 2, "num_blocks": blocks, "num_heads": 1}
        expected.append(("attention_prefill", 2, {**common, **of_tiles, **counts}))
    assert library.launches == expected


def test_the_warp_form_reads_pages_and_needs_no_room_for_blocks() -> None:
    attention = _attention(_layout(), 4, "sm_80")
    plan = attention.plan([(0, 0, 16, 100_000), (1, 16, 16, 0)])
    assert (attention.scratch_bytes, len(plan.rounds), plan.rounds[0].num_heads) == (0, 1, 2)


def test_a_ring_beyond_shared_memory_is_refused_with_both_sizes() -> None:
    library = KernelLibrary("sm_90a", overlap=False)
    with pytest.raises(LayoutError, match=r"needs \d+ bytes of shared memory, 232448 exist"):
        PrefillAttention(library, _layout(), 8, 132, 8192, ring=PrefillRing(6, 4))


@pytest.mark.parametrize(("group", "rows"), [(1, 128), (3, 42), (4, 32), (5, 24), (7, 18), (8, 16)])
def test_tiles_hold_the_tokens_whose_heads_fill_two_warpgroups(group: int, rows: int) -> None:
    assert _attention(_layout(), group).tile_rows == rows


@pytest.mark.parametrize(("group", "rows"), [(1, 64), (3, 20), (4, 16), (5, 12), (7, 8), (8, 8)])
def test_tiles_of_the_warp_form_hold_the_tokens_whose_heads_fill_its_warps(group: int, rows: int) -> None:
    assert _attention(_layout(), group, "sm_90a", "KVALET_NO_WGMMA").tile_rows == rows
    assert _attention(_layout(), group, "sm_80").tile_rows == rows
    assert _attention(_layout(), group, "sm_75").tile_rows == rows // 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_variants_compile_without_spills_and_without_serialized_products(arch: str) -> None:
    def complaints(case: tuple[str, int]) -> list[str]:
        variant = _attention(_layout(*case), 4, arch).variant(ActivationLayout.TILE)
        _, notes = ProgramCompiler(arch).compile_verbose(PREFILL, variant)
        return [f"{case}: {complaint}" for complaint in ptxas_complaints(notes)]

    assert side_by_side(complaints, [("f16", 128), ("int8", 128), ("k8v4", 128), ("k8v4", 64)]) == []


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90a"])
@pytest.mark.parametrize(("kv_format", "head_dim"), [("f16", 128), ("int8", 128), ("k8v4", 64)])
def test_the_launcher_gives_the_shared_memory_that_the_kernel_asks_for(
    arch: str, kv_format: str, head_dim: int
) -> None:
    variant = _attention(_layout(kv_format, head_dim), 4, arch).variant(ActivationLayout.TILE)
    assert variant["SHARED_BYTES"] <= shared_bytes(arch)
    compiler = ProgramCompiler(arch)
    compiler.compile(PREFILL, variant)
    with pytest.raises(KernelCompileError, match="shared memory"):
        compiler.compile(PREFILL, {**variant, "SHARED_BYTES": variant["SHARED_BYTES"] - 16})
