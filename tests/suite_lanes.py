"""Which tests a run takes, in what order, and what it says of those that it did not take.

Three kinds of runs, each by an option of pytest:

- the *default lane* (no option, `make test`): everything that decides whether a change is right;
- the *second lane* (``--second``, `make test-second`): the tests marked `second`, the cases that
  `sampled` leaves out of the default lane, and all examples of what that draws a share of;
- the *whole* (``--whole``, `make proof`): all tests, those marked `long` too.

`SuiteLanes` is the plugin. Files run longest first, by `DURATIONS`, and the files of one group of
`GROUPS` run in one process of pytest-xdist, so that they share an engine.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).resolve().parent.parent
DURATIONS: Final = ROOT / "tests" / "durations.json"
"""Seconds of each file in each lane, as ``--record-durations`` last saw them."""
DURATION_S_MIN: Final = 0.5
"""Shorter files are not recorded."""
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    # They share the fixture `child` of tests/engine/spark.
    "engine": (
        "tests/engine/spark/test_bad_operands.py",
        "tests/engine/spark/test_child.py",
        "tests/engine/spark/test_delta_nodes.py",
        "tests/engine/spark/test_plain_query.py",
        "tests/engine/spark/test_plan_inspector.py",
        "tests/engine/spark/test_prepared_steps.py",
        "tests/engine/spark/test_row_arithmetic_on_spark.py",
        "tests/engine/spark/test_statement_check.py",
        "tests/engine/spark/test_summed_contents.py",
        "tests/engine/spark/test_taking.py",
    ),
    # They share the fixture `spark_house`.
    "service": (
        "tests/doors/clients/test_adbc.py",
        "tests/doors/clients/test_asyncpg_client.py",
        "tests/doors/clients/test_connect_jdbc.py",
        "tests/doors/clients/test_dbt_spark.py",
        "tests/doors/clients/test_pandas.py",
        "tests/doors/clients/test_pgjdbc.py",
        "tests/doors/clients/test_psql.py",
        "tests/doors/clients/test_psqlodbc.py",
        "tests/doors/clients/test_psycopg_client.py",
        "tests/doors/clients/test_pyspark_remote.py",
        "tests/doors/clients/test_sql_differences.py",
        "tests/doors/clients/test_sqlalchemy.py",
        "tests/doors/connect_gateway/test_code_on_spark.py",
        "tests/doors/connect_gateway/test_gateway_on_spark.py",
        "tests/doors/postgres/pg_server/test_returning.py",
        "tests/doors/postgres/pg_server/test_session_zones.py",
        "tests/doors/postgres/pg_server/test_types_beside_postgres.py",
        "tests/doors/postgres/pg_server/test_unbounded_numerics.py",
        "tests/engine/spark/test_filling_views.py",
        "tests/engine/spark/test_limits_on_spark.py",
        "tests/engine/spark/test_sql_door_on_spark.py",
    ),
}
"""Files that share what takes long to start."""
_GROUP_OF: Final = {path: name for name, paths in GROUPS.items() for path in paths}


EXAMPLES_SHARE: Final = 4
"""The default lane draws one in so many examples of a property."""
EXAMPLES_MIN: Final = 3
_draws_all = False


def draw_all_examples(wanted: bool) -> None:
    """Choose between all examples and the default lane's share, before tests are imported."""
    global _draws_all
    _draws_all = wanted


