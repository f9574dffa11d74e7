"""The engine's process has named variables of the environment, and no secret of the service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.engine.spark.environment import (
    DROPPED_VARIABLES,
    PASSED,
    PROXY_VARIABLES,
    REMOTE_TOKEN,
    engine_environment,
)
from actors.engine.spark.java import JavaHome
from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings, load

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canary",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "canary",
    "AZURE_STORAGE_ACCOUNT_KEY": "canary",
    "PGPASSWORD": "canary",
    "PENSTOCK_SECRET_SHOP": "canary",
    "PENSTOCK_CONSENSUS_URL": "canary",
    "MY_OWN": "canary",
    "HTTPS_PROXY": "canary",
    REMOTE_TOKEN: "canary",
}
PLAIN = {"PATH": "/bin", "LC_ALL": "C", "HOME": "/of/it", "PYTHONHASHSEED": "7", "TZ": "UTC"}


def secrets_in(settings: Settings) -> set[str]:
    found = engine_environment(SECRETS | PLAIN, settings, None)
    assert found.items() >= PLAIN.items()
    return {name for name, value in found.items() if value == "canary"}


def test_no_secret_of_the_service_is_in_the_engine() -> None:
    assert secrets_in(Settings()) == set()
    assert secrets_in(Settings(blob_url="file:/shared")) == set()
    # Spark does not reach for the bucket then.
    assert secrets_in(Settings(blob_url="s3://b/p", engine_part_copies=True)) == set()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/path", "AWS_SECRET_ACCESS_KEY"),
        ("gs://bucket", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        ("az://container", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_spark_reads_parts_of_a_bucket_with_credentials_of_that_store_alone(
    url: str, name: str
) -> None:
    assert secrets_in(Settings(blob_url=url)) == {name, *SECRETS.keys() & set(PROXY_VARIABLES)}


def test_the_operator_adds_variables() -> None:
    settings = load(environment={"PENSTOCK_ENGINE_ENVIRONMENT": "MY_*,PGPASSWORD"})
    assert secrets_in(settings) == {"MY_OWN", "PGPASSWORD"}
    for wrong in ("A=B", "A B", "*", ""):
        with pytest.raises(BadSettings, match="engine_environment"):
            Settings(engine_environment=(wrong,)).check()


def test_only_a_client_of_spark_connect_has_its_token() -> None:
    assert secrets_in(Settings(spark_master="sc://host:15002")) == {REMOTE_TOKEN}


def test_other_installations_are_left_out_and_our_java_and_packages_are_there() -> None:
    given = dict.fromkeys(DROPPED_VARIABLES, "x") | {"PYTHONPATH": "/own", "JAVA_HOME": "/old"}
    java = JavaHome(Path("/java"), 17, "PATH", build="17.0.1")
    found = engine_environment(given, Settings(engine_environment=("SPARK_*",)), java, here=True)
    assert not found.keys() & set(DROPPED_VARIABLES)
    assert found["JAVA_HOME"] == "/java"
    assert found["PYSPARK_PYTHON"]
    assert found["PYTHONPATH"].split(os.pathsep)[-1] == "/own"
    assert (Path(found["PYTHONPATH"].split(os.pathsep)[0]) / "actors").is_dir()


def test_no_pattern_of_ours_is_one_of_secrets() -> None:
    # A pattern that ends in a star must not grow to take what belongs to stores or to sources.
    wide = [pattern[:-1] for pattern in PASSED if pattern.endswith("*")]
    assert wide
    assert not [name for name in SECRETS for begin in wide if name.startswith(begin)]
