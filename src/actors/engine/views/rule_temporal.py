"""Temporal filters: rows enter and leave the view as time passes.

A row of the input is in the output from the first millisecond at which all bounds hold, until the
first at which one of them no longer holds (`plan.relational.TimeEdge`). A hidden state, the
*schedule*, holds future changes: a row with the time at which it will enter (sign 1) or leave (sign
-1). A step applies the scheduled changes that are due (``c{k}``). Of a changed row it applies what
happens within the step; later changes go to the schedule. A deleted row retracts its scheduled
changes.

Source: the temporal filters of Materialize, which write updates at future times into the collection
itself. Here a shard has no times beyond its upper, so these updates are kept in a separate state.
"""

from __future__ import annotations

from typing import Final

from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    ViewOperator,
    merge_origins,
    select,
)
from actors.engine.views.rule_linear import PassingOperator
from actors.model.plan.delta import (
    DUE_BUCKET_MS,
    INTERVAL,
    INTERVAL_SCHEMA,
    FilterRows,
    HiddenState,
    NamedInput,
    Node,
    PairRows,
    RowLifetimes,
    UnionRows,
    WeighRows,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import TemporalFilter, TimeEdge
from actors.model.plan.schema import TableColumn, TableSchema

_EXTREME: Final = 4_000_000_000_000_000_000
"""Microseconds beyond any time of the service, but small enough that shifting a bound cannot
overflow."""


def first_ms(micros: str, edge: TimeEdge) -> str:
    """Return an expression for the millisecond at which the result of a comparison changes.
    `micros`: the column of its microseconds.

    >>> first_ms("m", TimeEdge("unix_micros(ts)", True, False))
    '((m + pmod(-(m), 1000L)) div 1000L)'
    >>> first_ms("m", TimeEdge("unix_micros(ts)", True, True, before=-3600000000))
    '((((m + 1L) + 3600000000L) + pmod(-(((m + 1L) + 3600000000L)), 1000L)) div 1000L)'
    """
    text = _plus(micros, (1 if edge.strict else 0) - edge.after)
    if edge.unit > 1:
        text = f"({text} + pmod(-({text}), {edge.unit}L))"
    text = _plus(text, -edge.before)
    return f"(({text} + pmod(-({text}), 1000L)) div 1000L)"


def _plus(text: str, number: int) -> str:
    return f"({text} {'+' if number > 0 else '-'} {abs(number)}L)" if number else text


class TemporalOperator(PassingOperator):
    """Keeps the rows for which all comparisons with the clock hold."""

    def __init__(
        self, context: DerivationContext, plan: TemporalFilter, below: ViewOperator
    ) -> None:
        super().__init__(context, below)
        self._types = dict(plan.types)
        self._edges = [edge for bound in plan.bounds for edge in bound.edges]
        prefix = context.prefix()
        self._begins, self._ends = f"{prefix}begins", f"{prefix}ends"
        self._due, self._bucket, self._sign = (
            f"{prefix}{word}" for word in ("due", "bucket", "sign")
        )
        self._micros = f"{prefix}m"
        # The number of its hidden state; -1 until `make_delta` registers the state.
        self._number = -1

    # -- rows with their times ---------------------------------------------------------------------

    @property
    def _own(self) -> list[tuple[str, str]]:
        return [(id_, id_) for id_ in self.columns]

    def _bounded(self, node: Node) -> Node:
        """Return the rows whose bounds are not NULL, with the times at which they enter and
        leave."""
        names = [f"{self._micros}{place}" for place in range(len(self._edges))]
        pairs = list(zip(names, self._edges, strict=True))
        # A comparison with NULL never holds.
        timed = FilterRows(
            select(node, [*self._own, *((name, edge.micros) for name, edge in pairs)]),
            " AND ".join(f"{name} IS NOT NULL" for name in names),
        )
        # Clamped before shifting, which would overflow at the extremes of a timestamp.
        clamped = select(
            timed,
            [
                *self._own,
                *((name, f"greatest(least({name}, {_EXTREME}L), -{_EXTREME}L)") for name in names),
            ],
        )
        made = []
        for column, ends, word in ((self._begins, False, "greatest"), (self._ends, True, "least")):
            texts = [first_ms(name, edge) for name, edge in pairs if edge.ends == ends]
            if texts:
                text = f"{word}({', '.join(texts)})" if len(texts) > 1 else texts[0]
                made.append((column, text))
            elif ends:
                self._ends = ""
            else:
                self._begins = ""
        return select(clamped, [*self._own, *made])

    def _beside_interval(self, node: Node) -> Node:
        return PairRows(node, NamedInput(INTERVAL, INTERVAL_SCHEMA.names), ())

    # -- the operator's interface ------------------------------------------------------------------

    def make_delta(self) -> Node:
        """Return the scheduled changes that are due, and the input's changes that take effect
        within the step."""
        changes = self._bounded(self._below.delta(shared=True))
        planned = [
            *self._own,
            (self._due, self._due),
            (self._bucket, self._bucket),
            (self._sign, self._sign),
        ]
        number = self._number = len(self.context.hidden)
        columns = [TableColumn(id_, self._types[id_]) for id_ in self.columns]
        columns += [TableColumn(self._due, "bigint"), TableColumn(self._bucket, "bigint")]
        schema = TableSchema((*columns, TableColumn(self._sign, "int")))
        # The rows of this hidden state that are due in the step are an input of their own.
        due = NamedInput(InputKind.DUE.text(number), schema.names)
        state = HiddenState(schema, (self._bucket,), self._due, self._bucket)
        # This reserves the number; `plans` replaces `due` below.
        self.context.hidden.append((state, due))
        later = [
            self._later(changes, column, sign)
            for column, sign in ((self._begins, 1), (self._ends, -1))
            if column
        ]
        # A change that is due leaves the schedule: when it is emitted, it is retracted there.
        plans = UnionRows((*later, select(WeighRows(due, "-1"), planned)))
        self.context.hidden[number] = state, plans
        interval = NamedInput(INTERVAL, INTERVAL_SCHEMA.names)
        now = select(RowLifetimes(changes, interval, self._begins, self._ends), self._own)
        return UnionRows((now, select(WeighRows(due, self._sign), self._own)))

    def _later(self, changes: Node, column: str, sign: int) -> Node:
        """Return the changes that will happen after the step, at the time in a column."""
        # A row that would leave before it enters never appears, so nothing is scheduled for it.
        ordered = f" AND {self._begins} < {self._ends}" if self._begins and self._ends else ""
        beyond = FilterRows(self._beside_interval(changes), f"{column} >= hi{ordered}")
        bucket = f"{column} div {DUE_BUCKET_MS}L"
        made = [(self._due, column), (self._bucket, bucket), (self._sign, str(sign))]
        return select(beyond, [*self._own, *made])

    def old(self) -> Node:
        """Return the rows of the input that are in the output just before the step."""
        rows = self._beside_interval(self._bounded(self._below.old()))
        # A row that enters at `lo` appears in this step.
        tests = [f"{self._begins} < lo"] if self._begins else []
        tests += [f"{self._ends} >= lo"] if self._ends else []
        return select(FilterRows(rows, " AND ".join(tests)), self._own)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the input, and the changes that are due."""
        return merge_origins(
            self._below.delta_origins(ids), ((InputKind.DUE.text(self._number), ids),)
        )

    def is_constant(self) -> bool:
        """Return False, since time passes."""
        return False
