"""Counts how often a test run took each side of each threshold, and writes the page of counts.

`ThresholdCounting` is a pytest plugin, registered by a conftest. It names a folder in the
environment, in which every process of the run keeps its counts (`actors.runtime.threshold_probes`):
the processes of pytest-xdist, services in processes of their own, and engines. At the end it adds
them up. A *full run* (``--whole``; no path, no ``-k``, ``-m`` or ``--lf``; all tests passed)
reports each side that was never taken, and fails if `REQUIRED_VARIABLE` is 1. Its counts are kept
in pytest's cache. ``--thresholds`` prints the counts of any run. If the environment variable is set
already, its folder is used and not removed, so that the counts of several runs add up.

    python -m tests.kit.threshold_counts docs/internals/testing.md

writes the counts of the last full run into the page, and ``--from FOLDER`` those in a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from actors.runtime.threshold_probes import (
    COUNT_BYTES,
    COUNTS_SUFFIX,
    COUNTS_VARIABLE,
    THRESHOLDS,
    SettingThreshold,
    ThresholdProbe,
    count_into,
)

if TYPE_CHECKING:
    import pytest

Counts: TypeAlias = Mapping[str, Sequence[int]]
"""Name of a threshold → number of times that the side within and the side beyond were taken."""

CACHE_KEY: Final = "penstock/thresholds"
CACHE_FILE: Final = Path(".pytest_cache", "v", *CACHE_KEY.split("/"))
BEGIN: Final = "<!-- thresholds: written by tests.kit.threshold_counts -->"
END: Final = "<!-- end of thresholds -->"


def read_counts(folder: Path) -> dict[str, list[int]]:
    """Return the sums over the processes that have counted into `folder`."""
    size = 2 * len(THRESHOLDS)
    sums = [0] * size
    for path in folder.glob(f"*{COUNTS_SUFFIX}"):
        data = path.read_bytes()
        if (
            len(data) == size * COUNT_BYTES
        ):  # otherwise its process has just started and counted nothing
            for place, count in enumerate(memoryview(data).cast("Q")):
                sums[place] += count
    return {each.name: sums[each.place : each.place + 2] for each in THRESHOLDS}


def sides_never_taken(counts: Counts) -> list[str]:
    """Return a line for each side of a threshold that was never taken."""
    missing = []
    for each in THRESHOLDS:
        within, beyond = counts.get(each.name, (0, 0))
        if not within:
            missing.append(f"{each.name}: never within: {each.within}")
        if not beyond:
            missing.append(f"{each.name}: never beyond: {each.beyond}")
    return missing


def kind_of(threshold: ThresholdProbe) -> str:
    """Return the kind of a threshold in Markdown: a setting, or a fixed limit."""
    if isinstance(threshold, SettingThreshold):
        decision = threshold.name.removeprefix(threshold.setting).removeprefix(": ")
        return f"`{threshold.setting}`" + (f" ({decision})" if decision else "")
    return f"{threshold.name} (fixed)"


def table_of(counts: Counts) -> str:
    """Return the Markdown table of all thresholds."""
    lines = ["| threshold | within | times | beyond | times |", "|---|---|--:|---|--:|"]
    for each in THRESHOLDS:
        within, beyond = counts.get(each.name, (0, 0))
        lines.append(
            f"| {kind_of(each)} | {each.within} | {within:,} | {each.beyond} | {beyond:,} |"
        )
    return "\n".join(lines)


def with_table(page: str, counts: Counts) -> str:
    """Return a page with the table between its two marks. Raises `ValueError` if they are
    missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN if not begin else END}")
    return f"{before}{BEGIN}\n\n{table_of(counts)}\n\n{END}{after}"


REQUIRED_VARIABLE: Final = "THRESHOLDS_REQUIRED"
"""Environment variable. If it is "1", a full run fails if a side was never taken. On a machine
without PostgreSQL or Azurite some sides are never taken, because their tests are skipped."""


class ThresholdCounting:
    """The plugin of one pytest process; see the module docstring."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._missing: list[str] = []
        self._counts: dict[str, list[int]] = {}
        self._own: str | None = None
        """The folder, if it was created for this run; removed at its end."""
        folder = os.environ.get(COUNTS_VARIABLE)
        if folder is None:
            folder = self._own = tempfile.mkdtemp(prefix="penstock-thresholds-")
            os.environ[COUNTS_VARIABLE] = folder
            count_into(folder)
        self._folder = Path(folder)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Add up the counts. A full run that passed fails for a side never taken if
        `REQUIRED_VARIABLE` is 1."""
        self._counts = read_counts(self._folder)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            del os.environ[COUNTS_VARIABLE]
        if session.exitstatus != 0 or not is_full(self._config):
            return
        assert self._config.cache is not None
        self._config.cache.set(CACHE_KEY, self._counts)
        self._missing = sides_never_taken(self._counts)
        if self._missing and os.environ.get(REQUIRED_VARIABLE) == "1":
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the sides never taken, and with the option all counts."""
        if self._missing:
            terminalreporter.section("thresholds of which a side was never taken", red=True)
            terminalreporter.write_line("\n".join(self._missing))
        if self._config.getoption("thresholds"):
            terminalreporter.section("thresholds")
            terminalreporter.write_line(
                "\n".join(
                    f"{name}: {within:,} within, {beyond:,} beyond"
                    for name, (within, beyond) in self._counts.items()
                )
            )


def is_full(config: pytest.Config) -> bool:
    """Return whether a run is one of the whole suite."""
    option = config.option
    chosen = (
        option.keyword,
        option.markexpr,
        option.deselect,
        option.collectonly,
        getattr(option, "lf", False),  # pytest's cache may be switched off
        getattr(option, "stepwise", False),
        option.ignore,
        option.ignore_glob,
    )
    # Only long tests take some of the sides; a project without the option has none.
    whole = getattr(option, "whole", True)
    return config.args_source is config.ArgsSource.TESTPATHS and whole and not any(chosen)


def main(arguments: Sequence[str]) -> int:
    """Write the table into a page; see the module docstring. Return the exit status."""
    parser = argparse.ArgumentParser(description="Writes counts of thresholds into a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--from", dest="folder", type=Path, help="a folder of counts")
    given = parser.parse_args(arguments)
    if given.folder is not None:
        counts: Counts = read_counts(given.folder)
    elif CACHE_FILE.is_file():
        counts = json.loads(CACHE_FILE.read_text())
    else:
        print(f"{CACHE_FILE} is not there: run the suite with --whole first", file=sys.stderr)
        return 2
    given.page.write_text(with_table(given.page.read_text(), counts))
    missing = sides_never_taken(counts)
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