def examples(count: int) -> int:
    """Return how many of `count` drawn examples this run looks at: all, or a share of them.

    For tests of hypothesis, and for those marked `sampled`: the second lane runs both again.

    >>> examples(300)
    75
    """
    return count if _draws_all else max(EXAMPLES_MIN, count // EXAMPLES_SHARE)


class Lane(StrEnum):
    """The run that takes a test first, in the words of the report."""

    DEFAULT = "in the default lane (make test)"
    SECOND = "in the second lane (make test-second)"
    LONG = "long (make proof)"


def lanes_of_test(item: pytest.Item, earlier_cases: int) -> tuple[Lane, ...]:
    """Return the lanes of a test. `earlier_cases`: cases of the same test that come before it, of
    which `sampled` leaves all but every so many-th to the second lane."""
    if item.get_closest_marker("long"):
        return (Lane.LONG,)
    sampled = item.get_closest_marker("sampled")
    every = sampled.kwargs.get("every", 1) if sampled else 1
    if item.get_closest_marker("second") or earlier_cases % every:
        return (Lane.SECOND,)
    if item.get_closest_marker("hypothesis") or (sampled and "every" not in sampled.kwargs):
        return (Lane.DEFAULT, Lane.SECOND)
    return (Lane.DEFAULT,)


def lanes_of_tests(items: Iterable[pytest.Item]) -> dict[pytest.Item, tuple[Lane, ...]]:
    """Return the lanes of each of all collected tests."""
    found: dict[pytest.Item, tuple[Lane, ...]] = {}
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        found[item] = lanes_of_test(item, seen[name])
        seen[name] += 1
    return found


def scope_of_test(nodeid: str) -> str:
    """Return the name of the tests that stay together in one process: a group or a file."""
    path = nodeid.partition("::")[0]
    return _GROUP_OF.get(path, path)


def order_by_duration(scopes: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Return scopes, the longest first: processes that share them then end at about the same time.

    `seconds`: of each file; a group takes the sum of its files. Files of one length stay in order.
    """
    sums: Counter[str] = Counter()
    for path, taken in seconds.items():
        sums[scope_of_test(path)] += taken  # type: ignore[assignment]
    return sorted(scopes, key=lambda scope: -sums[scope])


def count_reasons(reasons: Iterable[str]) -> str:
    """Return the reasons, the most frequent first, each with how often it was given.

    >>> count_reasons(["no Azurite", "no Java", "no Azurite"])
    '2 no Azurite; 1 no Java'
    """
    counts = Counter(reasons)
    return "; ".join(f"{count:,} {reason}" for reason, count in counts.most_common())


class ScopeScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands whole scopes to the processes of pytest-xdist, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of_test(nodeid)


class SuiteLanes:
    """The plugin of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lane = Lane.SECOND.name if config.getoption("second") else Lane.DEFAULT.name
        self._left_out: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._skipped: list[str] = []

    @pytest.hookimpl(trylast=True)  # after hypothesis has marked its own
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests of other lanes, and put the others in the order of the run."""
        if not self._config.getoption("whole"):
            wanted = Lane.SECOND if self._config.getoption("second") else Lane.DEFAULT
            lanes = lanes_of_tests(items)
            left_out = [item for item in items if wanted not in lanes[item]]
            self._left_out.update(lanes[item][0].value for item in left_out)
            self._config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if wanted in lanes[item]]
        scopes = dict.fromkeys(scope_of_test(item.nodeid) for item in items)
        seconds = read_durations().get(self._lane, {})
        places = {name: at for at, name in enumerate(order_by_duration(scopes, seconds))}
        items.sort(key=lambda item: places[scope_of_test(item.nodeid)])

    def pytest_collection_finish(self) -> None:
        """Put what the collection has made out of the sight of Python's collector: it stays, and
        each look at half a million objects costs more than a small test."""
        gc.collect()
        gc.freeze()

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ScopeScheduling:
        """Return the scheduler of this run."""
        return ScopeScheduling(config, log)

    def pytest_sessionfinish(self) -> None:
        """Tell the process that reports what this one has left out; write the durations."""
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["left_out"] = dict(self._left_out)
        elif self._config.getoption("record_durations"):
            _write_durations(self._lane, self._seconds)

    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process has left out: each collects all tests, so one tells for all."""
        told = getattr(node, "workeroutput", {}).get("left_out")
        if told is not None:
            self._left_out = Counter(told)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what a file takes, and note why a test was skipped."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped.append(report.longrepr[2].removeprefix("Skipped: "))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many tests did not run, and why."""
        if self._config.args_source is pytest.Config.ArgsSource.ARGS:
            terminalreporter.write_line(f"left out: all but {' '.join(self._config.args)}")
        if self._left_out:
            told = "; ".join(f"{count:,} {lane}" for lane, count in self._left_out.most_common())
            terminalreporter.write_line(f"left out: {told}")
        if self._skipped:
            reasons = count_reasons(self._skipped)
            terminalreporter.write_line(f"skipped {len(self._skipped):,}: {reasons}")


def read_durations() -> dict[str, dict[str, float]]:
    """Return the recorded seconds of each file, by the name of the lane."""
    recorded: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text())
    return recorded


def _write_durations(lane: str, seconds: Mapping[str, float]) -> None:
    """Replace what is recorded of a lane."""
    recorded = read_durations()
    recorded[lane] = {
        path: round(taken, 1) for path, taken in seconds.items() if taken >= DURATION_S_MIN
    }
    DURATIONS.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
