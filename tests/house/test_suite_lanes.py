"""The lanes of the suite: each test is in one at least, and whole groups stay together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from suite_lanes import (  # type: ignore[import-not-found]
    GROUPS,
    ROOT,
    Lane,
    lanes_of_tests,
    order_by_duration,
    read_durations,
    scope_of_test,
)


class Marked:
    """A collected test, as far as lanes look at it."""

    def __init__(self, nodeid: str, **marks: dict[str, Any]) -> None:
        self.nodeid = nodeid
        self._marks = marks

    def get_closest_marker(self, name: str) -> Any:
        """The mark of this name; None if there is none."""
        found = self._marks.get(name)
        return None if found is None else SimpleNamespace(kwargs=found)


@pytest.mark.parametrize(
    ("marks", "lanes"),
    [
        ({}, (Lane.DEFAULT,)),
        ({"second": {}}, (Lane.SECOND,)),
        ({"long": {}, "second": {}, "sampled": {"every": 2}}, (Lane.LONG,)),
        # What draws a share of its examples is run again, with all of them.
        ({"hypothesis": {}}, (Lane.DEFAULT, Lane.SECOND)),
        ({"sampled": {}}, (Lane.DEFAULT, Lane.SECOND)),
        ({"sampled": {"every": 2}}, (Lane.DEFAULT,)),
    ],
)
def test_marks_choose_the_lane(marks: dict[str, Any], lanes: tuple[Lane, ...]) -> None:
    (found,) = lanes_of_tests([Marked("tests/test_x.py::test_y", **marks)]).values()
    assert found == lanes


def test_every_so_many_th_case_is_in_the_default_lane() -> None:
    cases = [
        Marked(f"tests/test_x.py::{name}[{case}]", sampled={"every": 3})
        for case in range(7)
        for name in ("test_y", "test_z")  # each test counts its own cases
    ]
    found = [lane for (lane,) in lanes_of_tests(cases).values()]
    assert found[::2] == found[1::2] == [
        Lane.DEFAULT if case % 3 == 0 else Lane.SECOND for case in range(7)
    ]  # fmt: skip


def test_the_longest_scope_is_first_and_a_group_counts_as_one() -> None:
    first, second, *_ = GROUPS["engine"]
    seconds = {first: 30.0, second: 30.0, "tests/test_a.py": 50.0, "tests/test_b.py": 1.0}
    scopes = ["tests/test_new.py", "tests/test_b.py", "engine", "tests/test_a.py"]
    assert order_by_duration(scopes, seconds) == [
        "engine",
        "tests/test_a.py",
        "tests/test_b.py",
        "tests/test_new.py",
    ]
    assert scope_of_test(f"{first}::test_x[a::b]") == "engine"
    assert scope_of_test("tests/test_a.py::test_x") == "tests/test_a.py"


def test_files_that_are_named_exist() -> None:
    """One that was moved would lose its place without a word."""
    grouped = [path for paths in GROUPS.values() for path in paths]
    assert len(grouped) == len(set(grouped))
    timed = {path for seconds in read_durations().values() for path in seconds}
    named = [*grouped, *sorted(timed)]
    assert [path for path in named if not (ROOT / path).is_file()] == []
