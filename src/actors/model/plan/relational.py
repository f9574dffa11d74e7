"""The relational plan of a view: its query after name resolution and before the delta rules.

Every column of a plan has an id that is unique in the plan (such as ``i0_carrier`` of a scan or
``a0_n`` of an aggregate), so no join is ambiguous; only the inputs of a `UnionAll` share the ids of
the union. Expressions are Spark SQL over the column ids of the input, and depend on a single row.
Types are those that Spark determined.

`plan.relational_text` writes a plan as SQL again, with the same contents.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from actors.model.plan.nearby import Reach
from actors.model.plan.schema import TableSchema


class NamedExpression(msgspec.Struct, frozen=True):
    """An expression and the column that it makes."""

    name: str
    expression: str


class GroupKey(msgspec.Struct, frozen=True):
    """A grouping expression: the column that it makes, and its Spark type."""

    name: str
    expression: str
    type: str
    nullable: bool = True


# Nodes name columns by ids that are unique in a plan. So a rule may move a predicate or a
# projection past a join without renaming, and two scans of a table are distinct.
class ScanNode(msgspec.Struct, frozen=True, tag="Scan"):
    """One occurrence of import `input_index`. Each column is (column id, name in the table).

    `columns` may be empty, which gives rows without columns.
    """

    input_index: int = msgspec.field(name="source")
    columns: tuple[tuple[str, str], ...]


class ValuesNode(msgspec.Struct, frozen=True, tag="Constants"):
    """Rows in the query itself: VALUES, range(), and the single row of a SELECT without FROM.

    `table` is how Spark writes them ("" is one row without columns), and `generator` makes them
    from one row. The expression of a column is its name.
    """

    columns: tuple[GroupKey, ...]
    table: str
    generator: str


class FilterNode(msgspec.Struct, frozen=True, tag="Filter"):
    """The rows that satisfy the predicate."""

    input: Plan
    predicate: str


class TimeEdge(msgspec.Struct, frozen=True):
    """The time at which a comparison with the clock changes.

    It is the first T, in microseconds since the epoch, at which ``floor((T + before) / unit) * unit
    + after`` is at least `micros`, or with `strict` greater. `micros` is an expression over the
    row; if it is NULL there is no such time. At T the comparison becomes true, or with `ends`
    false.
    """

    micros: str
    ends: bool
    strict: bool
    before: int = 0
    unit: int = 1
    after: int = 0


class TimeBound(msgspec.Struct, frozen=True):
    """A predicate that compares a row with the clock: its text, and the times at which it
    changes."""

    test: str
    edges: tuple[TimeEdge, ...]


class TemporalFilter(msgspec.Struct, frozen=True, tag=True):
    """The rows that satisfy all bounds; at time t, the clock shows t."""

    input: Plan
    bounds: tuple[TimeBound, ...]
    types: tuple[tuple[str, str], ...]
    """(column id, Spark type) of the input's columns."""


class ProjectNode(msgspec.Struct, frozen=True, tag="Project"):
    """Computed columns. A column whose expression is a bare id is passed through."""

    input: Plan
    columns: tuple[NamedExpression, ...]


class ColumnEquality(msgspec.Struct, frozen=True):
    """Two column ids that must be equal. If null-safe, two NULLs are equal too."""

    left: str
    right: str
    null_safe: bool = False


class JoinNode(msgspec.Struct, frozen=True, tag="Join"):
    """Inner join of any number of inputs, none of which is an inner join.

    Each `ColumnEquality` relates two different inputs; without any it is a cross product. All
    predicates in `residual` must be true as well. Output: all columns of all inputs.
    """

    inputs: tuple[Plan, ...]
    equal: tuple[ColumnEquality, ...]
    residual: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    """(column id, Spark type) of all inputs, as far as they are known."""


