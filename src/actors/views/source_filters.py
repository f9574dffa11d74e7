"""What a view surely does not look at of its sources: conditions that every use of one shares.

A source's listen task may leave out parts whose rows the view's own WHERE drops all of
(`persist.filtering`). That changes nothing only when

- the source is read as a delta alone: a lookup of its state (``s{n}``) is answered by an
  arrangement that other views share, and which is filled from the same deltas;
- every use goes through a WHERE directly: bare columns may be renamed on the way, nothing may be
  computed, since a row that is dropped later might have raised an error first;
- every conjunct of that WHERE is understood, and cannot raise an error: a column compared with a
  literal that has its type, or casts to it without loss (`plain_sql`), BETWEEN, IN, tests of NULL.

A WHERE above another is looked at as well, as long as those below are understood: a row that one
drops is not shown to the next. When in doubt, there is no filter. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from actors.persist.filtering import Condition, PartFilter
from actors.persist.statistics import has_bounds
from actors.plan.delta import DeltaPlan, Input, Node, Select, Where
from actors.plan.schema import Schema, arrow_type
from actors.views.operators import children_of, is_name
from actors.views.plain_sql import ColumnTest, NotPlain, PlainReader, value_of


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
            except (NotPlain, RecursionError, ValueError, pa.ArrowException):
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
    """Raises `NotPlain` when a part of it is not understood."""
    reader = PlainReader(predicate)
    tests = reader.conjunction()
    if not reader.at_end():
        raise NotPlain("more than a conjunction of plain tests")
    types = {column.name: column.type.lower() for column in schema.columns}
    return [_condition(test, columns, types) for test in tests]


def _condition(test: ColumnTest, columns: Mapping[str, str], types: Mapping[str, str]) -> Condition:
    qualifier, name = test.column
    if qualifier or name not in columns or test.op == "<>":
        raise NotPlain(f"a test of {name} by {test.op}")
    own = columns[name]
    if not test.values:
        return Condition(own, test.op)
    kind = types[own]
    if not has_bounds(kind, arrow_type(kind)):
        raise NotPlain(f"a type without bounds: {kind}")
    scalars = (pa.scalar(value_of(value, kind), arrow_type(kind)) for value in test.values)
    return Condition(own, test.op, tuple(scalars))
