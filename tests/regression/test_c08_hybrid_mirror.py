"""C08: replies carried another conversation's material and forgot their own recent turns (K8V4, parking, drafting).

One of two append paths, the batched one of the verify window, passed no mirror for the hybrid format; the row-by-row
path did, and plain int8 never failed. Here every format takes every path: single rows and drafted windows of 2 to 8,
all cells resident or 64 of them, staying or parked and restored on another worker, with a second conversation between
that takes the memory. Right is what the same conversation gives without parking, drafting or eviction, and device
bytes equal mirror bytes for K, V and scales.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from gpu.cache import Sequence
from gpu.cpu.threads import CpuThreads
from gpu.model.forward import HostModel
from gpu.model.rope import rope_table
from gpu.model.tiny import tiny_config, tiny_weights
from gpu.plan import RowKind
from tests.kv_lab import FORMATS, Lab, chain, make_lab, park

PROMPT = tuple(random.Random(8).randrange(256) for _ in range(200))
OTHER = tuple(random.Random(9).randrange(256) for _ in range(300))
FIRST_REPLY, SECOND_REPLY = 120, 40


@cache
def model() -> HostModel:
    config = tiny_config()
    return HostModel(config, tiny_weights(config), CpuThreads(1))


def worker(kv_format: str, resident_cells: int | None, num_pages: int = 48) -> Lab:
    rope = rope_table(model().config, 1024)
    return make_lab(
        kv_format, kernels="numba", num_pages=num_pages, resident_cells=resident_cells, model=model(), rope=rope
    )


def generate(lab: Lab, sequence: Sequence, ids: list[int], count: int, drafts: tuple[int, ...] = ()) -> None:
    """Sample `count` ids onto `ids`, one row at a time or in windows with drafted ids of which some are wrong."""
    end, choice = len(ids) + count, random.Random(count)
    while len(ids) < end:
        window = min(choice.randint(2, 8) if drafts else 1, end - len(ids))
        drafted = [token if choice.random() < 0.8 else token ^ 1 for token in drafts[len(ids) : len(ids) + window - 1]]
        kind = RowKind.VERIFY if drafted else RowKind.DECODE
        sampled = lab.step(sequence, [ids[-1], *drafted], kind).entries[0].token_ids
        agreed = next((i for i, token in enumerate(drafted) if token != sampled[i]), len(drafted))
        lab.cache.truncate(sequence, sequence.length - len(drafted) + agreed)
        ids.extend(sampled[: agreed + 1])
        lab.seal_all(sequence, ids[: sequence.accepted])


@cache
def expected_ids(kv_format: str) -> tuple[int, ...]:
    lab = worker(kv_format, None)
    sequence, ids = lab.cache.open(), list(PROMPT)
    lab.step(sequence, ids[:-1])
    generate(lab, sequence, ids, FIRST_REPLY + SECOND_REPLY)
    return tuple(ids)


@pytest.mark.parametrize("parking", ["stay", "park"])
@pytest.mark.parametrize("resident_cells", [None, 64])
@pytest.mark.parametrize("append", ["single", "drafted"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_c08_reply_after_eviction_continues_its_own_conversation(
    kv_format: str, append: str, resident_cells: int | None, parking: str
) -> None:
    drafts = expected_ids(kv_format) if append == "drafted" else ()
    lab = worker(kv_format, resident_cells)
    sequence, ids = lab.cache.open(), list(PROMPT)
    lab.step(sequence, ids[:-1])
    generate(lab, sequence, ids, FIRST_REPLY, drafts)
    assert lab.cache.attest(sequence) >= 1, "device bytes equal mirror bytes, the tail's too"

    if parking == "park":
        stored = park(lab, sequence, ids[: sequence.accepted])
        lab = worker(kv_format, resident_cells, num_pages=24)
        occupy(lab)
        sequence = lab.cache.open()
        lab.cache.attach(sequence, lab.restore(stored, chain(ids[:-1], 16)))
        assert sequence.length == len(ids[:-1]) // 16 * 16
        lab.step(sequence, ids[sequence.length : -1])
    else:
        occupy(lab)
    generate(lab, sequence, ids, SECOND_REPLY, drafts)
    assert tuple(ids) == expected_ids(kv_format)
    assert lab.cache.attest(sequence) >= 1


def occupy(lab: Lab) -> None:
    """A second conversation fills pages and device slots, then leaves."""
    second = lab.cache.open()
    lab.step(second, OTHER[:200])
    lab.seal_all(second, OTHER[:200])
    lab.step(second, OTHER[200:])
    lab.seal_all(second, OTHER)
    lab.cache.close(second)
