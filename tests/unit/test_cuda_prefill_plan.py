"""Prefill attention without a device: shapes that are refused, rows of a tile, shared memory as the kernel has it."""

from __future__ import annotations

import pytest

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.architectures import shared_bytes
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.prefill_attention import PREFILL, PrefillAttention, PrefillRing
from gpu.cuda.programs import ProgramCompiler
from gpu.errors import KernelCompileError, LayoutError, PlanError
from gpu.formats import CACHE_FORMATS
from gpu.layout import KVLayout
from tests.kernel_sweep import ptxas_complaints


def _layout(kv_format: str = "f16", head_dim: int = 128, page_size: int = 64) -> KVLayout:
    chosen = CACHE_FORMATS[kv_format]
    return KVLayout(2, 2, head_dim, page_size, chosen.k, chosen.v)


def _attention(layout: KVLayout, group: int = 4, arch: str = "sm_90a", *without: str) -> PrefillAttention:
    return PrefillAttention(KernelLibrary(arch, overlap=False), layout, 2 * group, 132, without)


def test_shapes_that_the_kernel_is_not_made_for_are_refused_with_field_and_limit() -> None:
    with pytest.raises(LayoutError, match=r"head_dim=96: must be 64 or 128"):
        _attention(_layout(head_dim=96))
    with pytest.raises(LayoutError, match=r"page_size=48: must be one of"):
        _attention(_layout(page_size=48))
    with pytest.raises(LayoutError, match=r"num_heads=18: must be 1 to 8 times 2"):
        _attention(_layout(), group=9)
    with pytest.raises(PlanError, match=r"attention.num_tiles=0: must be positive"):
        _attention(_layout()).plan(0)


def test_a_ring_beyond_shared_memory_is_refused_with_both_sizes() -> None:
    library = KernelLibrary("sm_90a", overlap=False)
    with pytest.raises(LayoutError, match=r"needs \d+ bytes of shared memory, 232448 exist"):
        PrefillAttention(library, _layout(), 8, 132, ring=PrefillRing(6, 2, 4))


@pytest.mark.parametrize(("group", "rows"), [(1, 128), (3, 42), (4, 32), (5, 24), (7, 18), (8, 16)])
def test_tiles_hold_the_tokens_whose_heads_fill_two_warpgroups(group: int, rows: int) -> None:
    assert _attention(_layout(), group).tile_rows == rows


@pytest.mark.parametrize(("group", "rows"), [(1, 64), (3, 20), (4, 16), (5, 12), (7, 8), (8, 8)])
def test_tiles_of_the_warp_form_hold_the_tokens_whose_heads_fill_its_warps(group: int, rows: int) -> None:
    assert _attention(_layout(), group, "sm_90a", "KVALET_NO_WGMMA").tile_rows == rows
    assert _attention(_layout(), group, "sm_80").tile_rows == rows
    assert _attention(_layout(), group, "sm_75").tile_rows == rows // 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(("kv_format", "head_dim"), [("f16", 128), ("int8", 128), ("k8v4", 128), ("k8v4", 64)])
def test_variants_compile_without_spills_and_without_serialized_products(
    arch: str, kv_format: str, head_dim: int
) -> None:
    variant = _attention(_layout(kv_format, head_dim), 4, arch).variant(ActivationLayout.TILE)
    _, notes = ProgramCompiler(arch).compile_verbose(PREFILL, variant)
    assert list(ptxas_complaints(notes)) == []


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
