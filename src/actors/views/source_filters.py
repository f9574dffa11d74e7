"""What a view surely does not look at of its sources: conditions that every use of one shares.

A source's listen task may leave out parts whose rows the view's own WHERE drops all of
(`persist.filtering`). That changes nothing only when

- the source is read as a delta alone: a lookup of its state (``s{n}``) is answered by an
  arrangement that other views share, and which is filled from the same deltas;
- every use goes through a WHERE directly: bare columns may be renamed on the way, nothing may be
  computed, since a row that is dropped later might have raised an error first;
- every conjunct of that WHERE is understood, and cannot raise an error: a column compared with a
  literal that has its type, or casts to it without loss (`simple.py`), BETWEEN, IN, tests of NULL.

A WHERE above another is looked at as well, as long as those below are understood: a row that one
drops is not shown to the next. When in doubt, there is no filter. Pure.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.persist.filtering import Condition, Op, PartFilter
from actors.persist.statistics import has_bounds
from actors.plan.delta import DeltaPlan, Input, Node, Select, Where
from actors.plan.schema import Schema, arrow_type
from actors.views.operators import children_of, is_name
from actors.views.parse import DIALECT
from actors.views.simple import NotSimple, conjuncts, literal

_OPS: Mapping[Any, tuple[Op, Op]] = {
    exp.EQ: ("=", "="),
    exp.LT: ("<", ">"),
    exp.LTE: ("<=", ">="),
    exp.GT: (">", "<"),
    exp.GTE: (">=", "<="),
}
"""Each comparison, and what it is with its sides exchanged."""
_IN = frozenset({"this", "expressions"})
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def source_filter(plan: DeltaPlan, source: int) -> PartFilter | None:
    """What of an import the plan can look at; None: all of it, as far as is known."""
    state = f"s{source}"
    named = {name for stratum in plan.strata for name in stratum.inputs}
    named |= {lookup.target for stratum in plan.strata for lookup in stratum.lookups}
    if state in named or any("collation" in name.lower() for name, _ in plan.conf):
        return None
    schema = plan.source_schemas[source]
    uses = []
    for stratum in plan.strata:
        for path in _paths(stratum.node, f"d{source}"):
            found = _use(path, schema)
            if not found:
                return None
            uses.append(found)
    return PartFilter(schema, *uses) if uses else None


def _paths(node: Node, name: str) -> Iterator[list[Node]]:
    """From each use of an input up to the root."""
    if isinstance(node, Input):
        if node.name == name:
            yield [node]
        return
    for child in children_of(node):
        for path in _paths(child, name):
            yield [*path, node]


def _use(path: list[Node], schema: Schema) -> list[Condition]:
    """Conditions that one use of the source puts on its rows; none: it may look at every row."""
    columns = {name: name for name in schema.names}
    found: list[Condition] = []
    for node in path[1:]:
        if isinstance(node, Select):
            renamed = {each.name: _bare(each.expression) for each in node.columns}
            if not all(expression in columns for expression in renamed.values()):
                break
            columns = {name: columns[expression] for name, expression in renamed.items()}
        elif isinstance(node, Where):
            try:
                found += _conditions(node.predicate, columns, schema)
            except (NotSimple, SqlglotError, RecursionError, ValueError, pa.ArrowException):
                break
        else:
            break
    return found


def _bare(expression: str) -> str:
    """A column's name, quoted or not; what is none is returned as it is."""
    if len(expression) > 2 and expression[0] == expression[-1] == "`":
        name = expression[1:-1].replace("``", "\0")
        return expression if "`" in name else name.replace("\0", "`")
    return expression if is_name(expression) else f"({expression})"


def _conditions(predicate: str, columns: Mapping[str, str], schema: Schema) -> list[Condition]:
    """Raises `NotSimple` when a part of it is not understood."""
    tree = sqlglot.parse_one(predicate, dialect=DIALECT)
    types = {column.name: column.type.lower() for column in schema.columns}
    found: list[Condition] = []
    for each in conjuncts(tree):
        found += _condition(each, columns, types)
    return found


def _condition(node: Any, columns: Mapping[str, str], types: Mapping[str, str]) -> list[Condition]:
    negated = isinstance(node, exp.Not)
    inner = node.this if negated else node
    while isinstance(inner, exp.Paren):
        inner = inner.this
    if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
        own = _column(inner.this, columns)
        return [Condition(own, "is not null" if negated else "is null")]
    if negated:
        raise NotSimple
    if isinstance(inner, exp.In):
        given = inner.expressions
        if not given or {name for name, part in inner.args.items() if part} - _IN:
            raise NotSimple
        return [_compared(inner.this, "in", given, columns, types)]
    if isinstance(inner, exp.Between):
        if inner.args.get("symmetric"):
            raise NotSimple
        low, high = inner.args["low"], inner.args["high"]
        return [
            _compared(inner.this, ">=", [low], columns, types),
            _compared(inner.this, "<=", [high], columns, types),
        ]
    if type(inner) not in _OPS:
        raise NotSimple
    op, exchanged = _OPS[type(inner)]
    left, right = inner.this, inner.expression
    if not isinstance(left, exp.Column):
        left, right, op = right, left, exchanged
    return [_compared(left, op, [right], columns, types)]


def _compared(
    node: Any, op: Op, values: list[Any], columns: Mapping[str, str], types: Mapping[str, str]
) -> Condition:
    own = _column(node, columns)
    kind = types[own]
    if not has_bounds(kind, arrow_type(kind)):
        raise NotSimple
    scalars = (pa.scalar(_value(value, kind), arrow_type(kind)) for value in values)
    return Condition(own, op, tuple(scalars))


def _value(node: Any, kind: str) -> Any:
    """As `simple.literal`, and a number with digits after the point where that is exact: as a
    decimal, and as the double that Spark makes of it."""
    sign = 1
    inner = node
    if isinstance(inner, exp.Neg):
        sign, inner = -1, inner.this
    number = isinstance(inner, exp.Literal) and not inner.is_string
    if number and _NUMBER.fullmatch(inner.this):
        if kind.startswith("decimal"):
            return sign * decimal.Decimal(inner.this)
        if kind == "double" and "." in inner.this:
            return sign * float(inner.this)
    if isinstance(node, exp.Cast) and kind == "date" and node.to.is_type("date"):
        text = node.this
        if isinstance(text, exp.Literal) and text.is_string and _DAY.fullmatch(text.this):
            return datetime.date.fromisoformat(text.this)  # a cast that cannot fail
    return literal(node, kind)


def _column(node: Any, columns: Mapping[str, str]) -> str:
    if not isinstance(node, exp.Column) or node.table or node.name not in columns:
        raise NotSimple
    return columns[node.name]
