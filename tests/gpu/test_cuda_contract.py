"""The contract of all backends, on a device: the bytes of a token list are its own alone, however it got there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest

from gpu.cuda.weight_packing import PackedStorage
from gpu.plan import RowKind, SamplingParams, StepPlan
from tests.contract.test_kv_contract import PAGE, PARK_AT, TOKENS, write
from tests.gpu.backend_lab import Talk, cuda_lab, page_bytes_of, run_talks
from tests.gpu.lab import device_missing
from tests.kv_lab import FORMATS, Lab, park
from tests.model_files import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device")]
SETUPS = {"resident": None, "streamed": 0, "mixed": PAGE}
LONG = [int(token) for token in np.random.default_rng(3).integers(0, 512, 700)]


@pytest.fixture
def labs() -> Iterator[list[Lab]]:
    made: list[Lab] = []
    yield made
    for lab in made:
        lab.backend.close()
    gc.collect()


@cache
def expected_pages(kv_format: str) -> dict[bytes, bytes]:
    lab = cuda_lab(kv_format=kv_format)
    sequence = lab.cache.open()
    write(lab, sequence, TOKENS, "chunk")
    pages = park(lab, sequence, TOKENS)
    lab.backend.close()
    return pages


@pytest.mark.parametrize("parking", ["stay", "park"])
@pytest.mark.parametrize("setup", list(SETUPS))
@pytest.mark.parametrize("way", ["row", "rows", "chunk", "verify"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_any_way_gives_equal_page_bytes(kv_format: str, way: str, setup: str, parking: str, labs: list[Lab]) -> None:
    labs.append(cuda_lab(kv_format=kv_format, resident_cells=SETUPS[setup]))
    lab = labs[-1]
    sequence = lab.cache.open()
    write(lab, sequence, TOKENS[:PARK_AT], way)
    if parking == "park":
        stored = park(lab, sequence, TOKENS[:PARK_AT])
        labs.append(cuda_lab(kv_format=kv_format, resident_cells=SETUPS[setup]))
        lab = labs[-1]
        sequence = lab.cache.open()
        lab.cache.attach(sequence, lab.restore(stored, list(stored)))
        assert sequence.length == 32
    write(lab, sequence, TOKENS, way)
    assert park(lab, sequence, TOKENS) == expected_pages(kv_format)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_chunks_of_any_size_give_equal_pages_and_tokens(kv_format: str, page_size: int, labs: list[Lab]) -> None:
    """Large chunks go through the kernels for many rows, small ones through those for few."""
    outcomes = []
    for chunk in (512, 192, 65, 64, 17, 1):
        num_rows = 260 if chunk == 1 else 600
        lab = cuda_lab(kv_format=kv_format, page_size=page_size, num_pages=64)
        labs.append(lab)
        talk = Talk(lab, LONG[:num_rows])
        run_talks(lab, [talk], 5, chunk)
        outcomes.append((page_bytes_of(lab, talk), talk.ids[num_rows:]))
    assert all(outcome == outcomes[0] for outcome in outcomes[:-1])
    size = len(outcomes[-1][0]) // lab.layout.page_bytes * lab.layout.page_bytes
    assert outcomes[-1][0][: size - lab.layout.page_bytes] == outcomes[0][0][: size - lab.layout.page_bytes]


@pytest.mark.parametrize("kv_format", ["f16", "k8v4"])
@pytest.mark.parametrize("count", [2, 7, 32])
def test_a_conversation_alone_equals_itself_among_others(kv_format: str, count: int, labs: list[Lab]) -> None:
    prompts = [LONG[index : index + 40 + 11 * index % 150] for index in range(count)]
    lab = cuda_lab(kv_format=kv_format, num_pages=800)
    labs.append(lab)
    together = [Talk(lab, prompt) for prompt in prompts]
    run_talks(lab, together, 24)
    for index in (0, count // 2, count - 1):
        alone = Talk(lab, prompts[index])
        run_talks(lab, [alone], 24)
        assert alone.ids == together[index].ids
        assert page_bytes_of(lab, alone) == page_bytes_of(lab, together[index])


@pytest.mark.parametrize("storage", list(PackedStorage))
def test_every_weight_storage_keeps_the_promise(storage: PackedStorage, labs: list[Lab]) -> None:
    lab = cuda_lab(storage=storage, num_pages=200)
    labs.append(lab)
    talks = [Talk(lab, LONG[:300]), Talk(lab, LONG[:300]), Talk(lab, LONG[:300])]
    run_talks(lab, talks[:1], 10, 512)
    run_talks(lab, talks[1:2], 10, 50)
    run_talks(lab, [talks[2], Talk(lab, LONG[100:333])], 10, 300)
    assert talks[0].ids == talks[1].ids == talks[2].ids
    assert page_bytes_of(lab, talks[0]) == page_bytes_of(lab, talks[1]) == page_bytes_of(lab, talks[2])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_biases_and_head_norms_keep_the_promise(architecture: str, labs: list[Lab]) -> None:
    lab = cuda_lab(tiny_config(architecture), num_pages=200)
    labs.append(lab)
    talks = [Talk(lab, LONG[:150]), Talk(lab, LONG[:150])]
    run_talks(lab, talks[:1], 10, 512)
    run_talks(lab, talks[1:], 10, 31)
    assert talks[0].ids == talks[1].ids
    assert page_bytes_of(lab, talks[0]) == page_bytes_of(lab, talks[1])


def test_a_step_behind_draws_what_a_step_at_a_time_draws(labs: list[Lab]) -> None:
    params = SamplingParams(temperature=0.9, seed=11, top_p=0.95, presence_penalty=0.4, frequency_penalty=0.2)
    lab = cuda_lab(num_pages=200)
    labs.append(lab)
    waited, ahead = Talk(lab, LONG[:30], params), Talk(lab, LONG[:30], params)
    run_talks(lab, [waited], 40)
    handles = [lab.backend.launch(StepPlan((ahead.prefill_entry(30),)))]
    for number in range(1, 41):
        ahead.num_output = number
        handles.append(lab.backend.launch(StepPlan((ahead.decode_entry(),))))
        ahead.ids.extend(handles[-2].wait().entries[0].token_ids)
    ahead.ids.extend(handles[-1].wait().entries[0].token_ids)
    assert ahead.ids == waited.ids


def test_captured_steps_equal_launched_ones(labs: list[Lab]) -> None:
    lab = cuda_lab(num_pages=200)
    labs.append(lab)
    first, second = Talk(lab, LONG[:20]), Talk(lab, LONG[:20])
    run_talks(lab, [first], 30)
    captured = lab.backend.graphs.num_captured  # type: ignore[union-attr]
    lab.backend.graphs.close()  # type: ignore[union-attr]
    run_talks(lab, [second], 1)
    for _ in range(29):
        lab.backend.graphs.close()  # type: ignore[union-attr]
        result = lab.backend.launch(StepPlan((second.decode_entry(),))).wait()
        second.take(result.entries[0].token_ids)
    assert captured >= 1
    assert lab.backend.graphs.num_captured == captured  # type: ignore[union-attr]
    assert second.ids == first.ids


@pytest.mark.parametrize(("kv_format", "rows"), list(product(FORMATS, (1, 8))))
def test_verify_rows_draw_what_single_rows_draw(kv_format: str, rows: int, labs: list[Lab]) -> None:
    lab = cuda_lab(kv_format=kv_format, num_pages=200)
    labs.append(lab)
    single = Talk(lab, LONG[:60])
    run_talks(lab, [single], 16)
    drawn = single.ids[60:]
    sequence = lab.cache.open()
    lab.step(sequence, LONG[:59])
    checked = [LONG[59], *drawn[:-1]]
    for start in range(0, 16, rows):
        result = lab.step(sequence, checked[start : start + rows], RowKind.VERIFY)
        lab.cache.truncate(sequence, sequence.length)
        assert list(result.entries[0].token_ids) == drawn[start : start + rows]
