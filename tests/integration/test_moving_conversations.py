"""Two conversations that move at every turn say what they say when they stay: tiny model, both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import tiny_model
from tests.moving import FORMATS, check_moved, moving_stack


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_tiny_model_moved_thirty_turns_says_the_same(backend: str, kv_format: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    settings: dict[str, Any] = {"kv_format": kv_format, "model_name": "test", "backend": backend, "mirror_mib": 64}
    if backend == "simulated":
        settings |= {"kv_resident": 2 * 2 * 64, "attest": "always"}
    with moving_stack(model, **settings) as stack:
        check_moved(stack, model, 30, 64, **settings)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tiny_model_that_drafts_and_moves_says_the_same(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    settings: dict[str, Any] = {"kv_format": "k8v4", "model_name": "test", "backend": "simulated", "mirror_mib": 64}
    settings |= {"draft": "suffix", "draft_rows": 3, "suffix_min_match": 2}
    settings |= {"kv_resident": 2 * 2 * 64, "attest": "always"}
    with moving_stack(model, **settings) as stack:
        check_moved(stack, model, 8, 64, **settings)
        workers = httpx.get(f"{stack.base_url}/workers", timeout=10).json()["data"]
    assert all(worker["info"]["draft"] == "suffix" for worker in workers)
    assert sum(worker["info"]["accepted_rows"] for worker in workers) > 0, "not exercised"
