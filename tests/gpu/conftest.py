"""Tests here need a CUDA device; without one they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.lab import Lab, device_missing


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    reason = device_missing()
    if reason:
        pytest.skip(reason)
    made = Lab()
    yield made
    made.close()
