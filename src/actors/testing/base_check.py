"""Checks a view script over a base: many additional rows that its tables hold from the start.

Theory of operation. The views run as real dataflows on real shards (`stage`), in files. The base
(`base_rows`) is written together with the changes of the first time, so that the first contents are
computed from it, and is deleted at the last time with all other rows. In between come the script's
own changes, cut at random into up to two groups, with compaction and one restart. At the last time
of each group a view is compared with plain Spark: one job runs the view's own text over its tables
and subtracts the contents of the view's shard, so that only differing rows are returned, however
large both are. The job reads tables from the generated rows, not from the shards; views that other
views read are taken from their shards, which were compared before. If the base is to *stay*, it is
not deleted, and its views are compared once, after all changes: that is a third of the work.

Rules
- The base is as far from the script's values as the views tolerate (`base_rows.RANGES`): the first
  range in which no query raises that does not also raise without it, as found on a sample.
- A join of N rows may return many more: the base is cut to the size whose answers, extrapolated
  from one sample to another, fit `OUTPUT_ROWS_MAX`, and the result says so.
- *Error or equal* holds as without a base. Windows of expected errors are not checked, since
  several times share a step. A view for which Spark may choose among rows is compared with one such
  choice, and reported as not checked where they differ.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.durable.persist.blob_file import FileBlob
from actors.model.plan.delta import INTERVAL_SCHEMA, DeltaPlan, MatchState, PairRows, columns_of
from actors.model.plan.jobs import ComputeDifference, JobRows
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.model.plan.updates import negate, set_column, to_ipc
from actors.replica.dataflow.contents import contents
from actors.replica.dataflow.engine import EngineClient
from actors.runtime.errors import DefiniteError, PenstockError
from actors.runtime.kernel import ActorAddress, SystemClock
from actors.runtime.settings import Settings
from actors.testing.base_rows import RANGES, UnmakeableTable, base_rows, script_values
from actors.testing.check_stores import check_stores
from actors.testing.checking import DATAFLOW_SETTINGS, CheckedScript, CheckPlace
from actors.testing.engine import table_of
from actors.testing.maintain import accumulated, updates_of, weighted
from actors.testing.nodes import NodeRelation
from actors.testing.nondeterminism import is_approximate, nondeterminism_of
from actors.testing.oracle import RELATIVE_TOLERANCE, differences
from actors.testing.reference import text_at
from actors.testing.stage import ScriptStage, shard_name

SAMPLES: Final = {"far": (500, 4_000), "near": (500, 4_000), "own": (40, 160)}
"""Rows per table for sampling the views' answers before the base is made. The script has few `own`
values, so even few rows join to many."""
OUTPUT_ROWS_MAX: Final = 1_000_000
CROSSED_ROWS_MAX: Final = 1_000
"""Most rows per table of a base whose rows are compared pair by pair (a join without an
equality)."""
COMPARED_ROWS_MAX: Final = 2_000
"""Most differing rows to compare one by one."""
WAIT_SECONDS: Final = 900.0


async def check_with_base(
    checked: CheckedScript, place: CheckPlace, rows: int, seed: str, *, stays: bool = False
) -> None:
    """Run the script's views over a base, which `stays` or is deleted at the last time, and record
    any difference. Raises errors of the engine and the stores that cannot be retried."""
    plans = checked.plans
    crossing: set[str] = set()
    for name, plan in plans.items():
        if _crosses(plan) or crossing.intersection(plan.inputs):
            crossing.add(name)
    plain = {name: plan for name, plan in plans.items() if name not in crossing}
    needed = {each for name in crossing for each in _with_inputs(name, plans)}
    crossed = {name: plan for name, plan in plans.items() if name in needed}
    for number, (some, count) in enumerate(((plain, rows), (crossed, min(rows, CROSSED_ROWS_MAX)))):
        if some:
            check = BaseCheck(checked, some, place, f"{seed}-{number}", stays=stays)
            await check.choose(count, rows)
            await check.run()


def _three_groups(times: Sequence[int], choose: random.Random, *, stays: bool) -> list[list[int]]:
    """Return the times in up to three groups: the last time alone, the others cut anywhere. If the
    base stays and there are two times, both other groups have one."""
    changing = times[:-1]
    cut = choose.randint(1, max(1, len(changing) - stays))
    last = [] if stays else [times[-1]]
    groups = [list(changing[:cut]), list(changing[cut:]), last]
    return [group for group in groups if group]


def _tolerable_rows(sample: int, size: int, power: float) -> int:
    """Return the number of rows per table that give an answer of `OUTPUT_ROWS_MAX`, if `sample`
    rows give one of `size` that grows with a power of them. If the answer hardly grows, the number
    is very large.

    >>> _tolerable_rows(100, 10_000, 2.0), _tolerable_rows(100, 110, 0.001)
    (1000, 48516519541)
    """
    return round(sample * math.exp(min(20.0, math.log(OUTPUT_ROWS_MAX / size) / power)))


def _with_inputs(name: str, plans: Mapping[str, DeltaPlan]) -> dict[str, DeltaPlan]:
    """Return a view and the views that it reads, in the script's order."""
    wanted = {name}
    for other in reversed(list(plans)):
        if other in wanted:
            wanted.update(plans[other].inputs)
    return {other: plan for other, plan in plans.items() if other in wanted}


