"""The host's part of draws on the device, without a device: table entries, what is sent to slots and when."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest

from gpu.cuda.device import DeviceBuffer, PinnedBuffer
from gpu.cuda.draw_tables import DRAW_ROW, DrawFlag, Draws
from gpu.cuda.programs import ProgramCompiler
from gpu.cuda.sampling import MAX_VOCAB_SIZE, SAMPLING, DeviceSampler
from gpu.cuda.slot_words import ENDS_REPLY, IN_PROMPT
from gpu.errors import LayoutError, PlanError
from gpu.plan import RowKind, SamplingParams
from gpu.sampling import SampleRequest, TokenHistory

VOCAB = 64
COUNTED = SamplingParams(0.0, presence_penalty=0.5)
REPEATED = SamplingParams(0.0, repetition_penalty=1.5, min_tokens=3, end_ids=(2, 9))


class Memory:
    """Device and pinned memory in ordinary memory; copies happen at once and are noted by their target."""

    kernels: Any = None
    num_processors = 132

    def __init__(self) -> None:
        self.compute = self
        self.copied: list[int] = []
        self._kept: list[Any] = []

    def allocate(self, num_bytes: int) -> DeviceBuffer:
        self._kept.append(ctypes.create_string_buffer(b"\xcd" * num_bytes, num_bytes))
        return DeviceBuffer(ctypes.addressof(self._kept[-1]), num_bytes)

    def pin(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(self.allocate(num_bytes).address, num_bytes)

    def copy_async(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        ctypes.memmove(target, source, num_bytes)
        self.copied.append(target)

    def clear_async(self, address: int, num_bytes: int, stream: Any) -> None:
        ctypes.memset(address, 0, num_bytes)

    def create_event(self) -> Memory:
        return self

    def record(self, event: Any) -> None:
        """Copies have happened already."""

    def sync(self) -> None:
        """Copies have happened already."""


class Steps:
    """A sampler over `Memory`. `step` writes one step's table; `read` hands ids to the sampler."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.sampler = DeviceSampler(self.memory, VOCAB, 8)  # type: ignore[arg-type]
        self.table = np.zeros(8, DRAW_ROW)

    def step(
        self,
        requests: list[SampleRequest],
        slots: list[int] | None = None,
        kinds: list[RowKind] | None = None,
        *,
        queued: bool = True,
    ) -> Draws:
        self.memory.copied.clear()
        self.table[:] = np.frombuffer(b"\xa5" * DRAW_ROW.itemsize, DRAW_ROW)[0]
        draws = self.sampler.write(
            {"draws": self.table}, requests, np.array(slots or range(len(requests)), np.int32),
            kinds or [RowKind.DECODE] * len(requests), 8, general=self.sampler.needs_general(requests),
        )  # fmt: skip
        if queued:
            self.sampler.launched(draws)
        return draws

    def read(self, draws: Draws, *ids: int) -> list[int]:
        words = np.zeros(self.sampler.num_result_words(8), np.uint32)
        words[: len(ids)] = ids
        return [sample.token_id for sample in self.sampler.read(words, draws)]

    def decode(self, history: TokenHistory, token_id: int, params: SamplingParams = COUNTED, slot: int = 0) -> bool:
        """One whole step; whether the words were sent again."""
        draws = self.step([SampleRequest(params, history, len(history.output_ids))], [slot])
        sent = bool(self.memory.copied)
        self.read(draws, token_id)
        history.extend([token_id])
        return sent

    def words(self, row: int = 0) -> np.ndarray:
        """What a row's words hold on the device."""
        address = int(self.table["words"][row])
        return np.frombuffer((ctypes.c_uint8 * (4 * VOCAB)).from_address(address), np.uint32)


