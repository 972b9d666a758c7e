"""C59 (ggml-org/llama.cpp PR#27188, huggingface/huggingface.js PR#2020, PR#2028).

Files of a few dozen bytes that claim 2^63 entries hung readers or made them eat memory by the gigabyte, and nested
arrays recursed without limit. Each sample is opened in a process with 2 GB of address space: a typed error, in under
a second, with under 100 MB of growth.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

HEX = {
    "array_of_2_63": (
        "47475546 03000000 0000000000000000 0100000000000000 0100000000000000 61 09000000 00000000 0000000000000080"
    ),
    "key_of_2_63": "47475546 03000000 0000000000000000 0100000000000000 0000000000000080",
    "metadata_of_2_63": "47475546 03000000 0000000000000000 0000000000000080",
    "tensors_of_2_63": "47475546 03000000 0000000000000080 0000000000000000",
}
ONE_KEY = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a"
NESTED = struct.pack("<IQ", 9, 1)
SAMPLES: dict[str, bytes] = {
    **{name: bytes.fromhex(text) for name, text in HEX.items()},
    "nested_100000": ONE_KEY + b"\t\0\0\0" + NESTED * 100_000,
    "bools_2_40": ONE_KEY + b"\t\0\0\0" + struct.pack("<IQ", 7, 2**40),
    "string_one_too_long": ONE_KEY + b"\x08\0\0\0" + struct.pack("<Q", 9) + b"12345678",
    "magic_only": b"GGUF",
    "empty": b"",
    "version_0": b"GGUF" + struct.pack("<IQQ", 0, 0, 0),
    "version_1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "version_99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "version_byte_swapped": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}

PROBE = """
import json, resource, sys, time
from pathlib import Path
from gpu.errors import ModelFileError
from gpu.model.load import open_source
resource.setrlimit(resource.RLIMIT_AS, (2_000_000 * 1024, 2_000_000 * 1024))
answers = {}
for path in map(Path, sys.argv[1:]):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        open_source(path)
        fault = None
    except ModelFileError as error:
        fault = str(error)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    answers[path.stem] = (fault, time.perf_counter() - start, growth * 1024)
print(json.dumps(answers))
"""

Answer = tuple[str | None, float, int]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What the loader said to each sample, with seconds and bytes of growth."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = [folder / f"{name}.gguf" for name in SAMPLES]
    for path, block in zip(paths, SAMPLES.values(), strict=True):
        path.write_bytes(block)
    command = [sys.executable, "-c", PROBE, *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, timeout=60, check=True, env=environment)
    parsed: dict[str, Answer] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize("name", SAMPLES)
def test_hostile_header_is_refused_with_a_typed_error(answers: dict[str, Answer], name: str) -> None:
    fault = answers[name][0]
    assert fault is not None
    assert ": " in fault


@pytest.mark.parametrize("name", SAMPLES)
def test_hostile_header_is_refused_within_a_second(answers: dict[str, Answer], name: str) -> None:
    assert answers[name][1] < 1.0


@pytest.mark.parametrize("name", SAMPLES)
def test_hostile_header_costs_less_than_100_megabytes(answers: dict[str, Answer], name: str) -> None:
    assert answers[name][2] < 100_000_000


def test_unknown_versions_and_byte_order_are_told_apart(answers: dict[str, Answer]) -> None:
    assert "GGUF version unsupported" in (answers["version_99"][0] or "")
    assert "byte order unsupported" in (answers["version_byte_swapped"][0] or "")
