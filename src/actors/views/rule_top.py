"""Limits: the first rows of an order, kept with a reserve.

Theory of operation. Of an input only the rows that can come into the answer matter. A hidden state,
the *candidates*, holds the first rows of the order: those of the answer and a reserve. A second
one, the *edge*, holds the last of them once others were left out: every row of the input up to it
is a candidate. So a change behind the edge changes nothing, one before it is applied to the
candidates, and the answer's changes are those of their first rows. Candidates that grow too many
are cut again, which moves the edge.

Rows that go use up the reserve. Where fewer candidates are left at some time than the answer needs
while others were left out, that is a *shortage*: a run of its own finds it, its output is a row
then and only then, and the whole input is looked up where it has one. Steps without a shortage read
the candidates alone.

The order is total: the view's own, and then all columns. So the answer is a function of the
contents, however steps are cut. Rows that even then are peers (0.0 and -0.0) are kept or left out
together.

Source: the top-k operator with a bounded buffer of the field (Feldera, RisingWave); the refill by a
conditional lookup is ours.
"""

from __future__ import annotations

from actors.plan.delta import (
    Consolidate,
    Hidden,
    Input,
    Node,
    RecomputeRows,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    Union,
    Where,
    WindowColumn,
)
from actors.plan.relational import Filter, Limit, Named, WindowCall, WindowFunctions
from actors.plan.schema import Column, Schema
from actors.threshold_probes import LIMIT_RESERVE
from actors.views.lookups import Wanted
from actors.views.operators import Context, Ids, Operator, Origins, select
from actors.views.rule_linear import FilterOperator, ProjectOperator
from actors.views.rule_window import WindowOperator


def limit(context: Context, plan: Limit, below: Operator) -> Operator:
    """The operators of a limit; of an offset alone, which has no first rows, by the rank of all
    rows. A column that is never NULL keeps rows without columns rows."""
    if plan.count is None:
        return _behind(context, plan, below)
    if not below.columns:
        id_ = f"{context.prefix()}any"
        below = ProjectOperator(context, (Named(id_, "0"),), below)
        top: Operator = TopOperator(context, plan, below, {id_: "int"})
        return ProjectOperator(context, (), top)
    return TopOperator(context, plan, below, dict(plan.types))


def _behind(context: Context, plan: Limit, below: Operator) -> Operator:
    context.keyed.append("OFFSET without LIMIT: all rows are ranked when one changes")
    number = f"{context.prefix()}rank"
    call = WindowCall(number, "row_number()", "", "int", by_row=True)
    ranked = WindowFunctions(plan.input, (), plan.order, (call,), plan.types)
    kept = FilterOperator(
        context,
        Filter(plan.input, f"{number} > {plan.offset}"),
        WindowOperator(context, ranked, below),
    )
    return ProjectOperator(context, tuple(Named(id_, id_) for id_ in below.columns), kept)


class TopOperator(Operator):
    """The first rows behind an offset."""

    def __init__(
        self, context: Context, plan: Limit, below: Operator, types: dict[str, str]
    ) -> None:
        super().__init__(context, below.columns)
        self._below = below
        self._order = (*plan.order, *(id_ for id_ in below.columns if id_ not in plan.order))
        self._offset = plan.offset
        assert plan.count is not None, "an offset alone has no first rows"
        self._last = plan.offset + plan.count
        self._types = types
        self._rank = f"{context.prefix()}rank"
        self._hidden: tuple[Input, Input] | None = None
        self._wanted: frozenset[Wanted] = frozenset()

    def make_delta(self) -> Node:
        """The first rows of the candidates before and after each touched time."""
        candidates, edge, shortage = self._states()
        changes = self._below.delta(shared=True)
        covered = TopCovered(changes, edge, self._order)
        rows = self._below.old()
        old = Union((TopGate(candidates, shortage, True), TopGate(rows, shortage, False)))
        taken = Union((TopGate(covered, shortage, True), TopGate(changes, shortage, False)))
        for state, edges in ((candidates, False), (edge, True)):
            number = int(state.name[1:])
            hidden, _ = self.context.hidden[number]
            made = TopCandidates(
                old, taken, candidates, edge, shortage, self._order, self._kept, self._most, edges
            )
            self.context.hidden[number] = hidden, made
        return Consolidate(self._first(old, taken))

    @property
    def _kept(self) -> int:
        """How many candidates stay when there are too many; as many again may come."""
        return self._last + LIMIT_RESERVE.limit

    @property
    def _most(self) -> int:
        return self._kept + LIMIT_RESERVE.limit

    def _states(self) -> tuple[Input, Input, Input]:
        """The candidates, the edge, and the run that finds a shortage; asks for all of them, and
        for the whole input where there is a shortage."""
        context = self.context
        self._below.delta(shared=True)
        schema = Schema(tuple(Column(id_, self._types[id_]) for id_ in self.columns))
        number = len(context.hidden)
        candidates = Input(f"h{number}", self.columns)
        edge = Input(f"h{number + 1}", self.columns)
        # Their numbers are taken now; how they change is known when all is.
        for state in (candidates, edge):
            context.hidden.append((Hidden(schema, self.columns), state))
            context.bounded.add(state.name)
        self._hidden = candidates, edge
        return candidates, edge, self._shortage(candidates, edge)

    def _shortage(self, candidates: Input, edge: Input) -> Input:
        context = self.context
        covered = TopCovered(self._below.delta(), edge, self._order)
        found = TopShortage(covered, candidates, edge, self._last)
        shortage = context.cut(found, ("short",))
        context.seldom.add(shortage.name)
        wanted = context.ask(candidates.name, (), (), (), nulls=False)
        wanted |= context.ask(edge.name, (), (), (), nulls=False)
        self._wanted = wanted
        self._below.seek((), ((shortage.name, ()),), frozenset(), nulls=False)
        return shortage

    def _first(self, old: Node, changes: Node) -> Node:
        """The rows in the answer, of these."""
        number = WindowColumn(self._rank, "row_number()", self._order, "")
        ranked = RecomputeRows(old, changes, (), (number,))
        tests = [f"{self._rank} > {self._offset}"] if self._offset else []
        tests.append(f"{self._rank} <= {self._last}")
        kept = Where(ranked, " AND ".join(tests))
        return select(kept, [(id_, id_) for id_ in self.columns])

    def old(self) -> Node:
        """The first rows of the old candidates."""
        self.delta()
        assert self._hidden is not None
        candidates, _ = self._hidden
        return Consolidate(self._first(Where(candidates, "1 = 0"), candidates))

    def trace_delta(self, ids: Ids) -> Origins | None:
        """None, but for whether there may be any row."""
        return None if ids else self._below.delta_origins(())

    def old_origins(self, ids: Ids) -> Origins | None:
        """The candidates."""
        self.delta()
        assert self._hidden is not None
        return ((self._hidden[0].name, ids),)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """All candidates, which every step has."""
        self.delta()
        self.context.repeat(self._wanted)
        return self._wanted

    def seekable(self, ids: Ids) -> bool:
        """Any columns: there are few rows."""
        return True

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """The input's."""
        return self._below.unique_ids()

    def is_one_row(self) -> bool:
        """LIMIT 1."""
        return self._last - self._offset <= 1

    def kind(self, id_: str) -> str | None:
        """The input's."""
        return self._types.get(id_)