def test_table_entries_have_the_layout_that_kernels_read() -> None:
    assert DRAW_ROW.itemsize == 112
    assert [DRAW_ROW.fields[name][1] for name in ("seed", "words", "slot", "flags", "presence_penalty")] == [
        40, 48, 64, 68, 96,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        (SamplingParams(0.0, top_k=3, top_p=0.5, min_p=0.1, logprobs=0), DrawFlag.LOGPROBS),
        (SamplingParams(1.0, top_k=VOCAB), DrawFlag.RANDOM),
        (SamplingParams(1.0, top_k=3), DrawFlag.RANDOM | DrawFlag.TOP_K),
        (SamplingParams(1.0, top_p=0.5, min_p=0.1), DrawFlag.RANDOM | DrawFlag.TOP_P | DrawFlag.MIN_P),
        (COUNTED, DrawFlag.ADDITIVE_PENALTIES | DrawFlag.REMEMBERED),
        (REPEATED, DrawFlag.REPETITION | DrawFlag.SUPPRESSED_ENDS | DrawFlag.REMEMBERED),
        (SamplingParams(0.0, min_tokens=3, end_ids=(2,)), DrawFlag.SUPPRESSED_ENDS),
        (SamplingParams(0.0, min_tokens=3), DrawFlag(0)),
        (SamplingParams(0.0, logit_bias=((1, 2.0),)), DrawFlag(0)),
    ],
)
def test_flags_of_a_row_follow_its_parameters(params: SamplingParams, flags: DrawFlag) -> None:
    steps = Steps()
    steps.step([SampleRequest(params, TokenHistory(()), 0)])
    assert steps.table["flags"].tolist() == [flags, *[DrawFlag.PADDING] * 7]


def test_plain_rows_name_no_tables() -> None:
    steps = Steps()
    steps.step([SampleRequest(SamplingParams(0.0), TokenHistory(()), 0)] * 2, [5, 6], [RowKind.DECODE, RowKind.VERIFY])
    assert not steps.sampler.needs_general([SampleRequest(SamplingParams(0.0), TokenHistory(()), 0)])
    assert steps.table[:2][["words", "biases", "flags", "slot"]].tolist() == [(0, 0, 0, 5), (0, 0, 0, -1)]


def test_words_hold_counts_prompt_and_ends() -> None:
    steps = Steps()
    steps.step([SampleRequest(REPEATED, TokenHistory([9, 1, VOCAB + 5], [4, 4, 9]), 0)])
    words = dict(enumerate(steps.words().tolist()))
    assert {token_id: word for token_id, word in words.items() if word} == {
        1: IN_PROMPT, 2: ENDS_REPLY, 4: 2, 9: 1 | IN_PROMPT | ENDS_REPLY,
    }  # fmt: skip


def test_words_are_sent_once_for_a_reply() -> None:
    steps, history = Steps(), TokenHistory([1])
    assert [steps.decode(history, token_id) for token_id in (5, 6, 6, 7)] == [True, False, False, False]


def test_words_are_not_sent_while_the_host_is_behind() -> None:
    steps, history = Steps(), TokenHistory([1])
    unread: list[tuple[Draws, int]] = []
    for index in range(9):
        unread.append((steps.step([SampleRequest(COUNTED, history, index)]), 20 + index))
        assert bool(steps.memory.copied) == (index == 0)
        if len(unread) == 3:
            draws, token_id = unread.pop(0)
            history.extend(steps.read(draws, token_id))


@pytest.mark.parametrize("change", ["foreign", "failed", "failed, then foreign", "slot", "params", "not queued"])
def test_words_are_sent_again_when_they_may_differ_from_the_history(change: str) -> None:
    steps, history = Steps(), TokenHistory([1])
    steps.decode(history, 5)
    params, slot = COUNTED, 0
    if "failed" in change:
        steps.read(steps.step([SampleRequest(COUNTED, history, 1)]), 6)
    if "foreign" in change:
        history.extend([8])
    if change == "slot":
        steps.decode(TokenHistory([1], [5]), 3)
    if change == "params":
        params = SamplingParams(0.0, presence_penalty=0.5, repetition_penalty=2.0)
    if change == "not queued":
        steps.step([SampleRequest(COUNTED, history, 1)], queued=False)
    assert steps.decode(history, 6, params, slot)
    assert steps.words()[:9].tolist() == [
        0, IN_PROMPT * (change == "params"), 0, 0, 0, 1, 0, 0, int("foreign" in change),
    ]  # fmt: skip
    assert not steps.decode(history, 7, params, slot)


