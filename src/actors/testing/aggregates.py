"""Aggregates of the in-memory engine: computes Spark's results over rows with weights.

`compile_aggregates` turns the text of an expression over aggregates (``max(x)``, ``count(DISTINCT
x)``, ``sum(x) FILTER (WHERE p)``) into its Spark type and a function of a group's weighted rows. It
also accepts ``aggregate`` over collected values, the form in which sums of floats are written.
`aggregate_type` only determines the type, for `analysis`.

Rules: a row of weight w counts w times; NULL arguments and rows whose FILTER is not true are
skipped; an aggregate of no values is NULL, but count is 0. Integer sums overflow as bigint does in
ANSI mode; decimal averages have Spark's scale, rounded half up; NaN is the greatest value. Rows
have no order: ``first`` returns the value of any row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, Final, TypeAlias

from sqlglot import exp

from actors.runtime.errors import QueryRejected
from actors.testing.expressions import (
    WIDE,
    Columns,
    Function,
    cast_value,
    compare_values,
    compile_expression,
    decimal_digits,
    decimal_type,
    parse,
)

Weighted: TypeAlias = Sequence[tuple[tuple[Any, ...], int]]
"""(row, weight > 0) pairs of one group."""
GroupFunction: TypeAlias = Callable[[Weighted], Any]
Values: TypeAlias = list[tuple[Any, int]]

_FREE: Final = (exp.First, exp.Last, exp.AnyValue)
_SPREADS: Final = (exp.Stddev, exp.StddevSamp, exp.StddevPop, exp.Variance, exp.VariancePop)
_TRUTHS: Final = (exp.LogicalAnd, exp.LogicalOr)
_BY: Final = (exp.ArgMax, exp.ArgMin)
_SYNONYMS: Final[dict[str, Any]] = {
    "std": exp.StddevSamp,
    "mean": exp.Avg,
    "every": exp.LogicalAnd,
    "some": exp.LogicalOr,
}


def aggregate_type(tree: Any, argument: str) -> str:
    """Return Spark's result type of an aggregate over a type. Raises `QueryRejected`."""
    if isinstance(tree, exp.Count | exp.CountIf):
        return "bigint"
    if isinstance(tree, (exp.Min, exp.Max, *_FREE, *_BY)):
        return argument
    if isinstance(tree, _SPREADS):
        return "double"
    if isinstance(tree, _TRUTHS):
        if argument not in ("boolean", "void"):
            raise QueryRejected(f"[DATATYPE_MISMATCH] {tree.sql()} over {argument}")
        return "boolean"
    if not isinstance(tree, exp.Sum | exp.Avg):
        raise QueryRejected(f"the in-memory engine does not know {tree.sql(dialect='spark')}")
    average = isinstance(tree, exp.Avg)
    if argument.startswith("decimal"):
        precision, scale = decimal_digits(argument)
        if average:
            return decimal_type(min(38, precision + 4), min(38, scale + 4))
        return decimal_type(min(38, precision + 10), scale)
    if argument in ("float", "double", "string") or average:
        return "double"
    if argument not in ("tinyint", "smallint", "int", "bigint", "void"):
        raise QueryRejected(f"[DATATYPE_MISMATCH] {tree.sql()} over {argument}")
    return "bigint"


def compile_aggregates(text: str, columns: Columns) -> tuple[str, GroupFunction]:
    """Return (type, function of a group's rows) of an expression over aggregates.

    Raises `QueryRejected` for anything outside the supported subset.
    """
    made: list[tuple[str, GroupFunction]] = []
    names: dict[str, tuple[int, str]] = {}

    def replace(node: Any) -> Any:
        if not isinstance(node, exp.Filter | exp.AggFunc | exp.Reduce):
            return node
        name = f"__made{len(made)}"
        made.append((_fold if isinstance(node, exp.Reduce) else _one)(node, columns))
        names[name] = (len(made) - 1, made[-1][0])
        return exp.column(name)

    tree = parse(text).copy().transform(with_canonical_names).transform(replace)
    kind, finish = compile_expression(tree, names)
    return kind, lambda rows: finish(_LazyValues([function for _, function in made], rows))


class _LazyValues(Sequence[Any]):
    """A group's aggregates, each computed only when it is indexed: one inside a CASE may raise."""

    def __init__(self, functions: list[GroupFunction], rows: Weighted) -> None:
        self._functions = functions
        self._rows = rows

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, index: Any) -> Any:
        return self._functions[index](self._rows)


def with_canonical_names(node: Any) -> Any:
    """Return an aggregate that has several names under its canonical name, for `transform`."""
    if isinstance(node, exp.Any):
        return exp.LogicalOr(this=node.this)
    if isinstance(node, exp.Anonymous) and node.name.lower() in _SYNONYMS:
        return _SYNONYMS[node.name.lower()](this=node.expressions[0])
    return node


def _one(tree: Any, columns: Columns) -> tuple[str, GroupFunction]:
    test: Function | None = None
    if isinstance(tree, exp.Filter):
        test = compile_expression(tree.expression.this, columns)[1]
        tree = tree.this
    trees, distinct = _arguments(tree)
    arguments = [compile_expression(one, columns) for one in trees]
    kind = aggregate_type(tree, arguments[0][0] if arguments else "bigint")
    combine = _combine(tree, kind)

    def value(rows: Weighted) -> Any:
        values: Values = []
        for row, weight in rows:
            if test is not None and test(row) is not True:
                continue
            found = tuple(function(row) for _, function in arguments)
            if isinstance(tree, _BY):
                if found[1] is not None:
                    values.append((found, weight))
            elif None not in found:
                values.append((found[0] if len(found) == 1 else found, weight))
        return combine(_distinct(values) if distinct else values)

    return kind, value


