"""API keys and settings."""

from pathlib import Path

import pytest

from gateway.auth import LOCAL, ApiKeys, hash_key, load_keys
from gateway.errors import AuthenticationFailed
from gateway.settings import SettingsError, load_settings


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def test_keys_known_key_belongs_to_its_tenant(tmp_path: Path) -> None:
    keys = load_keys(keys_file(tmp_path, f"# ours\n{hash_key('sk-a')} acme ci\n{hash_key('sk-b')} beta ops admin\n"))
    first, second = keys.principal("Bearer sk-a"), keys.principal("bearer sk-b")
    assert (first.tenant, first.key_id, first.is_admin) == ("acme", "ci", False)
    assert (second.tenant, second.key_id, second.is_admin) == ("beta", "ops", True)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic sk-a", "Bearer sk-x", "Bearer sk-a x"])
def test_keys_unknown_key_is_refused(tmp_path: Path, header: str | None) -> None:
    keys = load_keys(keys_file(tmp_path, f"{hash_key('sk-a')} acme\n"))
    with pytest.raises(AuthenticationFailed):
        keys.principal(header)


def test_keys_none_given_everybody_is_local() -> None:
    assert ApiKeys(()).principal("Bearer whatever") == LOCAL


@pytest.mark.parametrize(
    "line",
    ["sk-plain acme", "0" * 64, "0" * 64 + " a b c d", "0" * 64 + " ../x", "", "0" * 64 + " a\n" + "0" * 64 + " b"],
)
def test_keys_malformed_file_stops_the_start(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingsError):
        load_keys(keys_file(tmp_path, line + "\n"))


def test_keys_file_never_holds_the_key_itself() -> None:
    assert "sk-a" not in hash_key("sk-a")


def test_settings_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_GATEWAY_PROT", "1")
    with pytest.raises(SettingsError, match="KVALET_GATEWAY_PROT"):
        load_settings()


def test_settings_malformed_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_GATEWAY_PORT", "70000")
    with pytest.raises(SettingsError, match="KVALET_GATEWAY_PORT='70000'"):
        load_settings()


def test_settings_open_address_without_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_GATEWAY_HOST", "0.0.0.0")
    with pytest.raises(SettingsError, match="KEYS_FILE"):
        load_settings()


def test_settings_shared_control_url_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_CONTROL_URL", "redis://elsewhere:1/0")
    assert load_settings().control_url == "redis://elsewhere:1/0"


def test_settings_overrides_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_GATEWAY_PORT", "1234")
    assert load_settings(port=4321, control_url="redis://x/0").port == 4321
