"""Kernels are compiled before a worker is ready, and by one process only."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fleet import tiny_model

ROOT = Path(__file__).parent.parent.parent

# Which specializations each compiled function has after the start, and after a turn that samples in every way.
AFTER_A_TURN = """
import importlib, pkgutil, sys
from dataclasses import replace
import gpu.cpu
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.sampling import TokenHistory
from workers.model_runtime import load_runtime
from workers.settings import WorkerSettings

def specialized():
    modules = [importlib.import_module(f"gpu.cpu.{item.name}") for item in pkgutil.iter_modules(gpu.cpu.__path__)]
    return {
        (module.__name__, name, signature)
        for module in modules
        for name, function in vars(module).items()
        for signature in map(str, getattr(function, "signatures", ()))
    }

runtime = load_runtime(WorkerSettings(model=sys.argv[1], threads=1, mirror_mib=16))
ready, backend = specialized(), runtime.backend
sequence, history = backend.cache.open(), TokenHistory((1, 2, 3))
backend.cache.reserve(sequence, 40)
backend.launch(StepPlan((PlanEntry(sequence, RowKind.PREFILL, (1, 2, 3)),))).wait()
plain = SamplingParams()
every = [
    plain, replace(plain, temperature=0.0), replace(plain, top_p=0.5), replace(plain, top_k=5),
    replace(plain, top_k=5, top_p=0.5), replace(plain, min_p=0.1), replace(plain, logprobs=3),
    replace(plain, top_k=3, min_p=0.1, logprobs=0), replace(plain, repetition_penalty=1.3, frequency_penalty=0.5),
    replace(plain, logit_bias=((5, 1.0),), min_tokens=9, end_ids=(2,)),
]
for index, params in enumerate(every):
    backend.launch(StepPlan((PlanEntry(sequence, RowKind.DECODE, (), params, index, history) if index else
                             PlanEntry(sequence, RowKind.DECODE, (4,), params, index, history),))).wait()
print(len(ready), sorted(specialized() - ready))
"""

COMPILING = """
import os, sys, time
from gpu.cpu.compile_cache import compiling
with compiling(sys.argv[1]):
    print("in", time.monotonic(), flush=True)
    time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "fail":
        os._exit(9)
    print("out", time.monotonic(), flush=True)
"""


def started(folder: Path, variant: str, hold_s: float, end: str = "well") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMPILING, variant, str(hold_s), end]
    return subprocess.Popen(command, cwd=ROOT, env=environment(folder), stdout=subprocess.PIPE, text=True)


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "NUMBA_CACHE_DIR": str(folder)}


def times(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate(timeout=60)
    return {name: float(at) for name, at in (line.split() for line in output.splitlines())}


def overlap(spans: list[dict[str, float]]) -> bool:
    first, second = sorted(spans, key=lambda span: span["in"])
    return second["in"] < first["out"]


@pytest.mark.timeout(400)  # with a cold cache it compiles everything
def test_turn_compiles_nothing_that_the_start_has_not_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTER_A_TURN, str(tiny_model(tmp_path))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    count, _, late = ran.stdout.partition(" ")
    assert (int(count or 0) > 4, late.strip()) == (True, "[]"), ran.stderr[-2000:]


def test_second_process_waits_until_the_first_has_compiled(tmp_path: Path) -> None:
    spans = [times(process) for process in [started(tmp_path, "a", 1.0), started(tmp_path, "a", 1.0)]]
    assert not overlap(spans)


def test_processes_do_not_wait_once_the_kernels_are_there(tmp_path: Path) -> None:
    times(started(tmp_path, "a", 0.0))
    spans = [times(process) for process in [started(tmp_path, "a", 4.0), started(tmp_path, "a", 4.0)]]
    assert overlap(spans)


def test_process_that_dies_while_it_compiles_hands_the_work_on(tmp_path: Path) -> None:
    dying = started(tmp_path, "a", 0.5, "fail")
    assert dying.stdout is not None
    dying.stdout.readline()
    follower = started(tmp_path, "a", 0.0)
    begun = time.monotonic()
    assert set(times(follower)) == {"in", "out"}
    assert (dying.wait(10), time.monotonic() - begun < 30) == (9, True)
    assert [path.suffix for path in tmp_path.glob("a-*")] == [".compiled"]
