"""Shared by all tests. Nothing heavy: a test makes what it needs."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from actors.threshold_probes import use_kernel_limits

# How long an example takes says more of the machine than of the code. The suite draws the same
# examples each time, so that what passes once passes again; `make proof` searches for new ones.
lenient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("penstock", derandomize=True, **lenient)
settings.register_profile("search", max_examples=1000, **lenient)
settings.load_profile("penstock")

pytest_plugins = ["actors.testing.fixtures"]

ROOT = Path(__file__).resolve().parent.parent
JAVA_VARIABLE = "JDK_JAVA_OPTIONS"
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
HEAVY = (
    "testing_kit/test_scripts_on_spark.py",
    "spark/test_prepared.py",
    "docs/test_doc_pages.py",
    "connect_gateway/test_gateway_on_spark.py",
    "testing_kit/test_check_views.py",
    "testing_kit/test_simulated_seeds.py",
    "testing_kit/test_simulation.py",
    "spark/test_spark_executor_on_spark.py",
    "spark/test_delta_nodes.py",
    "spark/test_child.py",
    "spark/test_connect.py",
    "test_copy_to.py",
    "test_memory.py",
    "test_cli.py",
    "demo/test_proof.py",
    "tracing/test_two_processes.py",
    "persist/test_state_directory.py",
    "spark/test_taking.py",
    "sources/test_tpch_source.py",
    "views/test_maintained_views.py",
    "dataflow/test_copying_buckets.py",
    "testing_kit/test_simulated_halves.py",
    "testing_kit/test_simulated_workers.py",
    "testing_kit/test_simulated_wal.py",
    "testing_kit/test_simulated_copies.py",
    "sinks/test_delta_sink.py",
    "clients/test_adbc.py",
    "clients/test_sqlalchemy.py",
)
"""Files of more than ten seconds, and those that need an engine which they started: the longest
first. Processes that share the tests then end at about the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of `actors.testing.threshold_counts`, and that of samples."""
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


def pytest_configure(config: pytest.Config) -> None:
    """Counts thresholds; in processes of pytest-xdist the environment says where."""
    if not hasattr(config, "workerinput"):
        from actors.testing.threshold_counts import ThresholdCounting

        config.pluginmanager.register(ThresholdCounting(config), "threshold-counting")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the heavy files first; `make test` hands out files in this order, without long tests."""
    if not config.getoption("whole"):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    places = {ROOT / "tests" / name: place for place, name in enumerate(HEAVY)}
    absent = [str(path) for path in places if not path.is_file()]
    if absent:
        raise pytest.UsageError(f"no such files, named in tests/conftest.py: {absent}")
    items.sort(key=lambda item: places.get(item.path, len(places)))


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The long tests, and of those of which only every so many-th runs the others."""
    found: set[pytest.Item] = set()
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        every = sampled.kwargs.get("every", 1) if sampled else 1
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("long") or seen[name] % every:
            found.add(item)
        seen[name] += 1
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether a test marked `sampled` looks at everything."""
    return bool(pytestconfig.getoption("whole"))


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
def default_kernel_limits() -> Iterator[None]:
    """A service that a test starts sets the limits of this process: the next test's are its own."""
    yield
    use_kernel_limits({})


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """A command that a test runs sets what is logged: the next test's lines must not be lost."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
