"""Maintains one view step by step through an engine, with nothing else of the service.

What: `Maintained` keeps the inputs' updates, the output's and the hidden state as plain Python
rows, answers the plan's lookups from them, sends Prepare, Step and Difference to an executor
actor, and cuts their answers as the dataflow does. Checks of views and property tests drive it.

Rules: a step covers ``lo <= time < hi``; the first one hydrates with ``lo == 0``. Steps run
their strata alternately one by one, with looked-up hidden state, and all in one run, with the
hidden state whole, so that both ways are exercised. On a `DefiniteError` the interval is halved
until one time fails; the view is in error from there, and is computed from scratch at each later
time until that succeeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from actors.errors import DefiniteError
from actors.kernel import Address
from actors.plan.delta import DeltaPlan, Lookup
from actors.plan.jobs import (
    Analyze,
    Analyzed,
    Answer,
    Difference,
    ExecutorMessage,
    Forget,
    Job,
    Prepare,
    Rows,
    RowsDone,
    Run,
    Step,
)
from actors.plan.schema import DIFF, TIME, Schema
from actors.plan.updates import from_ipc, to_ipc
from actors.testing.engine import table_of
from actors.testing.nodes import Relation, frozen, group_key
from actors.testing.nodes import Update as Row
from actors.views.compile import Analyze as AnalyzeFunction

KEEP: Final = "__keep"


class Engine:
    """An executor actor as a caller sees it."""

    def __init__(self, executor: Address[Any], name: str) -> None:
        self._executor = executor
        self._name = name
        self._jobs = 0

    def job_id(self) -> str:
        """A fresh job id."""
        self._jobs += 1
        return f"{self._name}-{self._jobs}"

    async def run(self, job: Job) -> Answer:
        """The job's answer. Raises what it failed with."""

        def ask(reply: Any) -> ExecutorMessage:
            return Run(job, reply)

        answer: Answer = await self._executor.ask(ask)
        return answer

    def analyze(self) -> AnalyzeFunction:
        """The function that `compile_view` asks."""

        async def analyze(
            tables: tuple[tuple[str, Schema], ...],
            texts: tuple[str, ...],
            conf: tuple[tuple[str, str], ...],
        ) -> Analyzed:
            answer = await self.run(Analyze(self.job_id(), tables, texts, conf))
            assert isinstance(answer, Analyzed)
            return answer

        return analyze

    async def rows(self, job: Job) -> pa.Table:
        """The updates that a Step or Difference makes. Raises what it failed with."""
        answer = await self.run(job)
        assert isinstance(answer, RowsDone)
        if answer.arrow is not None:
            return from_ipc(answer.arrow)
        assert answer.arrow_file is not None
        return _read_once(answer.arrow_file)

    async def query(
        self,
        plan: DeltaPlan,
        contents: Sequence[Counter[tuple[Any, ...]]],
        time: int,
        old: Iterable[Row] | None = None,
    ) -> list[Row]:
        """The view's own text by plain Spark, less `old`."""
        tables = tuple(
            (name, rows_message(schema, weighted(bag, time)))
            for name, schema, bag in zip(plan.sources, plan.source_schemas, contents, strict=True)
        )
        job = Difference(
            job_id=self.job_id(),
            sql=plan.sql,
            tables=tables,
            output=plan.output,
            time=time,
            old=None if old is None else rows_message(plan.output, old),
            conf=plan.conf,
        )
        return updates_of(await self.rows(job), plan.output.names)


def _read_once(path: str) -> pa.Table:
    with pa.OSFile(path, "rb") as source:
        table = pa.ipc.open_file(source).read_all()
    Path(path).unlink(missing_ok=True)
    return table


def weighted(bag: Counter[tuple[Any, ...]], time: int) -> list[Row]:
    """A bag as updates at one time."""
    return [(row, time, weight) for row, weight in bag.items() if weight]


def rows_message(schema: Schema, updates: Iterable[Row]) -> Rows:
    """Updates as a job carries them."""
    columns = tuple((column.name, column.type) for column in schema.columns)
    rows = list(updates)
    return Rows(schema=schema, arrow=to_ipc(table_of(Relation(columns, rows))) if rows else None)


