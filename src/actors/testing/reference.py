"""The reference: a view's contents at many times, as plain Spark evaluates the view's own query.

`ViewReference` answers for one view, given the contents of its inputs at each time. All times go to
the engine together: one query with a branch for each time, in which a WITH binds the tables' names
to that time's contents. A branch that fails makes the whole query fail, so a failing batch is
halved until the times that raise are known. No code of the compiler is used.

Rules: equal contents are evaluated once; an answer of None means that plain Spark raised. Where
plain Spark may choose, the answer is all candidates (see `nondeterminism`). A library writes the
query for the candidates: if they do not admit plain Spark's answer to the view's own query, they
are not used, and only an answer equal to that one counts as exact.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import ComputeDifference, JobRows
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import DefiniteError, QueryRejected
from actors.testing.maintain import EngineCaller, rows_message, updates_of, weighted
from actors.testing.nondeterminism import NONE, QueryNondeterminism, nondeterminism_of
from actors.testing.oracle import RowDifference as RowDifference

Bag: TypeAlias = Counter[tuple[Any, ...]]
AT: Final = "__at"
BATCH_MAX: Final = 8
"""Most branches of one query: Spark's planning time grows faster than their number."""


class _Text(msgspec.Struct):
    """A query's text, and plain Spark's answers to it by contents."""

    sql: str
    output: TableSchema
    known: dict[Any, Bag | None] = {}
    """Answers so far, by the inputs' contents; None if plain Spark raised."""


class ViewReference:
    """The reference of one view."""

    def __init__(self, engine: EngineCaller, plan: DeltaPlan, *, batched: bool = True) -> None:
        self._engine = engine
        self._plan = plan
        self._batch = BATCH_MAX if batched else 1
        """Number of times to evaluate with one query."""
        self._own = self._text = _Text(plan.sql, plan.output)
        """The view's own query, and the query that is evaluated: the same, or one for
        candidates."""
        self.nondeterminism: QueryNondeterminism = NONE
        """The choices that the query leaves to Spark; found by `prepare`."""

    async def prepare(self) -> None:
        """Find the choices that the query leaves to Spark, and prepare the query for candidates."""
        found = nondeterminism_of(self._plan.sql)
        if found.sql:
            tables = tuple(zip(self._plan.inputs, self._plan.input_schemas, strict=True))
            try:
                analyzed = await self._engine.analyze()(tables, found.sql, self._plan.conf)
            except QueryRejected:
                found = QueryNondeterminism(
                    "unknown", why=found.why or "its candidates cannot be queried"
                )
            else:
                self._text = _Text(found.sql, analyzed.schema)
        self.nondeterminism = found

    async def contents(self, moments: Mapping[int, Sequence[Bag]]) -> dict[int, Bag | None]:
        """Return the answer at each time, from the inputs' contents at that time."""
        answers = await self._answers(self._text, moments)
        if self._text is self._own:
            return answers
        own = await self._answers(self._own, moments)
        if all(self._admits(answers[time], own[time]) for time in moments):
            return answers
        self.nondeterminism = QueryNondeterminism(
            "unknown", why="no query distinguishes its candidates"
        )
        self._text = self._own
        return own

    def _admits(self, candidates: Bag | None, own: Bag | None) -> bool:
        """Return whether plain Spark's own answer is among the candidates."""
        if candidates is None or own is None:
            return candidates is own
        return not self.nondeterminism.differences(candidates, own, exact_decimals=True)

    async def _answers(
        self, text: _Text, moments: Mapping[int, Sequence[Bag]]
    ) -> dict[int, Bag | None]:
        passing = self._plan.temporal
        keys = {time: (time if passing else 0, _key(bags)) for time, bags in moments.items()}
        wanted: dict[Any, Sequence[Bag]] = {}
        for time, bags in moments.items():
            if keys[time] not in text.known:
                wanted.setdefault(keys[time], bags)
        pending = list(wanted.items())
        for start in range(0, len(pending), self._batch):
            await self._evaluate(text, pending[start : start + self._batch])
        return {time: text.known[key] for time, key in keys.items()}

    def differences(
        self, expected: Bag, found: Bag, *, exact_decimals: bool
    ) -> list[RowDifference]:
        """Return the differences of `found` from every answer that plain Spark could give."""
        return self.nondeterminism.differences(expected, found, exact_decimals=exact_decimals)

    def _at(self, sql: str, time: int) -> str:
        return text_at(sql, time) if self._plan.temporal else sql

    async def _evaluate(self, text: _Text, batch: list[tuple[Any, Sequence[Bag]]]) -> None:
        try:
            answers = await self._run(text, [(time, bags) for (time, _), bags in batch])
        except DefiniteError:
            if len(batch) == 1:
                text.known[batch[0][0]] = None
                return
            middle = len(batch) // 2
            await self._evaluate(text, batch[:middle])
            await self._evaluate(text, batch[middle:])
            return
        for (key, _), answer in zip(batch, answers, strict=True):
            text.known[key] = answer

    async def _run(self, text: _Text, batch: list[tuple[int, Sequence[Bag]]]) -> list[Bag]:
        plan = self._plan
        tables: list[tuple[str, JobRows]] = []
        if len(batch) == 1:
            time, bags = batch[0]
            sql, output = self._at(text.sql, time), text.output
            tables = [
                (name, rows_message(schema, weighted(bag, 0)))
                for name, schema, bag in zip(plan.inputs, plan.input_schemas, bags, strict=True)
            ]
        else:
            branches = []
            for number, (time, bags) in enumerate(batch):
                heads = []
                for name, schema, bag in zip(plan.inputs, plan.input_schemas, bags, strict=True):
                    view = f"__{number}_{name}"
                    tables.append((view, rows_message(schema, weighted(bag, 0))))
                    heads.append(f"`{name}` AS (SELECT * FROM `{view}`)")
                with_ = f"WITH {', '.join(heads)} " if heads else ""
                branches.append(f"SELECT {number} AS {AT}, v.* FROM ({with_}SELECT * FROM\n(\n"
                                f"{self._at(text.sql, time)}\n)) v")  # fmt: skip
            sql = "\nUNION ALL\n".join(branches)
            output = TableSchema((TableColumn(AT, "int", False), *text.output.columns))
        job = ComputeDifference(
            self._engine.job_id(), sql, tuple(tables), output, 0, None, plan.conf
        )
        updates = updates_of(await self._engine.rows(job), output.names)
        answers: list[Bag] = [Counter() for _ in batch]
        for row, _, diff in updates:
            if len(batch) == 1:
                answers[0][row] += diff
            else:
                answers[row[0]][row[1:]] += diff
        return answers


def text_at(sql: str, time: int) -> str:
    """Return a text with its calls of the clock, matched as words, replaced by a time.

    >>> text_at("select * from t where at > now() and d = current_date", 5)
    'select * from t where at > timestamp_millis(5L) and d = CAST(timestamp_millis(5L) AS date)'
    """
    moment = f"timestamp_millis({time}L)"
    for pattern, made in (
        (r"\b(?:now\(\)|current_timestamp\b(?:\(\))?)", moment),
        (r"\b(?:current_date\b(?:\(\))?|curdate\(\))", f"CAST({moment} AS date)"),
        (r"\blocaltimestamp\b(?:\(\))?", f"CAST({moment} AS timestamp_ntz)"),
    ):
        sql = re.sub(pattern, made, sql, flags=re.IGNORECASE)
    return sql


def _key(bags: Sequence[Bag]) -> Any:
    return tuple(frozenset((row, weight) for row, weight in bag.items() if weight) for bag in bags)
