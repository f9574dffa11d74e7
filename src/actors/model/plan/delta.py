"""The delta plan: how a view's changes are computed from its inputs' changes and the state that
they touch.

A small algebra over *updates*: every relation here has its columns plus ``__time`` and ``__diff``.
The same plan runs on Spark (`actors.engine.spark`) and in pure Python (`actors.testing`).

The inputs of a stratum have names (see `plan.input_names`):

- ``d{n}``: the changes of import n, its updates with ``lo <= time < hi``.
- ``s{n}``: the state of import n, at least those of its updates with ``time < lo`` that the changes
  can touch. Times below `lo` have no meaning and may have been advanced.
- ``n{k}``: at least those rows of ``s{n}`` that are near changes (`DeltaPlan.nearby`).
- ``k{n}``: the changes ``d{n}`` up to the edges of their groups (`DeltaPlan.covered`).
- ``h{k}``: hidden state k, at least its touched groups at ``time < lo``.
- ``r{k}``: the output of stratum k of the same step.
- ``c{k}``: the rows of hidden state k that come due in the step (`HiddenState.due`), each at its
  due time. These are changes that the clock alone makes.
- ``i0``: a single row with the step's interval, `lo` and `hi`, at time 0.

A step is a function of its interval and these inputs, and its output is right at every time in the
interval: a join pair has the later of the two times, and aggregates run over (group, time).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, TypeAlias

import msgspec

from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import ComparedRange, CoveredChanges, NearbyRows
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema

AUTO: Final = "auto"
INTERVAL: Final = InputKind.INTERVAL.text(0)
INTERVAL_SCHEMA: Final = TableSchema((TableColumn("lo", "bigint"), TableColumn("hi", "bigint")))
OUTPUT_PREFIX: Final = "o_"
TO: Final = "__to"
DUE_BUCKET_MS: Final = 1000
"""Milliseconds that share a value of `HiddenState.bucket`."""
ROW_COUNT: Final = "n"
"""Column of a grouping that counts its rows."""


# Nodes are stored in the catalog, and their bytes are the plan's fingerprint. So tags and the order
# of fields never change. A new field comes last and is omitted while it has its default
# (`omit_defaults`), so that plans that do not use it keep their fingerprint.
class NamedInput(msgspec.Struct, frozen=True, tag="Input"):
    """A named input (see the module docstring) with its columns."""

    name: str
    columns: tuple[str, ...]


class FilterRows(msgspec.Struct, frozen=True, tag="Where"):
    """The updates whose row satisfies the predicate."""

    input: Node
    predicate: str


class SelectColumns(msgspec.Struct, frozen=True, tag="Select"):
    """Computed columns. Time and diff are passed through."""

    input: Node
    columns: tuple[NamedExpression, ...]


class RowLifetimes(msgspec.Struct, frozen=True, tag=True):
    """Updates of rows that exist for a limited time.

    Each row appears at the later of its own time and `begins`, and is retracted at `ends`. A row
    that would end before it begins does not appear. `begins` and `ends` are columns of milliseconds
    without NULLs; "" means that there is no such bound. Updates at `hi` or later are left out.
    `interval` is the step's.
    """

    input: Node
    interval: NamedInput
    begins: str
    ends: str


class WeighRows(msgspec.Struct, frozen=True, tag="Weigh"):
    """Diffs multiplied by an integer expression over the columns, such as ``-1`` or a count ``n``.

    Updates whose diff becomes 0 are left out.
    """

    input: Node
    factor: str


class PairRows(msgspec.Struct, frozen=True, tag="Pair"):
    """Inner join: every matching pair, with the later of the two times and the product of the
    diffs.

    `equal` and `same` contain (left expression, right expression); `same` compares null-safe.
    Without either it is a cross product.
    """

    left: Node
    right: Node
    equal: tuple[tuple[str, str], ...]
    residual: str | None = None
    same: tuple[tuple[str, str], ...] = ()


class MatchState(msgspec.Struct, frozen=True, tag="Match"):
    """Joins `left` to a state in one operation, without deltas: an outer, semi or anti join.

    `right` (and for ``full`` also `left`) is a state: rows of positive weight whose times have no
    meaning. The kinds ``left`` and ``full`` are SQL's (pairs, and rows without a match padded with
    NULL); ``semi`` and ``anti`` keep the rows of `left` with or without a match, with the columns
    of `left`. Times are those of the left row, 0 for a padded right row. The diff of a pair is the
    product of both diffs; a row without a match keeps its own.
    """

    left: Node
    right: Node
    kind: str
    equal: tuple[tuple[str, str], ...]
    residual: str | None = None
    same: tuple[tuple[str, str], ...] = ()


class ExpandRows(msgspec.Struct, frozen=True, tag="Expand"):
    """Repeats every update for each of the integers below `count`. The new column `tag` (an int)
    after the input's columns contains the integer."""

    input: Node
    tag: str
    count: int