def updates_of(table: pa.Table, names: Sequence[str]) -> list[Row]:
    """An updates table as plain rows."""
    values = [[frozen(value) for value in table[name].to_pylist()] for name in names]
    rows = zip(*values, strict=True) if values else iter([()] * table.num_rows)
    rest = zip(table[TIME].to_pylist(), table[DIFF].to_pylist(), strict=True)
    return [(tuple(row), t, d) for row, (t, d) in zip(rows, rest, strict=True)]


def accumulated(updates: Iterable[Row], time: int) -> Counter[tuple[Any, ...]]:
    """Sums of the diffs up to a time, zeros left out."""
    sums: Counter[tuple[Any, ...]] = Counter()
    for row, at, diff in updates:
        if at <= time:
            sums[row] += diff
    return Counter({row: diff for row, diff in sums.items() if diff})


class Maintained:
    """One view and everything its maintenance remembers."""

    def __init__(self, engine: Engine, plan: DeltaPlan, dataflow: str) -> None:
        self.plan = plan
        self.inputs: list[list[Row]] = [[] for _ in plan.sources]
        self.output: list[Row] = []
        self.hidden: list[Row] = []
        self.errors: set[int] = set()
        """Times at which the view was found to be in error."""
        self.in_error = False
        self._engine = engine
        self._dataflow = dataflow
        self._steps = 0

    async def prepare(self) -> None:
        """Makes the plan known. Raises what the engine refuses it with."""
        if self.plan.strata:
            await self._engine.run(Prepare(self._engine.job_id(), self._dataflow, self.plan))

    async def forget(self) -> None:
        """Drops the plan in the engine."""
        if self.plan.strata:
            await self._engine.run(Forget(self._engine.job_id(), self._dataflow))

    async def advance(self, deltas: Sequence[list[Row]], lo: int, hi: int) -> None:
        """One step, whatever it takes. Raises the engine's errors but `DefiniteError`."""
        times = sorted({time for delta in deltas for _, time, _ in delta})
        if self.in_error or self.plan.mode == "opaque":
            for time in times or ([hi - 1] if lo == 0 else []):
                self._take(deltas, time, time + 1)
                await self._recompute(time)
            return
        output, hidden = len(self.output), list(self.hidden)
        try:
            await self._step(deltas, lo, hi)
        except DefiniteError:
            del self.output[output:]
            self.hidden = hidden
            if len(times) <= 1:
                self._take(deltas, lo, hi)
                self.in_error = True
                self.errors.add(times[0] if times else lo)
                return
            middle = times[len(times) // 2]
            await self.advance([_between(d, lo, middle) for d in deltas], lo, middle)
            await self.advance([_between(d, middle, hi) for d in deltas], middle, hi)
        else:
            self._take(deltas, lo, hi)

    def _take(self, deltas: Sequence[list[Row]], lo: int, hi: int) -> None:
        for known, delta in zip(self.inputs, deltas, strict=True):
            known += _between(delta, lo, hi)

    async def _recompute(self, time: int) -> None:
        """The view at one time from scratch, less what was."""
        try:
            if self.plan.mode == "opaque":
                contents = [accumulated(updates, time) for updates in self.inputs]
                old = weighted(accumulated(self.output, time), time)
                made = await self._engine.query(self.plan, contents, time, old)
                self.output += made
            else:
                await self._from_scratch(time)
        except DefiniteError:
            self.in_error = True
            self.errors.add(time)
        else:
            self.in_error = False

    async def _from_scratch(self, time: int) -> None:
        plan = self.plan
        inputs = {
            f"d{index}": rows_message(schema, weighted(accumulated(updates, time), time))
            for index, (schema, updates) in enumerate(
                zip(plan.source_schemas, self.inputs, strict=True)
            )
        }
        last = len(plan.strata) - 1
        job = Step(self._engine.job_id(), self._dataflow, 0, last, inputs, 0, time + 1)
        output, hidden = cut(plan, await self._engine.rows(job))
        new = accumulated(output, time)
        new.subtract(accumulated(self.output, time))
        self.output += weighted(new, time)
        self.hidden = hidden

    async def _step(self, deltas: Sequence[list[Row]], lo: int, hi: int) -> None:
        plan = self.plan
        found: dict[str, Relation] = {}
        for index, delta in enumerate(deltas):
            found[f"d{index}"] = _relation(plan.source_schemas[index], delta)
        fused = self._steps % 2 == 0
        self._steps += 1
        last = len(plan.strata) - 1
        table: pa.Table | None = None
        first = 0
        while first <= last:
            upto = last if fused else first
            inputs = self._gather(first, upto, found, lo, whole_hidden=fused)
            job = Step(self._engine.job_id(), self._dataflow, first, upto, inputs, lo, hi)
            table = await self._engine.rows(job)
            if upto < last:
                assert plan.hidden is not None
                names = plan.hidden.schema.names
                updates = updates_of(table, names)
                found[f"r{upto}"] = _relation(plan.hidden.schema, updates)
            first = upto + 1
        assert table is not None
        output, hidden = cut(plan, table)
        for _, time, _ in output:
            assert lo <= time < hi, f"an update at {time}, outside of [{lo}, {hi})"
        self.output += output
        self.hidden += hidden

    def _gather(
        self, first: int, last: int, found: dict[str, Relation], lo: int, *, whole_hidden: bool
    ) -> dict[str, Rows]:
        """The inputs of strata `first` to `last`, looked up."""
        plan = self.plan
        taken: dict[str, set[int]] = {}
        for stratum in plan.strata[first : last + 1]:
            for lookup in stratum.lookups:
                self._look_up(lookup, found, taken, lo, whole_hidden=whole_hidden)
        names = dict.fromkeys(n for s in plan.strata[first : last + 1] for n in s.inputs)
        return {
            name: rows_message(self._schema(name), found[name].updates)
            for name in names
            if name in found and found[name].updates
        }

    def _look_up(
        self,
        lookup: Lookup,
        found: dict[str, Relation],
        taken: dict[str, set[int]],
        lo: int,
        *,
        whole_hidden: bool,
    ) -> None:
        """Adds what the lookup returns to its target; no row twice."""
        target, schema = lookup.target, self._schema(lookup.target)
        kept = self.hidden if target == "h" else self.inputs[int(target[1:])]
        keys: set[tuple[Any, ...]] | None = set()
        if not lookup.key or (target == "h" and whole_hidden):
            keys = None
        else:
            for name, columns in lookup.origins:
                relation = found.get(name)
                if relation is not None:
                    order = [[n for n, _ in relation.columns].index(c) for c in columns]
                    keys = (keys or set()) | {
                        group_key(row[i] for i in order) for row, _, _ in relation.updates
                    }
        order = [schema.names.index(column) for column in lookup.key]
        chosen = taken.setdefault(target, set())
        for index, (row, _, _) in enumerate(kept):
            if keys is None or group_key(row[i] for i in order) in keys:
                chosen.add(index)
        state = max(lo - 1, 0)
        updates = [(kept[index][0], state, kept[index][2]) for index in sorted(chosen)]
        found[target] = _relation(schema, updates)

    def _schema(self, name: str) -> Schema:
        if name[0] in "ds":
            return self.plan.source_schemas[int(name[1:])]
        assert self.plan.hidden is not None
        return self.plan.hidden.schema


def cut(plan: DeltaPlan, table: pa.Table) -> tuple[list[Row], list[Row]]:
    """(output delta, hidden delta) of the last stratum's output."""
    if plan.hidden is None:
        return updates_of(table, plan.output.names), []
    kept = table.filter(table[KEEP])
    output = updates_of(kept, [f"o_{name}" for name in plan.output.names])
    return output, updates_of(table, plan.hidden.schema.names)


def _relation(schema: Schema, updates: list[Row]) -> Relation:
    return Relation(tuple((column.name, column.type) for column in schema.columns), updates)


def _between(updates: list[Row], lo: int, hi: int) -> list[Row]:
    return [update for update in updates if lo <= update[1] < hi]
