"""Comparisons with the clock in Catalyst's trees: where they turn, and which are refused."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.catalyst.plan_nodes import NotTranslated
from actors.engine.catalyst.plan_tree import TreeNode
from actors.engine.catalyst.temporal import is_row_safe, reads_clock, time_bound
from actors.model.plan.relational import TimeBound, TimeEdge

HOUR = 3_600_000_000
DAY = 24 * HOUR
EPOCH = datetime.date(1970, 1, 1)


def node(name: str, *children: TreeNode, **fields: Any) -> TreeNode:
    return TreeNode(f"x.{name}", fields, list(children))


def of_type(name: str, kind: str, *children: TreeNode) -> TreeNode:
    return node(name, *children, type=kind)


NOW = of_type("Now", "timestamp")
TODAY = of_type("CurrentDate", "date")
AT = node("AttributeReference", exprId=1, dataType="timestamp", nullable=True)
ON = node("AttributeReference", exprId=2, dataType="date", nullable=True)


def span(micros: int, kind: str = "interval day to second") -> TreeNode:
    return node("Literal", value=str(micros), dataType=kind)


def days(count: int) -> TreeNode:
    return node("Literal", value=str(count), dataType="integer")


def bound_of(part: TreeNode, zone: str = "UTC") -> TimeBound:
    return time_bound(part, "its text", lambda each: f"c{each.fields['exprId']}", zone)


def edges(part: TreeNode, zone: str = "UTC") -> tuple[TimeEdge, ...]:
    return bound_of(part, zone).edges


@pytest.mark.parametrize(
    ("name", "turned", "wanted"),
    [
        ("GreaterThan", "LessThan", [(True, False)]),
        ("GreaterThanOrEqual", "LessThanOrEqual", [(True, True)]),
        ("LessThan", "GreaterThan", [(False, True)]),
        ("LessThanOrEqual", "GreaterThanOrEqual", [(False, False)]),
        ("EqualTo", "EqualTo", [(False, False), (True, True)]),
    ],
)
def test_a_comparison_begins_or_ends(
    name: str, turned: str, wanted: list[tuple[bool, bool]]
) -> None:
    made = [TimeEdge("unix_micros(c1)", ends, strict) for ends, strict in wanted]
    assert edges(node(name, AT, NOW)) == tuple(made)
    assert edges(node(turned, NOW, AT)) == tuple(made)
    assert bound_of(node(name, AT, NOW)).test == "its text"


def test_intervals_move_the_clock() -> None:
    moved = of_type("DatetimeSub", "timestamp", NOW, span(2 * HOUR))
    moved = of_type("Cast", "timestamp", moved)
    moved = of_type("TimestampAddInterval", "timestamp", moved, span(5))
    assert edges(node("GreaterThan", AT, moved))[0].before == 5 - 2 * HOUR
    week = of_type("DatetimeSub", "timestamp", NOW, span(7 * DAY, "interval day"))
    assert edges(node("GreaterThan", AT, week))[0].before == -7 * DAY


def test_units_are_added() -> None:
    for unit, count, wanted in (
        ("HOUR", -2, -2 * HOUR),
        ("week", 1, 7 * DAY),
        ("Second", 3, 3 * 10**6),
    ):
        moved = node("TimestampAdd", days(count), NOW, unit=unit, type="timestamp")
        assert edges(node("GreaterThan", AT, moved))[0].before == wanted
    month = node("TimestampAdd", days(1), NOW, unit="MONTH", type="timestamp")
    with pytest.raises(NotTranslated, match="TIMESTAMPADD of MONTH"):
        bound_of(node("GreaterThan", AT, month))


def test_days_cut_the_clock() -> None:
    minus = of_type("UnaryMinus", "int", of_type("ExtractANSIIntervalDays", "int", span(3 * DAY)))
    for moved, shift in (
        (TODAY, 0),
        (of_type("DateSub", "date", TODAY, days(2)), -2),
        (of_type("DateAdd", "date", TODAY, days(2)), 2),
        (of_type("DateAdd", "date", TODAY, minus), -3),
        (of_type("Cast", "date", NOW), 0),
    ):
        (edge,) = edges(node("GreaterThanOrEqual", ON, moved))
        assert edge.micros == "unix_micros(CAST(c2 AS timestamp))"
        assert (edge.before, edge.unit, edge.after) == (0, DAY, shift * DAY)
    # An hour behind midnight of the day that it was an hour ago.
    earlier = of_type("DatetimeSub", "timestamp", NOW, span(HOUR))
    midnight = of_type("Cast", "timestamp", of_type("Cast", "date", earlier))
    late = of_type("TimestampAddInterval", "timestamp", midnight, span(HOUR))
    (edge,) = edges(node("LessThan", AT, late))
    assert (edge.before, edge.unit, edge.after) == (-HOUR, DAY, HOUR)


def test_between_is_two_comparisons() -> None:
    low = of_type("DatetimeSub", "timestamp", NOW, span(HOUR))
    found = edges(node("Between", AT, low, NOW, stale=False))
    assert [(edge.ends, edge.strict, edge.before) for edge in found] == [
        (True, True, -HOUR),
        (False, False, 0),
    ]
    until = node("AttributeReference", exprId=3, dataType="timestamp")
    found = edges(node("Between", NOW, AT, until, stale=False))
    assert [(edge.micros, edge.ends) for edge in found] == [
        ("unix_micros(c1)", False),
        ("unix_micros(c3)", True),
    ]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (node("GreaterThan", AT, AT), "outside a comparison"),
        (node("GreaterThan", NOW, NOW), "outside a comparison"),
        (node("Or", node("GreaterThan", AT, NOW), AT), "outside a comparison"),
        (node("GreaterThan", AT, of_type("Year", "int", NOW)), "inside Year"),
        (
            node("GreaterThan", AT, of_type("DatetimeSub", "x", NOW, span(1, "interval month"))),
            "not a constant of days or smaller units",
        ),
        (
            node("GreaterThan", AT, of_type("DatetimeSub", "x", NOW, AT)),
            "not a constant of days or smaller units",
        ),
        (node("GreaterThan", ON, of_type("DateAdd", "date", TODAY, AT)), "not a constant"),
        (
            node("GreaterThan", AT, of_type("DatetimeSub", "x", NOW, span(5 * 10**17))),
            "12,000 years",
        ),
        (
            node("GreaterThan", node("AttributeReference", exprId=4, dataType="long"), NOW),
            "of type bigint",
        ),
    ],
)
def test_what_is_no_such_comparison_is_refused(part: TreeNode, text: str) -> None:
    with pytest.raises(NotTranslated, match=text):
        bound_of(part)


def test_where_days_differ_only_hours_are_known() -> None:
    hours = of_type("DatetimeSub", "timestamp", NOW, span(23 * HOUR))
    assert edges(node("GreaterThan", AT, hours), "Europe/Berlin")[0].before == -23 * HOUR
    for moved in (
        of_type("DatetimeSub", "timestamp", NOW, span(24 * HOUR)),
        of_type("Cast", "timestamp", TODAY),
        of_type("LocalTimestamp", "timestamp_ntz"),
    ):
        with pytest.raises(NotTranslated, match="where days differ in length"):
            bound_of(node("GreaterThan", AT, moved), "Europe/Berlin")
    with pytest.raises(NotTranslated, match="where days differ in length"):
        bound_of(node("GreaterThan", ON, NOW), "Europe/Berlin")


def test_who_reads_the_clock_and_who_raises() -> None:
    assert reads_clock(node("Not", node("GreaterThan", AT, NOW)))
    assert not reads_clock(node("GreaterThan", AT, AT))
    assert is_row_safe(node("GreaterThan", AT, NOW))
    assert not is_row_safe(node("GreaterThan", of_type("Divide", "timestamp", AT, AT), NOW))


@given(
    clock=st.integers(-400 * DAY, 800 * DAY),
    on=st.dates(datetime.date(1969, 1, 1), datetime.date(1972, 1, 1)),
    shift=st.integers(-400, 400),
)
def test_a_day_is_compared_as_python_does(clock: int, on: datetime.date, shift: int) -> None:
    """An edge's own formula, over days."""
    moved = of_type("DateAdd", "date", TODAY, days(shift))
    (edge,) = edges(node("LessThan", ON, moved))
    value = (clock + edge.before) // edge.unit * edge.unit + edge.after
    today = EPOCH + datetime.timedelta(days=clock // DAY)
    assert (value > (on - EPOCH).days * DAY) == (on < today + datetime.timedelta(days=shift))
