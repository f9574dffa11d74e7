"""Comparisons of a row with the clock, inverted to the times at which they are true.

A temporal filter compares an expression of the row, `e`, with a value that depends only on the
clock: ``now()`` shifted by constant intervals, or a day made from it. At time T (in microseconds)
this is ``floor((T + c) / D) * D + s``: `c` shifts the clock before it is truncated to days (`D` is
a day, else one microsecond), `s` after it. The value never decreases, so the result of the
comparison changes only once (`plan.relational.TimeEdge`).

Source: Materialize's temporal filters (`mz_now()`); the inversion is new here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from actors.engine.catalyst.expressions import CLOCK_CALLS
from actors.engine.catalyst.filter_safety import is_surely_safe
from actors.engine.catalyst.plan_nodes import NotTranslated
from actors.engine.catalyst.plan_tree import TreeNode, type_of, walk
from actors.model.plan.relational import TimeBound, TimeEdge

_DAY: Final = 86_400_000_000
_SHIFT_MAX: Final = 400_000_000_000_000_000
_WHOLE_ZONES: Final = frozenset({"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "+00:00", "UTC+00:00"})
"""Zones whose local time is UTC: a day has 24 hours and starts at midnight UTC."""
_TURNED: Final = {
    "EqualTo": "EqualTo",
    "GreaterThan": "LessThan",
    "GreaterThanOrEqual": "LessThanOrEqual",
    "LessThan": "GreaterThan",
    "LessThanOrEqual": "GreaterThanOrEqual",
}
# ``e <= value`` starts to hold when the value is at least `e`, ``e < value`` when it is greater.
# ``e >= value`` stops to hold when ``e < value`` starts, and ``e > value`` when ``e <= value``
# does.
_EDGES: Final = {
    "EqualTo": ((False, False), (True, True)),
    "GreaterThan": ((True, False),),
    "GreaterThanOrEqual": ((True, True),),
    "LessThan": ((False, True),),
    "LessThanOrEqual": ((False, False),),
}
"""Edges of each comparison of a row with the clock: whether the comparison stops to hold there, and
whether the clock must have passed the row's time."""
_MOVES: Final = frozenset(
    {"DateAdd", "DateSub", "DatetimeSub", "TimestampAdd", "TimestampAddInterval"}
)
_UNITS: Final = {
    "MICROSECOND": 1,
    "MILLISECOND": 1_000,
    "SECOND": 1_000_000,
    "MINUTE": 60_000_000,
    "HOUR": 3_600_000_000,
    "DAY": _DAY,
    "WEEK": 7 * _DAY,
}
_STAND_ALONE: Final = "the clock is used outside a comparison with a row's time in WHERE"


class ClockValue(msgspec.Struct, frozen=True):
    """A function of the clock, in microseconds: ``floor((T + before) / unit) * unit + after``."""

    before: int = 0
    unit: int = 1
    after: int = 0

    def moved(self, micros: int) -> ClockValue:
        """Return the value shifted later by some microseconds. Raises `NotTranslated` beyond a
        limit."""
        name, value = ("before", self.before) if self.unit == 1 else ("after", self.after)
        if abs(value + micros) > _SHIFT_MAX:
            raise NotTranslated("an interval of more than 12,000 years with the clock")
        return msgspec.structs.replace(self, **{name: value + micros})


def reads_clock(node: TreeNode) -> bool:
    """Return whether an expression (not counting its subqueries) calls the clock."""
    return any(found.name in CLOCK_CALLS for found in walk(node))


def is_row_safe(part: TreeNode) -> bool:
    """Return whether a comparison with the clock can never raise an error, on any row at any
    time."""
    return all(is_surely_safe(each) for each in part.children if not reads_clock(each))


def time_bound(part: TreeNode, test: str, write: Callable[[TreeNode], str], zone: str) -> TimeBound:
    """Return the times at which a predicate that reads the clock is true. `test` is its text.

    Raises `NotTranslated` for anything but a comparison (``=``, ``<``, ``<=``, ``>``, ``>=``,
    BETWEEN) of the clock with an expression of the row.
    """
    edges: list[TimeEdge] = []
    for each in _comparisons(part):
        word = each.name
        # Any other predicate may have a different number of children.
        if word not in _TURNED or reads_clock(each.children[0]) == reads_clock(each.children[1]):
            raise NotTranslated(_STAND_ALONE)
        left, right = each.children
        if reads_clock(left):
            word, left, right = _TURNED[word], right, left
        clock = _clock_value(right, zone)
        micros = _micros(write(left), type_of(left), zone)
        for ends, strict in _EDGES[word]:
            edges.append(TimeEdge(micros, ends, strict, clock.before, clock.unit, clock.after))
    return TimeBound(test, tuple(edges))


