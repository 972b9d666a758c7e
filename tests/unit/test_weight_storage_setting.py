"""How weights are kept is a setting of the worker and part of its numerics."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.errors import BadOption
from deploy.options import worker_environment
from snapshot_store.fingerprint import diff
from tests.teacher import teacher


def test_weights_kept_as_bf16_are_of_other_numerics_and_one_format(fp16_gguf: Path) -> None:
    fingerprints = []
    for weights in ("auto", "f32", "bf16"):
        runtime = teacher(fp16_gguf, weights=weights, threads=1)
        fingerprints.append(runtime.fingerprint)
        runtime.close()
    as_stored, f32, bf16 = fingerprints
    assert as_stored == f32, "the file holds fp16, which f32 keeps"
    assert {(difference.record, difference.field) for difference in diff(f32, bf16)} == {
        ("numerics", "probe"), ("numerics", "weight_storage")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "weights", "allowed"), [("cpu", "int4", "auto, f32, bf16"), ("cuda", "f32", "auto, bf16, int8, int4")]
)
def test_weights_that_the_backend_cannot_keep_are_refused_by_name(backend: str, weights: str, allowed: str) -> None:
    with pytest.raises(BadOption, match=f"--weights='{weights}': .*{backend} keeps them as {allowed}"):
        worker_environment(backend=backend, weights=weights)
