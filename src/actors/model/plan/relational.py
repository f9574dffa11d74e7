"""The relational plan of a view: the query, once names are resolved and before delta rules.

Every column of a plan has an id that is unique in the whole plan (``i0_carrier`` at a scan,
``a0_n`` of an aggregate), so that no join is ambiguous; only the inputs of a `UnionAll` share
the union's ids. Expressions are Spark SQL text over the column ids of the input, each an
expression that a row alone determines. Types are what Spark said.

`plan.relational_text` writes a plan out again as SQL; its contents are the query's contents.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from actors.model.plan.nearby import Reach
from actors.model.plan.schema import TableSchema


class NamedExpression(msgspec.Struct, frozen=True):
    """An expression and the column it makes."""

    name: str
    expression: str


class GroupKey(msgspec.Struct, frozen=True):
    """A group expression: the column it makes, and its Spark type."""

    name: str
    expression: str
    type: str
    nullable: bool = True


# Nodes name columns by ids that are unique in a plan. So a rule may move a predicate or a
# projection past a join without renaming, and two visits of one table stay apart.
class ScanNode(msgspec.Struct, frozen=True, tag="Scan"):
    """One occurrence of import number `input_index`: (column id, the table's own name) each.

    `columns` may be empty: rows without columns.
    """

    input_index: int = msgspec.field(name="source")
    columns: tuple[tuple[str, str], ...]


class ValuesNode(msgspec.Struct, frozen=True, tag="Constants"):
    """Rows that the query itself says: VALUES, range(), and the one row of a SELECT without FROM.

    `table` is how Spark writes them (nothing: one row without columns), and `generator` makes them
    of one row. A column's expression is its own name.
    """

    columns: tuple[GroupKey, ...]
    table: str
    generator: str


class FilterNode(msgspec.Struct, frozen=True, tag="Filter"):
    """Rows for which the predicate is true."""

    input: Plan
    predicate: str


class TimeEdge(msgspec.Struct, frozen=True):
    """The time at which a comparison with the clock turns: the first T, in microseconds since the
    epoch, at which ``floor((T + before) / unit) * unit + after`` is no less than `micros`, or with
    `strict` greater; no time where `micros` is NULL.

    `micros` is an expression of the row. The comparison becomes true there, or with `ends` false.
    """

    micros: str
    ends: bool
    strict: bool
    before: int = 0
    unit: int = 1
    after: int = 0


class TimeBound(msgspec.Struct, frozen=True):
    """A predicate that compares a row with the clock: its text, and the times at which it turns."""

    test: str
    edges: tuple[TimeEdge, ...]


class TemporalFilter(msgspec.Struct, frozen=True, tag=True):
    """Rows for which all bounds hold: at time t the clock stands at t."""

    input: Plan
    bounds: tuple[TimeBound, ...]
    types: tuple[tuple[str, str], ...]
    """(column id, Spark type) of the input's columns."""


class ProjectNode(msgspec.Struct, frozen=True, tag="Project"):
    """Computed columns. One whose expression is a bare id passes that column on."""

    input: Plan
    columns: tuple[NamedExpression, ...]


class ColumnEquality(msgspec.Struct, frozen=True):
    """Two column ids that must be equal; null-safe: two NULLs are equal too."""

    left: str
    right: str
    null_safe: bool = False


class JoinNode(msgspec.Struct, frozen=True, tag="Join"):
    """Inner join of any number of inputs; no input is an inner join itself.

    Each `ColumnEquality` ties two different inputs. Without any it is a product. All predicates of
    `residual` must be true as well. Output: all columns of all inputs.
    """

    inputs: tuple[Plan, ...]
    equal: tuple[ColumnEquality, ...]
    residual: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    """(column id, Spark type) of all inputs, as far as they are known."""


class OuterJoin(msgspec.Struct, frozen=True, tag=True):
    """``left`` or ``full`` outer join (a right one is a left one turned around).

    `equal` has its left ids in `left`. The ON clause is `equal` and `residual` together; what
    one side alone decides is part of the residual, never a filter. Output: the columns of both.
    """

    left: Plan
    right: Plan
    kind: str
    equal: tuple[ColumnEquality, ...]
    residual: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    """(column id, Spark type) of both sides."""


class SemiJoin(msgspec.Struct, frozen=True, tag=True):
    """Rows of `left` that have a match in `right` (with `anti`: that have none), each as often
    as it is in `left`. Output: the columns of `left`."""

    left: Plan
    right: Plan
    anti: bool
    equal: tuple[ColumnEquality, ...]
    residual: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    """(column id, Spark type) of both sides."""


class AggregateFormula(msgspec.Struct, frozen=True):
    """An aggregate that Spark alone knows how to compute: ``max_by(x, y)``.

    `written` is the call as the query has it, `chosen` one with the same meaning whose value the
    bag of rows determines: where Spark takes any of several, it says which. Both have ``{0}``,
    ``{1}`` … in the places of the arguments, and other braces doubled.

    >>> formula = AggregateFormula("first({0})", "min({0})", ("upper(s)",))
    >>> formula.written.format(*formula.arguments)
    'first(upper(s))'
    """

    written: str
    chosen: str
    arguments: tuple[str, ...]
    """Expressions over the columns below the grouping."""


SPREADS: Final = frozenset({"stddev_samp", "stddev_pop", "var_samp", "var_pop"})
"""Aggregate functions that Spark computes in floats."""
SAME_DISTINCT: Final = frozenset({"min", "max", "bool_and", "bool_or"})
"""Aggregate functions whose result repeated values do not change."""


class AggregateCall(msgspec.Struct, frozen=True):
    """One aggregate over one argument.

    `function` is Spark's name in lower case. Without a `formula` (``count``, ``sum``, ``avg``, and
    those of `SPREADS` and `SAME_DISTINCT`) it passes over NULL arguments, so a FILTER is a CASE in
    the argument; ``count`` without an argument counts rows. Any other one has a `formula`: its
    argument is the formula's only one, or a struct of them.
    """

    name: str
    function: str
    argument: str | None
    type: str
    """Spark type of the result."""
    argument_type: str = "bigint"
    argument_nullable: bool = True
    distinct: bool = False
    """True if it is over the distinct values of the argument."""
    formula: AggregateFormula | None = None


class AggregationNode(msgspec.Struct, frozen=True, tag="Aggregate"):
    """GROUP BY `keys`; without keys one row, always. Output: the keys, then the calls.

    `ansi`: whether overflow is an error (ANSI mode) and not NULL.
    """

    input: Plan
    keys: tuple[GroupKey, ...]
    calls: tuple[AggregateCall, ...]
    ansi: bool = True


class DistinctNode(msgspec.Struct, frozen=True, tag="Distinct"):
    """Each row once; rows compare null-safe. `columns` are the input's, with their types."""

    input: Plan
    columns: tuple[GroupKey, ...]
    """Each one's expression is its own name."""


class UnionAll(msgspec.Struct, frozen=True, tag=True):
    """All rows of all inputs, which have the same columns (ids and types)."""

    inputs: tuple[Plan, ...]


class ExpandNode(msgspec.Struct, frozen=True, tag="Expansion"):
    """Each row of the input once for each of `rows`, which give the columns' expressions: what
    GROUPING SETS, ROLLUP and CUBE group."""

    input: Plan
    columns: tuple[GroupKey, ...]
    """Names and types; each one's expression is its own name."""
    rows: tuple[tuple[str, ...], ...]


class GenerateNode(msgspec.Struct, frozen=True, tag="Generation"):
    """Each row of the input once for each row that a generator (``explode(…)``) makes of it; with
    `outer` once, padded with NULL, where it makes none. Output: the input's columns, then these."""

    input: Plan
    generator: str
    outer: bool
    columns: tuple[GroupKey, ...]
    """Names and types; each one's expression is its own name."""


class WindowCall(msgspec.Struct, frozen=True):
    """A window function: ``function OVER (PARTITION BY … ORDER BY … frame)``."""

    name: str
    function: str
    frame: str
    type: str
    by_row: bool
    """True if its value depends on the order of rows that the window's own order leaves equal."""
    reach: Reach | None = None
    """Reach of a change in its partition: ``rows`` or ``range``, at most `size`; ``first`` and
    ``distinct`` are ranks with gaps and without; None: anywhere."""
    size: int = 0


class WindowFunctions(msgspec.Struct, frozen=True, tag=True):
    """The input's columns, then a column for each call over the rows of one partition.

    Where `order` leaves rows equal, and a call depends on which comes first, the order of all
    other columns decides, so that the choice is the same at each evaluation.
    """

    input: Plan
    keys: tuple[str, ...]
    """Column ids."""
    order: tuple[str, ...]
    calls: tuple[WindowCall, ...]
    types: tuple[tuple[str, str], ...]
    """(column id, Spark type) of the input's columns."""


class LimitNode(msgspec.Struct, frozen=True, tag="Limit"):
    """The first `count` rows (None: all) behind the first `offset`, by `order` and then by all
    columns."""

    input: Plan
    order: tuple[str, ...]
    count: int | None
    offset: int
    types: tuple[tuple[str, str], ...]
    """(column id, Spark type) of the input's columns."""


class OpaqueNode(msgspec.Struct, frozen=True, tag="Opaque"):
    """A query that no rule knows: its text, recomputed at each time and subtracted."""

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
    """A view's query, resolved. `root` is a `ProjectNode` onto the output's columns, by name, each
    cast to its type."""

    inputs: tuple[str, ...]
    """Names of the imported objects, as the query writes them, by `ScanNode.input_index`."""
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
