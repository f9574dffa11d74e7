"""Additive aggregates: the hidden sums that each call needs, and its result computed from them.

A grouping keeps the column ``n`` (its number of rows) and, for each argument, sums and the count of
non-NULL values. The result of a call is an expression over these totals. `not_additive` finds the
calls for which there is no such expression.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from actors.model.plan.delta import AdditiveMeasure
from actors.model.plan.relational import (
    SAME_DISTINCT,
    SPREADS,
    AggregateCall,
    AggregationNode,
    NamedExpression,
)

ROWS: Final = "n"
SQUARED_DIGITS_MAX: Final = 13
_INTEGERS: Final = {"tinyint": 3, "smallint": 5, "int": 10}


class FinishedMeasures(msgspec.Struct, frozen=True):
    """Hidden sums, and the results of the calls as expressions over them."""

    measures: tuple[AdditiveMeasure, ...]
    columns: tuple[NamedExpression, ...]


class _Measures:
    """Hidden columns, shared by all calls that need them."""

    def __init__(self, rows: str) -> None:
        # The measures so far, by kind and argument.
        self.found: dict[tuple[str, str], AdditiveMeasure] = {}
        self.rows = rows
        """The column that counts rows."""

    def take(self, kind: str, argument: str, type_: str) -> str:
        """Return the name of a measure, and create it if it is new."""
        key = (kind, argument)
        if key not in self.found:
            self.found[key] = AdditiveMeasure(f"m{len(self.found)}", kind, argument, type_)
        return self.found[key].name


def derive_sums(plan: AggregationNode, rows: str = ROWS) -> FinishedMeasures:
    """Return the sums and results of a grouping whose calls are all additive. `rows`: the column
    that counts its rows."""
    measures = _Measures(rows)
    columns = tuple(NamedExpression(call.name, _result(call, measures)) for call in plan.calls)
    return FinishedMeasures(tuple(measures.found.values()), columns)


def not_additive(call: AggregateCall, *, ansi: bool) -> str:
    """Return the reason why the result of a call is not a function of sums; "" if it is."""
    kind = call.argument_type.lower()
    what = f"{call.function}({kind})"
    if call.formula is not None:
        return f"{call.function} is not a sum"
    if call.distinct and call.function not in SAME_DISTINCT:
        return f"{call.function}(DISTINCT …) is not a sum"
    if call.function in ("count", "bool_and", "bool_or"):
        return ""
    # When the extreme value is deleted, a total cannot give the next one.
    if call.function in ("min", "max"):
        return f"{call.function} is not a sum"
    if kind in _INTEGERS:
        return ""
    if call.function in SPREADS:
        if kind.startswith("decimal") and digits(kind)[0] <= SQUARED_DIGITS_MAX:
            return ""
        return f"{what} is not an exact sum"
    if kind == "bigint":
        return ""
    if kind.startswith("decimal"):
        precision, scale = digits(kind)
        # Beyond these limits the division in `_decimal_average` would not have enough digits.
        if call.function == "avg" and (scale > 10 or precision - scale > 18):
            return f"{what} has too many digits to be divided exactly"
        # Without ANSI mode an overflow gives NULL, which a running total would lose.
        if precision > 26 and not ansi:
            return f"{what} without ANSI mode may overflow to NULL"
        return ""
    # Each addition of a float or double rounds, so the order of rows decides the last bits.
    return f"{what} depends on the order of rows"


def _result(call: AggregateCall, measures: _Measures) -> str:
    """Return the result of a call as an expression over the hidden columns."""
    argument = call.argument
    if argument is None:
        return measures.rows
    if call.function == "count" and not call.argument_nullable:
        return measures.rows
    # A group without non-NULL values has the result NULL, so each call needs their count.
    count = measures.rows
    if call.argument_nullable:
        count = measures.take("count", argument, "bigint")
    if call.function == "count":
        return count
    if call.function in ("bool_and", "bool_or"):
        # The count of the deciding values is a sum: false ones for bool_and, true ones for bool_or.
        word, test = ("NOT ", "= 0") if call.function == "bool_and" else ("", "> 0")
        deciding = f"CASE WHEN {word}({argument}) THEN 1 END"
        result = f"{measures.take('count', deciding, 'bigint')} {test}"
    elif call.function in SPREADS:
        return _variance(call, argument, count, measures)
    else:
        kind = call.argument_type.lower()
        way = "sum_bigint" if kind == "bigint" else "sum"
        total = measures.take(way, argument, _sum_type(kind))
        if call.function == "sum":
            # Spark may fail on a partial sum in some orders of rows; this cast depends on the total
            # alone.
            result = f"CAST({total} AS {call.type})"
        elif kind.startswith("decimal"):
            result = _decimal_average(total, count, kind, call.type)
        else:
            result = f"CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE)"
    return f"CASE WHEN {count} > 0 THEN {result} END"


def _sum_type(kind: str) -> str:
    # A hidden sum must not overflow before the query's own sum: 2^32 ints fit into a bigint.
    if kind in _INTEGERS:
        return "bigint"
    if kind == "bigint":
        return "decimal(38,0)"
    precision, scale = digits(kind)
    # Two digits more than Spark's own buffer: as in Spark, the cast to the query's type overflows
    # first.
    return f"decimal({min(38, precision + 12)},{scale})"


def digits(kind: str) -> tuple[int, int]:
    """Return the precision and scale of a decimal type's text."""
    found = [int(part) for part in re.findall(r"\d+", kind)]
    return (found[0], found[1] if len(found) > 1 else 0) if found else (10, 0)


