"""Expansions and generators: each update becomes several, with the same time and diff.

An expansion (GROUPING SETS, ROLLUP, CUBE) passes on the columns that are the same in all its rows;
a generator passes on all columns of its input. Both are linear and have no state.
"""

from __future__ import annotations

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import DerivationContext, Ids, Origins, ViewOperator, narrowed
from actors.engine.views.rule_linear import ProjectOperator
from actors.model.plan.delta import ExpandRows, GenerateRows, Node, SelectColumns
from actors.model.plan.relational import ExpandNode, GenerateNode, NamedExpression


class ExpansionOperator(ProjectOperator):
    """Each row once per list of expressions."""

    def __init__(self, context: DerivationContext, plan: ExpandNode, below: ViewOperator) -> None:
        self._tag = f"{context.prefix()}tag"
        self._count = len(plan.rows)
        made = []
        for place, column in enumerate(plan.columns):
            texts = [row[place] for row in plan.rows]
            text = texts[0]
            if any(other != text for other in texts):
                cases = (f"WHEN {number} THEN {each}" for number, each in enumerate(texts))
                text = f"CAST(CASE {self._tag} {' '.join(cases)} END AS {column.type})"
            made.append(NamedExpression(column.name, text))
        super().__init__(context, tuple(made), below)

    def make_delta(self) -> Node:
        """Return the expansion of the input's delta."""
        return self._expanded(self._below.delta())

    def old(self) -> Node:
        """Return the expansion of the input's state."""
        return self._expanded(self._below.old())

    def _expanded(self, below: Node) -> Node:
        return SelectColumns(ExpandRows(below, self._tag, self._count), self._made)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return no keys: every row occurs several times."""
        return ()

    def is_one_row(self) -> bool:
        """Return False: every row occurs several times."""
        return False


class GenerationOperator(ViewOperator):
    """Each row once per row that a generator makes of it."""

    def __init__(self, context: DerivationContext, plan: GenerateNode, below: ViewOperator) -> None:
        self._made = tuple(column.name for column in plan.columns)
        super().__init__(context, (*below.columns, *self._made))
        self._plan = plan
        self._below = below

    def _generated(self, below: Node) -> Node:
        return GenerateRows(below, self._plan.generator, self._plan.outer, self._made)

    def make_delta(self) -> Node:
        """Return the rows generated from the input's delta."""
        return self._generated(self._below.delta())

    def old(self) -> Node:
        """Return the rows generated from the input's state."""
        return self._generated(self._below.old())

    def _passes(self, ids: Ids) -> bool:
        return not any(id_ in self._made for id_ in ids)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the input's origins; None for generated columns."""
        return self._below.delta_origins(ids) if self._passes(ids) else None

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the input's origins; None for generated columns."""
        return self._below.old_origins(ids) if self._passes(ids) else None

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the input by those of the columns that it has."""
        kept = [place for place, id_ in enumerate(ids) if id_ not in self._made]
        picked, narrow = narrowed(ids, origins, kept)
        return self._below.seek(picked, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether the input has these columns and can be looked up by them."""
        return self._passes(ids) and self._below.seekable(ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the input's answer: generated columns determine nothing."""
        return ids | self._below.determined_by(ids - frozenset(self._made))

    def is_constant(self) -> bool:
        """Return whether the input never changes."""
        return self._below.is_constant()

    def kind(self, id_: str) -> str | None:
        """Return the input's type; None for generated columns."""
        return None if id_ in self._made else self._below.kind(id_)
