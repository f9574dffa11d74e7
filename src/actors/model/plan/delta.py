"""The delta plan: how an output delta is computed from input deltas and touched state.

A small algebra over *updates*: every relation here has its columns plus ``__time`` and
``__diff``. The same plan runs on Spark (`actors.engine.spark`) and in pure Python
(`actors.testing`).

Inputs of a stratum are named (`plan.input_names` makes and takes apart the names):

- ``d{n}``  the delta of import n: its updates with ``lo <= time < hi``;
- ``s{n}``  the state of import n: (a superset of) its updates with ``time < lo`` that the
  delta can touch; times below `lo` carry no meaning and may have been advanced;
- ``n{k}``  of the rows ``s{n}`` at least those that are near changes (`DeltaPlan.nearby`);
- ``k{n}``  of the changes ``d{n}`` those up to the edges of their groups (`DeltaPlan.covered`);
- ``h{k}``  hidden state k: (a superset of) the touched groups at ``< lo``;
- ``r{k}``  the output of stratum k of the same step;
- ``c{k}``  the rows of hidden state k that come due in the step (`HiddenState.due`), each at that
  time: changes that the clock alone makes;
- ``i0``    one row with the step's interval, `lo` and `hi`, at time 0.

A step is a function of its interval and these inputs alone, and its output is right at every
time in the interval: join pairs take the greater time, aggregates run over (group, time).
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
"""Milliseconds that share one value of `HiddenState.bucket`."""
ROW_COUNT: Final = "n"
"""The column of a grouping that counts its rows."""


# Nodes are stored in the catalog, and their bytes are the plan's fingerprint: tags and the order
# of fields stay for ever. A field that is added comes last and is left out while it has its default
# (`omit_defaults`), so plans that do not use it keep their fingerprint.
class NamedInput(msgspec.Struct, frozen=True, tag="Input"):
    """A named input (see the module's text), with the columns it has."""

    name: str
    columns: tuple[str, ...]


class FilterRows(msgspec.Struct, frozen=True, tag="Where"):
    """Updates for whose row the predicate is true."""

    input: Node
    predicate: str


class SelectColumns(msgspec.Struct, frozen=True, tag="Select"):
    """Computed columns; time and diff pass through."""

    input: Node
    columns: tuple[NamedExpression, ...]


class RowLifetimes(msgspec.Struct, frozen=True, tag=True):
    """Updates of rows that exist only for a while: each at the later of its own time and `begins`,
    and retracted at `ends`; none for a row that ends before it begins.

    `begins` and `ends` are columns of milliseconds, none of them NULL; empty: there is no such
    bound. Updates at `hi` or later are left out. `interval` is the step's.
    """

    input: Node
    interval: NamedInput
    begins: str
    ends: str


class WeighRows(msgspec.Struct, frozen=True, tag="Weigh"):
    """Diffs multiplied by an integer expression over the columns: ``-1``, or a count ``n``.

    Updates whose diff becomes 0 are left out.
    """

    input: Node
    factor: str


class PairRows(msgspec.Struct, frozen=True, tag="Pair"):
    """Inner join: every matching pair, at the greater time, with the product of the diffs.

    `equal` and `same` hold (left expression, right expression); `same` compares null-safe.
    Without any it is a cross product.
    """

    left: Node
    right: Node
    equal: tuple[tuple[str, str], ...]
    residual: str | None = None
    same: tuple[tuple[str, str], ...] = ()


class MatchState(msgspec.Struct, frozen=True, tag="Match"):
    """Plain join of `left` to a state: an outer, semi or anti join in one go, without deltas.

    `right` (and of kind ``full`` also `left`) is a state: rows of positive weight whose times
    carry no meaning. `kind`: ``left`` and ``full`` (as SQL: pairs, and rows without a match
    padded with NULL), ``semi`` and ``anti`` (rows of `left` with, without a match; its columns
    alone). Times are the left row's (0 for a padded right row); diffs are the product of both,
    those of a row without a partner its own.
    """

    left: Node
    right: Node
    kind: str
    equal: tuple[tuple[str, str], ...]
    residual: str | None = None
    same: tuple[tuple[str, str], ...] = ()


class ExpandRows(msgspec.Struct, frozen=True, tag="Expand"):
    """Every update once for each of the integers below `count`, which the new column `tag` (an
    int) holds behind the input's columns."""

    input: Node
    tag: str
    count: int


class GenerateRows(msgspec.Struct, frozen=True, tag="Generate"):
    """Every update once for each row that a generator (``explode(…)``) makes of it, whose `columns`
    stand behind the input's; with `outer` once, padded with NULL, where it makes none."""

    input: Node
    generator: str
    outer: bool
    columns: tuple[str, ...]


class UnionRows(msgspec.Struct, frozen=True, tag="Union"):
    """All updates of all inputs; columns by name.

    A column that is the bare expression ``NULL`` in an input takes its type from the first
    input, which has types for all.
    """

    inputs: tuple[Node, ...]


class AdditiveMeasure(msgspec.Struct, frozen=True):
    """One additive hidden column of an aggregate.

    ``count``: sum of diffs where `argument` is not NULL; ``sum``: sum of argument × diff, with
    NULLs left out; ``sum_bigint``: the same of a bigint, which may be summed in halves. `type`
    is the hidden column's Spark type, wide enough not to overflow where the query's own result
    does not.
    """

    name: str
    kind: str
    argument: str
    type: str


class ReduceGroups(msgspec.Struct, frozen=True, tag="Reduce"):
    """Contributions: per (keys, time) the sum of diffs as ``n``, and each measure.

    Output columns: keys, ``n``, measures, ``__time``, ``__diff`` (always 1).
    """

    input: Node
    keys: tuple[NamedExpression, ...]
    measures: tuple[AdditiveMeasure, ...]


class AccumulateTotals(msgspec.Struct, frozen=True, tag="Accumulate"):
    """Running totals: hidden rows before and after each touched (group, time).

    `contributions` are a `ReduceGroups`'s columns; `hidden` has keys, ``n`` and measures, one row a
    group at ``< lo``. At each touched (group, t) it emits the group's total before t with diff
    -1 and its total at t with diff +1, both at time t; a total with ``n = 0`` is not emitted,
    except for the global aggregate (no keys), whose one row exists also when it is empty, from
    the first hydration on. Groups compare null-safe.

    With `flips` (no measures) its columns are the keys alone: it emits +1 where a group comes
    (``n`` from 0 to more) and -1 where it goes, and nothing else.
    """

    contributions: Node
    hidden: Node
    keys: tuple[str, ...]
    measures: tuple[str, ...]
    flips: bool = False


class SparkCall(msgspec.Struct, frozen=True):
    """An aggregate as Spark itself evaluates it: ``max(x)``; `type` is the result's."""

    name: str
    text: str
    type: str


class RecomputeGroups(msgspec.Struct, frozen=True, tag="Recompute"):
    """Aggregates of touched groups computed afresh, for functions that no sum can keep.

    `old` are (a superset of) the touched groups' rows below `lo`, `changes` the updates since.
    At each (group, t) that `changes` touch it emits the aggregates over the group's rows before
    t with diff -1 (if there were any) and those up to t with diff +1 (if there are any); a row
    of weight w counts w times. Output columns: keys, then calls. Without keys the one group has
    a row also when it is empty, from the first hydration (``lo = 0``) on, as in `AccumulateTotals`;
    with `begins`, for an old state, from time 0 on where there is one (``lo > 0``). Groups compare
    null-safe.
    """

    old: Node
    changes: Node
    keys: tuple[str, ...]
    calls: tuple[SparkCall, ...]
    begins: bool = False


class WindowColumn(msgspec.Struct, frozen=True):
    """A window function over the rows of one partition at one time: its function, the order
    within the partition, and its frame."""

    name: str
    function: str
    order: tuple[str, ...]
    frame: str


class WindowLayer(msgspec.Struct, frozen=True):
    """Windows over rows that have windows themselves: what is made of those rows, and a column for
    each call over the partitions by `keys`."""

    columns: tuple[NamedExpression, ...]
    keys: tuple[str, ...]
    calls: tuple[WindowColumn, ...]


class RecomputeRows(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The rows of touched partitions with window functions over them, computed afresh.

    `old` are (a superset of) the touched partitions' rows below `lo`, `changes` the updates since.
    At each (partition, t) that `changes` touch it emits the partition's rows before t with
    negative diffs and those up to t with positive ones, each with its `calls`; a row of weight w
    is w rows. What stays the same occurs with both signs. Partitions compare null-safe.
    """

    old: Node
    changes: Node
    keys: tuple[str, ...]
    calls: tuple[WindowColumn, ...]
    above: tuple[WindowLayer, ...] = ()
    """Layers, each over the rows of the one before it; `keys` are among its own columns."""


class TopGate(msgspec.Struct, frozen=True, tag=True):
    """The updates of the input in groups that have a row in `switch`, or with `closes` in groups
    that have none. Without keys all rows are one group."""

    input: Node
    switch: Node
    keys: tuple[str, ...]
    closes: bool


class TopCovered(msgspec.Struct, frozen=True, tag=True):
    """The `changes` up to the edge of their group in an order (peers of it among them), and all
    changes of groups without a row in `edges`."""

    changes: Node
    edges: Node
    keys: tuple[str, ...]
    order: tuple[str, ...]


class TopShortage(msgspec.Struct, frozen=True, tag=True):
    """The keys of groups that have an edge and in which at some time fewer than `count` rows are
    left of the `candidates` and the `changes` since. Without keys a row with the one column
    ``short``, or none."""

    changes: Node
    candidates: Node
    edges: Node
    keys: tuple[str, ...]
    count: int


class TopCandidates(msgspec.Struct, frozen=True, tag=True):
    """The changes of groups' first rows and edges at the end of a step (`views.rule_top`).

    A group's new candidates are the old ones and the `changes`; of a group of which `shortage` has
    a row they are all of `rows`, as of before the step, and the changes. Where they are more than
    `most`, or after a shortage, the first `kept` of them stay (with the peers of the last), and the
    last of those is the edge if others were left out. Emits how the candidates of groups with
    changes differ from those before, and, with true in the column `mark`, how the edges do.
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
    """Sums the diffs of equal (row, time) and drops zeros; rows compare null-safe."""

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
    """Return the columns that a node makes, without time and diff."""
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
    """Return the nodes that a part of a limit reads."""
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
    """Yield the inputs of a tree, as often as they are named."""
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
    """State of import `target` that a step needs: the rows whose key columns match.

    `key` are columns of the target (its own names). `origins` say where key values come from:
    each is (input name, columns): ``d2`` for the delta of import 2, ``s1`` for rows of import 1
    that an earlier lookup of this plan returned, ``r0`` for the output of stratum 0; an empty
    column name there stands for NULL. An empty `key` asks for the whole state; with origins only
    where any of these has a row: a small side of a join without equality seldom changes. A lookup
    returns at least what Spark would match, NULL matching NULL.
    """

    target: str
    """``s{n}`` or ``h{k}``: the input that it fills."""
    key: tuple[str, ...]
    origins: tuple[tuple[str, tuple[str, ...]], ...]
    nulls: bool = True
    """True if NULL must match NULL; else key values with a NULL may be passed over."""
    number: int = -1
    """Number of its own in the plan. A lookup stands in several strata if its origins get rows
    anew."""
    fills: tuple[tuple[int, ...], ...] = ()
    """Lookups whose rows each origin means, by number; none: all rows of the input. Rows that one
    term of a join finds must not lead another further."""


class PlanStratum(msgspec.Struct, frozen=True, omit_defaults=True):
    """One Spark run: its lookups, in order, then its node; the output is ``r{index}``."""

    lookups: tuple[StateLookup, ...]
    node: Node
    inputs: tuple[str, ...]
    """Names of all inputs the node reads."""
    usual: tuple[str, ...] = ()
    """Inputs of which it needs rows while no stratum that seldom makes a row has made one; only in
    a plan that has such strata."""
    seldom: bool = False
    """True if it seldom makes a row. A run may be optimistic: it counts as if this made none, and
    the step is void where the answer tells of one (`DeltaPlan`)."""
    ranges: tuple[ComparedRange, ...] = ()
    """Limits of what lookups without a key read."""


def missed_later(
    strata: Sequence[PlanStratum], first: int, last: int, *, optimistic: bool = False
) -> bool:
    """Return whether later strata read an output that a run of strata `first` to `last` does not
    hand out: it hands out the last one's alone. With `optimistic`, strata that seldom make a row do
    not count."""
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
    """Durable hidden state of one grouping: schema and its key columns.

    A temporal filter's has a column `due`, the time when a row comes due in milliseconds, and a
    column `bucket`, that time divided by `DUE_BUCKET_MS`.
    """

    schema: TableSchema
    keys: tuple[str, ...]
    due: str = ""
    bucket: str = ""


class EagerSums(msgspec.Struct, frozen=True):
    """Sums of an import that are taken below a join, by its key (`views.rule_eager`)."""

    input_index: int = msgspec.field(name="source")
    columns: tuple[str, ...]
    """Key columns, by the table's own names."""
    rows_for_each: int
    """About how many rows of it there were for each row that they are joined to, when the view was
    made; 0 if unknown."""


class DeltaColumns(msgspec.Struct, frozen=True):
    """Place of one delta in the table of all deltas (`DeltaPlan`)."""

    names: tuple[str, ...]
    """Its columns there, in the order of `schema`."""
    schema: TableSchema
    bit: int
    """Rows whose ``__to`` has this bit belong to it; 0: all rows do, and there is no ``__to``."""


class DeltaPlan(msgspec.Struct, frozen=True):
    """All that a dataflow needs to maintain one view.

    Without `hidden` the last stratum's output has the view's columns under their own names.
    With it, one table carries all deltas: the view's columns prefixed ``o_``, those of hidden
    state k prefixed ``h{k}_``, and ``__to`` (int), whose bit 0 says that the row belongs to the
    view's delta, bit k + 1 to that of hidden state k; columns of what a row does not belong to
    carry no meaning. The bit above all of these tells of a row of a stratum that seldom makes one.
    With ``mode == "opaque"`` there are no strata: the view is `sql`, recomputed at each time and
    subtracted.
    """

    inputs: tuple[str, ...] = msgspec.field(name="sources")
    """Names of the imports, as `sql` writes them."""
    input_schemas: tuple[TableSchema, ...] = msgspec.field(name="source_schemas")
    output: TableSchema
    sql: str
    """The view's own text: hydration of opaque views, recomputation, the oracle."""
    mode: str
    """The weakest of its nodes: ``incremental``, ``keyed`` (touched groups are computed
    afresh), ``opaque``."""
    reason: str
    """Reason why it is not incremental, or what it reads whole at times although it is."""
    strata: tuple[PlanStratum, ...] = ()
    hidden: tuple[HiddenState, ...] = ()
    conf: tuple[tuple[str, str], ...] = ()
    """Spark settings that belong to the view (ANSI mode, time zone)."""
    fingerprint: str = ""
    policy: str = AUTO
    """The refresh policy (`views.fingerprint`)."""
    tree: str = ""
    """The relational plan for people, a node a line."""
    nearby: tuple[NearbyRows, ...] = ()
    """Rows of each input ``n{k}``."""
    covered: tuple[CoveredChanges, ...] = ()
    """Changes of each input ``k{n}``."""
    eager: tuple[EagerSums, ...] = ()
    """Sums below a join; a view that is compiled again goes on with them."""
    eager_open: bool = False
    """True if these sums could not be chosen: a table had no rows when the view was made."""

    @property
    def temporal(self) -> bool:
        """Return whether contents change as time passes, without a change of an import."""
        return any(state.due for state in self.hidden)

    @property
    def optimistic(self) -> bool:
        """Return whether steps first count on some strata to make no rows."""
        return any(stratum.seldom for stratum in self.strata)

    @property
    def keeps_state(self) -> bool:
        """Return whether a step reads anything but the changes."""
        return bool(self.hidden) or any(stratum.lookups for stratum in self.strata)

    @property
    def deltas(self) -> tuple[DeltaColumns, ...]:
        """Return the deltas that the last stratum makes: the view's, then each hidden state's."""
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
        """Return the bit of ``__to`` that rows of strata which seldom make one have."""
        return 2 << len(self.hidden)

    @property
    def made_columns(self) -> tuple[TableColumn, ...]:
        """Return the columns that the last stratum makes, but for time and diff."""
        columns = [
            TableColumn(name, column.type)
            for delta in self.deltas
            for name, column in zip(delta.names, delta.schema.columns, strict=True)
        ]
        return tuple([*columns, TableColumn(TO, "int")] if self.hidden else columns)

    def input_schema(self, name: str) -> TableSchema | None:
        """Return the schema of an input other than a stratum's output; None if there is no such
        input."""
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
        """Return the inputs of a run from scratch, each with the import whose contents it is given.

        Without earlier rows all changes are up to the edges.
        """
        found = {InputKind.CHANGES.text(i): i for i in range(len(self.input_schemas))}
        for number, covered in enumerate(self.covered):
            found[InputKind.COVERED.text(number)] = covered.input_index
        return found

    def input_names(self) -> list[str]:
        """Return the names of all inputs but strata's outputs."""
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
    """Return the columns of the input `name` that the strata read."""
    read = {
        column
        for stratum in strata
        for found in inputs_below(stratum.node)
        if found.name == name
        for column in found.columns
    }
    return TableSchema(columns_kept(schema, read))


def columns_kept(schema: TableSchema, read: Set[str]) -> tuple[TableColumn, ...]:
    """Return a schema's columns that are read; of rows that are only counted, the first.

    >>> types = {"id": "int", "at": "date", "x": "int"}
    >>> schema = TableSchema(tuple(TableColumn(*each) for each in types.items()))
    >>> [each.name for each in columns_kept(schema, {"x", "at"})]
    ['at', 'x']
    >>> [each.name for each in columns_kept(schema, set())]
    ['id']
    """
    return tuple(each for each in schema.columns if each.name in read) or schema.columns[:1]


def aggregate_below_unions(plan: DeltaPlan) -> DeltaPlan:
    """Return the plan with every union that retracts rows summed up before anything is computed of
    its rows: no expression then raises for a row that is gone in the end.

    Only a view computed from scratch needs it, and only if it raises: a step that raises is
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
            # A weighed input may retract rows of the others.
            takes_back = any(isinstance(each, WeighRows) for each in node.inputs)
            made[node] = ConsolidateRows(whole) if takes_back else whole
        else:
            made[node] = msgspec.structs.replace(node, **below) if below else node
    return made[node]
