"""Rows that the query itself says: VALUES, range(), a SELECT without FROM.

Theory of operation. They are there from the first time of a view on and never change. So they are
made of the one row of a grouping without keys, which comes with the first contents
(`plan.delta.Recompute`): a generator makes them of it. A term of a join that starts at their delta
meets no old state, for there is none at the first time; it asks for nothing.

What it does not do: a search reads all of them, and none begins at them: what is joined to a table
by way of them is read whole.
"""

from __future__ import annotations

from actors.plan.delta import Call, Generate, Input, Node, Recompute, Where
from actors.plan.relational import Constants
from actors.views.lookups import Wanted
from actors.views.operators import Context, Ids, Operator, Origins, select
from actors.views.unsupported import Unsupported


class ConstantsOperator(Operator):
    """Rows that never change."""

    def __init__(self, context: Context, plan: Constants) -> None:
        super().__init__(context, tuple(column.name for column in plan.columns))
        if not context.schemas:
            raise Unsupported("a query without tables")
        self._plan = plan
        self._kinds = {column.name: column.type for column in plan.columns}

    def make_delta(self) -> Node:
        """All rows at the first time of all."""
        return self._rows(begins=False)

    def old(self) -> Node:
        """All rows, behind the first time."""
        return self._rows(begins=True)

    def _rows(self, *, begins: bool) -> Node:
        nothing = Where(Input("d0", ()), "1 = 0")
        calls = (Call("one", "count(*)", "bigint"),)
        made: Node = Recompute(nothing, nothing, (), calls, begins)
        if self.columns:
            made = Generate(made, self._plan.generator, False, self.columns)
        return select(made, [(name, name) for name in self.columns])

    def trace_delta(self, ids: Ids) -> Origins | None:
        """None: where there is a delta, there is nothing to look up."""
        return ()

    def old_origins(self, ids: Ids) -> Origins | None:
        """Unknown: no input holds them."""
        return None

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Nothing: all rows are at hand."""
        return frozenset()

    def seekable(self, ids: Ids) -> bool:
        """By any column."""
        return True

    def kind(self, id_: str) -> str | None:
        """The column's type."""
        return self._kinds.get(id_)

    def is_constant(self) -> bool:
        """Yes."""
        return True
