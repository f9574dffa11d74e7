"""Groupings by sums: GROUP BY with additive aggregates, DISTINCT, and the join of the parts of a
grouping.

For each group the hidden state holds ``n`` (its rows) and a sum per measure. A `ReduceGroups` sums
the delta per (group, time). An `AccumulateTotals` adds that to the state of the touched groups, and
emits each total before and after. The aggregates are expressions over the totals, so a retraction
has the same bits as the insertion before it. DISTINCT is a grouping by all columns without
measures, which emits only groups that appear or disappear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from actors.engine.views.lookups import Wanted
from actors.engine.views.measures import FinishedMeasures, derive_sums
from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    UnsupportedConstruct,
    ViewOperator,
    is_name,
    narrowed,
    select,
)
from actors.engine.views.rule_join import JoinOperator
from actors.engine.views.rule_linear import ProjectOperator
from actors.model.plan.delta import (
    AccumulateTotals,
    AdditiveMeasure,
    FilterRows,
    HiddenState,
    NamedInput,
    Node,
    ReduceGroups,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import (
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    GroupKey,
    NamedExpression,
)
from actors.model.plan.schema import TableColumn, TableSchema

ROWS: Final = "n"
# Types that Spark cannot group by.
_UNGROUPED: Final = ("map<", "variant", "void", "interval")


def join_groups(
    context: DerivationContext,
    keys: Sequence[GroupKey],
    made: Sequence[str],
    parts: Sequence[ViewOperator],
) -> ViewOperator:
    """Return the groups with the columns `made` of all parts, in this order.

    If the aggregates of a grouping are maintained in different ways, it consists of parts that are
    joined by their keys. Each part has a row for each group.

        SELECT k, sum(x), max(y) FROM t GROUP BY k

        =   SELECT p.k, p.x, q.y FROM (SELECT k, sum(x) AS x FROM t GROUP BY k) p
            JOIN (SELECT k, max(y) AS y FROM t GROUP BY k) q ON p.k <=> q.k
    """
    if len(parts) == 1:
        return parts[0]
    names = [key.name for key in keys]
    first, *others = parts
    inputs, equal = [first], list[ColumnEquality]()
    for part in others:
        prefix = context.prefix()
        columns = [NamedExpression(f"{prefix}{name}", name) for name in names]
        columns += [NamedExpression(name, name) for name in part.columns if name not in names]
        # Null-safe: each part also has a row for the group by NULL.
        equal += [ColumnEquality(name, f"{prefix}{name}", True) for name in names]
        inputs.append(ProjectOperator(context, tuple(columns), part))
    whole = JoinOperator(context, tuple(inputs), tuple(equal), ())
    return ProjectOperator(
        context, tuple(NamedExpression(name, name) for name in (*names, *made)), whole
    )


class GroupOperator(ViewOperator):
    """A grouping by sums, or a DISTINCT (`flips`)."""

    def __init__(
        self,
        context: DerivationContext,
        below: ViewOperator,
        keys: tuple[GroupKey, ...],
        finished: FinishedMeasures | None,
        by: Ids | None = None,
    ) -> None:
        """`by`: the keys by which touched groups are looked up; None for all keys."""
        made = () if finished is None else tuple(c.name for c in finished.columns)
        super().__init__(context, (*(key.name for key in keys), *made))
        self._below = below
        self._keys = keys
        self._names = tuple(key.name for key in keys)
        self._finished: tuple[NamedExpression, ...] = () if finished is None else finished.columns
        self._measures: tuple[AdditiveMeasure, ...] = () if finished is None else finished.measures
        self._flips = finished is None
        self._by = by
        self._schema = _schema(keys, self._measures)
        # Name of the run that computes the contributions; None while they need no run of their own.
        self._cut_keys: str | None = None
        # The result of `totals`, once it is known.
        self._totals: AccumulateTotals | None = None
        self.number = -1
        """The number of its hidden state; -1 until `totals` registers the state."""

    # -- the delta --------------------------------------------------------------------------------

    def make_delta(self) -> Node:
        """Return the finished rows before and after; for a DISTINCT, the rows that appear or
        disappear."""
        totals = self.totals()
        if self._flips:
            state = NamedInput(InputKind.HIDDEN.text(self.number), self._schema.names)
            # A second Accumulate over the same contributions, since the first one updates the
            # state.
            return AccumulateTotals(totals.contributions, state, self._names, (), flips=True)
        return self._finish(totals)

    def totals(self) -> AccumulateTotals:
        """Return the hidden rows before and after each touched (group, time), and register the
        state."""
        context = self.context
        if self._totals is not None:
            return self._totals
        below = self._below.delta()
        keys = tuple(NamedExpression(key.name, key.expression) for key in self._keys)
        contributions: Node = ReduceGroups(below, keys, self._measures)
        known = self._touched()
        names = self._schema.names
        # A computed key is not known before Spark runs, so a run of its own first makes the
        # contributions.
        if known is None:
            contributions = context.cut(contributions, names)
            self._cut_keys = contributions.name
            known = self._names, ((contributions.name, self._names),)
        measures = tuple(measure.name for measure in self._measures)
        self.number = len(context.hidden)
        state = NamedInput(InputKind.HIDDEN.text(self.number), names)
        self._totals = made = AccumulateTotals(contributions, state, self._names, measures)
        context.hidden.append((HiddenState(self._schema, self._names), made))
        # The output of a run does not wait for lookups.
        after = frozenset() if self._cut_keys else self._below.delta_lookups()
        key, origins = known
        context.ask(
            InputKind.HIDDEN.text(self.number), key, origins if key else (), after, nulls=True
        )
        return made

    def _touched(self) -> tuple[Ids, Origins] | None:
        """Return key columns and the inputs that hold their values; None if these must be
        computed."""
        if not self._keys:
            return (), ()
        if self._by is not None:
            ids = self._below_ids(self._by)
            assert ids is not None, "given by name"
            return self._by, self._below.keys_of_delta(ids)
        ids = self._below_ids(self._names)
        if ids is not None:
            found = self._below.delta_origins(ids)
            if found is not None:
                return self._names, found
        if ids is None:
            return None
        for unique in self._below.unique_ids():
            # Keys that contain the PRIMARY KEY of their table suffice: the lookup returns few
            # additional rows.
            if unique <= set(ids) <= self._below.determined_by(unique):
                picked = [key for key in self._keys if key.expression in unique]
                found = self._below.delta_origins(tuple(key.expression for key in picked))
                if found is not None:
                    return tuple(key.name for key in picked), found
        return None

    def _below_ids(self, wanted: Ids) -> Ids | None:
        expressions = {key.name: key.expression for key in self._keys}
        found = tuple(expressions.get(id_, id_) if id_ else "" for id_ in wanted)
        columns = self._below.columns
        known = all(not id_ or (is_name(id_) and id_ in columns) for id_ in found)
        return found if known else None

    def _finish(self, rows: Node) -> Node:
        passed = [(name, name) for name in self._names]
        made = [(column.name, column.expression) for column in self._finished]
        return select(rows, [*passed, *made])

    # -- the state --------------------------------------------------------------------------------

    def old(self) -> Node:
        """Return the finished rows of the groups that were looked up."""
        self.delta()
        state: Node = NamedInput(InputKind.HIDDEN.text(self.number), self._schema.names)
        if self._names:
            # The group without keys always has a row; others exist only while they have rows.
            state = FilterRows(state, f"{ROWS} <> 0")
        return self._finish(state)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of keys: those of the touched groups, in the input or the
        contributions."""
        if not all(not id_ or id_ in self._names for id_ in ids):
            return None
        if self._cut_keys is not None:
            return ((self._cut_keys, ids),)
        below = self._below_ids(ids)
        return None if below is None else self._below.delta_origins(below)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the hidden rows as the origins of keys."""
        if not all(not id_ or id_ in self._names for id_ in ids):
            return None
        return ((InputKind.HIDDEN.text(self.number), ids),)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up hidden rows by those of the columns that are keys."""
        self.delta()
        at = {id_: i for i, id_ in reversed(list(enumerate(ids))) if id_ in self._names}
        key = tuple(name for name in self._names if name in at)
        _, narrow = narrowed(ids, origins, [at[name] for name in key])
        target = InputKind.HIDDEN.text(self.number)
        return self.context.ask(target, key, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all columns are keys."""
        return bool(ids) and all(id_ in self._names for id_ in ids)

    @property
    def hidden_names(self) -> tuple[str, ...]:
        """Return the columns of the hidden state."""
        return self._schema.names

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return all columns if `ids` contain the keys."""
        whole = frozenset(self._names) <= ids
        return ids | frozenset(self.columns) if whole else ids

    def kind(self, id_: str) -> str | None:
        """Return a key's type."""
        return next((key.type for key in self._keys if key.name == id_), None)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the keys: each group occurs once."""
        return (frozenset(self._names),) if self._names else ()

    def is_one_row(self) -> bool:
        """Return whether there are no keys, and therefore a single group."""
        return not self._names

    def is_constant(self) -> bool:
        """Return whether the input never changes."""
        return self._below.is_constant()


def aggregate(
    context: DerivationContext, plan: AggregationNode, below: ViewOperator
) -> GroupOperator:
    """Return the operator of a GROUP BY with additive aggregates. Raises `UnsupportedConstruct`."""
    return GroupOperator(context, below, plan.keys, derive_sums(plan))


def distinct(context: DerivationContext, plan: DistinctNode, below: ViewOperator) -> GroupOperator:
    """Return the operator of a DISTINCT. Raises `UnsupportedConstruct`."""
    return GroupOperator(context, below, plan.columns, None)


def _schema(keys: tuple[GroupKey, ...], measures: tuple[AdditiveMeasure, ...]) -> TableSchema:
    for key in keys:
        if key.type.lower().startswith(_UNGROUPED):
            raise UnsupportedConstruct(f"a group by {key.expression}, which has type {key.type}")
    columns = [TableColumn(key.name, key.type, key.nullable) for key in keys]
    columns.append(TableColumn(ROWS, "bigint", False))
    columns += [TableColumn(measure.name, measure.type, False) for measure in measures]
    return TableSchema(tuple(columns))
