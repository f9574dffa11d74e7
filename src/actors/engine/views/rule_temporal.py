"""Temporal filters: rows appear and vanish as time passes.

A row of the input is in the output from the first millisecond at which all bounds hold, until the
first at which one no longer does (`plan.relational.TimeEdge`). A hidden state, the *schedule*,
holds future changes: a row with the time at which it will appear (sign 1) or vanish (sign -1). A
step applies the scheduled changes that are due (``c{k}``), and of a changed row the part within the
step; the part beyond goes to the schedule. A deleted row retracts its scheduled changes.

Source: Materialize's temporal filters, which write updates at future times into the collection
itself; here a shard has no time beyond its upper, so they are kept beside it.
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
"""Microseconds beyond every time of the service, such that shifting a bound cannot overflow."""


def first_ms(micros: str, edge: TimeEdge) -> str:
    """Return the millisecond at which a comparison's result changes, over a column of microseconds.

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
        self._number = -1

    # -- rows with their times ---------------------------------------------------------------------

    @property
    def _own(self) -> list[tuple[str, str]]:
        return [(id_, id_) for id_ in self.columns]

    def _bounded(self, node: Node) -> Node:
        """Return the rows whose bounds are not NULL, with the times at which they begin and end."""
        names = [f"{self._micros}{place}" for place in range(len(self._edges))]
        pairs = list(zip(names, self._edges, strict=True))
        # A comparison with NULL never holds.
        timed = FilterRows(
            select(node, [*self._own, *((name, edge.micros) for name, edge in pairs)]),
            " AND ".join(f"{name} IS NOT NULL" for name in names),
        )
        # Clamped before the shifts, which would overflow at the extremes of a timestamp.
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
        """Return the changes that are due, and the part of the input's changes within the step."""
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
        # The rows of this hidden state that are due in the step come as an input of their own.
        due = NamedInput(InputKind.DUE.text(number), schema.names)
        state = HiddenState(schema, (self._bucket,), self._due, self._bucket)
        self.context.hidden.append((state, due))  # reserves the number; `plans` replace `due` below
        later = [
            self._later(changes, column, sign)
            for column, sign in ((self._begins, 1), (self._ends, -1))
            if column
        ]
        # A change that is due leaves the schedule: it is retracted there as it is emitted.
        plans = UnionRows((*later, select(WeighRows(due, "-1"), planned)))
        self.context.hidden[number] = state, plans
        interval = NamedInput(INTERVAL, INTERVAL_SCHEMA.names)
        now = select(RowLifetimes(changes, interval, self._begins, self._ends), self._own)
        return UnionRows((now, select(WeighRows(due, self._sign), self._own)))

    def _later(self, changes: Node, column: str, sign: int) -> Node:
        """Return the changes that will happen at a column's time, after the step."""
        # A row whose end is not after its begin never appears: nothing is scheduled for it.
        ordered = f" AND {self._begins} < {self._ends}" if self._begins and self._ends else ""
        beyond = FilterRows(self._beside_interval(changes), f"{column} >= hi{ordered}")
        bucket = f"{column} div {DUE_BUCKET_MS}L"
        made = [(self._due, column), (self._bucket, bucket), (self._sign, str(sign))]
        return select(beyond, [*self._own, *made])

    def old(self) -> Node:
        """Return the rows of the input that are in the output just before the step."""
        rows = self._beside_interval(self._bounded(self._below.old()))
        # A row that begins at `lo` appears in this step.
        tests = [f"{self._begins} < lo"] if self._begins else []
        tests += [f"{self._ends} >= lo"] if self._ends else []
        return select(FilterRows(rows, " AND ".join(tests)), self._own)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the input's origins and the changes that are due."""
        return merge_origins(
            self._below.delta_origins(ids), ((InputKind.DUE.text(self._number), ids),)
        )

    def is_constant(self) -> bool:
        """Return False: time passes."""
        return False