def _fold(tree: Any, columns: Columns) -> tuple[str, GroupFunction]:
    """Return the sum of sorted collected values (``aggregate``), or, if it starts with a struct of
    a mean ``m`` and ``q``, the sum of their squared distances from the mean."""
    gathered = tree.this.this
    distinct = isinstance(gathered, exp.ArrayUniqueAgg)
    _, function = compile_expression(gathered.this, columns)
    start = tree.args["initial"]
    mean: GroupFunction | None = None
    if isinstance(start, exp.Struct):
        mean = compile_aggregates(start.expressions[0].expression.sql(dialect="spark"), columns)[1]

    def value(rows: Weighted) -> Any:
        values: Values = [(function(row), weight) for row, weight in rows]
        values = [(found, weight) for found, weight in values if found is not None]
        values = _distinct(values) if distinct else values
        if mean is not None:
            middle = mean(rows)
            values = [((found - middle) ** 2, weight) for found, weight in values]
        return float(_total(values, "double"))

    return "double", value


def _arguments(tree: Any) -> tuple[list[Any], bool]:
    """Return the argument expressions (none: rows are counted), and whether they are distinct."""
    this = tree.this
    if isinstance(this, exp.Distinct):
        return list(this.expressions), True
    if isinstance(this, exp.Star) or this is None:
        return [], False
    second = tree.expression if isinstance(tree, _BY) else None
    rest = list(tree.expressions) if isinstance(tree, exp.Count) else []
    return [this, *([second] if second is not None else []), *rest], False


def _distinct(values: Values) -> Values:
    seen: dict[Any, Any] = {}
    for value, _ in values:
        parts = value if isinstance(value, tuple) else (value,)
        seen.setdefault(tuple(_plain(part) for part in parts), value)
    return [(value, 1) for value in seen.values()]


def _plain(value: Any) -> Any:
    """Return the value in the form in which it is compared: a single NaN, a single zero."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def _combine(tree: Any, kind: str) -> Callable[[Values], Any]:
    if isinstance(tree, exp.CountIf):
        return lambda values: sum(weight for value, weight in values if value is True)
    if isinstance(tree, exp.Count):
        return lambda values: sum(weight for _, weight in values)
    if isinstance(tree, exp.Sum):
        return lambda values: cast_value(_total(values, kind), kind) if values else None
    if isinstance(tree, exp.Avg):
        return lambda values: _average(values, kind) if values else None
    if isinstance(tree, exp.Min | exp.Max):
        sign = 1 if isinstance(tree, exp.Max) else -1
        return lambda values: _extreme((value for value, _ in values), sign)
    if isinstance(tree, _BY):
        wanted = 1 if isinstance(tree, exp.ArgMax) else -1
        return lambda values: _extreme_by((value for value, _ in values), wanted)
    if isinstance(tree, _SPREADS):
        root = isinstance(tree, exp.Stddev | exp.StddevSamp | exp.StddevPop)
        whole = isinstance(tree, exp.StddevPop | exp.VariancePop)
        return lambda values: _spread(values, root=root, whole=whole)
    if isinstance(tree, exp.LogicalAnd):
        return lambda values: all(value for value, _ in values) if values else None
    if isinstance(tree, exp.LogicalOr):
        return lambda values: any(value for value, _ in values) if values else None
    return lambda values: values[0][0] if values else None


def _total(values: Values, kind: str) -> Any:
    if kind == "double":
        terms = [float(value) * weight for value, weight in values]
        return math.fsum(terms) if _finite(values) else sum(terms)
    total = Decimal(0)
    for value, weight in values:
        total = WIDE.add(total, WIDE.multiply(Decimal(value), Decimal(weight)))
    return total if kind.startswith("decimal") else int(total)


def _finite(values: Values) -> bool:
    return all(math.isfinite(float(value)) for value, _ in values)


def _average(values: Values, kind: str) -> Any:
    count = sum(weight for _, weight in values)
    if kind.startswith("decimal"):
        total = _total(values, kind)
        return cast_value(WIDE.divide(total, Decimal(count)), kind)
    return float(_total(values, "double")) / count


def _extreme(values: Iterable[Any], sign: int) -> Any:
    best = None
    for value in values:
        if best is None or compare_values(value, best) == sign:
            best = value
    return best


def _extreme_by(values: Iterable[Any], sign: int) -> Any:
    best = None
    for value in values:
        if best is None or compare_values(value[1], best[1]) == sign:
            best = value
    return None if best is None else best[0]


def _spread(values: Values, *, root: bool, whole: bool) -> float | None:
    count = sum(weight for _, weight in values)
    if count == 0 or (count == 1 and not whole):
        return None
    numbers = [(float(value), weight) for value, weight in values]
    if not _finite(values):
        return math.nan
    mean = math.fsum(value * weight for value, weight in numbers) / count
    squares = math.fsum((value - mean) ** 2 * weight for value, weight in numbers)
    variance = squares / (count if whole else count - 1)
    return math.sqrt(variance) if root else variance