def test_a_reply_that_moves_and_returns_is_sent_again() -> None:
    steps, history = Steps(), TokenHistory([1])
    assert [steps.decode(history, 5, slot=slot) for slot in (0, 1, 1, 0, 0)] == [True, True, False, True, False]


def test_verify_rows_share_words_and_count_nothing() -> None:
    steps, history = Steps(), TokenHistory([1], [4])
    rows = [SampleRequest(COUNTED, history, row, (7, 8, 9)[:row]) for row in range(4)]
    draws = steps.step(rows, [3] * 4, [RowKind.VERIFY] * 4)
    assert len(steps.memory.copied) == 1
    assert steps.table[:4][["num_drafted", "drafted_id", "slot", "flags"]].tolist() == [
        (row, drafted, -1, DrawFlag.ADDITIVE_PENALTIES) for row, drafted in enumerate((0, 7, 8, 9))
    ]
    assert len(set(steps.table["words"][:4].tolist())) == 1
    steps.read(draws, 7, 8, 30, 31)
    steps.read(steps.step(rows, [3] * 4, [RowKind.VERIFY] * 4), 7, 8, 30, 31)
    assert not steps.memory.copied
    history.extend([7, 8, 30])
    assert steps.decode(history, 2, slot=3)


def test_penalties_that_begin_behind_an_unread_draw_are_refused() -> None:
    steps, history = Steps(), TokenHistory([1])
    draws = steps.step([SampleRequest(SamplingParams(0.0), history, 0)])
    with pytest.raises(PlanError, match="penalties cannot begin while a draw of the reply is unread"):
        steps.step([SampleRequest(COUNTED, history, 1)])
    history.extend(steps.read(draws, 5))
    assert steps.decode(history, 6)


def test_biases_are_sent_when_they_change() -> None:
    steps = Steps()
    sent = []
    for bias in (2.0, 2.0, 3.0):
        params = SamplingParams(0.0, logit_bias=((3, bias), (3, 0.5), (VOCAB, 1.0)))
        steps.read(steps.step([SampleRequest(params, TokenHistory(()), 0)]), 1)
        sent.append(len(steps.memory.copied))
    address = int(steps.table["biases"][0])
    values = np.frombuffer((ctypes.c_uint8 * (4 * VOCAB)).from_address(address), np.float32)
    assert sent == [1, 0, 1]
    assert values[3] == 3.5
    assert np.count_nonzero(values) == 1


def test_reports_are_taken_from_the_words_of_their_row() -> None:
    steps = Steps()
    params = [SamplingParams(1.0), SamplingParams(1.0, logprobs=2), SamplingParams(1.0, logprobs=0)]
    draws = steps.step([SampleRequest(own, TokenHistory(()), 0) for own in params])
    words = np.zeros(steps.sampler.num_result_words(8), np.uint32)
    words[:3] = (10, 11, 12)
    words.view(np.float32)[8 + 1 : 8 + 3] = (-0.5, -0.25)
    words[16 + 20 : 16 + 22] = (11, 5)
    words.view(np.float32)[16 + 8 * 20 + 20 : 16 + 8 * 20 + 22] = (-0.5, -1.5)
    plain, full, short = steps.sampler.read(words, draws)
    assert plain.logprobs is None
    assert full.logprobs is not None and short.logprobs is not None
    assert (full.logprobs.token_id, full.logprobs.logprob, full.logprobs.top) == (11, -0.5, ((11, -0.5), (5, -1.5)))
    assert (short.logprobs.logprob, short.logprobs.top) == (-0.25, ())


def test_limits_of_draws_are_named() -> None:
    with pytest.raises(PlanError, match="logprobs=21: at most 20"):
        Steps().step([SampleRequest(SamplingParams(0.0, logprobs=21), TokenHistory(()), 0)])
    with pytest.raises(LayoutError, match="vocab_size=262145: must be 1 to 262144 on CUDA"):
        DeviceSampler(Memory(), MAX_VOCAB_SIZE + 1, 8)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_draw_kernels_compile_without_spills(arch: str) -> None:
    _, notes = ProgramCompiler(arch).compile_verbose(SAMPLING, SAMPLING.samples[arch in ("sm_80", "sm_100")])
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", notes)
    assert len(frames) >= 4
    assert set(frames) == {("0", "0", "0")}