class BaseCheck:
    """Checks one script over its base."""

    def __init__(
        self,
        checked: CheckedScript,
        plans: Mapping[str, DeltaPlan],
        place: CheckPlace,
        seed: str,
        *,
        stays: bool = False,
    ) -> None:
        self._checked = checked
        self._plans = plans
        self._place = place
        self._seed = seed
        self._stays = stays
        self._scratch = place.scratch / f"base-{seed.replace('/', '-')}"
        executor: ActorAddress[Any] = place.executor
        self._engine = EngineClient(
            executor, place.system.clock, place.settings, self._scratch, f"base-{seed}"
        )
        self._first, self._end = checked.times[0], checked.times[-1]
        """First and last time of the script."""
        self._jobs = 0
        """Number of jobs and readers so far, used in their names."""
        self._reach = RANGES[0]
        """Distance of the base's values from the script's, chosen by `choose`."""
        self._base: dict[str, pa.Table] = {}
        """Generated rows by table."""
        self._files: dict[str, str] = {}
        """Paths of the generated rows' files, by table."""
        self._groups: list[list[int]] = []
        """Times that are written together."""
        self._restarts = True
        """True if the dataflows restart after one of the groups."""
        self.reads: dict[str, list[int]] = {name: [] for name in plans}
        """Rows of state that lookups returned in the last step of each group; -1 if the view was
        computed in full."""

    # -- the base ---------------------------------------------------------------------------------

    async def choose(self, rows: int, wanted: int) -> None:
        """Make the base: `rows` rows per table, or as many as the views tolerate. If these are
        fewer than `wanted`, say so in the views' results."""
        raising = {name for name, count in (await self._answers(0)).items() if count is None}
        best: tuple[int, int] | None = None
        sizes: dict[str, int | None] = {}
        for index, reach in enumerate(RANGES):
            self._reach = reach
            found = await self._answers(min(rows, SAMPLES[reach][0]))
            fault = (sum(found[name] is None for name in found.keys() - raising), index)
            if best is None or fault < best:
                best, sizes = fault, found
            if fault[0] == 0:
                break
        assert best is not None
        self._reach = RANGES[best[1]]
        count = await self._rows_tolerated(rows, sizes)
        self._base = self._make(count)
        await self._place.system.clock.run_blocking(self._write)
        if count < wanted:
            for name in self._plans:
                self._checked.note(name, f"over a base of {count} rows")

    async def take(
        self, base: Mapping[str, pa.Table], groups: Sequence[Sequence[int]], *, restart: bool = True
    ) -> None:
        """Use these updates of the first time, one table each, instead of generated rows. Write the
        times in these groups, and restart after one of them if `restart`."""
        self._base = dict(base)
        self._restarts = restart
        self._groups = [list(times) for times in groups]
        await self._place.system.clock.run_blocking(self._write)

    def _make(self, count: int) -> dict[str, pa.Table]:
        made: dict[str, pa.Table] = {}
        for name, schema in self._checked.script.tables.items():
            own = [row for row, _, _ in self._checked.base[name]]
            seed = f"{self._seed} {name}"
            try:
                made[name] = base_rows(
                    schema, script_values(schema, own), count, self._reach, seed, self._first
                )
            except UnmakeableTable:
                made[name] = schema.arrow_updates().empty_table()
        return made

    def _write(self) -> None:
        self._scratch.mkdir(parents=True, exist_ok=True)
        for number, (name, table) in enumerate(self._base.items()):
            path = self._scratch / f"base-{number}.parquet"
            pq.write_table(table, path)
            self._files[name] = str(path)

    async def _answers(self, count: int) -> dict[str, int | None]:
        """Return how many rows each view has at the first time over `count` rows per table; None if
        it raises, or reads a view that raises."""
        made = self._make(count) if count else {}
        sizes: dict[str, int | None] = {}
        answers: dict[str, JobRows] = {}
        for name, plan in self._plans.items():
            tables = []
            for read, schema in zip(plan.inputs, plan.input_schemas, strict=True):
                if read in self._checked.base:
                    held = [made[read]] if read in made else []
                    own = self._own_rows(read, schema, self._first)
                    tables.append((read, _inline(schema, [own, *held])))
                elif read in answers:
                    tables.append((read, answers[read]))
            sizes[name] = None
            if len(tables) == len(plan.inputs):
                try:
                    found = await self._engine.run(self._job(plan, tables, self._first, None))
                except DefiniteError:
                    continue
                sizes[name] = int(pc.sum(found.rows[DIFF]).as_py() or 0)
                answers[name] = _inline(plan.output, [found.rows])
        return sizes

    async def _rows_tolerated(self, rows: int, small: Mapping[str, int | None]) -> int:
        """Return how many rows per table the views tolerate."""
        first, second = SAMPLES[self._reach]
        if rows <= first:
            return rows
        for size in small.values():
            if size and size > first * 20:  # rows multiply: the second sample would be too large
                rows = min(rows, _tolerable_rows(first, size, math.log(size, first)))
        if rows <= second:
            return rows
        large = await self._answers(second)
        for name, size in large.items():
            power = math.log((size or 1) / max(1, small[name] or 1), second / first)
            if size and power > 0:
                rows = min(rows, _tolerable_rows(second, size, power))
        return rows

    # -- the run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Hydrate, write in groups, compact, restart, and compare."""
        checked, place = self._checked, self._place
        settings = msgspec.structs.replace(place.settings, **DATAFLOW_SETTINGS)
        blob = FileBlob(self._scratch / "blob", SystemClock())
        await blob.prepare()
        try:
            async with check_stores(settings, lambda: blob) as persist:
                stage = ScriptStage(
                    place.system,
                    place.executor,
                    persist,
                    self._scratch,
                    settings,
                    f"{self._seed}-live",
                )
                stage.wait_seconds = WAIT_SECONDS
                try:
                    await stage.open(checked.script.tables, self._plans)
                    await self._run_on(stage, settings)
                finally:
                    await stage.stop()
        except PenstockError as error:
            for name in self._plans:
                checked.note_wrong(name, f"over a base: {type(error).__name__}: {error}")

    async def _run_on(self, stage: ScriptStage, settings: Settings) -> None:
        checked = self._checked
        choose = random.Random(f"{self._seed} base")
        groups = self._groups or _three_groups(checked.times, choose, stays=self._stays)
        restart = choose.randrange(len(groups))
        as_of, lo = groups[0][-1], 0
        for number, times in enumerate(groups):
            hi = times[-1] + 1
            updates = {
                name: [u for u in rows if lo <= u[1] < hi] for name, rows in checked.base.items()
            }
            await stage.write(updates, hi, self._large(lo, hi))
            if number == 0:
                await stage.start(as_of, settings)
            await stage.wait(hi)
            for name, reads in self.reads.items():
                reads.append(stage.rows_read(name))
            if not self._stays or number == len(groups) - 1:
                await self._compare(stage, times[-1])
            if choose.random() < 0.5:
                await stage.compact(times[-1])
            if self._restarts and number == restart:
                await stage.stop()
                await stage.start(as_of, settings)
            lo = hi

    def _large(self, lo: int, hi: int) -> dict[str, list[pa.Table]]:
        """Return the updates of the base in an interval of times: insertions at the first time,
        retractions at the last."""
        made: dict[str, list[pa.Table]] = {name: [] for name in self._base}
        for name, table in self._base.items():
            if lo <= self._first < hi:
                made[name].append(table)
            if lo <= self._end < hi:
                times = pa.repeat(pa.scalar(self._end, pa.int64()), table.num_rows)
                made[name].append(set_column(negate(table), TIME, times))
        return made

    # -- comparing --------------------------------------------------------------------------------

    async def _compare(self, stage: ScriptStage, time: int) -> None:
        for name, plan in self._plans.items():
            async with AsyncExitStack() as opened:
                tables = []
                for read, schema in zip(plan.inputs, plan.input_schemas, strict=True):
                    if read in self._checked.base:
                        tables.append((read, self._table(read, schema, time)))
                        continue
                    held = await self._held(opened, stage, read, schema, time)
                    if not isinstance(held, str):
                        tables.append((read, held))
                if len(tables) < len(plan.inputs):
                    continue  # one of its inputs is in error
                old = await self._held(opened, stage, name, plan.output, time)
                try:
                    rows = None if isinstance(old, str) else old
                    made = await self._engine.run(self._job(plan, tables, time, rows))
                except DefiniteError:
                    continue
            if isinstance(old, str):
                where = f"at {time} over a base"
                why = f"in error ({old}), but plain Spark answers"
                self._checked.note_wrong(name, f"{where}: {why}")
                continue
            wrong = unexplained(made.rows, plan.output)
            determined = self._checked.script.determined
            free = nondeterminism_of(plan.sql).kind != "none" or is_approximate(plan.sql)
            if wrong and not determined and free:
                self._checked.note(name, "not checked: Spark may choose among many rows")
            elif wrong:
                row, weight = wrong[0]
                self._checked.note_wrong(
                    name,
                    f"at {time} over a base ({self._reach}): {made.rows.num_rows} rows differ, "
                    f"first {row}: {weight} too {'few' if weight > 0 else 'many'}",
                )

    async def _held(
        self, opened: AsyncExitStack, stage: ScriptStage, view: str, schema: TableSchema, time: int
    ) -> JobRows | str:
        """Return the contents of a view's shard, or the error that it holds."""
        self._jobs += 1
        reader = f"compare-{self._jobs}"
        found = await opened.enter_async_context(
            contents(stage.persist, self._engine, shard_name(view), schema, time, reader)
        )
        return found.errors[0] if found.errors else found.rows

    def _table(self, name: str, schema: TableSchema, time: int) -> JobRows:
        """Return a table's rows at a time: the base's file and the script's own rows."""
        own = _inline(schema, [self._own_rows(name, schema, time)])
        if time >= self._end or not self._base[name].num_rows:
            return own
        return msgspec.structs.replace(own, files=(self._files[name],))

    def _own_rows(self, name: str, schema: TableSchema, time: int) -> pa.Table:
        columns = tuple((column.name, column.type) for column in schema.columns)
        left = weighted(accumulated(self._checked.base[name], time), time)
        return table_of(NodeRelation(columns, left))

    def _job(
        self, plan: DeltaPlan, tables: Sequence[tuple[str, JobRows]], time: int, old: JobRows | None
    ) -> ComputeDifference:
        self._jobs += 1
        job_id = self._engine.job_id(0, self._jobs, "base")
        sql = text_at(plan.sql, time) if plan.temporal else plan.sql
        return ComputeDifference(job_id, sql, tuple(tables), plan.output, time, old, plan.conf)