def _comparisons(part: TreeNode) -> list[TreeNode]:
    if part.name != "Between" or part.fields.get("stale") or len(part.children) != 3:
        return [part]
    row, low, high = part.children
    pairs = (("GreaterThanOrEqual", low), ("LessThanOrEqual", high))
    return [TreeNode(name, {}, [row, bound]) for name, bound in pairs]


def _clock_value(node: TreeNode, zone: str) -> ClockValue:
    """Return a side of a comparison as a function of the clock. Raises `NotTranslated`."""
    name, children = node.name, node.children
    if name in ("Now", "CurrentTimestamp"):
        return ClockValue()
    if name == "LocalTimestamp":
        return _whole(ClockValue(), zone)
    if name == "CurrentDate":
        return _days(ClockValue(), zone)
    if name == "Cast":
        return _cast(node, zone)
    if name not in _MOVES or len(children) != 2:
        raise NotTranslated(f"the clock inside {name} in a comparison")
    if name == "TimestampAdd":
        value, micros = _clock_value(children[1], zone), _units_of(node)
    else:
        value = _clock_value(children[0], zone)
        span = (_days_of if name in ("DateAdd", "DateSub") else _span_of)(children[1])
        micros = -span if name.endswith("Sub") else span
    # Spark adds shorter intervals to the instant. In most zones, days have no constant length.
    return (value if abs(micros) < _DAY else _whole(value, zone)).moved(micros)


def _cast(node: TreeNode, zone: str) -> ClockValue:
    inner = node.children[0]
    source, target = type_of(inner), type_of(node)
    value = _clock_value(inner, zone)
    if source == target:
        return value
    if target == "date" and source in ("timestamp", "timestamp_ntz"):
        return _days(value, zone)
    if target in ("timestamp", "timestamp_ntz") and source in ("date", "timestamp_ntz"):
        return _whole(value, zone)
    if target == "timestamp_ntz" and source == "timestamp":
        return _whole(value, zone)
    raise NotTranslated(f"the clock as a {target} in a comparison")


def _whole(value: ClockValue, zone: str) -> ClockValue:
    # With summer time, a day may have 23 or 25 hours, which is not a constant shift of the clock.
    if zone not in _WHOLE_ZONES:
        raise NotTranslated(
            f"a day, or an interval of days, with the clock in the time zone {zone}, where days"
            " differ in length"
        )
    return value


def _days(value: ClockValue, zone: str) -> ClockValue:
    """Return the first microsecond of the value's day."""
    _whole(value, zone)
    if value.unit == 1:
        return ClockValue(value.before, _DAY)
    return msgspec.structs.replace(value, after=value.after // _DAY * _DAY)


def _span_of(node: TreeNode) -> int:
    """Return the microseconds of a constant interval."""
    if node.name == "UnaryMinus":
        return -_span_of(node.children[0])
    kind = str(node.fields.get("dataType"))
    # Months have no constant length in any zone.
    months = "month" in kind or "year" in kind
    spans = kind.startswith("interval ") and not months
    if node.name != "Literal" or not spans or node.fields["value"] is None:
        raise NotTranslated(
            "an interval with the clock that is not a constant of days or smaller units"
        )
    return int(node.fields["value"])


def _units_of(node: TreeNode) -> int:
    """Return the microseconds that a TIMESTAMPADD adds."""
    unit = str(node.fields.get("unit")).upper()
    if unit not in _UNITS:
        raise NotTranslated(f"TIMESTAMPADD of {unit} with the clock")
    return _number_of(node.children[0]) * _UNITS[unit]


def _days_of(node: TreeNode) -> int:
    """Return the microseconds of a constant number of days."""
    if node.name == "UnaryMinus":
        return -_days_of(node.children[0])
    if node.name == "ExtractANSIIntervalDays":
        micros = _span_of(node.children[0])
        # Rounded towards zero, as Spark extracts days.
        return (abs(micros) // _DAY) * (_DAY if micros > 0 else -_DAY)
    return _number_of(node) * _DAY


def _number_of(node: TreeNode) -> int:
    """Return a constant whole number."""
    if node.name == "UnaryMinus":
        return -_number_of(node.children[0])
    if node.name == "Cast" and type_of(node) in ("int", "bigint"):
        return _number_of(node.children[0])
    whole = node.name == "Literal" and type_of(node) in ("tinyint", "smallint", "int", "bigint")
    if not whole or node.fields["value"] is None:
        raise NotTranslated("a number with the clock that is not a constant")
    return int(node.fields["value"])


def _micros(text: str, kind: str, zone: str) -> str:
    """Return the text of a row's time in microseconds."""
    if kind in ("date", "timestamp_ntz"):
        _whole(ClockValue(), zone)
        text = f"CAST({text} AS timestamp)"
    elif kind != "timestamp":
        raise NotTranslated(f"the clock in a comparison of type {kind}")
    return f"unix_micros({text})"
