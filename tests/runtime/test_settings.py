from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.doors.commands.console import parse_settings, warn_of_variables
from actors.runtime.errors import BadSettings
from actors.runtime.settings import BUCKET_SETTINGS, Settings, load


def test_defaults_keep_their_own_rules() -> None:
    assert load(environment={}) == Settings()


def test_precedence_is_file_environment_flags(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('workers = 3\nlisten = "0.0.0.0:1"\nstate_dir = "a"\n')
    environment = {"PENSTOCK_LISTEN": "0.0.0.0:2", "PENSTOCK_STATE_DIR": "b", "OTHER": "x"}
    settings = load(file, environment, {"state_dir": "c", "workers": None})
    assert (settings.workers, settings.listen, settings.state_dir) == (3, "0.0.0.0:2", "c")


def test_numbers_in_the_environment(tmp_path: Path) -> None:
    assert load(environment={"PENSTOCK_WORKERS": "5"}).workers == 5


def test_truths_and_things_that_may_be_absent_in_the_environment() -> None:
    given = {
        "PENSTOCK_PIN_CORES": "true",
        "PENSTOCK_EXPIRATION_MS": "5",
        "PENSTOCK_LISTEN": "7",
    }
    settings = load(environment=given)
    assert (settings.pin_cores, settings.expiration_ms, settings.listen) == (True, 5, "7")
    with pytest.raises(BadSettings, match="pin_cores"):
        load(environment={"PENSTOCK_PIN_CORES": "perhaps"})


BOOLEANS = [each.name for each in msgspec.structs.fields(Settings) if each.type is bool]


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("On", True), ("1", True), ("FALSE", False), ("off", False), ("0", False)],
)
def test_what_is_on_or_off_is_taken_from_everywhere(
    name: str, text: str, value: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some need other settings, which is not asked here.
    monkeypatch.setattr(Settings, "check", lambda _: None)
    file = tmp_path / "settings.toml"
    file.write_text(f'{name} = "{text}"\n')
    found = [
        load(environment={}, flags=parse_settings([f"{name}={text}"])),
        load(environment={f"PENSTOCK_{name.upper()}": text}),
        load(file, environment={}),
    ]
    assert [getattr(each, name) for each in found] == [value] * 3


def test_texts_of_flags_become_what_the_setting_is() -> None:
    pairs = ["workers=3", "identity=7", "roles_required=true", "expiration_ms=5"]
    found = load(environment={}, flags=parse_settings(pairs))
    taken = (found.workers, found.identity, found.roles_required, found.expiration_ms)
    assert taken == (3, "7", True, 5)
    for wrong in ("roles_required=yes", "workers=many", "workers=true"):
        with pytest.raises(BadSettings, match=wrong.partition("=")[0]):
            load(environment={}, flags=parse_settings([wrong]))


@pytest.mark.parametrize(
    ("wrong", "right"), [("role_required", "roles_required"), ("pg_listn", "pg_listen")]
)
def test_a_setting_that_is_not_there_is_refused_with_the_nearest(
    wrong: str, right: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"{wrong} = 1\n")
    for given in ({"flags": {wrong: "1"}}, {"file": file}):
        with pytest.raises(BadSettings, match=f"unknown setting '{wrong}'; did you mean '{right}'"):
            load(environment={}, **given)
    with pytest.raises(BadSettings, match=r"unknown setting 'zzz'$"):
        load(environment={}, flags={"zzz": 1})


def test_spark_conf_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('[spark_conf]\n"spark.sql.ansi.enabled" = "false"\n')
    assert load(file, {}).spark_conf == {"spark.sql.ansi.enabled": "false"}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"workers": 0}, "workers = 0: must be greater than zero"),
        ({"workers": "many"}, "workers"),
        ({"wrokers": 1}, "wrokers"),
        ({"inline_part_bytes_max": 1 << 30}, "inline_part_bytes_max must not exceed"),
        ({"result_bytes_max": 1 << 30}, "result_bytes_max must be less than"),
        ({"engine_inline_bytes_max": 1 << 30}, "engine_inline_bytes_max must be less than"),
        ({"tls_certificate": "a.pem"}, "must be given together"),
        ({"tls_key": "a.pem", "tls_authority": "b.pem"}, "must be given together"),
        ({"expiration_ms": 0}, "expiration_ms = 0: must be greater"),
        ({"keepalive_ms": 20_000}, "keepalive_ms must be at most half"),
        ({"retry_delay_ms_min": 20_000}, "retry_delay_ms_min must not exceed"),
    ],
)
def test_what_does_not_fit_is_named(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSettings, match=text):
        load(environment={}, flags=flags)


def test_texts_are_never_changed_by_spark() -> None:
    for value in ("true", " TRUE", "${env:X}"):
        with pytest.raises(BadSettings, match=r"variable\.substitute = .* must be false"):
            load(flags={"spark_conf": {"spark.sql.variable.substitute": value}})
    load(flags={"spark_conf": {"spark.sql.variable.substitute": "false"}})


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    with pytest.raises(BadSettings, match="cannot read settings from"):
        load(file, {})
    file.write_text("workers =")
    with pytest.raises(BadSettings, match=r"penstock\.toml"):
        load(file, {})


def test_every_setting_is_documented(root: Path) -> None:
    """docs/reference/settings.md names each one, so that a new limit cannot be forgotten there."""
    text = (root / "docs" / "reference" / "settings.md").read_text()
    missing = [
        field.name for field in msgspec.structs.fields(Settings) if f"`{field.name}`" not in text
    ]
    assert missing == []


@pytest.mark.parametrize("name", BUCKET_SETTINGS)
def test_buckets_are_urls_and_in_text_separated_by_commas(name: str) -> None:
    for given in ("s3://exports/a,gs://other", ["s3://exports/a", "gs://other"]):
        made = load(environment={}, flags={name: given})
        assert getattr(made, name) == ("s3://exports/a", "gs://other")
    made = load(environment={f"PENSTOCK_{name.upper()}": "az://box/"})
    assert getattr(made, name) == ("az://box/",)
    assert getattr(load(environment={}, flags={name: ""}), name) == ()
    for wrong in (
        "exports",
        "http://host/x",
        "s3://",
        "s3://key:word@exports/x",
        "s3://exports:9000/x",
        "s3://exports/x?versionId=1",
        "s3://exports/../other",
        "s3://exports//x",
        "s3://exports/a b",
        "S3://exports",
    ):
        with pytest.raises(BadSettings, match=name):
            load(environment={}, flags={name: wrong})


@pytest.mark.parametrize("wrong", ["here", "/a:b", '["/a"]'])
def test_folders_of_sources_are_absolute(wrong: str) -> None:
    with pytest.raises(BadSettings, match="source_dirs"):
        load(environment={"PENSTOCK_SOURCE_DIRS": wrong})


def test_variables_that_are_no_settings_are_told(caplog: pytest.LogCaptureFixture) -> None:
    fine = {"PENSTOCK_WORKERS": "2", "PENSTOCK_SECRET_X": "s", "PENSTOCK_SERVICE_HOST": "h"}
    warn_of_variables({**fine, "PENSTOCK_PORT_6874_TCP": "p", "OTHER": "x"})
    assert caplog.messages == []
    warn_of_variables({"PENSTOCK_WORKRES": "2", "PENSTOCK_SPARK_CONF": "x"})
    (first, second) = caplog.messages
    assert "ignoring environment variable PENSTOCK_WORKRES" in first
    assert "did you mean 'PENSTOCK_WORKERS'?" in first
    assert "PENSTOCK_SPARK_CONF" in second