def _decimal_average(total: str, count: str, kind: str, result: str) -> str:
    _, scale = digits(kind)
    # Spark's avg of decimal(p,s) is a decimal(p+4,s+4), rounded half up. The whole part and the
    # remainder are divided separately, which is exact for groups below 10^9 rows.
    rows = f"CAST({count} AS DECIMAL(20,0))"
    whole = f"CAST({total} DIV {rows} AS DECIMAL(19,0))"
    rest = f"CAST({total} % {rows} AS DECIMAL({12 + scale},{scale}))"
    fraction = f"{rest} / CAST({count} AS DECIMAL(12,0))"
    return f"CAST({whole} + CAST({fraction} AS DECIMAL({scale + 5},{scale + 4})) AS {result})"


def _variance(call: AggregateCall, argument: str, count: str, measures: _Measures) -> str:
    kind = call.argument_type.lower()
    width, scale = (_INTEGERS[kind], 0) if kind in _INTEGERS else digits(kind)
    unit = f"CAST({10**scale} AS decimal({scale + 1},0))"
    exact = f"CAST(({argument}) * {unit} AS decimal({width},0))" if scale else argument
    if not scale:
        exact = f"CAST({argument} AS decimal({width},0))"
    # Exact sums of x and x² (for decimals, of the unscaled value).
    total = measures.take("sum", exact, f"decimal({width + 12},0)")
    squares = measures.take("sum", f"({exact}) * ({exact})", f"decimal({2 * width + 12},0)")
    middle = f"CAST(CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE) AS decimal({width + 1},0))"
    rows = f"CAST({count} AS decimal(12,0))"
    # The sum of (x - m)², where m is the rounded mean, and the remainder of the mean are both
    # exact. The remainder is below one half, so no digits cancel.
    spread = (
        f"{squares} - CAST(2 AS decimal(1,0)) * {middle} * {total} + {rows} * {middle} * {middle}"
    )
    left = f"CAST({total} - {rows} * {middle} AS DOUBLE)"
    deviation = f"(CAST({spread} AS DOUBLE) - {left} * {left} / CAST({count} AS DOUBLE))"
    sample = call.function.endswith("samp")
    divisor = f"(CAST({count} AS DOUBLE) - 1D)" if sample else f"CAST({count} AS DOUBLE)"
    power = float(10**scale)
    # greatest: rounding to double may give a deviation just below zero.
    if call.function.startswith("stddev"):
        result = f"sqrt(greatest({deviation}, 0D) / {divisor}) / {power!r}D"
    else:
        result = f"greatest({deviation}, 0D) / {divisor} / {power * power!r}D"
    return f"CASE WHEN {count} > {1 if sample else 0} THEN {result} END"
