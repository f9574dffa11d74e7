from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.errors import BadSettings
from actors.settings import BUCKET_SETTINGS, Settings, load


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
        with pytest.raises(BadSettings, match=r"variable\.substitute = .* always false"):
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
    """docs/operations.md names each one, so that a new limit cannot be forgotten there."""
    text = (root / "docs" / "operations.md").read_text()
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
