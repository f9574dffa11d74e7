"""Common subplans: equal parts of a query share one operator.

A table expression that is used three times occurs three times in Spark's plan, each time with
different column ids, and each copy would have its own states, lookups and runs. Two parts are equal
if their texts are equal once their ids are numbered in order of appearance. The later part becomes
a projection of the first one, which only renames columns (`SharedOperator`): there is one delta,
and one state for all lookups.

    Join(Aggregate(t) as a, Aggregate(t) as b)   =   Join(a, Project(a)), a one operator
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from actors.engine.views.operators import DerivationContext, Ids, ViewOperator
from actors.engine.views.rule_linear import PassingOperator
from actors.model.plan.delta import Node
from actors.model.plan.relational import (
    AggregationNode,
    DistinctNode,
    FilterNode,
    JoinNode,
    LimitNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    TemporalFilter,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.relational_text import QUOTED

_KEEPING: Final = (
    AggregationNode
    | DistinctNode
    | JoinNode
    | LimitNode
    | OuterJoin
    | SemiJoin
    | TemporalFilter
    | WindowFunctions
)
_REFERENCE: Final = re.compile(r"(?<![.\w])[A-Za-z_]\w*+(?!\s*:)")
"""A word that may be a column id. After a dot or before a colon it is the name of a field."""


class CommonSubplans:
    """A plan in which equal parts are the same object."""

    def __init__(self, plan: Plan) -> None:
        # The first part of each shape.
        self._first: dict[str, Plan] = {}
        # Shapes of parts by their identities: a cache for `shape_of`.
        self._shapes: dict[int, str] = {}
        self.shared: set[int] = set()
        """Identities of the parts of `root` that occur more than once in it."""
        self.root = self._merged(plan)

    def _merged(self, plan: Plan) -> Plan:
        """Return a part, or a projection of the first part that is equal to it."""
        # Only parts that have a state or a join are worth sharing.
        if not _keeps(plan):
            return plan
        text = shape_of(plan, self._shapes)
        first = self._first.get(text)
        if first is None:
            made = self._first[text] = self._within(plan)
            return made
        self.shared.add(id(first))
        pairs = zip(columns_of(plan), columns_of(first), strict=True)
        return ProjectNode(first, tuple(NamedExpression(own, other) for own, other in pairs))

    def _within(self, plan: Plan, *, below_window: bool = False) -> Plan:
        """Return a part with its own inputs merged."""
        changes: dict[str, Any] = {}
        for name in plan.__struct_fields__:
            value = getattr(plan, name)
            if isinstance(value, Plan):
                if _is_one(plan, value, below_window=below_window):
                    between = isinstance(value, ProjectNode)
                    changes[name] = self._within(value, below_window=between)
                else:
                    changes[name] = self._merged(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Plan):
                changes[name] = tuple(map(self._merged, value))
        return msgspec.structs.replace(plan, **changes)


def _is_one(plan: Plan, value: Plan, *, below_window: bool) -> bool:
    """Return whether one rule handles a part together with its input: a filter over a window, or a
    window over another window or over a projection of one."""
    if isinstance(value, WindowFunctions):
        return below_window or isinstance(plan, FilterNode | WindowFunctions)
    if not isinstance(plan, WindowFunctions) or not isinstance(value, ProjectNode):
        return False
    return isinstance(value.input, WindowFunctions)


def _inputs_of(plan: Plan) -> list[Plan]:
    found: list[Plan] = []
    for name in plan.__struct_fields__:
        value = getattr(plan, name)
        items = value if isinstance(value, tuple) else (value,)
        found += [item for item in items if isinstance(item, Plan)]
    return found


def _keeps(plan: Plan) -> bool:
    """Return whether a part contains a state or a join."""
    return isinstance(plan, _KEEPING) or any(map(_keeps, _inputs_of(plan)))


def shape_of(plan: Plan, known: dict[int, str] | None = None) -> str:
    """Return a part as text with its own column ids replaced by numbers.

    `known`: a cache of texts by the identities of parts; all of these parts must outlive it.

    >>> from actors.model.plan.relational import ScanNode
    >>> one = FilterNode(ScanNode(0, (("i0_k", "k"),)), "i0_k > 'i0_k'")
    >>> shape_of(one) == shape_of(FilterNode(ScanNode(0, (("i7_k", "k"),)), "i7_k > 'i0_k'"))
    True
    """
    known = {} if known is None else known
    if id(plan) in known:
        return known[id(plan)]
    numbers: dict[str, str] = {}
    for each in _inputs_of(plan):
        for id_ in columns_of(each):
            # The inputs of a union have the same ids.
            numbers.setdefault(id_, f"#{len(numbers)}")
    made = {id_: f"#{len(numbers) + n}" for n, id_ in enumerate(columns_of(plan))}
    if isinstance(plan, ScanNode):
        # A table's own names stay, even if one looks like an id.
        text = f"Scan({plan.input_index}, {[own for _, own in plan.columns]})"
    else:
        # The inputs of a union may have their columns in different orders, so the text contains the
        # order.
        order = [[numbers[id_] for id_ in columns_of(each)] for each in _inputs_of(plan)]
        text = f"{order} {_fields_text(plan, {**made, **numbers}, known)}"
    known[id(plan)] = text
    return text


def _fields_text(value: msgspec.Struct, ids: Mapping[str, str], known: dict[int, str]) -> str:
    # `types` is left out: it follows from the inputs, and may name columns that were dropped.
    names = [name for name in value.__struct_fields__ if name != "types"]
    fields = (_value_text(getattr(value, name), ids, known) for name in names)
    return f"{type(value).__name__}({', '.join(fields)})"


def _value_text(value: Any, ids: Mapping[str, str], known: dict[int, str]) -> str:
    """Return the value of a field as text, with numbers in place of column ids."""
    if isinstance(value, Plan):
        return shape_of(value, known)
    if isinstance(value, msgspec.Struct):
        return _fields_text(value, ids, known)
    if isinstance(value, tuple):
        return f"[{', '.join(_value_text(each, ids, known) for each in value)}]"
    return repr(_renumbered(value, ids) if isinstance(value, str) else value)


def _renumbered(text: str, ids: Mapping[str, str]) -> str:
    """Return an expression with numbers in place of its ids. Literals and quoted names stay the
    same.

    >>> _renumbered("CAST(i0_s AS struct<i0_s: int>).i0_s = 'i0_s'", {"i0_s": "#0"})
    "CAST(#0 AS struct<i0_s: int>).i0_s = 'i0_s'"
    """

    def numbered(part: str) -> str:
        return _REFERENCE.sub(lambda word: ids.get(word[0], word[0]), part)

    made, at = list[str](), 0
    for quoted in QUOTED.finditer(text):
        made += [numbered(text[at : quoted.start()]), quoted[0]]
        at = quoted.end()
    return "".join([*made, numbered(text[at:])])


class SharedOperator(PassingOperator):
    """An operator that several parts of a view use. A large delta is computed only once."""

    def __init__(self, context: DerivationContext, below: ViewOperator) -> None:
        super().__init__(context, below)

    def make_delta(self) -> Node:
        """Return the operator's delta, computed in a run of its own if it is large."""
        # Several parts read it, so a large delta is worth a run of its own.
        return self._below.delta(shared=True)

    def old(self) -> Node:
        """Return the operator's state."""
        return self._below.old()

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """Return the shared operator's answer."""
        return self._below.table_columns(ids, some=some)