class OuterJoin(msgspec.Struct, frozen=True, tag=True):
    """``left`` or ``full`` outer join; a right join is a left join with its sides swapped.

    The left ids of `equal` are those of `left`. The ON clause consists of `equal` and `residual`; a
    condition on one side alone is part of the residual, never a filter. Output: the columns of
    both.
    """

    left: Plan
    right: Plan
    kind: str
    equal: tuple[ColumnEquality, ...]
    residual: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    """(column id, Spark type) of both sides."""


class SemiJoin(msgspec.Struct, frozen=True, tag=True):
    """The rows of `left` with a match in `right`, or with `anti` those without, each as often as it
    is in `left`. Output: the columns of `left`."""

    left: Plan
    right: Plan
    anti: bool
    equal: tuple[ColumnEquality, ...]
    residual: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    """(column id, Spark type) of both sides."""


class AggregateFormula(msgspec.Struct, frozen=True):
    """An aggregate that only Spark can compute, such as ``max_by(x, y)``.

    `written` is the call in the query. `chosen` is a call with the same meaning whose value depends
    only on the bag of rows: where Spark may return any of several values, it says which. Both have
    ``{0}``, ``{1}`` … in place of the arguments, and other braces doubled.

    >>> formula = AggregateFormula("first({0})", "min({0})", ("upper(s)",))
    >>> formula.written.format(*formula.arguments)
    'first(upper(s))'
    """

    written: str
    chosen: str
    arguments: tuple[str, ...]
    """Expressions over the columns below the grouping."""


SPREADS: Final = frozenset({"stddev_samp", "stddev_pop", "var_samp", "var_pop"})
"""Aggregate functions that Spark computes in floating point."""
SAME_DISTINCT: Final = frozenset({"min", "max", "bool_and", "bool_or"})
"""Aggregate functions whose result does not depend on repeated values."""


class AggregateCall(msgspec.Struct, frozen=True):
    """One aggregate over one argument.

    `function` is Spark's name in lower case. Without a `formula` (``count``, ``sum``, ``avg``, and
    those of `SPREADS` and `SAME_DISTINCT`) it ignores NULL arguments, so a FILTER becomes a CASE in
    the argument; ``count`` without an argument counts rows. Any other aggregate has a `formula`,
    and its argument is the formula's only argument or a struct of all of them.
    """

    name: str
    function: str
    argument: str | None
    type: str
    """Spark type of the result."""
    argument_type: str = "bigint"
    argument_nullable: bool = True
    distinct: bool = False
    """True if it aggregates only the distinct values of the argument."""
    formula: AggregateFormula | None = None


class AggregationNode(msgspec.Struct, frozen=True, tag="Aggregate"):
    """GROUP BY `keys`; without keys there is always one row. Output: the keys, then the calls.

    `ansi` says whether overflow is an error (ANSI mode) instead of NULL.
    """

    input: Plan
    keys: tuple[GroupKey, ...]
    calls: tuple[AggregateCall, ...]
    ansi: bool = True


class DistinctNode(msgspec.Struct, frozen=True, tag="Distinct"):
    """The distinct rows, compared null-safe. `columns` are those of the input, with their types."""

    input: Plan
    columns: tuple[GroupKey, ...]
    """The expression of each column is its name."""


class UnionAll(msgspec.Struct, frozen=True, tag=True):
    """The rows of all inputs, which have the same columns (ids and types)."""

    inputs: tuple[Plan, ...]


class ExpandNode(msgspec.Struct, frozen=True, tag="Expansion"):
    """Repeats each input row for each of `rows`, which contain the expressions of the columns: the
    input of GROUPING SETS, ROLLUP and CUBE."""

    input: Plan
    columns: tuple[GroupKey, ...]
    """Names and types; the expression of each column is its name."""
    rows: tuple[tuple[str, ...], ...]