class GenerateRows(msgspec.Struct, frozen=True, tag="Generate"):
    """Repeats every update for each row that a generator such as ``explode(…)`` makes of it. The
    generator's `columns` follow the input's. With `outer`, an update for which it makes no row is
    kept, padded with NULL."""

    input: Node
    generator: str
    outer: bool
    columns: tuple[str, ...]


class UnionRows(msgspec.Struct, frozen=True, tag="Union"):
    """The updates of all inputs, matched by column names.

    A column that is the bare expression ``NULL`` in an input takes its type from the first input,
    which has types for all columns.
    """

    inputs: tuple[Node, ...]


class AdditiveMeasure(msgspec.Struct, frozen=True):
    """An additive hidden column of an aggregate.

    ``count`` is the sum of the diffs where `argument` is not NULL. ``sum`` is the sum of argument ×
    diff without NULLs. ``sum_bigint`` is the same for a bigint, which may be summed in halves.
    `type` is the Spark type of the hidden column, wide enough that it overflows only if the query's
    own result does.
    """

    name: str
    kind: str
    argument: str
    type: str


class ReduceGroups(msgspec.Struct, frozen=True, tag="Reduce"):
    """Contributions to groups: for each (keys, time) the sum of diffs as ``n``, and each measure.

    Output columns: keys, ``n``, measures, ``__time``, ``__diff`` (always 1).
    """

    input: Node
    keys: tuple[NamedExpression, ...]
    measures: tuple[AdditiveMeasure, ...]


class AccumulateTotals(msgspec.Struct, frozen=True, tag="Accumulate"):
    """Running totals: the hidden rows before and after each touched (group, time).

    `contributions` has the columns of `ReduceGroups`; `hidden` has keys, ``n`` and measures, with
    one row per group at ``time < lo``. For each touched (group, t) it emits the group's total
    before t with diff -1 and its total at t with diff +1, both at time t. A total with ``n = 0`` is
    not emitted, except for the global aggregate (no keys), whose single row exists even when it is
    empty, from the first hydration on. Groups compare null-safe.

    With `flips` (and no measures) the output has only the keys: +1 where a group appears (``n``
    rises above 0) and -1 where it disappears.
    """

    contributions: Node
    hidden: Node
    keys: tuple[str, ...]
    measures: tuple[str, ...]
    flips: bool = False


class SparkCall(msgspec.Struct, frozen=True):
    """An aggregate as Spark itself evaluates it, such as ``max(x)``. `type` is the type of the
    result."""

    name: str
    text: str
    type: str


class RecomputeGroups(msgspec.Struct, frozen=True, tag="Recompute"):
    """Recomputes the aggregates of touched groups, for functions that no sum can maintain.

    `old` is at least the touched groups' rows below `lo`, and `changes` are the updates since. For
    each (group, t) that `changes` touch it emits the aggregates over the group's rows before t with
    diff -1 (if there were any) and those over the rows up to t with diff +1 (if there are any). A
    row of weight w counts w times. Output columns: keys, then calls. Without keys, the single group
    has a row even when it is empty, from the first hydration (``lo = 0``) on, as in
    `AccumulateTotals`; with `begins`, for an old state, from time 0 if there is one (``lo > 0``).
    Groups compare null-safe.
    """

    old: Node
    changes: Node
    keys: tuple[str, ...]
    calls: tuple[SparkCall, ...]
    begins: bool = False


class WindowColumn(msgspec.Struct, frozen=True):
    """A window function over the rows of one partition at one time: its function, the order within
    the partition, and its frame."""

    name: str
    function: str
    order: tuple[str, ...]
    frame: str


class WindowLayer(msgspec.Struct, frozen=True):
    """Window functions over rows that may have window functions themselves: the columns made of
    those rows, and a column for each call over the partitions by `keys`."""

    columns: tuple[NamedExpression, ...]
    keys: tuple[str, ...]
    calls: tuple[WindowColumn, ...]


