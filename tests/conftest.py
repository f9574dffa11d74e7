"""Shared by all tests. Nothing heavy: a test makes what it needs."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from actors.testing.drawn_settings import restore_constants
from server_skips import (  # type: ignore[import-not-found]  # noqa: F401
    pytest_runtest_call,
    pytest_runtest_setup,
)
from suite_lanes import SuiteLanes, draw_all_examples, examples  # type: ignore[import-not-found]

if TYPE_CHECKING:
    import psycopg

    from actors.testing.postgres_server import PostgresServer
    from spark_house import SparkHouse  # type: ignore[import-not-found]

# How long an example takes says more of the machine than of the code. The suite draws the same
# examples each time, so that what passes once passes again; `make proof` searches for new ones.
lenient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("penstock", derandomize=True, **lenient)
settings.register_profile(
    "share", settings.get_profile("penstock"), max_examples=examples(settings().max_examples)
)
settings.register_profile("search", max_examples=1000, **lenient)
settings.load_profile("share")

pytest_plugins = ["actors.testing.fixtures"]

ROOT = Path(__file__).resolve().parent.parent
JAVA_VARIABLE = "JDK_JAVA_OPTIONS"
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `tests.kit.threshold_counts` and of `suite_lanes`."""
    parser.addoption(
        "--thresholds",
        action="store_true",
        help="print how often each side of each threshold was taken",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="tests marked `sampled` look at everything and those marked `long` run, as in "
        "`make proof`",
    )
    parser.addoption(
        "--second",
        action="store_true",
        help="run the second lane: what `make test` leaves out, without the tests marked `long`",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write into tests/durations.json how long each file took, by which files are ordered",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose and order the tests, and count thresholds; in processes of pytest-xdist the
    environment says where."""
    profile = config.getoption("hypothesis_profile")
    if config.getoption("whole") or config.getoption("second") or profile:
        draw_all_examples(True)
        settings.load_profile(profile or "penstock")
    config.pluginmanager.register(SuiteLanes(config), "suite-lanes")
    if not hasattr(config, "workerinput"):
        from tests.kit.threshold_counts import ThresholdCounting

        config.pluginmanager.register(ThresholdCounting(config), "threshold-counting")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="module")
def collector_is_off() -> Iterator[None]:
    """Python's collector is off: while hundreds of megabytes of syntax trees grow, half of the time
    would go to looking for garbage among them."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether a test marked `sampled` looks at everything."""
    return bool(pytestconfig.getoption("whole") or pytestconfig.getoption("second"))


@pytest.fixture(scope="session")
def spark_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkHouse]:
    """Yield the one service on real Spark of this process."""
    from spark_house import open_spark_house

    with open_spark_house(tmp_path_factory.mktemp("spark")) as house:
        yield house


@pytest.fixture(scope="module")
def spark_house(spark_service: SparkHouse) -> Iterator[SparkHouse]:
    """Yield the service on real Spark; each file of tests finds it empty."""
    yield spark_service
    spark_service.drop_all()


@pytest.fixture(scope="session")
def postgres(nothing_left_behind: None) -> Iterator[PostgresServer]:
    """Yield a server that keeps nothing safe, for speed: for tests that compare with it. It is in
    the service's zone, whatever the machine's."""
    from actors.testing.postgres_server import postgres_server

    with postgres_server(fsync="off", timezone="UTC") as server:
        yield server


@pytest.fixture(scope="module")
def compared(
    postgres: PostgresServer, spark_house: SparkHouse
) -> Iterator[tuple[psycopg.Connection, psycopg.Connection]]:
    """Yield a session of PostgreSQL, and one of the service on real Spark."""
    import psycopg

    with (
        psycopg.connect(postgres.conninfo(), autocommit=True) as theirs,
        psycopg.connect(spark_house.dsn, autocommit=True) as ours,
    ):
        yield theirs, ours


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this process, and those that it starts, a directory of its own for temporary files, and
    fail its last test when something is left there. Each worker of xdist has its own."""
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are looked for
    patch = pytest.MonkeyPatch()
    folder = tempfile.mkdtemp(prefix="penstock-tests-")
    os.chmod(folder, 0o1777)  # as the machine's own: a PostgreSQL of root's runs as another user
    patch.setenv("TMPDIR", folder)
    patch.setattr(tempfile, "tempdir", folder)
    try:
        yield
        left = sorted(os.listdir(folder))
    finally:
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)
    if left:
        pytest.fail(f"tests left in the directory for temporary files: {left}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> Iterator[None]:
    """A JVM of a test lives for seconds: its second compiler takes more of the processor than it
    gives back, two fifths of all that an engine takes. Without it the JVM keeps too little room for
    the first one's code. An option that a test, or the service, names itself goes before these."""
    given = os.environ.get(JAVA_VARIABLE, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JAVA_VARIABLE, f"{QUICK_JAVA} {given}".strip())
        yield


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PENSTOCK_ variable of whoever runs the tests must not change what they see."""
    for name in list(os.environ):
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def constants_as_they_are() -> Iterator[None]:
    """A test that draws its settings draws constants of this process, too, which end with it."""
    yield
    restore_constants()


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """A command that a test runs sets what is logged: the next test's lines must not be lost."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
