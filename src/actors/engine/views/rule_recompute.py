"""Groupings by aggregates that are not sums: touched groups are recomputed.

Sums of floats and similar aggregates are computed by Spark over the rows of a group, before and
after each time at which the group changes. The rows come from the input's old state if it can be
looked up by the keys, else from a state that is stored for this purpose (`rule_stored_rows`). The
cost is proportional to the size of the touched groups: mode *keyed*. Without keys, all rows are
read whenever one of them changes.
"""

from __future__ import annotations

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import DerivationContext, Ids, Origins, ViewOperator, narrowed
from actors.engine.views.rule_linear import ProjectOperator
from actors.engine.views.rule_stored_rows import make_searchable
from actors.model.plan.delta import FilterRows, Node, RecomputeGroups, SparkCall
from actors.model.plan.relational import SPREADS, AggregateCall, AggregationNode, NamedExpression

_FOLDED = ("float", "double", "string")


class RecomputeOperator(ViewOperator):
    """A grouping that recomputes touched groups."""

    def __init__(
        self, context: DerivationContext, plan: AggregationNode, below: ViewOperator
    ) -> None:
        super().__init__(
            context, (*(key.name for key in plan.keys), *(call.name for call in plan.calls))
        )
        self._keys = tuple(key.name for key in plan.keys)
        self._kinds = {key.name: key.type for key in plan.keys}
        self._calls = tuple(_call(call, i) for i, call in enumerate(plan.calls))
        arguments = [
            NamedExpression(f"__a{i}", call.argument)
            for i, call in enumerate(plan.calls)
            if call.argument is not None
        ]
        keys = [NamedExpression(key.name, key.expression) for key in plan.keys]
        kinds = self._kinds | {
            f"__a{i}": call.argument_type
            for i, call in enumerate(plan.calls)
            if call.argument is not None
        }
        rows = ProjectOperator(context, (*keys, *arguments), below)
        # The rows are aggregated but not emitted, so either zero will do.
        self._rows = make_searchable(context, rows, kinds, self._keys, exact_floats=False)

    def make_delta(self) -> Node:
        """Return the aggregates before and after each touched (group, time)."""
        self._rows.delta(shared=True)
        origins = self._rows.keys_of_delta(self._keys)
        after = self._rows.delta_lookups()
        # Ordered after the lookups, which may have cut the delta.
        changes = self._rows.delta()
        self._seek(self._keys, origins, after, nulls=True)
        return RecomputeGroups(self._rows.old(), changes, self._keys, self._calls)

    def old(self) -> Node:
        """Return the aggregates over the old rows of the groups that were looked up."""
        self.delta()
        rows = self._rows.old()
        # There are no old rows, so nothing is retracted, not even the empty row of a group without
        # keys.
        return RecomputeGroups(
            FilterRows(rows, "1 = 0"), rows, self._keys, self._calls, begins=True
        )

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of keys in the changed rows."""
        if not all(not id_ or id_ in self._keys for id_ in ids):
            return None
        return self._rows.delta_origins(ids)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the origins of keys in the old rows."""
        if not all(not id_ or id_ in self._keys for id_ in ids):
            return None
        return self._rows.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the old rows of the groups with these keys."""
        self.delta()
        return self._seek(ids, origins, after, nulls=nulls)

    def _seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        kept = [i for i, id_ in enumerate(ids) if id_ in self._keys]
        picked, narrow = narrowed(ids, origins, kept)
        return self._rows.seek(picked, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all columns are keys by which the rows can be looked up."""
        return bool(ids) and all(id_ in self._keys for id_ in ids) and self._rows.seekable(ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return all columns if `ids` contain the keys."""
        return ids | frozenset(self.columns) if frozenset(self._keys) <= ids else ids

    def kind(self, id_: str) -> str | None:
        """Return a key's type."""
        return self._kinds.get(id_)

    def is_one_row(self) -> bool:
        """Return whether there are no keys, and therefore a single group."""
        return not self._keys

    def is_constant(self) -> bool:
        """Return whether the input never changes."""
        return self._rows.is_constant()

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the keys: each group occurs once."""
        return (frozenset(self._keys),)


def _call(call: AggregateCall, index: int) -> SparkCall:
    argument = f"__a{index}"
    if call.argument is None:
        return SparkCall(call.name, "count(*)", call.type)
    if call.formula is not None:
        # The value of the formula depends only on the bag (`catalyst.aggregates`).
        fields = [f"{argument}.c{place}" for place in range(len(call.formula.arguments))]
        places = fields if len(fields) > 1 else [argument]
        return SparkCall(call.name, call.formula.chosen.format(*places), call.type)
    distinct = "DISTINCT " if call.distinct else ""
    kind = call.argument_type.lower()
    # Spark computes variances of any type in floats, so they also depend on the order of rows.
    spread = call.function in SPREADS
    # Aggregates of floats depend on the order of rows, so they are folded in a fixed order.
    if spread or (call.function in ("sum", "avg") and kind in _FOLDED):
        return SparkCall(call.name, _folded(call, f"{distinct}{argument}"), call.type)
    return SparkCall(call.name, f"{call.function}({distinct}{argument})", call.type)


def _folded(call: AggregateCall, argument: str) -> str:
    """Return a sum of floats in the order of their values, which is equal for equal bags."""
    gathered = "collect_set" if argument.startswith("DISTINCT ") else "collect_list"
    name = argument.removeprefix("DISTINCT ")
    # The retracted value must have the same bits as the inserted one. Sorting makes it a function
    # of the bag.
    values = f"array_sort({gathered}(CAST({name} AS DOUBLE)))"
    total = f"aggregate({values}, 0D, (s, x) -> s + x)"
    count = f"count({argument})"
    if call.function == "sum":
        result = total
    elif call.function == "avg":
        result = f"{total} / {count}"
    else:
        mean = f"({total} / {count})"
        squares = (
            f"aggregate({values}, named_struct('m', {mean}, 'q', 0D), "
            "(s, x) -> named_struct('m', s.m, 'q', s.q + (x - s.m) * (x - s.m)), s -> s.q)"
        )
        sample = call.function.endswith("samp")
        divided = f"{squares} / nullif({count}{' - 1' if sample else ''}, 0)"
        result = f"sqrt({divided})" if call.function.startswith("stddev") else divided
    return f"CASE WHEN {count} > 0 THEN CAST({result} AS {call.type}) END"
