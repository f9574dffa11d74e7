"""Top-k: the first rows of each group with a reserve, for LIMIT, filters on ranks, min and max.

A hidden state holds the *candidates*: the first rows of each group in its order, and a reserve. A
second one, the *edge*, holds the last candidate once other rows were left out. Every row of the
input up to the edge is a candidate, so a change after the edge has no effect, and one before it is
applied to the candidates. `TopOperator`, or the aggregate of `rule_extreme`, computes the result
from the candidates:

    first k of B   =   first k of FirstRows(B, k)

Source: the top-k operators with a bounded buffer of Feldera and RisingWave. The refill by a
conditional lookup is new here.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from actors.engine.views.rule_linear import FilterOperator, PassingOperator, ProjectOperator
from actors.engine.views.rule_stored_rows import make_searchable, unstorable_reason
from actors.engine.views.rule_window import PLAIN_TYPES, SORT_TEXT, WindowOperator, ranks_wanted
from actors.model.plan.delta import (
    ConsolidateRows,
    HiddenState,
    NamedInput,
    Node,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    UnionRows,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import CoveredChanges, SortColumn
from actors.model.plan.relational import (
    FilterNode,
    LimitNode,
    NamedExpression,
    WindowCall,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.schema import TableColumn, TableSchema

RESERVE_ROWS = 256
"""Number of rows that a view's LIMIT keeps in addition to its own."""

GROUP_SHARE: Final = 16
"""Divisor of the reserve for groups: a step may read the candidates of many groups, while a
shortage reads a single one."""


def limit(context: DerivationContext, plan: LimitNode, below: ViewOperator) -> ViewOperator:
    """Return the operators of a LIMIT. An OFFSET alone, which has no first rows, ranks all rows."""
    columns, types = below.columns, plan.types
    if not columns:
        # Rows without columns get one that is never NULL, since a state needs a key.
        types = ((f"{context.prefix()}any", "int"),)
        below = ProjectOperator(context, (NamedExpression(types[0][0], "0"),), below)
    number = f"{context.prefix()}rank"
    # The order is total (the query's own, then all other columns), so the result depends only on
    # the contents, however steps are cut.
    call = WindowCall(number, "row_number()", "", "int", by_row=True)
    ranked = WindowFunctions(plan.input, (), plan.order, (call,), types)
    tests = [f"{number} > {plan.offset}"] if plan.offset else []
    if plan.count is None:
        context.keyed.append("OFFSET without LIMIT: all rows are ranked when one changes")
        made: ViewOperator = _filtered(context, ranked, " AND ".join(tests or ["true"]), below)
    else:
        last = plan.offset + plan.count
        test = " AND ".join([*tests, f"{number} <= {last}"])
        made = TopOperator(context, ranked, test, below, last, single=plan.count <= 1)
    return ProjectOperator(context, tuple(NamedExpression(id_, id_) for id_ in columns), made)


def first_ranks(predicate: str, plan: WindowFunctions) -> int:
    """Return the last rank that a filter keeps, if the first rows of these ranks can be kept with a
    reserve. Return 0 if the calls are not such ranks, or their candidates cannot be stored."""
    types = {id_: kind.lower() for id_, kind in plan.types}
    # dense_rank is excluded: any number of rows may have its first `last` ranks.
    gaps = all(call.reach == "first" for call in plan.calls)
    plain = all(PLAIN_TYPES.fullmatch(types[key]) for key in plan.keys)
    if not (gaps and plain) or unstorable_reason(types, columns_of(plan.input), ()):
        return 0
    return ranks_wanted(predicate, plan.calls)


