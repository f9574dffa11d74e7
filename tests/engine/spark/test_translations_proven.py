"""A wrong translation is refused, whatever is wrong in it: the view is opaque, not wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import translation_lab  # type: ignore[import-not-found]

import actors
from actors.engine.spark.class_archive import find_archive
from actors.engine.spark.java import JavaHome
from actors.testing.patience import PROGRAM_S

pytestmark = [pytest.mark.spark, pytest.mark.long]

EXPECTED = {
    "AggregationNode: one key less",
    "AggregationNode: other aggregate",
    "DistinctNode: left out",
    "ExpandNode: one set less",
    "ExpandNode: one set twice",
    "FilterNode: left out",
    "GenerateNode: other padding",
    "GenerateNode: other rows",
    "JoinNode: an equality less",
    "JoinNode: no residual",
    "JoinNode: other NULLs",
    "LimitNode: one row further",
    "LimitNode: one row more",
    "LimitNode: other order",
    "OuterJoin: an equality less",
    "OuterJoin: no residual",
    "OuterJoin: other NULLs",
    "OuterJoin: other kind",
    "ProjectNode: an argument less",
    "SemiJoin: an equality less",
    "SemiJoin: negated",
    "SemiJoin: no residual",
    "SemiJoin: other NULLs",
    "TemporalFilter: left out",
    "TemporalFilter: other >",
    "TemporalFilter: other HOUR",
    "TemporalFilter: other now()",
    "UnionAll: one input less",
    "UnionAll: one input twice",
    "WindowFunctions: no partitions",
    "WindowFunctions: other frame",
    "WindowFunctions: other order",
}
"""Every change that the laboratory knows has a query that has it."""


@pytest.fixture(scope="module")
def told(java: JavaHome, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.home),
        "PYTHONPATH": str(Path(actors.__file__).parent.parent),
    }
    done = subprocess.run(
        [
            sys.executable,
            translation_lab.__file__,
            str(tmp_path_factory.mktemp("lab")),
            str(find_archive(java) or ""),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_the_builder_says_is_accepted(told: dict[str, Any]) -> None:
    assert told["right"] == dict.fromkeys(translation_lab.QUERIES, "")


def test_a_plan_with_one_fault_is_not_the_texts(told: dict[str, Any]) -> None:
    said = {
        (query, what): reason
        for query, changes in told["wrong"].items()
        for what, reason in changes.items()
    }
    accepted = {
        change: reason
        for change, reason in said.items()
        if not reason.startswith("its translation does not match the query: ")
    }
    assert accepted == {}
    assert {what.split(" ", 1)[1] for _, what in said} == EXPECTED
