"""The small suite under compute-sanitizer: no access outside an allocation, no race in shared memory.

The suite goes through every kernel once or more: appends of one row, of verify rows and of chunks, both ways of
attention with pages on the device and in the mirror, products of all storages, draws, poison and compare.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.lab import device_missing

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
ROOT = Path(__file__).parents[2]
GPU = "tests/gpu/test_cuda_"
SMALL_SUITE = (
    GPU + "contract.py::test_any_way_gives_equal_page_bytes[k8v4-verify-streamed-park]",
    GPU + "contract.py::test_any_way_gives_equal_page_bytes[f16-chunk-mixed-stay]",
    GPU + "contract.py::test_any_way_gives_equal_page_bytes[int8-chunk-streamed-park]",
    GPU + "contract.py::test_any_way_gives_equal_page_bytes[q4-rows-resident-park]",
    GPU + "contract.py::test_captured_steps_equal_launched_ones",
    GPU + "contract.py::test_every_weight_storage_keeps_the_promise",
    GPU + "rows.py::test_append_bytes_counts_and_tails_equal_the_reference[k8v4-128-16]",
    GPU + "rows.py::test_append_device_half_then_mirror_half_equal_the_reference",
    GPU + "rows.py::test_poison_pages_sets_the_marks_of_the_proof[k8v4-64-64]",
    GPU + "rows.py::test_compare_finds_one_flipped_bit_on_its_page[k8v4-64-16-2]",
    GPU + "sampling.py::test_a_row_alone_equals_itself_among_others",
    GPU + "sampling.py::test_a_captured_draw_follows_its_tables",
    GPU + "products.py::test_products_are_close_to_float64[shape2-0]",
    GPU + "products.py::test_products_are_close_to_float64[shape2-1]",
    GPU + "products.py::test_products_are_close_to_float64[shape2-2]",
    GPU + "attention.py::test_bytes_beyond_the_length_do_not_matter[64-k8v4]",
    GPU + "prefill_attention.py::test_bytes_beyond_the_length_do_not_matter[128-int8]",
    GPU + "prefill_attention.py::test_bytes_beyond_the_length_do_not_matter[16-f16]",
)
FOUND = 77

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device"),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed"),
]


# Racecheck's warnings are left out: it takes the initialization of a warp's own barriers, which the assembler issues
# once for the warp, for a store by another lane than the one that uses them.
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--report-api-errors", "no", "--racecheck-detect-level", "error"),
}


@pytest.mark.parametrize("tool", list(TOOLS))
def test_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = [str(SANITIZER), "--tool", tool, *TOOLS[tool], "--error-exitcode", str(FOUND)]
    command = [*sanitizer, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMALL_SUITE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", done.stdout), done.stdout[-2000:]
