"""Hidden states that store the rows of an operator, so that they can be looked up by any column.

A join looks up the rows that match by key, and a window the rows of a partition. An operator with
computed old rows (such as the results of a grouping) cannot be looked up by what it computes: all
its rows would have to be computed again. So its rows are stored as a DISTINCT with counts. This is
an arrangement of an intermediate result, whose size is the number of different rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    UnsupportedConstruct,
    ViewOperator,
    select,
)
from actors.engine.views.rule_group import ROWS, GroupOperator
from actors.engine.views.rule_linear import NOT_KEYS, PassingOperator, ProjectOperator
from actors.model.plan.delta import NamedInput, Node, WeighRows
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import GroupKey, NamedExpression

_FLOATS: Final = ("float", "double")
# Types that Spark cannot group by.
_UNGROUPED: Final = ("map<", "variant", "void", "interval", "unknown")


class StoredRowsOperator(PassingOperator):
    """The rows of another operator, stored in a state of their own."""

    def __init__(
        self,
        context: DerivationContext,
        below: ViewOperator,
        types: Mapping[str, str],
        by: Ids | None = None,
        *,
        exact_floats: bool = True,
        bounded: bool = False,
    ) -> None:
        """`types`: the types of the columns. `by`: the columns by which changed rows look up their
        old ones; None for all. `exact_floats`: true if 0.0 and -0.0 must stay different. `bounded`:
        true if the plan itself bounds the number of rows. Raises `UnsupportedConstruct` for rows
        that cannot be stored."""
        super().__init__(context, below)
        why = unstorable_reason(types, below.columns, by or ()) if exact_floats else ""
        if why:
            raise UnsupportedConstruct(why)
        self._types = types
        self._bounded = bounded
        prefix = context.prefix()
        # GROUP BY treats 0.0 and -0.0 as the same value. So floats are stored as text, which has
        # the same digits but cannot be looked up.
        floats = [id_ for id_ in below.columns if exact_floats and types[id_].lower() in _FLOATS]
        self._texts = {id_: f"{prefix}{id_}" for id_ in floats}
        rows = below
        if self._texts:
            made = tuple(
                NamedExpression(self._texts[id_], f"CAST({id_} AS string)")
                if id_ in self._texts
                else NamedExpression(id_, id_)
                for id_ in below.columns
            )
            rows = ProjectOperator(context, made, below)
        keys = tuple(
            GroupKey(id_, id_, "string" if id_ in self._texts.values() else types[id_])
            for id_ in rows.columns
        )
        self._group = GroupOperator(context, rows, keys, None, by)

    def make_delta(self) -> Node:
        """Return the delta of the other operator, and register the state."""
        self._below.delta(shared=True)
        self._group.totals()
        if self._bounded:
            self.context.bounded.add(InputKind.HIDDEN.text(self._group.number))
        return self._below.delta()

    def old(self) -> Node:
        """Return the stored rows, each repeated according to its count."""
        self.delta()
        state = NamedInput(InputKind.HIDDEN.text(self._group.number), self._group.hidden_names)
        columns = [
            (id_, f"CAST({self._texts[id_]} AS {self._types[id_]})" if id_ in self._texts else id_)
            for id_ in self.columns
        ]
        return select(WeighRows(state, ROWS), columns)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the other operator."""
        return self._below.delta_origins(ids)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the stored rows; None for floats, which are stored as text."""
        if any(id_ in self._texts for id_ in ids):
            return None
        self.delta()
        return self._group.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the stored rows."""
        self.delta()
        return self._group.seek(ids, origins, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all columns can be compared and none is a float that is stored as text."""
        return bool(ids) and all(
            id_ in self.columns
            and id_ not in self._texts
            and not self._types[id_].lower().startswith(NOT_KEYS)
            for id_ in ids
        )

    def kind(self, id_: str) -> str | None:
        """Return the type of the column."""
        return self._types.get(id_)


def make_searchable(
    context: DerivationContext,
    below: ViewOperator,
    types: Mapping[str, str],
    keys: Ids,
    *,
    exact_floats: bool = True,
) -> ViewOperator:
    """Return an operator whose rows can be looked up by `keys`: the same one if possible, else one
    that stores the rows. Raises `UnsupportedConstruct` for rows that cannot be stored."""
    if not keys or below.seekable(keys):
        return below
    return StoredRowsOperator(context, below, types, keys, exact_floats=exact_floats)


def unstorable_reason(types: Mapping[str, str], columns: Ids, by: Ids) -> str:
    """Return why rows of these columns cannot be stored and looked up `by` some of them; "" if they
    can.

    >>> unstorable_reason({"i0_x": "int", "i0_m": "map<int,int>"}, ("i0_x", "i0_m"), ())
    'a state with column i0_m, which has type map<int,int>'
    >>> unstorable_reason({"i0_x": "int", "i0_f": "double"}, ("i0_x", "i0_f"), ("i0_x",))
    ''
    """
    for id_ in columns:
        kind = types.get(id_, "unknown").lower()
        # A float within another type cannot be stored as text: its two zeros would become one.
        words = (*_UNGROUPED, *_FLOATS) if "<" in kind else _UNGROUPED
        if any(word in kind for word in words):
            return f"a state with column {id_}, which has type {kind}"
    wrong = [id_ for id_ in by if types[id_].lower() in _FLOATS]
    return f"a lookup by {wrong[0]}, which has type {types[wrong[0]]}" if wrong else ""
