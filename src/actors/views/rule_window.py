"""Window functions: the rows of touched partitions are computed afresh.

A change of one row may change a window function's value in every row of its partition. So the
partition's rows are read, and the functions computed over them, before and after each time at which
the partition changes; equal rows cancel. Old rows come from the input's state if that can be looked
up by the partition's keys, else from a state kept for it (`rule_kept`). Mode *keyed*.

If a change reaches only so far in its partition (``lag``, a frame of some rows or of an interval),
or only the first rows are read (``row_number() <= 10``), fewer rows of a table's partition are read
before Spark sorts it (`window_reach`, `plan.nearby`).
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.delta import (
    ConsolidateRows,
    FilterRows,
    Node,
    RecomputeRows,
    WindowColumn,
    WindowLayer,
)
from actors.plan.nearby import NearbyRows
from actors.plan.relational import NamedExpression, Plan, ProjectNode, WindowCall, WindowFunctions
from actors.views.lookups import Wanted
from actors.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    ViewOperator,
    merge_origins,
    narrowed,
    replace_input,
)
from actors.views.rule_kept import make_searchable


class WindowOperator(ViewOperator):
    """Window functions over the rows of one partition."""

    def __init__(
        self,
        context: DerivationContext,
        plan: WindowFunctions,
        below: ViewOperator,
        near: NearbyRows | None = None,
        above: Sequence[WindowFunctions] = (),
    ) -> None:
        """`near`: rows of a partition that matter to changes of others; None: all. `above`: the
        other windows of a `window_chain`."""
        # Looked up in the input's state if its keys allow, else in a state that is kept for it.
        below = make_searchable(context, below, dict(plan.types), plan.keys)
        columns = (*below.columns, *(call.name for call in plan.calls))
        layers = []
        for each in above:
            made = _between(each.input) or tuple(NamedExpression(name, name) for name in columns)
            names = tuple(column.name for column in made)
            calls = tuple(_column(each, call, names) for call in each.calls)
            layers.append(WindowLayer(made, each.keys, calls))
            columns = (*names, *(call.name for call in calls))
        super().__init__(context, columns)
        self.near = near
        self._below = below
        self._keys = plan.keys
        self._calls = tuple(_column(plan, call, below.columns) for call in plan.calls)
        self._above = tuple(layers)

    def make_delta(self) -> Node:
        """Return the rows of touched partitions before and after each touched time."""
        self._below.delta(shared=True)
        origins = self._below.keys_of_delta(self._keys)
        after = self._below.delta_lookups()
        # Ordered after the lookups, which may have cut the delta.
        changes = self._below.delta()
        self._seek(self._keys, origins, after, nulls=True)
        old = self._below.old()
        if self.near is not None:
            # Reads only rows near changes, before Spark sorts the partition.
            old = replace_input(old, f"s{self.near.source}", self.context.near(self.near))
        # Rows whose values did not change cancel.
        return ConsolidateRows(RecomputeRows(old, changes, self._keys, self._calls, self._above))

    def old(self) -> Node:
        """Return the old rows of the partitions that were looked up."""
        self.delta()
        rows = self._below.old()
        nothing = FilterRows(rows, "1 = 0")
        return ConsolidateRows(RecomputeRows(nothing, rows, self._keys, self._calls, self._above))

    def _made(self, ids: Ids) -> bool:
        return any(id_ and id_ not in self._passed for id_ in ids)

    @property
    def _passed(self) -> frozenset[str]:
        """Return the columns of the input that are passed on."""
        return frozenset(self._below.columns) & frozenset(self.columns)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the input's columns: of keys in the changed rows, of others in the
        old rows, too."""
        if self._made(ids):
            return None
        changed = self._below.delta_origins(ids)
        if all(not id_ or id_ in self._keys for id_ in ids):
            return changed
        return merge_origins(changed, self.old_origins(ids))

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the origins of the input's columns in its old rows."""
        if self._made(ids):
            return None
        return self._below.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the old rows of the partitions with these keys."""
        self.delta()
        return self._seek(ids, origins, after, nulls=nulls)

    def _seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        kept = [place for place, id_ in enumerate(ids) if id_ in self._keys]
        picked, narrow = narrowed(ids, origins, kept)
        return self._below.seek(picked, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all columns are keys by which the input can be looked up."""
        return bool(ids) and all(id_ in self._keys for id_ in ids) and self._below.seekable(ids)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the input's keys all of whose columns are passed on."""
        return tuple(ids for ids in self._below.unique_ids() if ids <= self._passed)

    def kind(self, id_: str) -> str | None:
        """Return the input's type; None for the functions' columns."""
        return self._below.kind(id_) if id_ in self._passed else None


def window_chain(plan: WindowFunctions) -> tuple[WindowFunctions, ...]:
    """Return the windows that one run computes, the lowest first: each reads the rows of the one
    before it, or a projection of them, and its partitions are parts of that one's partitions.

    >>> from actors.plan.relational import ScanNode
    >>> rows = ScanNode(0, (("i0_k", "k"), ("i0_x", "x")))
    >>> first = WindowFunctions(rows, ("i0_k",), (), (), (("i0_k", "int"), ("i0_x", "int")))
    >>> computed = NamedExpression("i0_k", "i0_k"), NamedExpression("c1", "i0_x % 7")
    >>> made = ProjectNode(first, computed)
    >>> types = (("i0_k", "int"), ("c1", "int"))
    >>> [each.keys for each in window_chain(WindowFunctions(made, ("i0_k", "c1"), (), (), types))]
    [('i0_k',), ('i0_k', 'c1')]
    >>> [each.keys for each in window_chain(WindowFunctions(made, ("c1",), (), (), types))]
    [('c1',)]
    """
    chain: tuple[WindowFunctions, ...] = (plan,)
    while True:
        below = chain[0].input
        made = _between(below)
        inner = below.input if isinstance(below, ProjectNode) else below
        if not isinstance(inner, WindowFunctions) or not set(inner.keys) <= set(chain[0].keys):
            return chain
        own = {*dict(inner.types), *(call.name for call in inner.calls)}
        # A projection that reuses a name for another expression would hide the column below.
        if any(each.name in own and each.name != each.expression for each in made):
            return chain
        chain = (inner, *chain)


def _between(below: Plan) -> tuple[NamedExpression, ...]:
    """Return the projection between a window and the one below; empty if there is none."""
    return below.columns if isinstance(below, ProjectNode) else ()


def _column(plan: WindowFunctions, call: WindowCall, columns: Ids) -> WindowColumn:
    """Return the call with an order that leaves no rows equal if the function depends on it."""
    whole = tuple(id_ for id_ in columns if id_ not in plan.keys and id_ not in plan.order)
    if plan.order:
        # A function of the contents alone: recomputed values must have the same bits as retracted
        # ones.
        order = (*plan.order, *whole) if call.by_row else plan.order
        return WindowColumn(call.name, call.function, order, call.frame)
    # Spark gives a frame for a window without an order, too: mostly the whole partition.
    return WindowColumn(call.name, call.function, whole, call.frame)
