"""Aggregates that are functions of sums: which hidden sums they need, and the result over them.

Theory of operation. Hidden are ``n`` (rows) and per argument a count of its non-NULL values and
sums. A call's result is an expression over these totals.

Widths. A hidden sum never overflows before the query's own: integers up to int in bigint (2^32
rows are out of reach), bigint in decimal(38,0), decimal(p,s) in decimal(min(38,p+12),s), two
digits more than Spark's own buffer. The cast to the query's type then overflows as Spark would:
an error under ANSI. Without ANSI, where overflow is NULL and would be lost from a running total,
sums that may fill 38 digits are not additive. Spark's own sum may also fail on a partial sum in
some order of rows; ours depends on the total alone.

``avg`` of integers is sum / count in double, of decimal(p,s) Spark's decimal(p+4,s+4) rounded
half up: the whole part and the remainder are divided apart, which keeps it exact for groups below
10^9 rows. Wider decimals (s > 10, p - s > 18) are not additive here.

Variances come from exact sums of x and x² over integers (decimals by their unscaled value of at
most `SQUARED_DIGITS_MAX` digits): with m the rounded mean, sum (x - m)² is exact in decimals and
what is left of the mean is below one half, so that no digits cancel. Sums of float and double
depend on the order of rows, and are not additive.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from actors.plan.delta import Measure
from actors.plan.relational import Aggregate, AggregateCall, Named

ROWS: Final = "n"
SQUARED_DIGITS_MAX: Final = 13
_INTEGERS: Final = {"tinyint": 3, "smallint": 5, "int": 10}
_VARIANCES: Final = frozenset(["stddev_samp", "stddev_pop", "var_samp", "var_pop"])


class Finished(msgspec.Struct, frozen=True):
    """Hidden sums, and the calls' results over them."""

    measures: tuple[Measure, ...]
    columns: tuple[Named, ...]


class _Measures:
    """Hidden columns, shared by the calls that need the same."""

    def __init__(self, rows: str) -> None:
        self.found: dict[tuple[str, str], Measure] = {}
        self.rows = rows
        """The column that counts rows."""

    def take(self, kind: str, argument: str, type_: str) -> str:
        """The name of the measure, made when it is new."""
        key = (kind, argument)
        if key not in self.found:
            self.found[key] = Measure(f"m{len(self.found)}", kind, argument, type_)
        return self.found[key].name


def finish(plan: Aggregate, rows: str = ROWS) -> Finished:
    """Return the sums and results of a grouping whose calls are all additive; `rows`: the column
    that counts its rows."""
    measures = _Measures(rows)
    columns = tuple(Named(call.name, _result(call, measures)) for call in plan.calls)
    return Finished(tuple(measures.found.values()), columns)


def not_additive(call: AggregateCall, *, ansi: bool) -> str:
    """Why a call's result is no function of sums; empty when it is."""
    kind = call.argument_type.lower()
    what = f"{call.function}({kind})"
    if call.formula is not None:
        return f"{call.function} is no sum"
    if call.distinct and call.function not in ("min", "max", "bool_and", "bool_or"):
        return f"{call.function}(DISTINCT …) is no sum"
    if call.function in ("count", "bool_and", "bool_or"):
        return ""
    if call.function in ("min", "max"):
        return f"{call.function} is no sum"
    if kind in _INTEGERS:
        return ""
    if call.function in _VARIANCES:
        if kind.startswith("decimal") and digits(kind)[0] <= SQUARED_DIGITS_MAX:
            return ""
        return f"{what} is no exact sum"
    if kind == "bigint":
        return ""
    if kind.startswith("decimal"):
        precision, scale = digits(kind)
        if call.function == "avg" and (scale > 10 or precision - scale > 18):
            return f"{what} has more digits than can be divided exactly"
        if precision > 26 and not ansi:
            return f"{what} without ANSI mode may overflow to NULL"
        return ""
    return f"{what} depends on the order of rows"


def _result(call: AggregateCall, measures: _Measures) -> str:
    """The call's result as an expression over the hidden columns."""
    argument = call.argument
    if argument is None:
        return measures.rows
    if call.function == "count" and not call.argument_nullable:
        return measures.rows
    count = measures.rows
    if call.argument_nullable:
        count = measures.take("count", argument, "bigint")
    if call.function == "count":
        return count
    if call.function in ("bool_and", "bool_or"):
        word, test = ("NOT ", "= 0") if call.function == "bool_and" else ("", "> 0")
        deciding = f"CASE WHEN {word}({argument}) THEN 1 END"
        result = f"{measures.take('count', deciding, 'bigint')} {test}"
    elif call.function in _VARIANCES:
        return _variance(call, argument, count, measures)
    else:
        kind = call.argument_type.lower()
        way = "sum_bigint" if kind == "bigint" else "sum"
        total = measures.take(way, argument, _sum_type(kind))
        if call.function == "sum":
            result = f"CAST({total} AS {call.type})"
        elif kind.startswith("decimal"):
            result = _decimal_average(total, count, kind, call.type)
        else:
            result = f"CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE)"
    return f"CASE WHEN {count} > 0 THEN {result} END"


def _sum_type(kind: str) -> str:
    if kind in _INTEGERS:
        return "bigint"
    if kind == "bigint":
        return "decimal(38,0)"
    precision, scale = digits(kind)
    return f"decimal({min(38, precision + 12)},{scale})"


def digits(kind: str) -> tuple[int, int]:
    """(precision, scale) of a decimal type's text."""
    found = [int(part) for part in re.findall(r"\d+", kind)]
    return (found[0], found[1] if len(found) > 1 else 0) if found else (10, 0)


def _decimal_average(total: str, count: str, kind: str, result: str) -> str:
    _, scale = digits(kind)
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
    total = measures.take("sum", exact, f"decimal({width + 12},0)")
    squares = measures.take("sum", f"({exact}) * ({exact})", f"decimal({2 * width + 12},0)")
    middle = f"CAST(CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE) AS decimal({width + 1},0))"
    rows = f"CAST({count} AS decimal(12,0))"
    # sum (x - m)², and the sum of what the rounding of m left over: both exact.
    spread = (
        f"{squares} - CAST(2 AS decimal(1,0)) * {middle} * {total} + {rows} * {middle} * {middle}"
    )
    left = f"CAST({total} - {rows} * {middle} AS DOUBLE)"
    deviation = f"(CAST({spread} AS DOUBLE) - {left} * {left} / CAST({count} AS DOUBLE))"
    sample = call.function.endswith("samp")
    divisor = f"(CAST({count} AS DOUBLE) - 1D)" if sample else f"CAST({count} AS DOUBLE)"
    power = float(10**scale)
    if call.function.startswith("stddev"):
        result = f"sqrt(greatest({deviation}, 0D) / {divisor}) / {power!r}D"
    else:
        result = f"greatest({deviation}, 0D) / {divisor} / {power * power!r}D"
    return f"CASE WHEN {count} > {1 if sample else 0} THEN {result} END"
