"""Window functions: the rows of touched partitions are recomputed.

A change of one row may change the value of a window function in every row of its partition. So the
rows of the partition are read, and the functions computed over them, before and after each time at
which the partition changes; equal rows cancel. Old rows come from the input's state if it can be
looked up by the keys of the partition, else from a state that is stored for this purpose
(`rule_stored_rows`). Mode *keyed*.

If a change has a limited reach in its partition (``lag``, a frame of some rows or of an interval),
or if only the first rows are read (``row_number() <= 10``), fewer rows of a table's partition are
read before Spark sorts it (`plan.nearby`). The reach is taken from Catalyst's own text
(`catalyst.window_calls`): the bounds of a frame, or the offset of ``lag``. A filter above may keep
only the first ranks. This applies only to columns of a table whose types have the same equality and
order in Arrow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    ViewOperator,
    merge_origins,
    narrowed,
    replace_input,
)
from actors.engine.views.rule_stored_rows import make_searchable
from actors.model.plan.delta import (
    ConsolidateRows,
    FilterRows,
    Node,
    RecomputeRows,
    WindowColumn,
    WindowLayer,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.nearby import SIZE_MAX, NearbyRows, Reach, SortColumn
from actors.model.plan.relational import (
    NamedExpression,
    Plan,
    ProjectNode,
    WindowCall,
    WindowFunctions,
)

# -- reach of a change -----------------------------------------------------------------------------

SORT_TEXT: Final = re.compile(r"(\w+)(?: (ASC|DESC) NULLS (FIRST|LAST))?")
"""A sort order by a column. By default, Spark sorts ascending with NULLs first."""
_ORDER: Final = re.compile(r"(\w+) (ASC|DESC) NULLS (FIRST|LAST)")
PLAIN_TYPES: Final = re.compile(
    r"tinyint|smallint|int|bigint|decimal\(\d+,\d+\)|string|boolean|date|timestamp|timestamp_ntz"
)
"""Types whose values have the same equality and order in Spark and Arrow: no floats, no other
collations."""
_MEASURED: Final = ("tinyint", "smallint", "int", "bigint", "date", "timestamp", "timestamp_ntz")
"""Types between whose values there is a distance."""
_BEFORE: Final = "RANGE BETWEEN UNBOUNDED PRECEDING AND 1L PRECEDING"
_UPTO: Final = "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
_SESSION: Final = re.compile(
    r"named_struct\('start', timestamp_micros\(unix_micros\((\w+)\)\), 'end', "
    r"timestamp_micros\(unix_micros\(\(\1 \+ CAST\('(\d+) (\w+?)s?' AS interval\)\)\)\)\)"
)
_UNITS: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 25 * 3_600_000_000,  # The longest day of any calendar.
}


def ranks_wanted(predicate: str, calls: Sequence[WindowCall]) -> int:
    """Return the last rank of some window functions that a filter keeps; 0 if it may keep any rank.

    >>> ranks = (WindowCall("w0", "rank()", "", "int", False, "first"),)
    >>> ranks_wanted("(w0 < 4) AND (i0_x = 1)", ranks)
    3
    >>> ranks_wanted("(i0_x = 1 OR (w0 < 4))", ranks)
    0
    """
    for call in calls:
        if call.reach not in ("first", "distinct"):
            continue
        # Each conjunct is in its own parentheses.
        test = rf"\({call.name} (<=|<|=) (\d+)\)"
        found = re.match(rf"{test}(?: AND |$)", predicate) or re.search(rf" AND {test}$", predicate)
        if found:
            return int(found[2]) - (found[1] == "<")
    return 0


def near_changes(plan: WindowFunctions, below: ViewOperator, ranks: int) -> NearbyRows | None:
    """Return the rows of a partition that changes of other rows can affect. Return None if that may
    be all of them, or if the rows are not those of a table."""
    reach, size = _reach(plan.calls, ranks)
    order = [found for each in plan.order if (found := _ORDER.fullmatch(each))]
    if reach is None or len(order) < len(plan.order) or not plan.keys or not order:
        return None
    ids = tuple(found[1] for found in order)
    # Distance by value does not depend on which rows a filter drops; distance by count does.
    table = below.table_columns((*plan.keys, *ids), some=reach == "range")
    kinds = [(below.kind(id_) or "").lower() for id_ in (*plan.keys, *ids)]
    if table is None or not all(PLAIN_TYPES.fullmatch(kind) for kind in kinds):
        return None
    if reach == "range" and (len(ids) > 1 or kinds[-1] not in _MEASURED):
        return None
    input_index, names = table
    count = len(plan.keys)
    sorts = tuple(
        SortColumn(name, found[2] == "DESC", found[3] == "FIRST")
        for name, found in zip(names[count:], order, strict=True)
    )
    return NearbyRows(input_index, names[:count], sorts, reach, size)


def _reach(calls: Sequence[WindowCall], ranks: int) -> tuple[Reach | None, int]:
    """Return the maximum distance over which a change affects any of these calls."""
    reaches = {call.reach for call in calls}
    size = max(call.size for call in calls)
    if ranks and reaches <= {"first", "distinct"}:
        # The filter may test any of these ranks. dense_rank, which has no gaps, keeps the most
        # rows.
        return ("distinct" if "distinct" in reaches else "first"), ranks
    if len(reaches) == 1 and reaches <= {"rows", "range"} and size <= SIZE_MAX:
        return calls[0].reach, size
    return None, 0


# -- sessions -------------------------------------------------------------------------------------


def near_sessions(
    ends: WindowFunctions, above: Sequence[WindowFunctions], below: ViewOperator
) -> NearbyRows | None:
    """Return the rows of the sessions that changes may touch. Return None if the windows are not
    sessions, or if the rows are not those of a table.

    Args:
        ends: The lowest of the windows: the greatest end among the rows before each row.
        above: The other windows: the session of each row, then those over the rows of a session.
        below: The input of the lowest.
    """
    begun, *others = above
    # Spark has three windows for sessions (`engine/spark/ConstructRewriter.java`): the ends before
    # a row, the start of its session, and the end of that. They are recognised by their exact
    # texts: a change never affects rows beyond a gap.
    found = _session_time(ends, begun)
    if found is None or not all(begun.calls[0].name in each.keys for each in others):
        return None
    time, gap = found
    keys = ends.keys
    table = below.table_columns((*keys, time), some=True)
    kinds = [(below.kind(id_) or "").lower() for id_ in keys]
    if table is None or not keys or not all(PLAIN_TYPES.fullmatch(kind) for kind in kinds):
        return None
    input_index, names = table
    types = {each.name: each.type for each in below.context.schemas[input_index].columns}
    if types[names[-1]] not in ("timestamp", "timestamp_ntz") or gap > SIZE_MAX:
        return None
    return NearbyRows(input_index, names[:-1], (SortColumn(names[-1]),), "gap", gap)


def _session_time(ends: WindowFunctions, plan: WindowFunctions) -> tuple[str, int] | None:
    """Return the time column and the gap in microseconds of a window that computes each row's
    session; None for any other window."""
    begun = plan.input
    if not isinstance(begun, ProjectNode):
        return None
    if len(plan.calls) != 1 or len(ends.calls) != 1 or len(plan.order) != 1:
        return None
    last, before = plan.calls[0], ends.calls[0]
    order = _ORDER.fullmatch(plan.order[0])
    made = {each.name: each.expression for each in begun.columns}
    if order is None or (ends.keys, ends.order) != (plan.keys, plan.order) or before.name in made:
        return None
    start, end = order[1], _argument(before, _BEFORE)
    test = f"CASE WHEN (({before.name} IS NULL) OR ({start} > {before.name})) THEN {start} END"
    uses = [name for name, text in made.items() if re.search(rf"\b{before.name}\b", text)]
    if end is None or uses != [_argument(last, _UPTO)] or made[uses[0]] != test:
        return None
    texts = _projected(ends.input)
    both = [
        re.fullmatch(rf"unix_micros\(\((\w+)\)\.`{part}`\)", texts.get(id_, ""))
        for id_, part in ((start, "start"), (end, "end"))
    ]
    if both[0] is None or both[1] is None or both[0][1] != both[1][1]:
        return None
    found = _SESSION.fullmatch(texts.get(both[0][1], ""))
    if found is None or found[3] not in _UNITS:
        return None
    return found[1], int(found[2]) * _UNITS[found[3]]


def _argument(call: WindowCall, frame: str) -> str | None:
    """Return the column whose greatest value in a frame is the value of the call; None for any
    other call."""
    found = re.fullmatch(r"max\((\w+)\)", call.function)
    return found[1] if found and call.frame == frame else None


def _projected(plan: Plan) -> Mapping[str, str]:
    """Return the expressions of several projections directly on top of each other."""
    found: dict[str, str] = {}
    while isinstance(plan, ProjectNode):
        found = {each.name: each.expression for each in plan.columns} | found
        plan = plan.input
    return {name: text for name, text in found.items() if name != text}


# -- the operator ----------------------------------------------------------------------------------


class WindowOperator(ViewOperator):
    """Window functions over the rows of a partition."""

    def __init__(
        self,
        context: DerivationContext,
        plan: WindowFunctions,
        below: ViewOperator,
        near: NearbyRows | None = None,
        above: Sequence[WindowFunctions] = (),
    ) -> None:
        """`near`: the rows of a partition that changes of other rows can affect; None for all.
        `above`: the other windows of a `window_chain`."""
        # Looked up in the input's state if its keys allow, else in a state that is stored for it.
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
            old = replace_input(
                old, InputKind.STATE.text(self.near.input_index), self.context.near(self.near)
            )
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
        """Return the origins of the input's columns: those of keys in the changed rows, and those
        of other columns also in the old rows."""
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
        """Return the input's type; None for the columns of the functions."""
        return self._below.kind(id_) if id_ in self._passed else None


def window_chain(plan: WindowFunctions) -> tuple[WindowFunctions, ...]:
    """Return the windows that one run computes, the lowest first. Each reads the rows of the one
    before it, or a projection of them, and its partitions are parts of the partitions of that one.

    >>> from actors.model.plan.relational import ScanNode
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
    """Return the projection between a window and the one below; () if there is none."""
    return below.columns if isinstance(below, ProjectNode) else ()


def _column(plan: WindowFunctions, call: WindowCall, columns: Ids) -> WindowColumn:
    """Return the call. If the function depends on the order of equal rows, its order becomes
    total."""
    whole = tuple(id_ for id_ in columns if id_ not in plan.keys and id_ not in plan.order)
    if plan.order:
        # The function must depend only on the contents: recomputed values must have the same bits
        # as retracted ones.
        order = (*plan.order, *whole) if call.by_row else plan.order
        return WindowColumn(call.name, call.function, order, call.frame)
    # Spark also gives a frame to a window without an order, usually the whole partition.
    return WindowColumn(call.name, call.function, whole, call.frame)
