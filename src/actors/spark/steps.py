"""Prepared plans and their steps.

`PreparedPlan` is a delta plan with what Spark alone knows of it: the types of its nodes, asked
for once, on empty inputs, and kept. `run_step` renders strata as one statement
(`actors.spark.translate`), gives Spark the rows as views, and collects the answer; a large one
that is wanted as files goes into files (`actors.spark.files`).

Small steps (no file left to Spark, `SMALL_BYTES_MAX` of rows at most) run in one partition; a
`Consolidate` at the root is then done on the collected Arrow, which spares an aggregation and
keeps the same bits as the statement for large steps does. They are executed from a plan built
once wherever that can be (`actors.spark.prepared`). A step whose inputs are all empty runs no
Spark job.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.errors import Canceled, InvalidUsage, QueryRejected
from actors.plan.delta import Consolidate, DeltaPlan, Node, narrowed
from actors.plan.jobs import FileDone, LikelyRun, Prepare, Prepared, Rehearse, RowsDone, Step
from actors.plan.schema import DIFF, TIME, Column, Schema
from actors.plan.updates import consolidate, empty_updates, set_column
from actors.spark.analysis import check_types, empty_frame, output_schema, query
from actors.spark.bridge import Bridge
from actors.spark.files import reduces, too_large, write_files
from actors.spark.prepared import PreparedSteps, Request
from actors.spark.rows import Loaded, all_ones, done, frame, load
from actors.spark.session import ThreadSessions
from actors.spark.translate import Relation, Translator, leaves

SMALL_BYTES_MAX: Final = 8 * 1024 * 1024
_SERIALS: Final = itertools.count()


class Slot(msgspec.Struct):
    """What a worker thread has: its sessions, and where answers go, by their sizes."""

    sessions: ThreadSessions
    steps: PreparedSteps
    """Of all threads."""
    out: Path
    inline_bytes_max: int
    collected_bytes_max: int
    canceled: threading.Event
    """Of the job at hand."""
    group: str = ""
    """Of the job at hand, in Spark."""
    pool: str = ""

    def check(self) -> None:
        """Raises `Canceled` when the job was canceled: called before each longer stretch."""
        if self.canceled.is_set():
            raise Canceled("canceled on request")


class PreparedPlan:
    """A plan and the types of its nodes. Shared by threads: facts are only ever added.

    `serial` is its own, so that nothing kept for one plan serves its successor.
    """

    def __init__(self, plan: DeltaPlan) -> None:
        self.plan = plan
        self.serial = next(_SERIALS)
        self._types: dict[Node, Schema] = {}
        self.forget: weakref.finalize[Any, PreparedPlan] | None = None
        """Drops, at this object's end, what is kept for its steps."""

    def schema(self, bridge: Bridge, node: Node) -> Schema:
        """Columns and types that a node makes, without time and diff."""
        known = self._types.get(node)
        if known is None:
            text = self._empty(bridge).text(node)
            made = output_schema(bridge.sql(text).schema)
            known = Schema(tuple(c for c in made.columns if c.name not in (TIME, DIFF)))
            self._types[node] = known
        return known

    def stratum(self, bridge: Bridge, index: int) -> Schema:
        """What stratum `index` makes."""
        return self.schema(bridge, self.plan.strata[index].node)

    def types(self, bridge: Bridge, node: Node) -> Mapping[str, str]:
        """Spark's type text of each column of a node."""
        return {column.name: column.type for column in self.schema(bridge, node).columns}

    def input_schema(self, bridge: Bridge, name: str) -> Schema:
        """The schema of a named input, as the plan knows it. Raises `InvalidUsage`."""
        plan = self.plan
        number = int(name[1:]) if name[1:].isdigit() else -1
        if name[:1] == "h" and 0 <= number < len(plan.hidden):
            return plan.hidden[number].schema
        if name[:1] in ("d", "s") and 0 <= number < len(plan.source_schemas):
            return plan.source_schemas[number]
        if name[:1] == "r" and 0 <= number < len(plan.strata):
            return self.stratum(bridge, number)
        raise InvalidUsage(f"the plan has no input {name!r}")

    def _empty(self, bridge: Bridge) -> Translator:
        """Renders any node of the plan over inputs without rows."""
        names = {name for stratum in self.plan.strata for name in leaves(stratum.node)}
        return Translator(
            _Empties(self, bridge, names),
            lambda node: self.types(bridge, node),
            interval=(1, 2),
            small=True,
        )