class RecomputeRows(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Recomputes the rows of touched partitions with the window functions over them.

    `old` is at least the touched partitions' rows below `lo`, and `changes` are the updates since.
    For each (partition, t) that `changes` touch it emits the partition's rows before t with
    negative diffs and those up to t with positive diffs, each with its `calls`. A row of weight w
    stands for w rows. Rows that do not change occur with both signs. Partitions compare null-safe.
    """

    old: Node
    changes: Node
    keys: tuple[str, ...]
    calls: tuple[WindowColumn, ...]
    above: tuple[WindowLayer, ...] = ()
    """Layers, each over the rows of the previous one. `keys` are among its own columns."""


class TopGate(msgspec.Struct, frozen=True, tag=True):
    """The updates of the input in groups that have a row in `switch`, or with `closes` in groups
    that have none. Without keys all rows are one group."""

    input: Node
    switch: Node
    keys: tuple[str, ...]
    closes: bool


class TopCovered(msgspec.Struct, frozen=True, tag=True):
    """The `changes` up to the edge of their group in an order, including peers of the edge, and all
    changes of groups without a row in `edges`."""

    changes: Node
    edges: Node
    keys: tuple[str, ...]
    order: tuple[str, ...]


class TopShortage(msgspec.Struct, frozen=True, tag=True):
    """The keys of groups with an edge in which at some time fewer than `count` rows are left of the
    `candidates` and the `changes` since. Without keys, a single row with the column ``short``, or
    none."""

    changes: Node
    candidates: Node
    edges: Node
    keys: tuple[str, ...]
    count: int


class TopCandidates(msgspec.Struct, frozen=True, tag=True):
    """The changes of groups' first rows and edges at the end of a step (`views.rule_top`).

    The new candidates of a group are the old ones plus the `changes`. For a group with a row in
    `shortage` they are all of `rows`, as of before the step, plus the changes. If there are more
    than `most`, or after a shortage, the first `kept` of them stay (with the peers of the last),
    and the last of those is the edge if others were left out. Emits the changes of the candidates
    in groups with changes and, with true in the column `mark`, the changes of the edges.
    """

    rows: Node
    changes: Node
    candidates: Node
    edges: Node
    shortage: Node
    keys: tuple[str, ...]
    order: tuple[str, ...]
    kept: int
    most: int
    mark: str


class ConsolidateRows(msgspec.Struct, frozen=True, tag="Consolidate"):
    """Sums the diffs of equal (row, time) and drops zeros. Rows compare null-safe."""

    input: Node


Node: TypeAlias = (
    NamedInput
    | FilterRows
    | SelectColumns
    | RowLifetimes
    | WeighRows
    | ExpandRows
    | GenerateRows
    | PairRows
    | MatchState
    | UnionRows
    | ReduceGroups
    | AccumulateTotals
    | RecomputeGroups
    | RecomputeRows
    | TopGate
    | TopCovered
    | TopShortage
    | TopCandidates
    | ConsolidateRows
)


def columns_of(node: Node) -> tuple[str, ...]:
    """Return the columns that a node produces, without time and diff."""
    match node:
        case NamedInput(columns=columns):
            return columns
        case FilterRows() | RowLifetimes() | WeighRows() | ConsolidateRows() | TopGate():
            return columns_of(node.input)
        case SelectColumns():
            return tuple(column.name for column in node.columns)
        case ExpandRows():
            return (*columns_of(node.input), node.tag)
        case GenerateRows():
            return (*columns_of(node.input), *node.columns)
        case MatchState(kind="semi" | "anti"):
            return columns_of(node.left)
        case PairRows() | MatchState():
            return columns_of(node.left) + columns_of(node.right)
        case UnionRows():
            return columns_of(node.inputs[0])
        case ReduceGroups():
            names = tuple(key.name for key in node.keys)
            return (*names, ROW_COUNT, *(measure.name for measure in node.measures))
        case AccumulateTotals():
            return node.keys if node.flips else (*node.keys, ROW_COUNT, *node.measures)
        case RecomputeGroups():
            return (*node.keys, *(call.name for call in node.calls))
        case RecomputeRows():
            below = columns_of(node.changes)
            layers = [(below, node.calls)]
            layers += [(tuple(c.name for c in each.columns), each.calls) for each in node.above]
            names, calls = layers[-1]
            return (*names, *(call.name for call in calls))
        case TopShortage():
            return node.keys or ("short",)
        case TopCovered():
            return columns_of(node.changes)
        case TopCandidates():
            return (*columns_of(node.changes), node.mark)


def tops(node: TopGate | TopCovered | TopShortage | TopCandidates) -> tuple[Node, ...]:
    """Return the nodes that a node of a limit reads."""
    match node:
        case TopGate():
            return node.input, node.switch
        case TopCovered():
            return node.changes, node.edges
        case TopShortage():
            return node.changes, node.candidates, node.edges
        case TopCandidates():
            return node.rows, node.changes, node.candidates, node.edges, node.shortage


def inputs_below(node: Node) -> Iterator[NamedInput]:
    """Yield the named inputs of a tree, each as often as it occurs."""
    match node:
        case NamedInput():
            yield node
        case (
            FilterRows()
            | SelectColumns()
            | WeighRows()
            | ExpandRows()
            | GenerateRows()
            | ConsolidateRows()
            | ReduceGroups()
        ):
            yield from inputs_below(node.input)
        case RowLifetimes():
            yield from inputs_below(node.input)
            yield node.interval
        case PairRows() | MatchState():
            yield from inputs_below(node.left)
            yield from inputs_below(node.right)
        case UnionRows():
            for child in node.inputs:
                yield from inputs_below(child)
        case AccumulateTotals():
            yield from inputs_below(node.contributions)
            yield from inputs_below(node.hidden)
        case RecomputeGroups() | RecomputeRows():
            yield from inputs_below(node.old)
            yield from inputs_below(node.changes)
        case TopGate() | TopCovered() | TopShortage() | TopCandidates():
            for child in tops(node):
                yield from inputs_below(child)


class StateLookup(msgspec.Struct, frozen=True):
    """The state of import `target` that a step needs: the rows whose key columns match.

    `key` contains columns of the target, by its own names. `origins` say where key values come
    from. Each is (input name, columns): ``d2`` for the changes of import 2, ``s1`` for rows of
    import 1 that an earlier lookup of this plan returned, ``r0`` for the output of stratum 0. An
    empty column name stands for NULL. An empty `key` reads the whole state, but if there are
    origins only when one of them has a row: the small side of a join without equality rarely
    changes. A lookup returns at least what Spark would match, where NULL matches NULL.
    """

    target: str
    """The input that it fills, ``s{n}`` or ``h{k}``."""
    key: tuple[str, ...]
    origins: tuple[tuple[str, tuple[str, ...]], ...]
    nulls: bool = True
    """True if NULL must match NULL; otherwise key values with a NULL may be skipped."""
    number: int = -1
    """Number of the lookup in the plan. It occurs in several strata if its origins get new rows."""
    fills: tuple[tuple[int, ...], ...] = ()
    """For each origin, the numbers of the lookups whose rows it means; empty for all rows of the
    input. Rows that one term of a join finds must not drive the lookups of another."""


class PlanStratum(msgspec.Struct, frozen=True, omit_defaults=True):
    """One Spark run: its lookups, in order, and then its node. The output is ``r{index}``."""

    lookups: tuple[StateLookup, ...]
    node: Node
    inputs: tuple[str, ...]
    """Names of all inputs that the node reads."""
    usual: tuple[str, ...] = ()
    """Inputs whose rows it needs as long as no stratum that rarely produces rows has produced any.
    Only in a plan with such strata."""
    seldom: bool = False
    """True if it rarely produces rows. An optimistic run assumes that it produces none; if the
    answer shows a row, the step is void (`DeltaPlan`)."""
    ranges: tuple[ComparedRange, ...] = ()
    """Ranges that limit what lookups without a key read."""


def missed_later(
    strata: Sequence[PlanStratum], first: int, last: int, *, optimistic: bool = False
) -> bool:
    """Return whether later strata read an output that a run of strata `first` to `last` does not
    return. A run returns only the output of its last stratum.

    With `optimistic`, strata that rarely produce rows are ignored.
    """
    inner = {
        InputKind.RESULT.text(k)
        for k in range(first, last)
        if not (optimistic and strata[k].seldom)
    }
    later = strata[last + 1 :] if inner else ()
    return any(
        not inner.isdisjoint(stratum.inputs)
        or any(name in inner for lookup in stratum.lookups for name, _ in lookup.origins)
        for stratum in later
    )


class HiddenState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The durable hidden state of one grouping: its schema and key columns.

    The state of a temporal filter has a column `due`, the time in milliseconds at which a row comes
    due, and a column `bucket`, that time divided by `DUE_BUCKET_MS`.
    """

    schema: TableSchema
    keys: tuple[str, ...]
    due: str = ""
    bucket: str = ""


class EagerSums(msgspec.Struct, frozen=True):
    """Sums of an import that are computed below a join, by the join's key (`views.rule_eager`)."""

    input_index: int = msgspec.field(name="source")
    columns: tuple[str, ...]
    """Key columns, by the table's own names."""
    rows_for_each: int
    """Approximate number of its rows for each row that they are joined to, when the view was
    created; 0 if unknown."""


class DeltaColumns(msgspec.Struct, frozen=True):
    """The position of one delta in the table of all deltas (`DeltaPlan`)."""

    names: tuple[str, ...]
    """Its columns there, in the order of `schema`."""
    schema: TableSchema
    bit: int
    """Bit of ``__to`` that marks its rows; 0 if all rows belong to it and there is no ``__to``."""


class DeltaPlan(msgspec.Struct, frozen=True):
    """Everything that a dataflow needs to maintain one view.

    Without `hidden`, the output of the last stratum has the view's columns under their own names.
    With it, one table has all deltas: the view's columns with the prefix ``o_``, those of hidden
    state k with the prefix ``h{k}_``, and ``__to`` (int). Bit 0 of ``__to`` says that the row
    belongs to the view's delta, bit k + 1 that it belongs to the delta of hidden state k; the
    columns of other deltas have no meaning in that row. The bit above these marks a row of a
    stratum that rarely produces rows. With ``mode == "opaque"`` there are no strata: `sql` is
    recomputed at each time and the old contents are subtracted.
    """

    inputs: tuple[str, ...] = msgspec.field(name="sources")
    """Names of the imports, as `sql` spells them."""
    input_schemas: tuple[TableSchema, ...] = msgspec.field(name="source_schemas")
    output: TableSchema
    sql: str
    """The view's own query, for hydrating opaque views, recomputation, and the test oracle."""
    mode: str
    """The weakest mode of its nodes: ``incremental``, ``keyed`` (touched groups are recomputed) or
    ``opaque``."""
    reason: str
    """Why it is not incremental, or what it sometimes reads in full although it is."""
    strata: tuple[PlanStratum, ...] = ()
    hidden: tuple[HiddenState, ...] = ()
    conf: tuple[tuple[str, str], ...] = ()
    """Spark settings that belong to the view, such as ANSI mode and time zone."""
    fingerprint: str = ""
    policy: str = AUTO
    """The refresh policy (`views.fingerprint`)."""
    tree: str = ""
    """The relational plan for display, one node per line."""
    nearby: tuple[NearbyRows, ...] = ()
    """The nearby rows of each input ``n{k}``."""
    covered: tuple[CoveredChanges, ...] = ()
    """The covered changes of each input ``k{n}``."""
    eager: tuple[EagerSums, ...] = ()
    """Sums below a join. A view keeps them when it is compiled again."""
    eager_open: bool = False
    """True if these sums could not be chosen because a table had no rows when the view was
    created."""

    @property
    def temporal(self) -> bool:
        """Return whether the contents change as time passes, without a change of an import."""
        return any(state.due for state in self.hidden)

    @property
    def optimistic(self) -> bool:
        """Return whether steps first assume that some strata make no rows."""
        return any(stratum.seldom for stratum in self.strata)

    @property
    def keeps_state(self) -> bool:
        """Return whether a step reads anything other than changes."""
        return bool(self.hidden) or any(stratum.lookups for stratum in self.strata)

    @property
    def deltas(self) -> tuple[DeltaColumns, ...]:
        """Return the deltas that the last stratum makes: the view's, then that of each hidden
        state."""
        if not self.hidden:
            return (DeltaColumns(self.output.names, self.output, 0),)
        prefixed = [(OUTPUT_PREFIX, self.output)]
        prefixed += [(hidden_prefix(k), state.schema) for k, state in enumerate(self.hidden)]
        return tuple(
            DeltaColumns(tuple(prefix + name for name in schema.names), schema, 1 << number)
            for number, (prefix, schema) in enumerate(prefixed)
        )

    @property
    def seldom_bit(self) -> int:
        """Return the bit of ``__to`` that marks rows of strata that rarely produce rows."""
        return 2 << len(self.hidden)

    @property
    def made_columns(self) -> tuple[TableColumn, ...]:
        """Return the columns that the last stratum makes, without time and diff."""
        columns = [
            TableColumn(name, column.type)
            for delta in self.deltas
            for name, column in zip(delta.names, delta.schema.columns, strict=True)
        ]
        return tuple([*columns, TableColumn(TO, "int")] if self.hidden else columns)

    def input_schema(self, name: str) -> TableSchema | None:
        """Return the schema of an input that is not the output of a stratum; None if there is no
        such input."""
        if name == INTERVAL:
            return INTERVAL_SCHEMA
        found = InputName.find(name)
        if found is None:
            return None
        schemas: tuple[TableSchema, ...] = ()
        match found.kind:
            case InputKind.HIDDEN | InputKind.DUE:
                schemas = tuple(state.schema for state in self.hidden)
            case InputKind.CHANGES | InputKind.STATE:
                schemas = self.input_schemas
            case InputKind.NEARBY:
                schemas = tuple(self.input_schemas[near.input_index] for near in self.nearby)
            case InputKind.COVERED:
                schemas = tuple(self.input_schemas[each.input_index] for each in self.covered)
        return schemas[found.number] if found.number < len(schemas) else None

    def whole_inputs(self) -> dict[str, int]:
        """Return the inputs of a run from scratch, each with the import whose contents it gets.

        Without earlier rows all changes are up to the edges.
        """
        found = {InputKind.CHANGES.text(i): i for i in range(len(self.input_schemas))}
        for number, covered in enumerate(self.covered):
            found[InputKind.COVERED.text(number)] = covered.input_index
        return found

    def input_names(self) -> list[str]:
        """Return the names of all inputs except the outputs of strata."""
        of_imports = InputKind.CHANGES, InputKind.STATE
        of_hidden = InputKind.HIDDEN, InputKind.DUE
        found = [kind.text(i) for i in range(len(self.input_schemas)) for kind in of_imports]
        found += [kind.text(k) for k in range(len(self.hidden)) for kind in of_hidden]
        found += [InputKind.NEARBY.text(k) for k in range(len(self.nearby))]
        found += [InputKind.COVERED.text(k) for k in range(len(self.covered))]
        return [*found, INTERVAL]


def hidden_prefix(number: int) -> str:
    """Return the prefix of a hidden state's columns in the table of all deltas (`DeltaPlan`).

    >>> hidden_prefix(2)
    'h2_'
    """
    return f"{InputKind.HIDDEN.text(number)}_"


def narrow_schema(schema: TableSchema, name: str, strata: Iterable[PlanStratum]) -> TableSchema:
    """Return the schema with only those columns of the input `name` that the strata read."""
    read = {
        column
        for stratum in strata
        for found in inputs_below(stratum.node)
        if found.name == name
        for column in found.columns
    }
    return TableSchema(columns_kept(schema, read))


def columns_kept(schema: TableSchema, read: Set[str]) -> tuple[TableColumn, ...]:
    """Return the columns of a schema that are read. If rows are only counted, return the first
    column.

    >>> types = {"id": "int", "at": "date", "x": "int"}
    >>> schema = TableSchema(tuple(TableColumn(*each) for each in types.items()))
    >>> [each.name for each in columns_kept(schema, {"x", "at"})]
    ['at', 'x']
    >>> [each.name for each in columns_kept(schema, set())]
    ['id']
    """
    return tuple(each for each in schema.columns if each.name in read) or schema.columns[:1]


def aggregate_below_unions(plan: DeltaPlan) -> DeltaPlan:
    """Return the plan with every union that retracts rows consolidated before anything is computed
    from its rows. Then no expression fails for a row that is gone in the end.

    Only a view computed from scratch needs this, and only if it fails: a step that fails is
    computed from scratch.
    """
    made: dict[Node, Node] = {}
    strata = tuple(
        msgspec.structs.replace(stratum, node=_unions_summed(stratum.node, made))
        for stratum in plan.strata
    )
    return msgspec.structs.replace(plan, strata=strata)


def _unions_summed(node: Node, made: dict[Node, Node]) -> Node:
    if node not in made:
        below = {
            name: _unions_summed(value, made)
            for name in node.__struct_fields__
            if isinstance(value := getattr(node, name), Node)
        }
        if isinstance(node, UnionRows):
            inputs = tuple(_unions_summed(each, made) for each in node.inputs)
            whole: Node = UnionRows(inputs)
            # An input with weights may retract rows of the others.
            takes_back = any(isinstance(each, WeighRows) for each in node.inputs)
            made[node] = ConsolidateRows(whole) if takes_back else whole
        else:
            made[node] = msgspec.structs.replace(node, **below) if below else node
    return made[node]
