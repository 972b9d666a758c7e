"""Fixtures of tests.fleet; registered by tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import Fleet, tiny_model
from tests.model_files import fp16_tensors
from tests.services import ValkeyServer

MakeFleet = Callable[..., Fleet]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a GGUF file."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fp16_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weights lose bits in bf16: workers that keep them so have other numerics."""
    return tiny_model(tmp_path_factory.mktemp("fp16"), fp16_tensors)


@pytest.fixture
def make_fleet(control_server: ValkeyServer, pages_server: ValkeyServer, tiny_gguf: Path) -> Iterator[MakeFleet]:
    """make_fleet(**settings): a fleet on the test's two servers, stopped at the end. model=PATH for another model."""
    made: list[Fleet] = []

    def make(model: Path = tiny_gguf, **settings: Any) -> Fleet:
        fleet = Fleet(control_server.url, pages_server.url, model, **settings)
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet.stop()
        assert fleet.fatal == [], "a worker was quarantined"


@pytest.fixture
def local_fleet(make_fleet: MakeFleet) -> Fleet:
    """A fleet with default settings: restore always, attest always."""
    return make_fleet()