class FirstRows(PassingOperator):
    """The first rows of each group, and some more. The operator above may depend only on the first
    rows."""

    def __init__(
        self,
        context: DerivationContext,
        below: ViewOperator,
        types: Mapping[str, str],
        keys: Ids,
        order: tuple[str, ...],
        last: int,
        tag: Ids = (),
    ) -> None:
        """`keys`: identify the group. Those in `tag` are constants of the plan, which lookups do
        not use. `last`: how many rows of each group matter."""
        super().__init__(context, below)
        self._types = types
        self._keys = keys
        self._sought = tuple(key for key in keys if key not in tag)
        self._order = order
        self._last = last
        self._mark = f"{context.prefix()}edge"
        # The input whose changes are read up to the edges, if the input's rows are a table's own.
        self._input_index: int | None = None
        # Name of the covered changes; "" until `make_delta`.
        self._covered = ""
        # The candidates and the run that finds shortages; None until `make_delta`.
        self._candidates: NamedInput | None = None
        self._shortage: NamedInput | None = None

    def make_delta(self) -> Node:
        """Return the changes that reach the candidates, and all changes of groups with a
        shortage."""
        context, below, keys, by = self.context, self._below, self._keys, self._sought
        # Used twice, by the covered changes and by the gate, so a large delta is computed only
        # once.
        below.delta(shared=True)
        origins = below.keys_of_delta(by) if by else ()
        after = below.delta_lookups()
        candidates, edges = self._register(), self._register()
        self._candidates = candidates
        wanted = context.ask(edges.name, by, origins, after, nulls=True)
        covered = self._cover(edges)
        changed, filled = self._covered_origins(by), frozenset([*after, *wanted])
        assert changed is not None, "keys are the table's columns, or a cut's"
        context.ask(candidates.name, by, changed, filled, nulls=True)
        # Deletions use up the reserve. A shortage means fewer candidates than the result needs,
        # although other rows were left out. Only then are the rows of the group looked up in the
        # input.
        short = TopShortage(covered, candidates, edges, keys, self._last)
        # Steps without a shortage read only the candidates: they run as if shortages did not exist
        # (`seldom`), and are repeated if the run finds one.
        self._shortage = shortage = context.cut(short, keys or ("short",))
        context.seldom[shortage.name] = short
        below.seek(by, ((shortage.name, by),), frozenset(), nulls=bool(by))
        # Ordered after the lookups, which may have cut the delta.
        changes = self._gated(covered, below.delta())
        reserve = RESERVE_ROWS
        if by:
            reserve = max(1, reserve // GROUP_SHARE)
        kept = self._last + reserve
        # Cut only when another full reserve has accumulated on top of the kept rows, not at each
        # step.
        made = TopCandidates(
            below.old(), changes, candidates, edges, shortage,
            keys, self._order, kept, kept + reserve, self._mark,
        )  # fmt: skip
        number = InputName.parse(candidates.name).number
        context.hidden[number] = context.hidden[number][0], made
        return changes

    def _cover(self, edges: NamedInput) -> Node:
        """Return the changes up to the edges. They are known before Spark runs if they are those of
        a table, and order and keys are its columns; else a run of its own finds them."""
        context, below, keys = self.context, self._below, self._keys
        sorts = [SORT_TEXT.fullmatch(each) for each in self._order]
        ids = (*keys, *(found[1] for found in sorts if found))
        table = below.table_columns(ids, some=True)
        plain = all(PLAIN_TYPES.fullmatch(self._types[id_].lower()) for id_ in ids)
        # Spark compares a computed key or order, or a type whose order differs from Arrow's.
        if table is None or len(ids) < len(keys) + len(sorts) or not plain:
            self._covered = context.cut(
                TopCovered(below.delta(), edges, keys, self._order), self.columns
            ).name
            return NamedInput(self._covered, self.columns)
        self._input_index, names = table
        order = tuple(
            SortColumn(name, found[2] == "DESC", found[3] != "LAST")
            for name, found in zip(names[len(keys) :], filter(None, sorts), strict=True)
        )
        number, width = InputName.parse(edges.name).number, len(keys)
        made = CoveredChanges(self._input_index, number, names[:width], order, ids)
        self._covered = context.cover(made)
        return replace_input(
            below.delta(), InputKind.CHANGES.text(self._input_index), self._covered
        )

    def _covered_origins(self, ids: Ids) -> Origins | None:
        """Return the inputs that hold these columns of the covered changes."""
        if self._input_index is None:
            return ((self._covered, ids),)
        found = self._below.table_columns(tuple(id_ for id_ in ids if id_), some=True)
        if found is None:
            return None
        names = iter(found[1])
        return ((self._covered, tuple(next(names) if id_ else "" for id_ in ids)),)

    def _register(self) -> NamedInput:
        """Reserve the number of a hidden state; `make_delta` sets its changes later."""
        context = self.context
        schema = TableSchema(tuple(TableColumn(id_, self._types[id_]) for id_ in self.columns))
        state = NamedInput(InputKind.HIDDEN.text(len(context.hidden)), self.columns)
        context.hidden.append((HiddenState(schema, self.columns), None))
        # A single group has few candidates: reading them in full costs little.
        if not self._sought:
            context.bounded.add(state.name)
        return state

    def _gated(self, kept: Node, all_rows: Node) -> Node:
        """Return the rows of `kept` for groups without a shortage, and all rows for groups with
        one."""
        assert self._shortage is not None, "make_delta must be called first"
        shortage, keys = self._shortage, self._keys
        return UnionRows(
            (TopGate(kept, shortage, keys, True), TopGate(all_rows, shortage, keys, False))
        )

    def old(self) -> Node:
        """Return the candidates, and all rows of groups with a shortage."""
        self.delta()
        assert self._candidates is not None
        return self._gated(self._candidates, self._below.old())

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the changes that reach the candidates."""
        covered = self._covered_origins(ids)
        # A group with a shortage has a change that reaches its candidates, so its keys are among
        # these.
        if all(not id_ or id_ in self._keys for id_ in ids):
            return covered
        return merge_origins(covered, self._below.delta_origins(ids))

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the candidates, which contain all rows of an old result."""
        self.delta()
        assert self._candidates is not None
        return ((self._candidates.name, ids),)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the candidates of whole groups."""
        self.delta()
        kept = [place for place, id_ in enumerate(ids) if id_ in self._sought]
        picked, narrow = narrowed(ids, origins, kept)
        assert self._candidates is not None
        return self.context.ask(self._candidates.name, picked, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all ids are keys. Without keys any columns will do, since there are few
        rows."""
        return not self._sought or (bool(ids) and all(id_ in self._keys for id_ in ids))

    def kind(self, id_: str) -> str | None:
        """Return the type of a column as it is stored."""
        return self._types.get(id_)


class TopOperator(PassingOperator):
    """The rows whose ranks a filter keeps."""

    def __init__(
        self,
        context: DerivationContext,
        plan: WindowFunctions,
        predicate: str,
        below: ViewOperator,
        last: int,
        *,
        single: bool = False,
    ) -> None:
        """`single`: true if the filter keeps at most one row."""
        types = dict(plan.types)
        self._first = FirstRows(
            context,
            make_searchable(context, below, types, plan.keys),
            types,
            plan.keys,
            _order(plan, below.columns),
            last,
        )
        super().__init__(context, _filtered(context, plan, predicate, self._first))
        self._keys = plan.keys
        self._single = single

    def make_delta(self) -> Node:
        """Return the changes of the first rows. A row of which only the rank changes is retracted
        and inserted."""
        return ConsolidateRows(self._below.delta())

    def old(self) -> Node:
        """Return the first rows of the old candidates."""
        return ConsolidateRows(self._below.old())

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of keys, which are those of the changed rows."""
        # A row that moves up to replace another is not among the changes; only its keys are known.
        known = all(not id_ or id_ in self._keys for id_ in ids)
        return self._first.delta_origins(ids) if known else None

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the candidates."""
        self.delta()
        return self._first.seek(ids, origins, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether the candidates can be looked up by these columns."""
        return self._first.seekable(ids)

    def is_one_row(self) -> bool:
        """Return whether the query is a LIMIT 1."""
        return self._single


def _order(plan: WindowFunctions, columns: Ids) -> tuple[str, ...]:
    """Return the order of the windows. It is made total if a call depends on which of equal rows
    comes first."""
    # Peers of a rank are kept or left out together, so their order does not matter.
    if not any(call.by_row for call in plan.calls):
        return plan.order
    # Keys are equal within a group, so they order nothing.
    rest = (id_ for id_ in columns if id_ not in plan.keys and id_ not in plan.order)
    return (*plan.order, *rest)


def _filtered(
    context: DerivationContext, plan: WindowFunctions, predicate: str, below: ViewOperator
) -> FilterOperator:
    return FilterOperator(
        context, FilterNode(plan.input, predicate), WindowOperator(context, plan, below)
    )
