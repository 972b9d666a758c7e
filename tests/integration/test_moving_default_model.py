"""Two conversations that change worker process at every turn say what they say when they stay: default model."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.model_fetch import default_model_path
from tests.moving import FORMATS, check_moved, moving_stack


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_default_model_moved_six_turns_says_the_same(kv_format: str) -> None:
    model = default_model_path()
    settings: dict[str, Any] = {"kv_format": kv_format, "model_name": "test", "mirror_mib": 256}
    with moving_stack(model, **settings) as stack:
        check_moved(stack, model, 6, 64, **settings)
