"""Settings of Spark on a cluster: the user's file of defaults, and what is ours all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.engine.spark.session import (
    ADAPTIVE,
    CONNECT_PLUGIN,
    JAVA_OPTIONS,
    NEEDED,
    PARTITIONS,
    PLAIN_TEXTS,
    SlotRows,
    ThreadSessions,
    cluster_partitions_max,
    spark_conf,
)
from actors.engine.spark.spark_defaults import FILE, parse_defaults, read_defaults
from actors.runtime.errors import EngineUnavailable
from actors.runtime.settings import Settings


def test_defaults_are_found_as_spark_finds_them(tmp_path: Path) -> None:
    for name in ("conf", "home/conf"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / FILE).write_text(f"spark.from {name}\n")
    own, home = str(tmp_path / "conf"), str(tmp_path / "home")
    assert read_defaults({"SPARK_CONF_DIR": own, "SPARK_HOME": home}) == {"spark.from": "conf"}
    assert read_defaults({"SPARK_HOME": home}) == {"spark.from": "home/conf"}
    assert read_defaults({"SPARK_CONF_DIR": str(tmp_path)}) == {}
    assert read_defaults({}) == {}
    (tmp_path / FILE).mkdir()
    with pytest.raises(EngineUnavailable, match=FILE):
        read_defaults({"SPARK_CONF_DIR": str(tmp_path)})


def test_a_file_of_defaults_is_read_as_javas_properties() -> None:
    text = (
        "# comment\n! too\n\n  spark.a\t1  \nspark.b=x=y\nspark.c : z\nspark.d on \\\n   two\n"
        "spark.e\nother 1\nspark.f C\\:\\\\x\n"
    )
    assert parse_defaults(text) == {
        "spark.a": "1", "spark.b": "x=y", "spark.c": "z", "spark.d": "on two", "spark.e": "",
        "spark.f": "C:\\x",
    }  # fmt: skip


def test_defaults_are_above_ours_and_below_what_is_needed(tmp_path: Path) -> None:
    given = dict.fromkeys(NEEDED, "theirs") | {
        "spark.executor.memory": "3g",
        "spark.buffer.pageSize": "1m",
        "spark.ui.enabled": "true",
        JAVA_OPTIONS: "-Dtheirs=1",
        "spark.plugins": "their.Plugin",
    }
    settings = Settings(spark_conf={"spark.ui.enabled": "false", "spark.executor.memory": "5g"})
    conf = spark_conf(settings, tmp_path, "", given)
    assert conf["spark.buffer.pageSize"] == "1m"
    assert (conf["spark.ui.enabled"], conf["spark.executor.memory"]) == ("false", "5g")
    assert "-Dtheirs=1" in conf[JAVA_OPTIONS]
    assert "ParallelGC" in conf[JAVA_OPTIONS]
    assert "theirs" not in [conf.get(name) for name in NEEDED]
    assert conf["spark.plugins"] == "their.Plugin"
    listening = Settings(connect_listen="127.0.0.1:0")
    conf = spark_conf(listening, tmp_path, "", {**given, "spark.connect.grpc.binding.port": "1"})
    assert conf["spark.plugins"] == f"{CONNECT_PLUGIN},their.Plugin"
    assert conf["spark.connect.grpc.binding.port"] == "0"
    assert spark_conf(Settings(), tmp_path).get("spark.plugins") is None


def test_no_xml_opens_an_address_on_executors_either(tmp_path: Path) -> None:
    name = "spark.executor.extraJavaOptions"
    assert name not in spark_conf(Settings(), tmp_path)
    far = Settings(spark_master="spark://10.0.0.1:7077", spark_conf={name: "-Dtheirs=1"})
    options = spark_conf(far, tmp_path)[name].split()
    assert options[-1] == "-Dtheirs=1"
    assert "-Djavax.xml.accessExternalDTD=" in options


def test_spark_replaces_nothing_in_texts_whoever_asks_for_it(tmp_path: Path) -> None:
    name, value = PLAIN_TEXTS
    for given in ({}, {name: "true"}):
        for settings in (Settings(), Settings(spark_conf={name: "true"})):
            assert spark_conf(settings, tmp_path, "", given)[name] == value == "false"


class FakeSession:
    """A session that keeps its settings; `cores` may change."""

    def __init__(self, cores: list[int]) -> None:
        self.values: dict[str, str] = {}
        self.cores_now = cores
        self.conf = self

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def newSession(self) -> FakeSession:  # noqa: N802 - Spark's name
        return FakeSession(self.cores_now)


class FakeBridge:
    """What `ThreadSessions` calls."""

    needs_replacement = False
    partitions = ""

    def __init__(self, session: FakeSession) -> None:
        self.session = session

    def activate(self) -> None: ...

    def close(self) -> None: ...

    def cores(self) -> int:
        return self.session.cores_now[0]


COMPILES = "spark.sql.codegen.factoryMode"


class FakeSessions(ThreadSessions):
    """Sessions of no Spark."""

    def _bridge(self, session: Any) -> Any:
        return FakeBridge(session)


def test_large_jobs_on_a_cluster_adapt_and_follow_its_cores(tmp_path: Path) -> None:
    cores = [2]
    root: Any = FakeSession(cores)
    sessions = FakeSessions(root, frozenset(), tmp_path, 10)

    def values(slots: SlotRows | None = None) -> dict[str, str]:
        made: Any = sessions.get((), small=False, slots=slots)
        return dict(made.session.values)

    assert (values()[ADAPTIVE], values()[PARTITIONS]) == ("true", "2")
    cores[0] = 8
    assert values()[PARTITIONS] == "8"
    cores[0] = 80
    assert values()[PARTITIONS] == "10"
    for rows in SlotRows:
        assert values(rows)[ADAPTIVE] == "false"
    assert values(SlotRows.FEW)[COMPILES] == "NO_CODEGEN"
    assert COMPILES not in values(SlotRows.MANY)
    small: Any = sessions.get((), small=True)
    assert (small.session.values.get(ADAPTIVE), small.session.values[PARTITIONS]) == (None, "1")
    view: Any = sessions.get(((PARTITIONS, "7"), (ADAPTIVE, "false")), small=False)
    assert (view.session.values[PARTITIONS], view.session.values[ADAPTIVE]) == ("7", "false")
    chosen = FakeSessions(root, frozenset({PARTITIONS, ADAPTIVE}), tmp_path, 10)
    mine: Any = chosen.get((), small=False)
    assert PARTITIONS not in mine.session.values
    assert ADAPTIVE not in mine.session.values


def test_one_machine_keeps_its_partitions(tmp_path: Path) -> None:
    assert cluster_partitions_max(Settings()) == 0
    assert cluster_partitions_max(Settings(spark_master="spark://h:1")) == 1_000
    root: Any = FakeSession([4])
    made: Any = FakeSessions(root, frozenset(), tmp_path, 0).get((), small=False)
    assert PARTITIONS not in made.session.values
