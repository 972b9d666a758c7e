"""Options and environment: what is wrong is named, before anything starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deploy.configuration import check_names, gateway_settings, settings_in_force
from deploy.errors import BadOption, BadSetting
from deploy.options import worker_environment
from deploy.stack import Stack, StackOptions


def test_options_that_were_given_become_variables() -> None:
    assert worker_environment(kv_format="q4", slots=3, threads=None) == {"KVALET_KV_FORMAT": "q4", "KVALET_SLOTS": "3"}


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("kv_format", "q5", "--kv"),
        ("slots", 0, "--slots"),
        ("mirror_mib", 0, "--mirror-mib"),
        ("accept_numerics", "all", "--accept-numerics"),
        ("device", "first", "--device"),
        ("device_kv_mib", 0, "--device-kv-mib"),
        ("lease_s", "inf", "--lease-s"),
    ],
)
def test_option_out_of_range_is_refused_by_flag_and_value(option: str, value: object, flag: str) -> None:
    with pytest.raises(BadOption) as refused:
        worker_environment(**{option: value})
    assert (refused.value.field, refused.value.value) == (flag, value)


def test_data_folder_of_a_stack_is_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "data"
    old = os.umask(0o022)
    try:
        Stack(StackOptions(directory=directory), lambda _: None)
    finally:
        os.umask(old)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (directory, directory / "run")] == [0o700, 0o700]


@pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
def test_device_may_be_named_by_its_uuid(prefix: str) -> None:
    device = f"{prefix}5fd4a2ab-0c12-11ee-be56-0242ac120002"
    assert worker_environment(backend="cuda", device=device)["KVALET_DEVICE"] == device


def test_malformed_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_SLOTS", "many")
    with pytest.raises(BadOption) as refused:
        worker_environment(kv_format="q4")
    assert (refused.value.field, refused.value.value) == ("KVALET_SLOTS", "many")


def test_unknown_variable_is_refused_by_name() -> None:
    with pytest.raises(BadOption) as refused:
        check_names({"KVALET_SLOTZ": "3"})
    assert refused.value.field == "KVALET_SLOTZ"


def test_variables_of_both_processes_are_known() -> None:
    check_names({"KVALET_SLOTS": "3", "KVALET_GATEWAY_PORT": "1", "KVALET_CONTROL_URL": "redis://h/0", "HOME": "/"})


def test_variable_of_the_kernel_cache_is_known() -> None:
    check_names({"KVALET_CUDA_CACHE_DIR": "/var/cache/cubins"})


def test_setting_from_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_SLOTS", "3")
    by_name = {setting.variable: setting for setting in settings_in_force()}
    assert (by_name["KVALET_SLOTS"].value, by_name["KVALET_SLOTS"].source) == ("3", "environment")
    assert by_name["KVALET_KV_FORMAT"].source == "default"


def test_password_of_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_CONTROL_URL", "redis://user:secret@host:6379/0")
    shown = [setting.value for setting in settings_in_force() if setting.variable == "KVALET_CONTROL_URL"]
    assert set(shown) == {"redis://***@host:6379/0"}


def test_address_beyond_loopback_without_keys_is_refused() -> None:
    with pytest.raises(BadSetting, match="KVALET_GATEWAY_HOST"):
        gateway_settings(host="0.0.0.0")


def test_keys_file_that_is_malformed_is_refused_before_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-in-clear acme\n")
    with pytest.raises(BadSetting, match="keys:1"):
        gateway_settings(keys_file=keys)