def _inline(schema: TableSchema, tables: Sequence[pa.Table]) -> JobRows:
    shape = schema.arrow_updates()
    whole = pa.concat_tables([table.select(shape.names).cast(shape) for table in tables])
    return JobRows(schema, arrow=to_ipc(whole))


def _crosses(plan: DeltaPlan) -> bool:
    """Return whether a join of the plan compares all pairs of rows."""
    nodes = (node for stratum in plan.strata for node in _nodes(stratum.node))
    joins = (node for node in nodes if isinstance(node, PairRows | MatchState))
    interval = INTERVAL_SCHEMA.names
    return any(
        not node.equal and not node.same and columns_of(node.right) != interval for node in joins
    )


def _nodes(node: Any) -> Iterator[Any]:
    if isinstance(node, msgspec.Struct):
        yield node
        for name in node.__struct_fields__:
            yield from _nodes(getattr(node, name))
    elif isinstance(node, tuple):
        for each in node:
            yield from _nodes(each)


def unexplained(delta: pa.Table, schema: TableSchema) -> list[tuple[tuple[Any, ...], int]]:
    """Return the rows of a difference that float rounding does not explain, each with how often it
    is missing. If there are many, only the first `COMPARED_ROWS_MAX` are compared."""
    if not delta.num_rows:
        return []
    floats = [
        c.name for c in schema.columns if pa.types.is_floating(delta.schema.field(c.name).type)
    ]
    nested = [c.name for c in schema.columns if pa.types.is_nested(delta.schema.field(c.name).type)]
    missing = delta.filter(pc.greater(delta[DIFF], 0))
    added = delta.filter(pc.less(delta[DIFF], 0))
    if floats and not nested and missing.num_rows == added.num_rows:
        close = _close_rows(missing, added, schema, floats)
        missing, added = missing.filter(close[0]), added.filter(close[1])
    few = pa.concat_tables([missing.slice(0, COMPARED_ROWS_MAX), added.slice(0, COMPARED_ROWS_MAX)])
    bags: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())
    for row, _, diff in updates_of(few, schema.names):
        bags[diff < 0][row] += abs(diff)
    wrong = differences(bags[0], bags[1], exact_decimals=True)
    return [(each.row, each.expected - each.found) for each in wrong]