class GenerateNode(msgspec.Struct, frozen=True, tag="Generation"):
    """Repeats each input row for each row that a generator such as ``explode(…)`` makes of it. With
    `outer`, a row for which it makes none is kept, padded with NULL. Output: the input's columns,
    then the generator's."""

    input: Plan
    generator: str
    outer: bool
    columns: tuple[GroupKey, ...]
    """Names and types; the expression of each column is its name."""


class WindowCall(msgspec.Struct, frozen=True):
    """A window function: ``function OVER (PARTITION BY … ORDER BY … frame)``."""

    name: str
    function: str
    frame: str
    type: str
    by_row: bool
    """True if its value depends on the order of rows that the window's own order leaves equal."""
    reach: Reach | None = None
    """How far a change affects its partition: ``rows`` or ``range`` means at most `size` away;
    ``first`` and ``distinct`` mean ranks with and without gaps; None means anywhere."""
    size: int = 0


class WindowFunctions(msgspec.Struct, frozen=True, tag=True):
    """The input's columns, then a column for each call over the rows of one partition.

    If `order` leaves rows equal and a call depends on their order, all other columns decide, so
    that every evaluation makes the same choice.
    """

    input: Plan
    keys: tuple[str, ...]
    """Column ids."""
    order: tuple[str, ...]
    calls: tuple[WindowCall, ...]
    types: tuple[tuple[str, str], ...]
    """(column id, Spark type) of the input's columns."""


class LimitNode(msgspec.Struct, frozen=True, tag="Limit"):
    """Skips the first `offset` rows and returns at most `count` (None: all), in the order of
    `order` and then of all columns."""

    input: Plan
    order: tuple[str, ...]
    count: int | None
    offset: int
    types: tuple[tuple[str, str], ...]
    """(column id, Spark type) of the input's columns."""


class OpaqueNode(msgspec.Struct, frozen=True, tag="Opaque"):
    """A query that no rule supports. Its text is recomputed at each time, and the old contents are
    subtracted."""

    sql: str
    reason: str


Plan: TypeAlias = (
    ScanNode
    | ValuesNode
    | FilterNode
    | TemporalFilter
    | ProjectNode
    | JoinNode
    | OuterJoin
    | SemiJoin
    | AggregationNode
    | DistinctNode
    | UnionAll
    | ExpandNode
    | GenerateNode
    | WindowFunctions
    | LimitNode
    | OpaqueNode
)


class ViewPlan(msgspec.Struct, frozen=True):
    """The resolved query of a view. `root` is a `ProjectNode` onto the output columns by name, each
    cast to its type."""

    inputs: tuple[str, ...]
    """Names of the imported objects, as the query spells them, by `ScanNode.input_index`."""
    root: ProjectNode
    output: TableSchema


def columns_of(plan: Plan) -> tuple[str, ...]:
    """Return the column ids that a plan makes, in order."""
    match plan:
        case ScanNode():
            return tuple(name for name, _ in plan.columns)
        case ValuesNode():
            return tuple(column.name for column in plan.columns)
        case FilterNode() | TemporalFilter():
            return columns_of(plan.input)
        case ProjectNode():
            return tuple(column.name for column in plan.columns)
        case JoinNode():
            return tuple(name for each in plan.inputs for name in columns_of(each))
        case OuterJoin():
            return columns_of(plan.left) + columns_of(plan.right)
        case SemiJoin():
            return columns_of(plan.left)
        case AggregationNode():
            return (*(k.name for k in plan.keys), *(c.name for c in plan.calls))
        case DistinctNode():
            return tuple(column.name for column in plan.columns)
        case UnionAll():
            return columns_of(plan.inputs[0])
        case ExpandNode():
            return tuple(column.name for column in plan.columns)
        case GenerateNode():
            return (*columns_of(plan.input), *(column.name for column in plan.columns))
        case WindowFunctions():
            return (*columns_of(plan.input), *(call.name for call in plan.calls))
        case LimitNode():
            return columns_of(plan.input)
        case OpaqueNode():
            return ()