class _Empties(Mapping[str, Relation]):
    """Relations without rows, their schemas asked for when they are needed."""

    def __init__(self, prepared: PreparedPlan, bridge: Bridge, names: set[str]) -> None:
        self._prepared = prepared
        self._bridge = bridge
        self._names = names

    def __getitem__(self, name: str) -> Relation:
        return Relation(self._prepared.input_schema(self._bridge, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def prepare(slot: Slot, prepared: PreparedPlan, job: Prepare) -> Prepared:
    """Builds the plan on empty inputs and checks what it makes.

    Raises `QueryRejected`, `InvalidUsage`, or Spark's own error.
    """
    plan = job.plan
    bridge = slot.sessions.get(plan.conf, small=True)
    if plan.mode == "opaque" or not plan.strata:
        empties = {
            name: empty_frame(bridge, schema)
            for name, schema in zip(plan.sources, plan.source_schemas, strict=True)
        }
        with bridge.views(empties):
            made = output_schema(query(bridge, plan.sql).schema)
        check_types(made, plan.output, "the query", names=False)
        return Prepared(job.job_id)
    for index in range(len(plan.strata)):
        made = prepared.stratum(bridge, index)
    if plan.hidden:
        _check_hidden(made, plan)
    else:
        check_types(made, plan.output, "the last stratum", names=True)
    return Prepared(job.job_id)


def _check_hidden(made: Schema, plan: DeltaPlan) -> None:
    """The last stratum must make all columns, prefixed, and ``__to`` (see `DeltaPlan`)."""
    prefixed = [("o_", plan.output)]
    prefixed += [(f"h{number}_", hidden.schema) for number, hidden in enumerate(plan.hidden)]
    wanted = (
        *(
            Column(f"{prefix}{column.name}", column.type)
            for prefix, schema in prefixed
            for column in schema.columns
        ),
        Column("__to", "int"),
    )
    by_name = {column.name: column for column in made.columns}
    missing = [column.name for column in wanted if column.name not in by_name]
    if missing:
        raise QueryRejected(f"the last stratum lacks column {missing[0]!r}; it makes {made.names}")
    found = Schema(tuple(by_name[column.name] for column in wanted))
    check_types(found, Schema(wanted), "the last stratum", names=True)


def run_step(slot: Slot, prepared: PreparedPlan, job: Step) -> RowsDone:
    """Runs strata `first` to `last`. Raises our errors or Spark's own."""
    started = time.perf_counter()
    plan = prepared.plan
    _check_range(plan, job)
    needed = _needed(plan, job)
    loaded = {name: load(rows) for name, rows in job.inputs.items() if name in needed}
    small = not any(rows.files for rows in loaded.values()) and (
        sum(rows.bytes for rows in loaded.values()) <= SMALL_BYTES_MAX
    )
    bridge = slot.sessions.get(plan.conf, small=small)
    if job.lo > 0 and all(rows.empty for rows in loaded.values()):
        table = empty_updates(prepared.stratum(bridge, job.last))
        return done(job.job_id, table, slot.out, slot.inline_bytes_max, 0.0)
    root = plan.strata[job.last].node
    peeled = small and isinstance(root, Consolidate)
    # Files are not consolidated: their readers do that, a part at a time.
    bare = peeled or job.into_files
    stand_in = _peel(root) if bare else None
    work = _Work(prepared, job, needed, loaded, stand_in, one_time(loaded))
    lasting = small and job.lo > 0 and not job.at_once
    made: pa.Table | tuple[FileDone, ...] | None = _run_prepared(slot, work) if lasting else None
    again = made is not None
    if made is None:
        made = _run_anew(slot, slot.sessions.get(plan.conf, small=small), work, small=small)
    elapsed = (time.perf_counter() - started) * 1000
    if isinstance(made, tuple):
        rows = sum(file.rows for file in made)
        return RowsDone(job.job_id, rows, spark_ms=elapsed, files=made)
    if peeled:
        made = consolidate(made)
        elapsed = (time.perf_counter() - started) * 1000
    return done(job.job_id, made, slot.out, slot.inline_bytes_max, elapsed, prepared=again)


class _Work(msgspec.Struct, frozen=True):
    """A step with its rows. `root` stands in for the last stratum's node."""

    prepared: PreparedPlan
    job: Step
    needed: frozenset[str]
    loaded: Mapping[str, Loaded]
    root: Node | None
    one_time: bool

    def statement(
        self,
        bridge: Bridge,
        relations: Mapping[str, Relation],
        interval: tuple[int, int],
        *,
        small: bool,
    ) -> str:
        def types(node: Node) -> Mapping[str, str]:
            return self.prepared.types(bridge, node)

        translator = Translator(
            relations,
            types,
            interval=interval,
            small=small,
            at_once=self.job.at_once,
            one_time=self.one_time,
        )
        return translator.statement(self.prepared.plan, self.job.first, self.job.last, self.root)

    def large(self, collected_bytes_max: int) -> bool:
        """Whether the answer is probably too large to be collected."""
        read = sum(rows.bytes for rows in self.loaded.values())
        if not self.job.into_files or read <= collected_bytes_max:
            return False
        strata = {f"r{index}": s.node for index, s in enumerate(self.prepared.plan.strata)}
        return not reduces(self.prepared.plan.strata[self.job.last].node, strata)

    def wanted(self, bridge: Bridge) -> pa.Schema:
        return self.prepared.stratum(bridge, self.job.last).arrow_updates()


def rehearse(slot: Slot, prepared: PreparedPlan, job: Rehearse) -> Prepared:
    """Builds the plans of such steps, and executes them on no rows: that compiles them."""
    plan = prepared.plan
    for run in job.runs:
        slot.check()
        _check_range(plan, run)
        step = Step(job.job_id, job.dataflow, run.first, run.last, {}, 1, 2)
        root = plan.strata[run.last].node
        bare = _peel(root) if isinstance(root, Consolidate) else None
        work = _Work(prepared, step, _needed(plan, step), {}, bare, run.one_time)
        request = _request(slot, slot.sessions.get(plan.conf, small=True), work)
        nothing = {name: empty_updates(request.schemas[name]) for name in run.changed}
        slot.steps.rehearse(msgspec.structs.replace(request, tables=nothing))
    return Prepared(job.job_id)


def _check_range(plan: DeltaPlan, run: Step | LikelyRun) -> None:
    if not 0 <= run.first <= run.last < len(plan.strata):
        raise InvalidUsage(f"strata {run.first} to {run.last}: the plan has {len(plan.strata)}")


def _needed(plan: DeltaPlan, job: Step) -> frozenset[str]:
    """The inputs that the step's strata read and do not make themselves."""
    made = {f"r{index}" for index in range(job.first, job.last)}
    nodes = [plan.strata[index].node for index in range(job.first, job.last + 1)]
    return frozenset({name for node in nodes for name in leaves(node)} - made)


def _run_prepared(slot: Slot, work: _Work) -> pa.Table | None:
    """Executes the step's plan again; None when it has none and can have none."""
    bridge = slot.sessions.get(work.prepared.plan.conf, small=True)
    return slot.steps.run(_request(slot, bridge, work))


def _request(slot: Slot, bridge: Bridge, work: _Work) -> Request:
    prepared, job = work.prepared, work.job
    if prepared.forget is None:
        prepared.forget = weakref.finalize(prepared, slot.steps.forget, prepared.serial)
    strata = prepared.plan.strata[job.first : job.last + 1]
    schemas = {name: prepared.input_schema(bridge, name) for name in work.needed}
    return Request(
        owner=prepared.serial,
        name=job.dataflow,
        strata=(job.first, job.last),
        one_time=work.one_time,
        schemas={name: narrowed(schema, name, strata) for name, schema in schemas.items()},
        tables={name: rows.table for name, rows in work.loaded.items() if not rows.empty},
        render=lambda relations, interval: work.statement(bridge, relations, interval, small=True),
        wanted=lambda: work.wanted(bridge),
        sociable=not prepared.plan.conf,
        group=slot.group,
        open=lambda: slot.sessions.get(prepared.plan.conf, small=True, slots=True),
        check=slot.check,
    )


def _run_anew(
    slot: Slot, bridge: Bridge, work: _Work, *, small: bool
) -> pa.Table | tuple[FileDone, ...]:
    """Plans the step and executes it."""
    job = work.job
    relations: dict[str, Relation] = {}
    frames = {}
    for name in work.needed:
        rows = work.loaded.get(name)
        if rows is None or rows.empty:
            schema = work.prepared.input_schema(bridge, name) if rows is None else rows.rows.schema
            relations[name] = Relation(schema)
        else:
            view = f"__{name}"
            # Asked of files only: there it spares a column and the products with it.
            ones = bool(rows.files) and job.at_once and all_ones(rows)
            relations[name] = Relation(rows.rows.schema, view, rows.bytes, ones)
            frames[view] = frame(bridge, rows)
    # What is at one time is computed at time 0: the same text, hence the same classes, each time.
    interval = (0, 1) if job.at_once else (job.lo, job.hi)
    with bridge.views(frames):
        text = work.statement(bridge, relations, interval, small=small)
        slot.check()
        found = bridge.sql(text)
        slot.check()
        if not small and work.large(slot.collected_bytes_max):
            return write_files(found, job.hi - 1, slot.out)
        try:
            # The plan may be checked meanwhile: by now its types are known.
            made = bridge.collect(found, lambda: work.wanted(bridge))
        except Exception as error:
            if not job.into_files or not too_large(error):
                raise
            print(f"{job.job_id} goes into files: {error}"[:300], file=sys.stderr, flush=True)
            return write_files(found, job.hi - 1, slot.out)
    if job.at_once:
        times = pa.repeat(pa.scalar(job.hi - 1, pa.int64()), made.num_rows)
        return set_column(made, TIME, times)
    return made


def one_time(loaded: Mapping[str, Loaded]) -> bool:
    """Whether all changes (not the state) surely are at one time."""
    times: set[int] = set()
    for name, rows in loaded.items():
        if name[0] in "dr" and not rows.empty:
            if rows.files:
                return False
            found = pc.min_max(rows.table[TIME])
            times |= {found["min"].as_py(), found["max"].as_py()}
    return len(times) == 1


def _peel(root: Node) -> Node:
    return root.input if isinstance(root, Consolidate) else root