def _close_rows(
    missing: pa.Table, added: pa.Table, schema: TableSchema, floats: Sequence[str]
) -> tuple[pa.Array, pa.Array]:
    """Return masks of the rows of either table without a close row in the same position. Both
    tables are sorted."""
    exact = [name for name in schema.names if name not in floats]
    order = [(name, "ascending") for name in (*exact, *floats)]
    places = [np.asarray(pc.sort_indices(table, sort_keys=order)) for table in (missing, added)]
    left, right = (t.take(pa.array(p)) for t, p in zip((missing, added), places, strict=True))
    same = np.asarray(pc.equal(left[DIFF], pc.negate(right[DIFF])))
    for name in exact:
        both = pc.equal(left[name], right[name]).combine_chunks()
        nulls = pc.and_(pc.is_null(left[name]), pc.is_null(right[name])).combine_chunks()
        same &= np.asarray(pc.or_(pc.fill_null(both, False), nulls))
    for name in floats:
        a, b = (np.asarray(pc.fill_null(t[name], 0.0), np.float64) for t in (left, right))
        nulls = np.asarray(pc.equal(pc.is_null(left[name]), pc.is_null(right[name])))
        same &= nulls & np.isclose(a, b, rtol=RELATIVE_TOLERANCE, atol=1e-12, equal_nan=True)
    found = []
    for place in places:
        wrong = np.empty(len(same), bool)
        wrong[place] = ~same
        found.append(pa.array(wrong))
    return found[0], found[1]
