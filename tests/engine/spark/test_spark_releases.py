"""What differs between releases of Spark is in one file, and that file is not out of date."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.catalyst.optimizer_rules import ONCE, REPEATED, rule_names
from actors.engine.spark import launch as launching
from actors.engine.spark import spark_releases
from actors.engine.spark.failures import is_gone
from actors.engine.spark.spark_releases import (
    DIFFERENCES,
    NEWEST,
    OLDEST,
    RELEASES,
    adapt_source,
    check_release,
    limit_calls,
    pipeline_messages,
    pushed_filter,
    release_of,
    stream_limits,
)
from actors.runtime.errors import EngineUnavailable
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SOURCES = Path(spark_releases.__file__).parent


def test_every_difference_is_one_of_a_source(root: Path) -> None:
    """A text that is rewritten, and that nothing here rewrites, would fail on an older Spark."""
    texts = [path.read_text() for path in SOURCES.glob("*.java")]
    texts += [rule_names(ONCE), rule_names(REPEATED)]
    for each in DIFFERENCES:
        assert any(each.ours in text for text in texts), each.ours
        assert OLDEST <= each.until < NEWEST, each.ours
        assert each.ours not in adapt_source(each.ours, "{}.{}.0".format(*each.until))
        assert adapt_source(each.ours, "{}.{}.0".format(*NEWEST)) == each.ours


def test_releases_are_those_of_the_makefile_and_of_the_package(root: Path) -> None:
    """A release that the file knows has an environment, and is in the range of dependencies."""
    older = ["{}.{}".format(*each) for each in RELEASES[:-1]]
    found = re.search(r"^RELEASES := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1].split() == older
    for each in older:
        assert f"pyspark=={each}." in (root / "requirements" / f"spark-{each}.txt").read_text()
    newest = "pyspark=={}.{}.".format(*NEWEST)
    assert newest in (root / "requirements" / "base.txt").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    beyond = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    assert f"pyspark>={older[0]},<{beyond}" in project["optional-dependencies"]["server"]


@pytest.mark.parametrize("version", ["3.5.9", "4.4.0", "5.0.0"])
def test_another_release_is_refused(version: str) -> None:
    with pytest.raises(EngineUnavailable, match=rf"{version} is not supported.*pip install"):
        check_release(version)


def refusal(version: str) -> str:
    """The error of a version, or nothing."""
    try:
        check_release(version)
    except EngineUnavailable as error:
        return str(error)
    return ""


@pytest.mark.parametrize("release", RELEASES)
def test_a_known_release_is_taken(release: tuple[int, int]) -> None:
    for version in ("{}.{}.7".format(*release), "{}.{}.0.dev1".format(*release)):
        assert refusal(version) == ""
        assert release_of(version) == release


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="invalid version of Spark 'trunk'"):
        release_of("trunk")


async def test_an_engine_of_another_release_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "installed_version", lambda: "3.5.9")
    with pytest.raises(EngineUnavailable, match=r"the service runs on Spark 4\.0 to 4\.\d+"):
        await launching.launch(Settings(), tmp_path, SystemClock())


def test_calls_of_a_client_without_deadlines_are_given_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 4.3; also for a client that is asked a second time."""
    from pyspark.sql.connect.client import core

    monkeypatch.delattr(core, "RpcDeadlines", raising=False)
    seen: dict[str, Any] = {}
    names = ("Config", "Interrupt", "ReleaseSession", "ExecutePlan")

    def called(name: str) -> Callable[..., None]:
        return lambda _, timeout=None: seen.update({name: timeout})

    stub = SimpleNamespace(**{name: called(name) for name in names})
    client = SimpleNamespace(_stub=stub)
    for seconds in (9.0, 30.0):
        limit_calls(client, seconds, 2.0)
    for name in names:
        getattr(stub, name)("a request")
    # A job has no deadline: it takes as long as it takes.
    assert seen == {"Config": 30.0, "Interrupt": 30.0, "ReleaseSession": 2.0, "ExecutePlan": None}


def test_what_pyspark_has_is_asked_of_it() -> None:
    """So that a release that is newer, or mended, is taken at its word."""
    release = release_of(spark_releases.installed_version())
    assert stream_limits().known == (release >= (4, 2))
    assert (pipeline_messages() is not None) == (release >= (4, 1))
    pushed = pushed_filter("EqualTo").__module__ == "pyspark.sql.datasource"
    assert pushed == (release >= (4, 1))


def test_a_client_that_tried_too_often_is_no_answer() -> None:
    """Its job is run again, as after any silence; before 4.3 the client raises this mark."""
    from pyspark.sql.connect.client.retries import RetryException

    assert is_gone(RetryException())
    assert not is_gone(ValueError())
