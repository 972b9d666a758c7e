"""Options and environment: what is wrong is named, before anything starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deploy.configuration import check_names, gateway_settings, settings_in_force, worker_settings
from deploy.errors import BadOption, BadSetting
from deploy.options import worker_environment
from deploy.stack import Stack, StackOptions
from deploy.startable import check_servers, check_worker
from tests.fleet import tiny_model

NUMERICS = "must be own, any, or numerics ids of 64 hex digits with commas between"


def test_options_that_were_given_become_variables() -> None:
    assert worker_environment(kv_format="q4", slots=3, threads=None) == {"KVALET_KV_FORMAT": "q4", "KVALET_SLOTS": "3"}


@pytest.mark.parametrize(
    ("option", "value", "flag", "limit"),
    [
        ("kv_format", "q5", "--kv", "must be 'f16', 'int8', 'q4' or 'k8v4'"),
        ("slots", 0, "--slots", "must be at least 1"),
        ("slots", 257, "--slots", "must be at most 256"),
        ("slots", "two", "--slots", "must be a whole number"),
        ("mirror_mib", 0, "--mirror-mib", "must be at least 1"),
        ("accept_numerics", "all", "--accept-numerics", NUMERICS),
        ("device", "first", "--device", "must be a GPU's number or its UUID"),
        ("device_kv_mib", 0, "--device-kv-mib", "must be at least 1"),
        ("lease_s", "inf", "--lease-s", "must be at most 86400.0"),
        ("lease_s", "soon", "--lease-s", "must be a number"),
        ("heartbeat_s", 0, "--heartbeat-s", "must be more than 0.0"),
        ("weights", "int8", "--weights", "cpu keeps them as auto, f32, bf16"),
    ],
)
def test_option_out_of_range_is_refused_by_flag_value_and_limit(
    option: str, value: object, flag: str, limit: str
) -> None:
    with pytest.raises(BadOption) as refused:
        worker_environment(**{option: value})
    assert (refused.value.field, refused.value.value, refused.value.limit) == (flag, value, limit)


@pytest.mark.parametrize("option", [{"device": "1"}, {"device_kv_mib": 64}])
def test_option_of_a_gpu_is_refused_without_one(option: dict[str, object]) -> None:
    with pytest.raises(BadOption, match="the cpu backend has no GPU"):
        worker_environment(backend="cpu", **option)
    worker_environment(backend="cuda", **option)


@pytest.mark.parametrize(
    ("url", "limit"),
    [
        ("foo", "must begin with redis://, rediss://, unix://"),
        ("http://user:secret@host", "must begin with redis://, rediss://, unix://"),
        ("redis://user:secret@host:port/0", "is no URL of a server"),
    ],
)
@pytest.mark.parametrize("option", ["control_url", "pages_url"])
def test_url_that_names_no_server_is_refused_without_its_password(option: str, url: str, limit: str) -> None:
    with pytest.raises(BadOption) as refused:
        worker_environment(**{option: url})
    assert refused.value.field == f"--{option.removesuffix('_url')}"
    assert limit in str(refused.value)
    assert "secret" not in str(refused.value)
    if option == "control_url":
        with pytest.raises(BadSetting, match="KVALET_CONTROL_URL"):
            gateway_settings(control_url=url)


@pytest.mark.parametrize("place", ["file/data", "file"])
def test_data_folder_that_cannot_be_one_is_refused_by_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match="cannot be used as a folder") as refused:
        Stack(StackOptions(directory=tmp_path / place), lambda _: None)
    assert refused.value.field == "--data"


@pytest.mark.parametrize(
    ("options", "flag", "limit"),
    [
        ({"context": 99_999_999}, "--context", r"the model's context is \d+ tokens"),
        ({"mirror_mib": 99_999_999}, "--mirror-mib", r"has \d+ MiB"),
        ({"page_size": 7}, "--page-size", "multiple of 16"),
    ],
)
def test_worker_that_its_model_or_machine_cannot_have_is_refused_before_the_start(
    tmp_path: Path, options: dict[str, object], flag: str, limit: str
) -> None:
    environment = worker_environment(model=tiny_model(tmp_path), **options)
    with pytest.raises(BadOption, match=limit) as refused:
        check_worker(worker_settings(environment), environment, lambda: None)
    assert refused.value.field == flag
    with pytest.raises(BadOption) as refused:
        check_worker(worker_settings(environment), (), lambda: None)
    assert refused.value.field == "KVALET" + flag.removeprefix("-").replace("-", "_").upper()


def test_default_model_is_fetched_before_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched = []
    with pytest.raises(BadOption, match="no such file"):
        check_worker(worker_settings({}), (), lambda: fetched.append(1))
    assert fetched == [1]


def test_server_that_does_not_answer_is_refused_by_option() -> None:
    for control, pages in (("redis://127.0.0.1:1", None), (None, "redis://127.0.0.1:1")):
        with pytest.raises(BadOption, match="does not answer") as refused:
            check_servers(control, pages)
        assert refused.value.field == ("--control" if control else "--pages")
    check_servers(None, None)


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


def test_variable_in_small_letters_is_refused_with_its_right_name() -> None:
    for name in ("kvalet_slots", "Kvalet_Gateway_Port"):
        with pytest.raises(BadOption, match=f"written {name.upper()}"):
            check_names({name: "3"})


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
