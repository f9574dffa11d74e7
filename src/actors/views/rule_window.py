"""Window functions: the rows of touched partitions are computed afresh.

Theory of operation. A change of one row may change what a window function says of every row of its
partition. So the partition's rows are read, and the functions computed over them, before and after
each time at which the partition changes; what stays the same cancels. Old rows come from the
input's state where the partition's keys can be sought there; else from a state that is kept for it
(`rule_kept`). Mode *keyed*.

Values must have the same bits whenever they are computed. Where a window's order leaves rows equal
and a function depends on which comes first, the order of all columns decides. Without an order of
its own a window is therefore computed over its rows in that order.

Where a change reaches only so far in its partition (``lag``, a frame of some rows or of an
interval), or only the first rows are wanted (``row_number() <= 10``), what is read of a table's
partition is thinned out before Spark sorts it (`window_reach`, `plan.nearby`).
"""

from __future__ import annotations

from actors.plan.delta import Consolidate, Node, RecomputeRows, Where, WindowColumn
from actors.plan.nearby import NearbyRows
from actors.plan.relational import WindowCall, WindowFunctions
from actors.views.lookups import Wanted
from actors.views.operators import Context, Ids, Operator, Origins, both, narrowed, reading
from actors.views.rule_kept import sought


class WindowOperator(Operator):
    """Window functions over the rows of one partition."""

    def __init__(
        self,
        context: Context,
        plan: WindowFunctions,
        below: Operator,
        near: NearbyRows | None = None,
    ) -> None:
        """`near`: which rows of a partition matter where others change; None: all may."""
        super().__init__(context, (*below.columns, *(call.name for call in plan.calls)))
        self.near = near
        self._below = below = sought(context, below, dict(plan.types), plan.keys)
        self._keys = plan.keys
        self._calls = tuple(_column(plan, call, below.columns) for call in plan.calls)

    def make_delta(self) -> Node:
        """The rows of touched partitions before and after each touched time."""
        self._below.delta(shared=True)
        origins = self._below.keys_of_delta(self._keys)
        after = self._below.delta_asked()
        # Only now, for asking may have cut the delta.
        changes = self._below.delta()
        self._seek(self._keys, origins, after, nulls=True)
        old = self._below.old()
        if self.near is not None:
            old = reading(old, f"s{self.near.source}", self.context.near(self.near))
        return Consolidate(RecomputeRows(old, changes, self._keys, self._calls))

    def old(self) -> Node:
        """The old rows of the partitions that were sought."""
        self.delta()
        rows = self._below.old()
        return Consolidate(RecomputeRows(Where(rows, "1 = 0"), rows, self._keys, self._calls))

    def _made(self, ids: Ids) -> bool:
        return any(id_ and id_ not in self._below.columns for id_ in ids)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Of keys the changed rows'; of other columns of the input also the old rows'."""
        if self._made(ids):
            return None
        changed = self._below.delta_origins(ids)
        if all(not id_ or id_ in self._keys for id_ in ids):
            return changed
        return both(changed, self.old_origins(ids))

    def old_origins(self, ids: Ids) -> Origins | None:
        """Of columns of the input: the old rows'."""
        if self._made(ids):
            return None
        return self._below.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """The old rows of the partitions with these keys."""
        self.delta()
        return self._seek(ids, origins, after, nulls=nulls)

    def _seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        kept = [place for place, id_ in enumerate(ids) if id_ in self._keys]
        picked, narrow = narrowed(ids, origins, kept)
        return self._below.seek(picked, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Any of the keys, where the rows can be sought by it."""
        return bool(ids) and all(id_ in self._keys for id_ in ids) and self._below.seekable(ids)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """The input's."""
        return self._below.unique_ids()

    def kind(self, id_: str) -> str | None:
        """The input's, of its columns."""
        return self._below.kind(id_) if id_ in self._below.columns else None


def _column(plan: WindowFunctions, call: WindowCall, columns: Ids) -> WindowColumn:
    """The call with an order that leaves nothing open where that matters."""
    whole = tuple(id_ for id_ in columns if id_ not in plan.keys and id_ not in plan.order)
    if plan.order:
        order = (*plan.order, *whole) if call.by_row else plan.order
        return WindowColumn(call.name, call.function, order, call.frame)
    # Spark says the frame of a window without an order, too: mostly the whole partition.
    return WindowColumn(call.name, call.function, whole, call.frame)
