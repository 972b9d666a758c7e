"""The device beside the host: same model, same text. Contents agree; bits need not, since weights round to bf16."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from deploy.model_fetch import default_model_path
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan, TokenLogprobs
from gpu.sampling import TokenHistory
from tests.gpu.lab import device_missing
from workers.model_runtime import ModelRuntime, load_runtime
from workers.settings import WorkerSettings

MODEL = Path(os.environ.get("TEST_MODEL") or default_model_path())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device"),
    pytest.mark.skipif(not MODEL.exists(), reason="the default model is not there: kvalet model fetch"),
]
TEXT = (
    "The harbour master keeps a ledger. Every ship that enters the bay is written down with her name, her captain, "
    "her cargo and the hour of the tide. In the spring the ledger fills with salt and timber; in the autumn it "
    "fills with wine, figs and copper. A careful reader can tell from the handwriting whether the night was calm. "
    "When two ships arrive at once, the pilot decides which of them may come in first, and the other waits outside "
    "the mole until the flag is lowered. The children of the town know every flag by heart. They sit on the wall "
    "and call out the names of the ships before the master has opened his book, and they are seldom wrong. Once, a "
    "ship came in without a name. Her hull had been painted over, and nobody on board would say where she had "
    "sailed from. The master wrote a line across the page and left the rest of it blank. Years later a clerk found "
    "the empty line and asked about it. The master, who was old by then, said that a ledger must be honest about "
    "what it does not know, and that an empty line is better than a guess. The clerk copied the sentence on the "
    "first page of the new book, where it can still be read today, under the date and the price of the paper."
)
ROWS = 60
TOP = SamplingParams(temperature=0.0, logprobs=5)


def logprobs_of(runtime: ModelRuntime, token_ids: list[int]) -> list[TokenLogprobs]:
    """For every position of a text, what comes next, in steps of verify rows."""
    sequence, found = runtime.backend.cache.open(), []
    runtime.backend.cache.reserve(sequence, len(token_ids))
    for start in range(0, len(token_ids), ROWS):
        rows = tuple(token_ids[start : start + ROWS])
        entry = PlanEntry(sequence, RowKind.VERIFY, rows, TOP, start, TokenHistory(()))
        found += runtime.backend.launch(StepPlan((entry,))).wait().entries[0].logprobs
        runtime.backend.cache.truncate(sequence, sequence.length)
    return found


@pytest.mark.parametrize(("kv_format", "median", "tail"), [("f16", 0.02, 0.15), ("k8v4", 0.05, 0.3)])
def test_device_and_host_agree_on_a_text(kv_format: str, median: float, tail: float) -> None:
    """median, tail (of one in twenty): differences of log probabilities; quantized cells carry rounding further."""
    found = {}
    for backend in ("cpu", "cuda"):
        runtime = load_runtime(WorkerSettings(model=MODEL, backend=backend, kv_format=kv_format, mirror_mib=64))
        try:
            token_ids = runtime.source.tokenizer.encode_text(TEXT)[:300]
            found[backend] = logprobs_of(runtime, token_ids)
        finally:
            runtime.close()
    assert len(token_ids) >= 250
    same = np.mean([a.token_id == b.token_id for a, b in zip(found["cpu"], found["cuda"], strict=True)])
    gaps = np.array([abs(a.logprob - dict(b.top).get(a.token_id, -9.0)) for a, b in zip(*found.values(), strict=True)])
    assert same >= 0.95
    assert np.median(gaps) <= median
    assert np.quantile(gaps, 0.95) <= tail
