"""What a view looks at of its sources: columns, and the rows that some WHERE of it lets pass.

A step keeps of its changes what the view looks at, and sums up equal rows, before anything is
looked up: an update of a column that no expression reads is gone then. Arrangements hold columns
and rows that are looked at (`arrangement.shared`). A source's listen task leaves out parts whose
rows the view's own WHERE drops all of (`persist.filtering`).

Rows are left out only when

- every use of them goes through a WHERE directly: bare columns may be renamed on the way, nothing
  may be computed, since a row that is dropped later might have raised an error first;
- every conjunct of that WHERE is understood, and cannot raise an error: a column compared with a
  literal that has its type, or casts to it without loss (`plain_sql`), BETWEEN, IN, tests of NULL.

Changes and state are told apart: a use of one says nothing of the other. A listen task feeds both,
so it leaves out nothing of a source whose state is looked up. A WHERE above another is looked at as
well, as long as those below are understood: a row that one drops is not shown to the next. When in
doubt, there is no filter. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import msgspec
import pyarrow as pa

from actors.persist.filtering import Condition, PartFilter
from actors.persist.statistics import has_bounds
from actors.plan.delta import (
    DeltaPlan,
    Input,
    Node,
    Select,
    Where,
    columns_kept,
    inputs_below,
)
from actors.plan.schema import DIFF, TIME, Schema, arrow_type
from actors.plan.updates import condensed
from actors.views.operators import children_of, is_name
from actors.views.plain_sql import ColumnTest, NotPlain, PlainReader, value_of


class SourceUse(msgspec.Struct, frozen=True):
    """What a plan looks at of one source."""

    schema: Schema
    """The columns, in the source's order; the PRIMARY KEY where all of it is among them."""
    changes: PartFilter | None
    """Which changed rows; None: any."""
    state: PartFilter | None
    """Which rows of its state; None: any."""

    def kept(self, changes: pa.Table) -> pa.Table:
        """Return the changes that the plan looks at, summed up. Reads every value."""
        if self.changes is not None:
            changes = self.changes.passing(changes)
        return condensed(changes.select([*self.schema.names, TIME, DIFF]))


def source_uses(plan: DeltaPlan) -> tuple[SourceUse, ...]:
    """Return what a plan looks at of each of its sources."""
    return tuple(_source_use(plan, number) for number in range(len(plan.sources)))


def _source_use(plan: DeltaPlan, source: int) -> SourceUse:
    schema = plan.source_schemas[source]
    near = {f"n{k}": each for k, each in enumerate(plan.nearby) if each.source == source}
    covered = {f"k{k}": each for k, each in enumerate(plan.covered) if each.source == source}
    own = {f"d{source}", f"s{source}", *near, *covered}
    read = {column for each in near.values() for column in each.columns}
    read.update(column for each in covered.values() for column in each.columns)
    for stratum in plan.strata:
        for found in inputs_below(stratum.node):
            if found.name in own:
                read.update(found.columns)
        for lookup in stratum.lookups:
            read.update(lookup.key if lookup.target in own else ())
            for name, columns in lookup.origins:
                read.update(columns if name in own else ())
    changes = _passing(plan, schema, {f"d{source}", *covered})
    state = _passing(plan, schema, {f"s{source}", *near})
    # Neighbours are those among the rows that a window is over, which both are told by.
    if near and (changes is None or state is None or changes.name != state.name):
        changes = state = None
    kept = columns_kept(schema, read)
    key = schema.key if {each.name for each in kept}.issuperset(schema.key) else ()
    return SourceUse(Schema(kept, key), changes, state)


def source_filter(plan: DeltaPlan, source: int) -> PartFilter | None:
    """Return which rows of a source the plan can look at; None: any, as far as is known."""
    state = f"s{source}"
    named = {name for stratum in plan.strata for name in stratum.inputs}
    named |= {lookup.target for stratum in plan.strata for lookup in stratum.lookups}
    if state in named:
        return None
    return _source_use(plan, source).changes


def _passing(plan: DeltaPlan, schema: Schema, names: Set[str]) -> PartFilter | None:
    """Which rows of some inputs of one source the strata look at; None: any."""
    if any("collation" in name.lower() for name, _ in plan.conf):
        return None
    uses: dict[tuple[Condition, ...], None] = {}
    for stratum in plan.strata:
        for path in _paths(stratum.node, names):
            found = _use(path, schema)
            if not found:
                return None
            uses[tuple(found)] = None
    return PartFilter(schema, *uses) if uses else None


def _paths(node: Node, names: Set[str]) -> Iterator[list[Node]]:
    """From each use of an input up to the root."""
    if isinstance(node, Input):
        if node.name in names:
            yield [node]
        return
    for child in children_of(node):
        for path in _paths(child, names):
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
