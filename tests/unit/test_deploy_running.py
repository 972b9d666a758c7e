"""Which service `chat` and `status` speak to."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.errors import BadOption
from deploy.running import service_url, write_running


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
    ],
)
def test_url_may_leave_the_version_out(given: str, url: str) -> None:
    assert service_url(given, None) == url


def test_stack_of_the_data_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadOption, match="no `kvalet up` runs") as refused:
        service_url(None, tmp_path)
    assert (refused.value.field, refused.value.value) == ("--data", str(tmp_path))
    write_running(tmp_path, {"KVALET_BASE_URL": "http://127.0.0.1:4711/v1"}, [])
    assert service_url(None, tmp_path) == "http://127.0.0.1:4711/v1"
    (tmp_path / "state" / "kvalet").mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_running(tmp_path / "state" / "kvalet", {"KVALET_BASE_URL": "http://127.0.0.1:4712/v1"}, [])
    assert service_url(None, None) == "http://127.0.0.1:4712/v1"
