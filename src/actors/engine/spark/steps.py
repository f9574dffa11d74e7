"""Runs the steps of delta plans.

`run_step` renders strata as one statement (`actors.engine.spark.translate`), or in pieces if a
single plan would be too large (`actors.model.plan.plan_splitting`), gives Spark the rows as views,
and collects the answer. A large answer that is wanted as files is written to files
(`actors.engine.spark.answer_files`).

Steps in which Spark reads no files run from a plan that was built before, if possible
(`actors.engine.spark.prepared_steps`). Other steps with few bytes (`engine_inline_bytes_max`) run
in one partition.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from actors.engine.spark.answer_files import (
    AnswerTooLarge,
    answer_rows_max,
    makes_few_rows,
    read_back,
    too_large,
    write_files,
)
from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.bucket_parts import BucketParts
from actors.engine.spark.exact_keys import exact_keys, types_of
from actors.engine.spark.failures import describe
from actors.engine.spark.fragments import consolidated
from actors.engine.spark.prepared_plan import PreparedPlan
from actors.engine.spark.prepared_steps import PreparedRequest, PreparedSteps
from actors.engine.spark.rows import LoadedRows, all_ones, frame, load, rows_done
from actors.engine.spark.session import ThreadSessions
from actors.engine.spark.subtraction import subtract_old_contents
from actors.engine.spark.translate import PlanTranslator, SessionRelation, leaves
from actors.model.plan.delta import (
    INTERVAL,
    ConsolidateRows,
    DeltaPlan,
    Node,
    aggregate_below_unions,
    narrow_schema,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.jobs import (
    FileDone,
    JobRows,
    LikelyRun,
    ObjectDone,
    PlanPrepared,
    RehearseSteps,
    RowsDone,
    RunStep,
)
from actors.model.plan.plan_splitting import emits_without_input
from actors.model.plan.schema import DIFF, TIME, quote
from actors.model.plan.updates import consolidate, empty_updates, set_column
from actors.runtime.errors import DefiniteError, InvalidUsage, JobTooLarge, OperationCanceled
from actors.runtime.threshold_probes import COLLECTED, PLAN_NODES

STATEMENT_BYTES_MAX: Final = 2 * 1024 * 1024
"""Maximum length of an SQL text; a job with a longer one is refused and never sent."""
NESTING_MAX: Final = 1_000
"""Maximum nesting of brackets in an SQL text. With several thousand levels, Spark's parser works
for minutes before its stack overflows. A job with a deeper text is refused as well."""
TREE_NODES_MAX: Final = 100_000
"""Maximum number of nodes of the plan that Spark makes from a view's text; a view with more is
recomputed."""

# Otherwise the optimizer computes constants without any row, and filters below a GROUP BY on rows
# whose diffs are not summed up yet. The price is that filters run after joins and groupings.
_ROW_BY_ROW: Final = (
    "spark.sql.optimizer.excludedRules",
    "org.apache.spark.sql.catalyst.optimizer.ConstantFolding,"
    "org.apache.spark.sql.catalyst.optimizer.PushDownPredicates",
)
"""Setting that prevents expressions from being computed before their rows are ready."""
_UNSUMMED: Final = "__unsummed"
_BRACKETS: Final = re.compile(r"""[()]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`""", re.DOTALL)
KEPT_BYTES: Final = 1 << 40
"""Assumed size of rows that stay in Spark uncounted."""


def nesting_of(text: str) -> int:
    """Return the nesting depth of the brackets in an SQL text, ignoring those in quotes."""
    depth = most = 0
    for found in _BRACKETS.findall(text):
        depth += {"(": 1, ")": -1}.get(found, 0)
        most = max(most, depth)
    return most


class ThreadSlot(msgspec.Struct):
    """A worker thread's sessions and limits, and the state of its current job."""

    # The sessions of this thread.
    sessions: ThreadSessions
    steps: PreparedSteps
    """The prepared steps of all threads."""
    # Folder for answers.
    out: Path
    # Maximum size of an answer that is sent inline, and of inputs that run in one partition.
    inline_bytes_max: int
    # Size of inputs above which an answer may be written to files.
    collected_bytes_max: int
    files_here: bool
    """True if files that Spark writes are visible to this process."""
    # Maximum number of nodes of one plan; a larger step runs in pieces.
    plan_nodes_max: int
    parts: BucketParts
    """Access to parts in buckets, shared by all threads."""
    canceled: threading.Event
    """Set when the current job is canceled."""
    group: str = ""
    """Spark's job group of the current job."""
    # Spark's scheduler pool of this thread.
    pool: str = ""
    frequent: bool = False
    """True if a plan of its own would pay for the current step."""
    waited_ms: float = 0.0
    """Time that the current step has waited for other steps."""

    def waited(self, ms: float) -> None:
        """Add to the time that the current step has waited for other steps."""
        self.waited_ms += ms

    def check(self) -> None:
        """Raise `OperationCanceled` if the job was canceled. Called before each longer
        operation."""
        if self.canceled.is_set():
            raise OperationCanceled("canceled on request")

    def check_size(self, text: str) -> None:
        """Raise `JobTooLarge` for a statement that must not be sent."""
        size = len(text.encode())
        if size > STATEMENT_BYTES_MAX:
            raise JobTooLarge(f"its SQL text has {size} bytes, more than {STATEMENT_BYTES_MAX}")
        depth = nesting_of(text) if text.count("(") > NESTING_MAX else 0
        if depth > NESTING_MAX:
            raise JobTooLarge(
                f"its SQL text is nested {depth} levels deep, more than {NESTING_MAX}"
            )


def run_step(slot: ThreadSlot, prepared: PreparedPlan, job: RunStep) -> RowsDone:
    """Run strata `first` to `last`. Raises errors of Penstock or of Spark."""
    _check_range(prepared.plan, job)
    loaded = _loaded(slot, prepared, job)
    old = tuple(load(rows, slot.parts, slot.inline_bytes_max) for rows in job.old)
    try:
        return _run_strata(slot, prepared, job, dict(loaded), old)
    except Exception as error:
        if not job.at_once or describe(error)[0] != DefiniteError.__name__:
            raise
    # The row that raised the error may be retracted in another part, or by an anti join; or no row
    # raised it but the optimizer, which computes what the NULLs of an outer join lead to. So the
    # step runs again, over rows that are summed first, row by row.
    plan = aggregate_below_unions(prepared.plan)
    plan = msgspec.structs.replace(plan, conf=(*plan.conf, _ROW_BY_ROW))
    bridge = slot.sessions.get(plan.conf, small=False)
    left = {name: _summed(bridge, rows) for name, rows in loaded.items()}
    return _run_strata(slot, PreparedPlan(plan), job, left, old)


def _summed(bridge: SessionBridge, loaded: LoadedRows) -> LoadedRows:
    """Return the rows with the diffs of equal rows summed up, whatever their times."""
    schema = loaded.rows.schema
    if not loaded.is_left_to_spark:
        times = pa.repeat(pa.scalar(0, pa.int64()), loaded.table.num_rows)
        table = consolidate(set_column(loaded.table, TIME, times))
        return msgspec.structs.replace(loaded, table=table)
    exact = exact_keys(types_of(schema))
    with bridge.views({_UNSUMMED: frame(bridge, loaded)}):
        rows = f"SELECT * FROM {quote(_UNSUMMED)}"
        found = bridge.sql(consolidated(rows, schema.names, exact, by_time=False))
        found = found.selectExpr(*map(quote, schema.names), f"0L AS {TIME}", DIFF)
    nothing = schema.arrow_updates().empty_table()
    return LoadedRows(loaded.rows, nothing, (), KEPT_BYTES, found)


def _run_strata(
    slot: ThreadSlot,
    prepared: PreparedPlan,
    job: RunStep,
    loaded: dict[str, LoadedRows],
    old: tuple[LoadedRows, ...],
) -> RowsDone:
    started = time.perf_counter()
    slot.frequent, slot.waited_ms = False, 0.0
    plan = prepared.plan
    small = is_small(slot, [*loaded.values(), *old])
    filled = frozenset(name for name, rows in loaded.items() if not rows.empty) - {INTERVAL}
    first, last = prepared.bounds(job.first, job.last)
    # All inputs are empty, so no Spark job is needed.
    if job.lo > 0 and not filled:
        bridge = slot.sessions.get(plan.conf, small=small)
        table = empty_updates(prepared.stratum(bridge, last))
        return rows_done(job.job_id, table, slot.out, slot.inline_bytes_max, 0.0)
    *earlier, chosen = prepared.pieces(
        first, last, filled, slot.plan_nodes_max, fresh=job.lo == 0, optimistic=job.optimistic
    )
    PLAN_NODES.crossed(bool(earlier))
    again = True
    for piece in earlier:
        rows, known = _inner(slot, prepared, job, piece, loaded, small=small)
        loaded[InputKind.RESULT.text(piece[-1])] = rows
        again &= known
    root = prepared.strata[last]
    work = _work(slot, prepared, job, chosen, loaded, _peel(root))
    work = msgspec.structs.replace(work, old=old)
    # An existing plan is faster than a job, even for rows that a job would divide into partitions.
    made = _run_ahead(slot, work) if not small and not earlier else None
    # Consolidated in the collected Arrow data, which saves Spark an aggregation and keeps the same
    # bits as the statement of a large step.
    peeled = (small or made is not None) and isinstance(root, ConsolidateRows)
    if made is None:
        # First contents in files or objects are not consolidated: their readers do that, one part
        # at a time. A difference is consolidated when it is computed.
        bare = job.at_once and (job.into_files or job.into_bucket)
        if not (peeled or bare or old):
            work = msgspec.structs.replace(work, root=None)
        made, known = _run(slot, work, small=small)
        again &= known
    elapsed = (time.perf_counter() - started) * 1000
    if isinstance(made, WrittenObjects):
        count = sum(each.rows for each in made.objects)
        return RowsDone(job.job_id, count, spark_ms=elapsed, objects=made.objects)
    if isinstance(made, tuple):
        count = sum(file.rows for file in made)
        return RowsDone(job.job_id, count, spark_ms=elapsed, files=made)
    if peeled:
        made = consolidate(made)
        elapsed = (time.perf_counter() - started) * 1000
    elapsed -= slot.waited_ms
    answer = rows_done(job.job_id, made, slot.out, slot.inline_bytes_max, elapsed, prepared=again)
    answer = msgspec.structs.replace(answer, wait_ms=slot.waited_ms)
    if slot.frequent and not earlier:
        changed = tuple(
            name
            for name in job.inputs
            if InputName.parse(name).holds_changes and not loaded[prepared.named(name)].empty
        )
        own = LikelyRun(job.first, job.last, changed, work.one_time, job.optimistic)
        answer = msgspec.structs.replace(answer, frequent=own)
    return answer


def is_small(slot: ThreadSlot, inputs: Collection[LoadedRows]) -> bool:
    """Return whether a job over these inputs should run in one partition."""
    return _all_here(inputs) and sum(rows.bytes for rows in inputs) <= slot.inline_bytes_max


def _all_here(inputs: Iterable[LoadedRows]) -> bool:
    """Return whether Spark reads no rows itself."""
    return not any(rows.is_left_to_spark or rows.frame is not None for rows in inputs)


def _run_ahead(slot: ThreadSlot, work: _StepRun) -> pa.Table | None:
    """Execute a larger step by a prepared plan; return None if it has no such plan, or if Spark has
    to read some of its rows."""
    if work.job.lo == 0 or work.job.at_once or not _all_here(work.loaded.values()):
        return None
    return _run_prepared(slot, work)


def _loaded(slot: ThreadSlot, prepared: PreparedPlan, job: RunStep) -> dict[str, LoadedRows]:
    """Return the given rows that the strata read."""
    needed = _needed(prepared.plan, job)
    strata = prepared.plan.strata[job.first : job.last + 1]
    found = {}
    for name, rows in job.inputs.items():
        if name not in needed:
            continue
        if rows.objects:
            # Of parts in a bucket, only the columns that the strata read are fetched.
            schema = narrow_schema(rows.schema, name, strata)
            rows = msgspec.structs.replace(rows, schema=schema)
        found[prepared.named(name)] = load(rows, slot.parts, slot.inline_bytes_max)
    return found


def _inner(
    slot: ThreadSlot,
    prepared: PreparedPlan,
    job: RunStep,
    chosen: tuple[int, ...],
    loaded: Mapping[str, LoadedRows],
    *,
    small: bool,
) -> tuple[LoadedRows, bool]:
    """Run an earlier piece. Return its rows for later pieces, and whether its plan existed already.

    Rows of large inputs stay in Spark.
    """
    # Only the last piece makes the answer.
    job = msgspec.structs.replace(job, into_files=False, into_bucket=(), old=())
    root = prepared.strata[chosen[-1]]
    work = _work(slot, prepared, job, chosen, loaded, _peel(root) if small else None)
    bridge = slot.sessions.get(prepared.plan.conf, small=small)
    rows = JobRows(schema=prepared.stratum(bridge, chosen[-1]))
    if small:
        table, known = _run(slot, work, small=True)
        made = consolidate(table) if isinstance(root, ConsolidateRows) else table
        return LoadedRows(rows, made, (), made.nbytes), known
    with _planned(slot, bridge, work, small=False) as found:
        # Otherwise each later piece would compute these rows again.
        kept = found.localCheckpoint()
    return LoadedRows(rows, rows.schema.arrow_updates().empty_table(), (), KEPT_BYTES, kept), False


def _work(
    slot: ThreadSlot,
    prepared: PreparedPlan,
    job: RunStep,
    chosen: tuple[int, ...],
    loaded: Mapping[str, LoadedRows],
    root: Node | None,
) -> _StepRun:
    """Return strata of a step with the rows that they read."""
    needed = {name for index in chosen for name in leaves(prepared.strata[index])}
    needed -= {InputKind.RESULT.text(index) for index in chosen}
    mine = {name: rows for name, rows in loaded.items() if name in needed}
    # From changes at one time, a temporal filter may make changes at several times.
    at_one_time = is_at_one_time(loaded) and not prepared.plan.temporal
    return _StepRun(slot, prepared, job, chosen, frozenset(needed), mine, root, at_one_time)


def _run(slot: ThreadSlot, work: _StepRun, *, small: bool) -> tuple[Any, bool]:
    """Return the rows, or their files, and whether their plan existed already."""
    nothing = all(rows.empty or name == INTERVAL for name, rows in work.loaded.items())
    alone = any(emits_without_input(work.prepared.strata[index]) for index in work.chosen)
    if work.job.lo > 0 and nothing and not alone:
        bridge = slot.sessions.get(work.prepared.plan.conf, small=small)
        return empty_updates(work.prepared.stratum(bridge, work.chosen[-1])), True
    if small and work.job.lo > 0 and not work.job.at_once:
        made = _run_prepared(slot, work)
        if made is not None:
            return made, True
    bridge = slot.sessions.get(work.prepared.plan.conf, small=small)
    return _run_unprepared(slot, bridge, work, small=small), False


class WrittenObjects(msgspec.Struct, frozen=True):
    """An answer that the executors wrote into a bucket."""

    objects: tuple[ObjectDone, ...]


class _StepRun(msgspec.Struct, frozen=True):
    """A step, or a piece of one, with its rows. `root` replaces the node of the last stratum."""

    slot: ThreadSlot
    prepared: PreparedPlan
    job: RunStep
    chosen: tuple[int, ...]
    needed: frozenset[str]
    loaded: Mapping[str, LoadedRows]
    root: Node | None
    one_time: bool
    old: tuple[LoadedRows, ...] = ()
    """The contents to subtract, one for each delta."""

    def statement(
        self,
        bridge: SessionBridge,
        relations: Mapping[str, SessionRelation],
        interval: tuple[int, int],
        *,
        small: bool,
    ) -> tuple[str, Mapping[str, int]]:
        """Return the statement, and how often its plan contains each relation."""

        def types(node: Node) -> Mapping[str, str]:
            return self.prepared.types(bridge, node)

        translator = PlanTranslator(
            relations,
            types,
            interval=interval,
            small=small,
            at_once=self.job.at_once,
            one_time=self.one_time,
        )
        made = translator.statement(self.prepared.strata, self.chosen, self.root)
        self.slot.check_size(made)
        return made, translator.uses

    def large(self, collected_bytes_max: int) -> bool:
        """Return whether the answer is probably too large to be collected."""
        read = sum(rows.bytes for rows in (*self.loaded.values(), *self.old))
        strata = {
            InputKind.RESULT.text(index): node for index, node in enumerate(self.prepared.strata)
        }
        few = read <= collected_bytes_max or makes_few_rows(
            self.prepared.strata[self.chosen[-1]], strata
        )
        return COLLECTED.crossed(not few)

    def wanted(self, bridge: SessionBridge) -> pa.Schema:
        return self.prepared.stratum(bridge, self.chosen[-1]).arrow_updates()

    def written(self, found: DataFrame) -> WrittenObjects:
        """Have the executors write the answer into the folders that the job names."""
        job, plan = self.job, self.prepared.plan
        time = job.hi - 1 if job.at_once else None
        folders, deltas = list(job.into_bucket), list(plan.deltas)
        if job.optimistic and not job.at_once:
            # Their objects only show that such rows exist; no shard adopts them.
            folders.append(folders[0])
            deltas.append(msgspec.structs.replace(deltas[0], bit=plan.seldom_bit))
        return WrittenObjects(self.slot.parts.write(found, folders, time, deltas))


def rehearse(slot: ThreadSlot, prepared: PreparedPlan, job: RehearseSteps) -> PlanPrepared:
    """Build the plans of likely steps and execute them on no rows, which compiles them."""
    for run in job.runs:
        slot.check()
        _check_range(prepared.plan, run)
        # A plan for all changes may be too large even if plans for single changes are not.
        if not _rehearse(slot, prepared, job, run) and len(run.changed) > 1:
            for name in run.changed:
                _rehearse(slot, prepared, job, msgspec.structs.replace(run, changed=(name,)))
    return PlanPrepared(job.job_id)


def _rehearse(slot: ThreadSlot, prepared: PreparedPlan, job: RehearseSteps, run: LikelyRun) -> bool:
    """Build the plan of a likely run; return whether it has one."""
    step = RunStep(
        job.job_id, job.dataflow, run.first, run.last, {}, 1, 2, optimistic=run.optimistic
    )
    first, last = prepared.bounds(run.first, run.last)
    changed = frozenset(map(prepared.named, run.changed))
    *earlier, chosen = prepared.pieces(
        first, last, changed, slot.plan_nodes_max, fresh=False, optimistic=run.optimistic
    )
    if earlier:
        return False  # What a later piece reads is known only once the earlier ones have run.
    root = prepared.strata[last]
    bare = _peel(root) if isinstance(root, ConsolidateRows) else None
    work = _work(slot, prepared, step, chosen, {}, bare)
    work = msgspec.structs.replace(work, one_time=run.one_time)
    request = _request(slot, slot.sessions.get(prepared.plan.conf, small=True), work)
    nothing = {
        name: empty_updates(schema) for name, schema in request.schemas.items() if name in changed
    }
    slot.steps.rehearse(msgspec.structs.replace(request, tables=nothing))
    return True


def _check_range(plan: DeltaPlan, run: RunStep | LikelyRun) -> None:
    if not 0 <= run.first <= run.last < len(plan.strata):
        raise InvalidUsage(f"strata {run.first} to {run.last}: the plan has {len(plan.strata)}")


def _needed(plan: DeltaPlan, job: RunStep) -> frozenset[str]:
    """Return the inputs that the step's strata read and do not make themselves."""
    made = {InputKind.RESULT.text(index) for index in range(job.first, job.last)}
    nodes = [plan.strata[index].node for index in range(job.first, job.last + 1)]
    return frozenset({name for node in nodes for name in leaves(node)} - made)


def _run_prepared(slot: ThreadSlot, work: _StepRun) -> pa.Table | None:
    """Execute the step's plan again; return None if it has none and can have none."""
    bridge = slot.sessions.get(work.prepared.plan.conf, small=True)
    request = _request(slot, bridge, work)
    made = slot.steps.run(request)
    slot.frequent = slot.steps.is_frequent(request)
    return made


def _request(slot: ThreadSlot, bridge: SessionBridge, work: _StepRun) -> PreparedRequest:
    prepared, job = work.prepared, work.job
    if prepared.forget is None:
        prepared.forget = weakref.finalize(prepared, slot.steps.forget, prepared.serial)
    strata = prepared.plan.strata[job.first : job.last + 1]
    schemas = {name: prepared.input_schema(bridge, name) for name in work.needed}
    # The given inputs have exactly the columns that the whole step reads.
    for given in _needed(prepared.plan, job):
        name = prepared.named(given)
        if name in schemas:
            schemas[name] = narrow_schema(schemas[name], given, strata)
    return PreparedRequest(
        owner=prepared.serial,
        name=job.dataflow,
        strata=work.chosen,
        one_time=work.one_time,
        schemas=schemas,
        tables={name: rows.table for name, rows in work.loaded.items() if not rows.empty},
        render=lambda relations, interval: work.statement(bridge, relations, interval, small=True)[
            0
        ],
        wanted=lambda: work.wanted(bridge),
        group=slot.group,
        open=lambda rows: slot.sessions.get(prepared.plan.conf, small=True, slots=rows),
        check=slot.check,
        waited=slot.waited,
    )


def _run_unprepared(
    slot: ThreadSlot, bridge: SessionBridge, work: _StepRun, *, small: bool
) -> pa.Table | tuple[FileDone, ...] | WrittenObjects:
    """Plan the step and execute it. A large answer is returned as objects or files if the job
    allows that, and else read back from files."""
    job = work.job
    time = job.hi - 1 if job.at_once else None
    with _planned(slot, bridge, work, small=small) as found:
        elsewhere = slot.files_here or bool(job.into_bucket)
        if small or not (elsewhere and work.large(slot.collected_bytes_max)):
            try:
                made = _collected(slot, bridge, work, found)
                return made if time is None else _at(made, time)
            except Exception as error:
                if not elsewhere or not too_large(error):
                    raise
                print(
                    f"{job.job_id} is written to files: {error}"[:300], file=sys.stderr, flush=True
                )
        # A large answer must never be on the driver's heap.
        if job.into_bucket:
            return work.written(found)
        files = write_files(found, time, slot.out)
    return files if job.into_files else read_back(files, work.wanted(bridge))


def _at(made: pa.Table, time: int) -> pa.Table:
    return set_column(made, TIME, pa.repeat(pa.scalar(time, pa.int64()), made.num_rows))


def _collected(
    slot: ThreadSlot, bridge: SessionBridge, work: _StepRun, found: DataFrame
) -> pa.Table:
    """Return the rows of the answer. Raises `AnswerTooLarge` if they can be written to files and
    are more than expected."""
    if not (slot.files_here or work.job.into_bucket):
        return bridge.collect(found, lambda: work.wanted(bridge))
    # A few rows that all match each other make many, and Spark checks the size of an answer only
    # once it has made all of it.
    rows_max = answer_rows_max(found.schema, slot.collected_bytes_max)
    # The plan may be checked in the meantime; its types are known by the end.
    made = bridge.collect(found.limit(rows_max + 1), lambda: work.wanted(bridge))
    if COLLECTED.crossed(made.num_rows > rows_max):
        raise AnswerTooLarge(rows_max)
    return made


@contextmanager
def _planned(
    slot: ThreadSlot, bridge: SessionBridge, work: _StepRun, *, small: bool
) -> Iterator[DataFrame]:
    """Yield the query of the step, which is valid while the context is open."""
    job = work.job
    relations: dict[str, SessionRelation] = {}
    read = {}
    for name in work.needed:
        rows = work.loaded.get(name)
        if rows is None or rows.empty:
            schema = work.prepared.input_schema(bridge, name) if rows is None else rows.rows.schema
            relations[name] = SessionRelation(schema)
        else:
            view = f"__{name}"
            # Checked only for files, for which it saves a column and the products with it.
            ones = rows.is_left_to_spark and job.at_once and all_ones(rows)
            relations[name] = SessionRelation(rows.rows.schema, view, rows.bytes, ones)
            read[view] = rows
    # A step at one time is computed at time 0, so that its text, and hence the compiled classes,
    # are always the same.
    interval = (0, 1) if job.at_once else (job.lo, job.hi)
    text, uses = work.statement(bridge, relations, interval, small=small)
    slot.check()
    with ExitStack() as stack:
        views = {view: frame(bridge, rows, uses[view]) for view, rows in read.items()}
        stack.enter_context(bridge.views(views))
        found = bridge.sql(text)
        if work.old:
            deltas = work.prepared.plan.deltas
            found = stack.enter_context(subtract_old_contents(bridge, found, work.old, deltas))
        slot.check()
        yield found


def is_at_one_time(loaded: Mapping[str, LoadedRows]) -> bool:
    """Return whether all changes (not the state) are certain to be at one time."""
    times: set[int] = set()
    for name, rows in loaded.items():
        if InputName.parse(name).holds_changes and not rows.empty:
            if rows.is_left_to_spark or rows.frame is not None:
                return False
            found = pc.min_max(rows.table[TIME])
            times |= {found["min"].as_py(), found["max"].as_py()}
    return len(times) == 1


def _peel(root: Node) -> Node:
    return root.input if isinstance(root, ConsolidateRows) else root
