"""Maintains one view step by step through an engine, without the rest of the service.

`MaintainedView` keeps the updates of the inputs and the output, and the hidden state, as plain
Python rows. It answers the plan's lookups from them, sends Prepare, Step and Difference to an
executor actor, and cuts the answers as a dataflow does. Checks of views and property tests use it.

Rules: a step covers ``lo <= time < hi``; the first one hydrates with ``lo == 0``. Lookups return
exactly the rows whose keys match, null-safe, as `plan.delta.StateLookup` defines it, so that a plan
that requests too few rows gives a wrong answer. Steps alternate between all strata in one run, one
by one, and cut at random (`fuse` fixes one way). A state that is looked up by the output of an
earlier stratum of the same run is given in full. On a `DefiniteError` the interval is halved until
a single time fails; from there the view is in error, and is computed from scratch at each later
time until that succeeds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.engine.views.query_analysis import AnalyzeQuery
from actors.model.plan.delta import (
    INTERVAL,
    INTERVAL_SCHEMA,
    TO,
    DeltaColumns,
    DeltaPlan,
    StateLookup,
    missed_later,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.jobs import (
    AnalyzeStatement,
    Answer,
    ComputeDifference,
    ExecutorMessage,
    ForgetPlan,
    Job,
    JobRows,
    PreparePlan,
    QueryAnalyzed,
    RowsDone,
    RunStep,
    SubmitJob,
)
from actors.model.plan.nearby import ComparedRange, covered_changes, nearby_rows, rows_in_range
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.runtime.errors import DefiniteError, InvalidUsage
from actors.runtime.kernel import ActorAddress
from actors.testing.analysis import ParsedTranslation
from actors.testing.engine import table_of
from actors.testing.nodes import NodeRelation, consolidated, frozen, group_key
from actors.testing.nodes import Update as Row


class EngineCaller:
    """Client of an executor actor."""

    def __init__(self, executor: ActorAddress[Any], name: str) -> None:
        self._executor = executor
        self._name = name
        self._jobs = 0
        """Number of job ids given out."""
        self.parses = False
        """True once a plan was made by a parser and not by Spark."""

    def job_id(self) -> str:
        """Return a new job id."""
        self._jobs += 1
        return f"{self._name}-{self._jobs}"

    async def run(self, job: Job) -> Answer:
        """Return the job's answer. Raises the error with which it failed."""

        def ask(reply: Any) -> ExecutorMessage:
            return SubmitJob(job, reply)

        answer: Answer = await self._executor.ask(ask)
        return answer

    def analyze(self) -> AnalyzeQuery:
        """Return the analysis function that `compile_view` takes."""

        async def analyze(
            tables: tuple[tuple[str, TableSchema], ...],
            sql: str,
            conf: tuple[tuple[str, str], ...],
            *,
            translate: bool = False,
        ) -> QueryAnalyzed:
            job = AnalyzeStatement(self.job_id(), tables, sql, conf, translate)
            answer = await self.run(job)
            assert isinstance(answer, QueryAnalyzed)
            self.parses |= isinstance(answer.translation, ParsedTranslation)
            return answer

        return analyze

    async def rows(self, job: Job) -> pa.Table:
        """Return the updates that a Step or Difference makes. Raises the error with which it
        failed."""
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
        """Return plain Spark's answer to the view's own query, minus `old`."""
        tables = tuple(
            (name, rows_message(schema, weighted(bag, time)))
            for name, schema, bag in zip(plan.inputs, plan.input_schemas, contents, strict=True)
        )
        job = ComputeDifference(
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
    """Return a bag as updates at one time."""
    return [(row, time, weight) for row, weight in bag.items() if weight]


def rows_message(schema: TableSchema, updates: Iterable[Row]) -> JobRows:
    """Return updates in the form in which a job carries them."""
    columns = tuple((column.name, column.type) for column in schema.columns)
    rows = list(updates)
    return JobRows(
        schema=schema, arrow=to_ipc(table_of(NodeRelation(columns, rows))) if rows else None
    )


def updates_of(table: pa.Table, names: Sequence[str]) -> list[Row]:
    """Return an updates table as plain rows."""
    values = [[frozen(_plain(value)) for value in table[name]] for name in names]
    rows = zip(*values, strict=True) if values else iter([()] * table.num_rows)
    rest = zip(table[TIME].to_pylist(), table[DIFF].to_pylist(), strict=True)
    return [(tuple(row), t, d) for row, (t, d) in zip(rows, rest, strict=True)]


def _plain(value: pa.Scalar) -> Any:
    """Return a value as a Python object; a time after year 9999, which Python lacks, as
    microseconds."""
    try:
        return value.as_py()
    except OverflowError:
        if isinstance(value, pa.StructScalar):
            return {name: _plain(item) for name, item in value.items()}
        if isinstance(value, pa.ListScalar | pa.MapScalar):
            return [_plain(item) for item in value.values]
        return value.value


def accumulated(updates: Iterable[Row], time: int) -> Counter[tuple[Any, ...]]:
    """Return the sums of the diffs up to a time, without zeros."""
    sums: Counter[tuple[Any, ...]] = Counter()
    for row, at, diff in updates:
        if at <= time:
            sums[row] += diff
    return Counter({row: diff for row, diff in sums.items() if diff})


class WeightedRows:
    """Rows of an import or of hidden state with their weights, indexed by key."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        self._weights: dict[tuple[Any, ...], int] = {}
        """Weight of each row; rows with weight 0 are removed."""
        self._indexes: dict[
            tuple[str, ...], dict[tuple[Any, ...], dict[tuple[Any, ...], None]]
        ] = {}
        """Rows by the values of their key columns, for each key that was looked up."""

    def add(self, updates: Iterable[Row]) -> None:
        """Add updates, whatever their times."""
        for row, _, diff in updates:
            bits = tuple(map(frozen, row))
            weight = self._weights.get(bits, 0) + diff
            if weight:
                self._weights[bits] = weight
            else:
                self._weights.pop(bits, None)
            for key, index in self._indexes.items():
                self._enter(index, key, bits, present=weight != 0)

    def all(self) -> set[tuple[Any, ...]]:
        """Return all rows."""
        return set(self._weights)

    def find(self, key: tuple[str, ...], values: Iterable[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        """Return the rows whose key columns equal one of the values, null-safe."""
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = {}
            for row in self._weights:
                self._enter(index, key, row, present=True)
        return {row for value in values for row in index.get(value, ())}

    def weighted(self, rows: Iterable[tuple[Any, ...]], time: int) -> list[Row]:
        """Return rows as updates at one time."""
        return [(row, time, self._weights[row]) for row in rows]

    def _enter(
        self,
        index: dict[tuple[Any, ...], dict[tuple[Any, ...], None]],
        key: tuple[str, ...],
        row: tuple[Any, ...],
        *,
        present: bool,
    ) -> None:
        place = index.setdefault(
            group_key(row[self.schema.names.index(column)] for column in key), {}
        )
        if present:
            place[row] = None
        else:
            place.pop(row, None)


class MaintainedView:
    """One view with all the state that its maintenance needs."""

    def __init__(
        self, engine: EngineCaller, plan: DeltaPlan, dataflow: str, *, fuse: bool | None = None
    ) -> None:
        """Start without contents. `dataflow` names the plan in the engine; several views may share
        it once it is prepared."""
        self.plan = plan
        self.inputs: list[list[Row]] = [[] for _ in plan.inputs]
        """Updates of each input so far."""
        self.output: list[Row] = []
        """Updates of the output so far."""
        self.hidden: tuple[list[Row], ...] = tuple([] for _ in plan.hidden)
        """Updates of each hidden state so far."""
        self.errors: set[int] = set()
        """Times at which the view was found to be in error."""
        self.in_error = False
        """True while the view is in error."""
        self.rows_read: list[int] = []
        """Number of rows of state that lookups returned, for each step that ran strata (each row
        once)."""
        self._engine = engine
        self._dataflow = dataflow
        self._fuse = fuse
        self._steps = 0
        """Number of steps so far; decides how the strata are cut into runs."""
        self._states: dict[str, WeightedRows] = {}
        """Rows that lookups read, by input or hidden state."""
        for index, schema in enumerate(plan.input_schemas):
            self._states[InputKind.STATE.text(index)] = WeightedRows(schema)
        self._forget_hidden()

    async def prepare(self) -> None:
        """Prepare the plan in the engine. Raises the error with which the engine refuses it."""
        if self.plan.strata:
            await self._engine.run(PreparePlan(self._engine.job_id(), self._dataflow, self.plan))

    async def forget(self) -> None:
        """Drop the plan in the engine."""
        if self.plan.strata:
            await self._engine.run(ForgetPlan(self._engine.job_id(), self._dataflow))

    async def advance(self, deltas: Sequence[list[Row]], lo: int, hi: int) -> None:
        """Run one step, halving or recomputing as needed. Raises the engine's errors except
        `DefiniteError`."""
        times: Sequence[int] = sorted({time for delta in deltas for _, time, _ in delta})
        if self.plan.temporal and lo > 0:  # the passage of time alone may change the view
            times = range(lo, hi)
        if self.in_error or not self.plan.strata:
            for time in times or ([hi - 1] if lo == 0 else []):
                self._take(deltas, time, time + 1)
                await self._recompute(time)
            return
        try:
            await self._step(deltas, lo, hi)
        except DefiniteError:
            if len(times) <= 1:
                self._take(deltas, lo, hi)
                await self._recompute(times[0] if times else lo)
                return
            middle = times[len(times) // 2]
            await self.advance([_between(d, lo, middle) for d in deltas], lo, middle)
            await self.advance([_between(d, middle, hi) for d in deltas], middle, hi)
        else:
            self._take(deltas, lo, hi)

    def _take(self, deltas: Sequence[list[Row]], lo: int, hi: int) -> None:
        for index, delta in enumerate(deltas):
            taken = _between(delta, lo, hi)
            self.inputs[index] += taken
            self._states[InputKind.STATE.text(index)].add(taken)

    def _forget_hidden(self) -> None:
        self.hidden = tuple([] for _ in self.plan.hidden)
        for index, state in enumerate(self.plan.hidden):
            self._states[InputKind.HIDDEN.text(index)] = WeightedRows(state.schema)

    def _take_hidden(self, hidden: Sequence[list[Row]]) -> None:
        for index, updates in enumerate(hidden):
            self.hidden[index].extend(updates)
            self._states[InputKind.HIDDEN.text(index)].add(updates)

    async def _recompute(self, time: int) -> None:
        """Compute the view at one time from scratch, and append the difference to its output."""
        try:
            if not self.plan.strata:
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
        contents = [
            rows_message(schema, weighted(accumulated(updates, time), time))
            for schema, updates in zip(plan.input_schemas, self.inputs, strict=True)
        ]
        inputs = {name: contents[index] for name, index in plan.whole_inputs().items()}
        if plan.temporal:
            inputs[INTERVAL] = rows_message(INTERVAL_SCHEMA, [((0, time + 1), 0, 1)])
        last = len(plan.strata) - 1
        job = RunStep(
            self._engine.job_id(), self._dataflow, 0, last, inputs, 0, time + 1, at_once=True
        )
        output, hidden = split_output(plan, await self._engine.rows(job))
        new = accumulated(output, time)
        new.subtract(accumulated(self.output, time))
        self.output += weighted(new, time)
        self._forget_hidden()
        self._take_hidden(hidden)

    async def _step(self, deltas: Sequence[list[Row]], lo: int, hi: int) -> None:
        plan = self.plan
        found: dict[str, NodeRelation] = {}
        for index, delta in enumerate(deltas):
            found[InputKind.CHANGES.text(index)] = _relation(plan.input_schemas[index], delta)
        found |= self._due(hi)
        found[INTERVAL] = _relation(INTERVAL_SCHEMA, [((lo, hi), 0, 1)])
        taken: dict[str, set[tuple[Any, ...]]] = {}
        by_lookup: dict[int, set[tuple[Any, ...]]] = {}
        table: pa.Table | None = None
        first = 0
        for upto in self._runs():
            for stratum in plan.strata[first : upto + 1]:
                ranges = {each.lookup: each for each in stratum.ranges}
                for lookup in stratum.lookups:
                    found |= self._covered(found)
                    within = ranges.get(lookup.number)
                    self._look_up(lookup, found, taken, by_lookup, lo, within)
            found |= self._nearby(found) | self._covered(found)
            names = dict.fromkeys(n for s in plan.strata[first : upto + 1] for n in s.inputs)
            inputs = {
                name: rows_message(_schema(found[name]), found[name].updates)
                for name in names
                if name in found and found[name].updates
            }
            job = RunStep(self._engine.job_id(), self._dataflow, first, upto, inputs, lo, hi)
            table = await self._engine.rows(job)
            found[InputKind.RESULT.text(upto)] = _made(table)
            first = upto + 1
        assert table is not None
        self.rows_read.append(sum(len(rows) for rows in taken.values()))
        output, hidden = split_output(plan, table)
        for _, time, _ in (*output, *(update for updates in hidden for update in updates)):
            assert lo <= time < hi, f"an update at {time}, outside of [{lo}, {hi})"
        self.output += output
        self._take_hidden(hidden)

    def _nearby(self, found: dict[str, NodeRelation]) -> dict[str, NodeRelation]:
        """Return the inputs of rows near changes, for inputs whose rows were looked up."""
        made = {}
        for index, near in enumerate(self.plan.nearby):
            rows = found.get(InputKind.STATE.text(near.input_index))
            changes = found[InputKind.CHANGES.text(near.input_index)]
            if rows is not None:
                thinned = nearby_rows(table_of(rows), table_of(changes), near)
                names = [name for name, _ in rows.columns]
                made[InputKind.NEARBY.text(index)] = NodeRelation(
                    rows.columns, updates_of(thinned, names)
                )
        return made

    def _covered(self, found: dict[str, NodeRelation]) -> dict[str, NodeRelation]:
        """Return the inputs of changes up to edges, for edges that were looked up."""
        made = {}
        for index, covered in enumerate(self.plan.covered):
            changes = found[InputKind.CHANGES.text(covered.input_index)]
            edges = found.get(InputKind.HIDDEN.text(covered.edges))
            if edges is not None:
                kept, _ = covered_changes(table_of(changes), table_of(edges), covered)
                names = [name for name, _ in changes.columns]
                made[InputKind.COVERED.text(index)] = NodeRelation(
                    changes.columns, updates_of(kept, names)
                )
        return made

    def _due(self, hi: int) -> dict[str, NodeRelation]:
        """Return the rows of hidden states that the clock changes before `hi`."""
        found = {}
        for index, hidden in enumerate(self.plan.hidden):
            if hidden.due:
                state = self._states[InputKind.HIDDEN.text(index)]
                place = hidden.schema.names.index(hidden.due)
                rows = [
                    (row, row[place], weight)
                    for row, _, weight in state.weighted(state.all(), 0)
                    if row[place] < hi
                ]
                found[InputKind.DUE.text(index)] = _relation(hidden.schema, rows)
        return found

    def _runs(self) -> list[int]:
        """Return the last stratum of each run of the next step."""
        strata = self.plan.strata
        number = self._steps
        self._steps += 1
        if self._fuse or (self._fuse is None and number % 3 == 0):
            return [len(strata) - 1]
        if self._fuse is False or number % 3 == 1:
            return list(range(len(strata)))
        pick = random.Random(f"{self._dataflow} {number}")
        runs: list[int] = []
        while not runs or runs[-1] < len(strata) - 1:
            first = runs[-1] + 1 if runs else 0
            last = pick.randrange(first, len(strata))
            while missed_later(strata, first, last):
                last -= 1
            runs.append(last)
        return runs

    def _have_rows(self, lookup: StateLookup, found: dict[str, NodeRelation]) -> bool:
        """Return whether a lookup's origin has a row; one that this same run makes might have."""
        relations = (found.get(name) for name, _ in lookup.origins)
        return any(relation is None or bool(relation.updates) for relation in relations)

    def _look_up(
        self,
        lookup: StateLookup,
        found: dict[str, NodeRelation],
        taken: dict[str, set[tuple[Any, ...]]],
        by_lookup: dict[int, set[tuple[Any, ...]]],
        lo: int,
        within: ComparedRange | None,
    ) -> None:
        """Add the lookup's rows to its target, without duplicates."""
        state = self._states[lookup.target]
        chosen = taken.setdefault(lookup.target, set())
        keys: set[tuple[Any, ...]] | None = set() if lookup.key else None
        for index, (name, columns) in enumerate(lookup.origins):
            if len(columns) != len(lookup.key):
                raise InvalidUsage(f"{lookup}: an origin does not fit the key")
            relation = found.get(name)
            if relation is not None and lookup.fills and lookup.fills[index]:
                origin = self._states[name]
                rows = set().union(*(by_lookup.get(n, ()) for n in lookup.fills[index]))
                relation = _relation(origin.schema, origin.weighted(rows, max(lo - 1, 0)))
            if relation is None:
                if InputName.parse(name).kind is not InputKind.RESULT:
                    raise InvalidUsage(f"{lookup}: nothing has looked up {name} before")
                keys = None  # this same run makes the origin, so any row may be looked up
            elif keys is not None:
                keys |= _key_values(relation, columns)
        if keys is not None and not lookup.nulls:
            keys = {key for key in keys if None not in key}
        wanted = lookup.key or not lookup.origins or self._have_rows(lookup, found)
        picked = state.find(lookup.key, keys) if keys is not None else state.all()
        picked = picked if wanted else set()
        changes = found.get(lookup.origins[0][0]) if within is not None else None
        if within is not None and changes is not None:
            read = _relation(state.schema, state.weighted(picked, 0))
            kept = rows_in_range(table_of(read), table_of(changes), within)
            picked &= {row for row, _, _ in updates_of(kept, state.schema.names)}
        chosen |= picked
        by_lookup.setdefault(lookup.number, set()).update(picked)
        found[lookup.target] = _relation(state.schema, state.weighted(chosen, max(lo - 1, 0)))


def _key_values(relation: NodeRelation, columns: tuple[str, ...]) -> set[tuple[Any, ...]]:
    """Return the values of columns; a column without a name is NULL."""
    names = [name for name, _ in relation.columns]
    order = [names.index(column) if column else None for column in columns]
    return {
        group_key(None if i is None else row[i] for i in order) for row, _, _ in relation.updates
    }


def split_output(plan: DeltaPlan, table: pa.Table) -> tuple[list[Row], tuple[list[Row], ...]]:
    """Return (output delta, hidden deltas) of the last stratum's output, consolidated."""
    bits = table[TO].to_pylist() if plan.hidden else [0] * table.num_rows

    def part(delta: DeltaColumns) -> list[Row]:
        updates = zip(updates_of(table, delta.names), bits, strict=True)
        return consolidated(update for update, to in updates if to & delta.bit == delta.bit)

    output, *hidden = map(part, plan.deltas)
    return output, tuple(hidden)


def _made(table: pa.Table) -> NodeRelation:
    """Return a stratum's output, with types derived from Arrow."""
    from actors.model.plan.schema import spark_type

    fields = [field for field in table.schema if field.name not in (TIME, DIFF)]
    columns = tuple((field.name, spark_type(field.type)) for field in fields)
    return NodeRelation(columns, updates_of(table, [name for name, _ in columns]))


def _schema(relation: NodeRelation) -> TableSchema:
    return TableSchema(tuple(TableColumn(name, kind) for name, kind in relation.columns))


def _relation(schema: TableSchema, updates: list[Row]) -> NodeRelation:
    return NodeRelation(tuple((column.name, column.type) for column in schema.columns), updates)


def _between(updates: list[Row], lo: int, hi: int) -> list[Row]:
    return [update for update in updates if lo <= update[1] < hi]
