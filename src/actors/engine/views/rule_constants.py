"""Constant rows of the query itself: VALUES, range(), or a SELECT without FROM.

They exist from the first time of a view on and never change. A generator makes them from the single
row of a grouping without keys, which comes with the first contents (`plan.delta.RecomputeGroups`).
"""

from __future__ import annotations

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    UnsupportedConstruct,
    ViewOperator,
    select,
)
from actors.model.plan.delta import (
    FilterRows,
    GenerateRows,
    NamedInput,
    Node,
    RecomputeGroups,
    SparkCall,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import ValuesNode


class ConstantsOperator(ViewOperator):
    """Rows that never change."""

    def __init__(self, context: DerivationContext, plan: ValuesNode) -> None:
        super().__init__(context, tuple(column.name for column in plan.columns))
        if not context.schemas:
            raise UnsupportedConstruct("a query without tables")
        self._plan = plan
        self._kinds = {column.name: column.type for column in plan.columns}

    def make_delta(self) -> Node:
        """Return all rows at the very first time."""
        return self._rows(begins=False)

    def old(self) -> Node:
        """Return all rows after the first time, and none before it."""
        return self._rows(begins=True)

    def _rows(self, *, begins: bool) -> Node:
        # An empty input: the group without keys still has a row.
        nothing = FilterRows(NamedInput(InputKind.CHANGES.text(0), ()), "1 = 0")
        calls = (SparkCall("one", "count(*)", "bigint"),)
        made: Node = RecomputeGroups(nothing, nothing, (), calls, begins)
        if self.columns:
            made = GenerateRows(made, self._plan.generator, False, self.columns)
        return select(made, [(name, name) for name in self.columns])

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return no origins."""
        # At the first time, the only one with a delta, there is no old state to look up.
        return ()

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return None: no input holds the rows. A table joined to others through them is read in
        full."""
        return None

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Return no lookups: all rows are in the plan."""
        return frozenset()

    def seekable(self, ids: Ids) -> bool:
        """Return True: a search reads all rows, which are few."""
        return True

    def kind(self, id_: str) -> str | None:
        """Return the type of the column."""
        return self._kinds.get(id_)

    def is_constant(self) -> bool:
        """Return True."""
        return True
