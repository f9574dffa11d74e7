"""Finds the columns and rows of its inputs that a view reads, so that all others are dropped early.

Before any lookup, a step reduces its changes to the columns that the view reads and sums up equal
rows. Arrangements hold only columns and rows that are read (`arrangement.shared`). An input's
listen task skips parts whose rows are all dropped by the view's WHERE (`persist.part_filter`).

Rows are dropped only if each use of them goes through a WHERE whose conjuncts are all understood
and cannot raise an error: a column compared with a literal of its type (or one that casts to it
without loss; see `plain_sql`), BETWEEN, IN, and tests for NULL. When in doubt, there is no filter.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import msgspec
import pyarrow as pa

from actors.durable.persist.part_filter import PartCondition, PartFilter
from actors.durable.persist.statistics import has_bounds
from actors.engine.views.operators import children_of, is_name
from actors.engine.views.plain_sql import (
    ColumnTest,
    NotPlain,
    plain_reader,
    read_conditions,
    value_of,
)
from actors.model.plan.delta import (
    DeltaPlan,
    FilterRows,
    NamedInput,
    Node,
    SelectColumns,
    columns_kept,
    inputs_below,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.schema import DIFF, TIME, TableSchema, arrow_type
from actors.model.plan.updates import consolidate_if_smaller


class InputUse(msgspec.Struct, frozen=True):
    """The columns and rows of one input that a plan reads."""

    schema: TableSchema
    """The columns in the order of the input, with the PRIMARY KEY if all its columns are among
    them."""
    changes: PartFilter | None
    """Filter for changed rows; None for all rows."""
    state: PartFilter | None
    """Filter for rows of the state; None for all rows."""

    def kept(self, changes: pa.Table) -> pa.Table:
        """Return the changes that the plan reads, with equal rows summed up. Reads every value."""
        if self.changes is not None:
            changes = self.changes.passing(changes)
        # Equal rows cancel here, so an update of a column that is not read disappears before any
        # lookup.
        return consolidate_if_smaller(changes.select([*self.schema.names, TIME, DIFF]))


def input_uses(plan: DeltaPlan) -> tuple[InputUse, ...]:
    """Return the uses of each of a plan's inputs."""
    return tuple(_input_use(plan, number) for number in range(len(plan.inputs)))


def _input_use(plan: DeltaPlan, input_index: int) -> InputUse:
    schema = plan.input_schemas[input_index]
    changes_name = InputKind.CHANGES.text(input_index)
    state_name = InputKind.STATE.text(input_index)
    near = {
        InputKind.NEARBY.text(k): each
        for k, each in enumerate(plan.nearby)
        if each.input_index == input_index
    }
    covered = {
        InputKind.COVERED.text(k): each
        for k, each in enumerate(plan.covered)
        if each.input_index == input_index
    }
    own = {changes_name, state_name, *near, *covered}
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
    changes = _passing(plan, schema, {changes_name, *covered})
    state = _passing(plan, schema, {state_name, *near})
    # Rows near changes are searched among the window's rows, so changes and state need the same
    # filter.
    if near and (changes is None or state is None or changes.name != state.name):
        changes = state = None
    kept = columns_kept(schema, read)
    key = schema.key if {each.name for each in kept}.issuperset(schema.key) else ()
    return InputUse(TableSchema(kept, key), changes, state)


def input_filter(plan: DeltaPlan, input_index: int) -> PartFilter | None:
    """Return the filter for the changes of an input in its listen task; None if all are needed."""
    state = InputKind.STATE.text(input_index)
    named = {name for stratum in plan.strata for name in stratum.inputs}
    named |= {lookup.target for stratum in plan.strata for lookup in stratum.lookups}
    # The listen task also feeds the arrangement of the state: a state that is looked up needs all
    # rows.
    if state in named:
        return None
    return _input_use(plan, input_index).changes


def _passing(plan: DeltaPlan, schema: TableSchema, names: Set[str]) -> PartFilter | None:
    """Return the filter for some rows of an input; None if all rows are read."""
    # Under another collation, equal texts have different bytes, so bounds would drop matching rows.
    if any("collation" in name.lower() for name, _ in plan.conf):
        return None
    uses: dict[tuple[PartCondition, ...], None] = {}
    for stratum in plan.strata:
        for path in _paths(stratum.node, names):
            found = _use(path, schema)
            if not found:
                return None
            uses[tuple(found)] = None
    return PartFilter(schema, *uses) if uses else None


def _paths(node: Node, names: Set[str]) -> Iterator[list[Node]]:
    """Yield the path from each use of an input up to the root."""
    if isinstance(node, NamedInput):
        if node.name in names:
            yield [node]
        return
    for child in children_of(node):
        for path in _paths(child, names):
            yield [*path, node]


def _use(path: list[Node], schema: TableSchema) -> list[PartCondition]:
    """Return the conditions that one use of the input puts on its rows; [] if it may read every
    row."""
    columns = {name: name for name in schema.names}
    found: list[PartCondition] = []
    for node in path[1:]:
        if isinstance(node, SelectColumns):
            renamed = {each.name: _bare(each.expression) for each in node.columns}
            # A computed column ends the walk: it might raise an error on a row that a later filter
            # drops.
            if not all(expression in columns for expression in renamed.values()):
                break
            columns = {name: columns[expression] for name, expression in renamed.items()}
        elif isinstance(node, FilterRows):
            try:
                # A row that one WHERE drops never reaches the next, so the conditions of all of
                # them apply.
                found += _conditions(node.predicate, columns, schema)
            except (NotPlain, RecursionError, ValueError, pa.ArrowException):
                break
        else:
            break
    return found


def _bare(expression: str) -> str:
    """Return the name of a column without quotes; any other expression in a form that matches no
    column."""
    if len(expression) > 2 and expression[0] == expression[-1] == "`":
        name = expression[1:-1].replace("``", "\0")
        return expression if "`" in name else name.replace("\0", "`")
    return expression if is_name(expression) else f"({expression})"


def _conditions(
    predicate: str, columns: Mapping[str, str], schema: TableSchema
) -> list[PartCondition]:
    """Return the conditions of a predicate. Raises `NotPlain` if a part of it is not understood."""
    reader = plain_reader(predicate)
    tests = read_conditions(reader)
    if not reader.ends():
        raise NotPlain("not a conjunction of plain tests")
    types = {column.name: column.type.lower() for column in schema.columns}
    return [_condition(test, columns, types) for test in tests]


def _condition(
    test: ColumnTest, columns: Mapping[str, str], types: Mapping[str, str]
) -> PartCondition:
    qualifier, name = test.column
    if qualifier or name not in columns or test.op == "<>":
        raise NotPlain(f"a test of {name} by {test.op}")
    own = columns[name]
    if not test.values:
        return PartCondition(own, test.op)
    kind = types[own]
    if not has_bounds(kind, arrow_type(kind)):
        raise NotPlain(f"a type without bounds: {kind}")
    scalars = (pa.scalar(value_of(value, kind), arrow_type(kind)) for value in test.values)
    return PartCondition(own, test.op, tuple(scalars))
