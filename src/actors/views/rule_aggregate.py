"""GROUP BY with count, sum and avg: contributions, running totals, and the view over them.

Theory of operation. All three are functions of sums: ``n`` (rows), and per argument a count of
its non-NULL values and a sum. Stratum 0 sums the delta per (group, time); stratum 1 adds it to
the hidden state of the groups it touches, and emits each total before and after. What is durable
is the hidden state; the view's row is an expression over it, so that a retraction computes from
the same totals the same bits that were inserted.

Widths. A hidden sum never overflows before the query's own: integers up to int in bigint (2^32
rows are out of reach), bigint in decimal(38,0), decimal(p,s) in decimal(min(38,p+12),s), two
digits more than Spark's own buffer. The cast to the query's type then overflows as Spark would:
an error under ANSI. Without ANSI, where overflow is NULL and would be lost from a running total,
sums that may fill 38 digits are refused here. Spark's own sum may also fail on a partial sum in
some order of rows; ours depends on the total alone.

``avg`` of integers is sum / count in double, of decimal(p,s) Spark's decimal(p+4,s+4) rounded
half up: the whole part and the remainder are divided apart, which keeps it exact for groups below
10^9 rows. Wider decimals (s > 10, p - s > 18) are refused here, as are float and double, whose
sums depend on the order of rows.

Rows where HAVING does not hold get no view columns computed: Spark would not compute them either.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from actors.plan.delta import (
    Accumulate,
    Hidden,
    Input,
    Lookup,
    Measure,
    Node,
    Reduce,
    Select,
    Stratum,
)
from actors.plan.relational import Aggregate, AggregateCall, Filter, Named, Plan, Project
from actors.plan.schema import Column, Schema
from actors.views.build import OUTPUT_PREFIX, Types
from actors.views.lookups import Lookups
from actors.views.resolve import Unsupported

ROWS: Final = "n"
KEEP: Final = "__keep"
HIDDEN: Final = "h"
_SMALL_INTEGERS: Final = frozenset(["tinyint", "smallint", "int"])
_NESTED: Final = ("array<", "map<", "struct<", "variant", "void", "interval")


class _Measures(msgspec.Struct):
    """Hidden columns, shared by the calls that need the same."""

    found: dict[tuple[str, str], Measure]

    def take(self, kind: str, argument: str, type_: str) -> str:
        """The name of the measure, made when it is new."""
        key = (kind, argument)
        if key not in self.found:
            self.found[key] = Measure(f"m{len(self.found)}", kind, argument, type_)
        return self.found[key].name


def matches(plan: Project) -> tuple[Aggregate, str | None] | None:
    """The grouping and HAVING directly below the view's projection, if there is one."""
    below: Plan = plan.input
    having: str | None = None
    if isinstance(below, Filter) and isinstance(below.input, Aggregate):
        having, below = below.predicate, below.input
    return (below, having) if isinstance(below, Aggregate) else None


def derive(
    plan: Project, contributions: Node, lookups: Lookups, types: Types
) -> tuple[tuple[Stratum, ...], Hidden]:
    """(strata, hidden state). Raises `Unsupported`."""
    matched = matches(plan)
    assert matched is not None
    aggregate, having = matched
    keys = tuple(key.name for key in aggregate.keys)
    measures = _Measures({})
    finished = tuple(Named(call.name, _finish(call, measures, types)) for call in aggregate.calls)
    hidden = _hidden(aggregate, measures, types)
    names = hidden.schema.names
    reduce = Reduce(contributions, aggregate.keys, tuple(measures.found.values()))
    totals = Accumulate(
        Input("r0", names), Input(HIDDEN, names), keys, tuple(names[len(keys) + 1 :])
    )
    passed = tuple(Named(name, name) for name in names)
    last = Select(Select(totals, (*passed, *finished)), (*passed, *_outputs(plan, having)))
    first = Stratum(lookups.ordered(), reduce, inputs_of(reduce))
    lookup = Lookup(HIDDEN, keys, (("r0", keys),) if keys else ())
    return (first, Stratum((lookup,), last, ("r0", HIDDEN))), hidden


def inputs_of(node: Node) -> tuple[str, ...]:
    """Names of the inputs that a node reads, each once."""
    found: dict[str, None] = {}

    def walk(value: object) -> None:
        if isinstance(value, Input):
            found[value.name] = None
        elif isinstance(value, msgspec.Struct):
            for field in value.__struct_fields__:
                walk(getattr(value, field))
        elif isinstance(value, tuple):
            for item in value:
                walk(item)

    walk(node)
    return tuple(found)


def _outputs(plan: Project, having: str | None) -> list[Named]:
    columns = [
        Named(
            OUTPUT_PREFIX + column.name,
            column.expression
            if having is None
            else f"CASE WHEN {having} THEN {column.expression} END",
        )
        for column in plan.columns
    ]
    keep = "true" if having is None else f"coalesce(({having}), false)"
    return [*columns, Named(KEEP, keep)]


def _hidden(aggregate: Aggregate, measures: _Measures, types: Types) -> Hidden:
    columns = []
    for key in aggregate.keys:
        kind, nullable = types.keys[key.name]
        if kind.startswith(_NESTED):
            raise Unsupported(f"GROUP BY {key.expression}, which is of type {kind}")
        columns.append(Column(key.name, kind, nullable))
    columns.append(Column(ROWS, "bigint", False))
    columns += [Column(m.name, m.type, False) for m in measures.found.values()]
    keys = tuple(key.name for key in aggregate.keys)
    return Hidden(Schema(tuple(columns)), keys)


def _finish(call: AggregateCall, measures: _Measures, types: Types) -> str:
    """The call's result as an expression over the hidden columns."""
    argument = call.argument
    if argument is None:
        return ROWS
    if call.function == "count":
        return measures.take("count", argument, "bigint")
    kind = call.argument_type
    total = measures.take("sum", argument, _sum_type(call, types))
    _, nullable = types.arguments[call.name]
    count = measures.take("count", argument, "bigint") if nullable else ROWS
    if call.function == "sum":
        result = f"CAST({total} AS {call.type})"
    elif kind.startswith("decimal"):
        result = _decimal_average(total, count, kind, call.type)
    else:
        result = f"CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE)"
    return f"CASE WHEN {count} > 0 THEN {result} END"


def _sum_type(call: AggregateCall, types: Types) -> str:
    kind = call.argument_type
    if kind in _SMALL_INTEGERS:
        return "bigint"
    if kind == "bigint":
        return "decimal(38,0)"
    if kind.startswith("decimal"):
        precision, scale = digits(kind)
        if call.function == "avg" and (scale > 10 or precision - scale > 18):
            raise Unsupported(f"avg({kind}), which has more digits than the rule divides exactly")
        if precision > 26 and not types.ansi:
            raise Unsupported(f"{call.function}({kind}) without ANSI mode: its total may overflow")
        return f"decimal({min(38, precision + 12)},{scale})"
    order = kind in ("float", "double", "string")
    why = ", whose result depends on the order of rows" if order else ""
    raise Unsupported(f"{call.function}({kind}){why}")


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
