"""Computes a query over full contents, and subtracts the old contents of its view.

Contents are the rows whose diffs sum to more than zero, each repeated that many times. Small inputs
are summed and repeated in Arrow, at no cost for Spark; Spark does the rest. Both keep the bits of a
row (see `actors.engine.spark.translate`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql import DataFrame

from actors.engine.spark.analysis import check_types, output_schema
from actors.engine.spark.answer_files import answer_rows_max, too_large
from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.bucket_parts import BucketPartScan
from actors.engine.spark.failures import describe
from actors.engine.spark.fragments import CHAR_LENGTH
from actors.engine.spark.rows import LoadedRows, load, rows_done
from actors.engine.spark.steps import ThreadSlot, is_small
from actors.engine.spark.stored_contents import contents_frame
from actors.engine.spark.subtraction import subtract_old_contents
from actors.model.plan.delta import DeltaColumns
from actors.model.plan.jobs import (
    ComputeDifference,
    JobRows,
    LendContents,
    ObjectDone,
    PlanPrepared,
    QueryFiles,
    ReturnContents,
    RowsDone,
)
from actors.model.plan.schema import DIFF, TIME, TableSchema, quote
from actors.model.plan.updates import consolidate, negate
from actors.runtime.errors import DefiniteError
from actors.runtime.threshold_probes import COLLECTED

LENT: Final = "__lent"
REPEATED_ROWS_MAX: Final = 2_000_000
"""Maximum number of rows that are repeated by their weights here, in memory, instead of by
Spark."""
ALL_COLUMNS: Final[Mapping[str, frozenset[str]]] = {}


def run_difference(slot: ThreadSlot, job: ComputeDifference) -> RowsDone:
    """Return the updates at `job.time` that turn `old` into the result of the query.

    Raises `QueryRejected` if the query does not make `job.output`, and Spark's own errors.
    """
    return retry_summed_first(lambda sum_first: _run_difference(slot, job, sum_first=sum_first))


def retry_summed_first(run: Callable[[bool], RowsDone]) -> RowsDone:
    """Run a query over contents. If its data make it raise an error, run it again with `sum_first`.

    With `sum_first`, Spark sums the diffs of equal rows before it computes anything else from the
    rows.
    """
    # Predicate pushdown stays on, unlike in the second run of a step (`steps.run_step`): a user's
    # query may have the conditions of its joins in WHERE.
    try:
        return run(False)
    except Exception as error:
        if describe(error)[0] != DefiniteError.__name__:
            raise
    # The row that raised the error may be one that a retraction removes. The second run costs as
    # much as the first, plus the loss of filters pushed below the sums, but only for a query that
    # raises an error.
    return run(True)


def _run_difference(slot: ThreadSlot, job: ComputeDifference, *, sum_first: bool) -> RowsDone:
    started = time.perf_counter()
    old = None if job.old is None else load(job.old, slot.parts, slot.inline_bytes_max)
    with open_query(slot, job.tables, job.conf, job.sql, old, sum_first=sum_first) as (
        opened,
        found,
    ):
        bridge = opened.bridge
        check_types(output_schema(found.schema), job.output, "the query", names=False)
        found = found.toDF(*job.output.names)
        slot.check()
        if opened.small:
            table = _subtract_here(bridge, found, old, job.output)
        else:
            made = _subtract_in_spark(slot, opened, found, old, job)
            if not isinstance(made, pa.Table):
                rows = sum(each.rows for each in made)
                elapsed = (time.perf_counter() - started) * 1000
                return RowsDone(job.job_id, rows, spark_ms=elapsed, objects=made)
            table = made
    table = table.add_column(
        len(job.output.columns),
        pa.field(TIME, pa.int64()),
        pa.repeat(pa.scalar(job.time, pa.int64()), table.num_rows),
    )
    elapsed = (time.perf_counter() - started) * 1000
    return rows_done(job.job_id, table, slot.out, slot.inline_bytes_max, elapsed)


class OpenedSession(NamedTuple):
    """A session with contents under their names. `bytes`: the size of all given rows."""

    bridge: SessionBridge
    small: bool
    bytes: int
    scans: Mapping[str, BucketPartScan]
    """Scans of parts in a bucket, by the name of the table."""

    def columns_read(self, found: DataFrame) -> dict[str, frozenset[str]]:
        """Return the columns of parts in a bucket that a query reads, by the name of the table. A
        table is left out if the query reads all its columns, or if they are not known."""
        if not self.scans:
            return {}
        read = self.bridge.columns_read(found)
        return {name: read[scan.name] for name, scan in self.scans.items() if scan.name in read}


@contextmanager
def open_query(
    slot: ThreadSlot,
    tables: Sequence[tuple[str, JobRows]],
    conf: tuple[tuple[str, str], ...],
    sql: str,
    old: LoadedRows | None = None,
    *,
    sum_first: bool = False,
) -> Iterator[tuple[OpenedSession, DataFrame]]:
    """Open contents as `open_contents` does, and also yield a user's query over them.

    Of parts in a bucket, only the columns that the query reads are fetched. Raises `QueryRejected`,
    and Spark's own errors.
    """
    with open_contents(slot, tables, conf, old, sum_first=sum_first) as opened:
        found = opened.bridge.query(sql)
        read = opened.columns_read(found)
        if not read:
            yield opened, found
            return
    # Spark does not prune columns that a Python function makes, so the query is analysed again over
    # frames with NULL in place of unread columns.
    with open_contents(slot, tables, conf, old, sum_first=sum_first, read=read) as opened:
        yield opened, opened.bridge.query(sql)


@contextmanager
def open_contents(
    slot: ThreadSlot,
    tables: Sequence[tuple[str, JobRows]],
    conf: tuple[tuple[str, str], ...],
    old: LoadedRows | None = None,
    *,
    sum_first: bool = False,
    read: Mapping[str, frozenset[str]] = ALL_COLUMNS,
) -> Iterator[OpenedSession]:
    """Open a session in which texts may name the contents of the tables. `small` of the session
    tells whether all rows are small, including `old`. `sum_first`: see `retry_summed_first`.
    `read`: the columns to fetch of parts in a bucket, by the name of the table; for tables that are
    left out, all columns."""
    loaded = {name: load(rows, slot.parts, slot.inline_bytes_max) for name, rows in tables}
    for name, columns in read.items():
        scan = loaded[name].scan
        if scan is not None:
            narrow = replace(scan, columns=columns | {DIFF})
            loaded[name] = replace(loaded[name], scan=narrow)
    all_rows = [*loaded.values(), *([] if old is None else [old])]
    size = sum(rows.bytes for rows in all_rows)
    scans = {name: rows.scan for name, rows in loaded.items() if rows.scan is not None}
    small = is_small(slot, all_rows)
    bridge = slot.sessions.get(conf, small=small)
    with ExitStack() as stack:
        contents = {}
        for number, (name, rows) in enumerate(loaded.items()):
            table = None if rows.is_left_to_spark else _contents_here(rows.table)
            if table is None:
                made = contents_frame(stack, bridge, rows, f"__raw{number}", sum_first=sum_first)
            else:
                made = bridge.table(table)
            contents[name] = _with_char_lengths(made, rows.rows.schema)
        stack.enter_context(bridge.views(contents))
        slot.check()
        yield OpenedSession(bridge, small, size, scans)


def _with_char_lengths(found: DataFrame, schema: TableSchema) -> DataFrame:
    """Return the frame with its CHAR(n) columns marked, so that Spark pads values that are compared
    with them."""
    for column in schema.columns:
        if column.type.lower().startswith("char("):
            found = found.withMetadata(column.name, {CHAR_LENGTH: column.type.lower()})
    return found


def lend_contents(slot: ThreadSlot, job: LendContents) -> PlanPrepared:
    """Make contents a global temporary view. Raises Spark's own errors."""
    # `sum_first`: a query over the view must not compute anything from a row that a retraction
    # removes.
    with open_contents(slot, ((LENT, job.rows),), (), sum_first=True) as opened:
        slot.check()
        found = opened.bridge.sql(f"SELECT * FROM {quote(LENT)}")
        # The view keeps the analysed plan, so it outlives the names that this session gave to the
        # tables.
        found.createOrReplaceGlobalTempView(job.name)
    return PlanPrepared(job.job_id)


def return_contents(slot: ThreadSlot, job: ReturnContents) -> PlanPrepared:
    """Drop the view of a `LendContents`."""
    slot.sessions.get((), small=False).session.catalog.dropGlobalTempView(job.name)
    return PlanPrepared(job.job_id)


def run_query(slot: ThreadSlot, job: QueryFiles) -> RowsDone:
    """Return the rows of a query over Parquet files as they are. Raises Spark's own errors.

    `spark_ms` counts only the query, not reading the schemas of the files.
    """
    bridge = slot.sessions.get(job.conf, small=False)
    tables = {name: bridge.session.read.parquet(path) for name, path in job.tables}
    with bridge.views(tables):
        slot.check()
        started = time.perf_counter()
        found = bridge.query(job.sql)
        table = bridge.collect(found, lambda: output_schema(found.schema).arrow())
    elapsed = (time.perf_counter() - started) * 1000
    return rows_done(job.job_id, table, slot.out, slot.inline_bytes_max, elapsed)


def _contents_here(updates: pa.Table) -> pa.Table | None:
    """Return the rows themselves; None if there are too many to repeat here."""
    summed = consolidate(updates.drop_columns([TIME]))
    kept = summed.filter(pc.greater(summed[DIFF], pa.scalar(0, pa.int64())))
    weights = kept[DIFF].to_numpy()
    if weights.sum() > REPEATED_ROWS_MAX:
        return None
    rows = kept.drop_columns([DIFF])
    if (weights == 1).all():
        return rows
    return rows.take(pa.array(np.repeat(np.arange(len(weights)), weights)))


def _subtract_here(
    bridge: SessionBridge, found: DataFrame, old: LoadedRows | None, output: TableSchema
) -> pa.Table:
    result = bridge.collect(found, output.arrow)
    ones = pa.repeat(pa.scalar(1, pa.int64()), result.num_rows)
    result = result.append_column(pa.field(DIFF, pa.int64()), ones)
    if old is not None and old.table.num_rows:
        gone = negate(old.table.drop_columns([TIME])).rename_columns(result.column_names)
        result = pa.concat_tables([result, gone.cast(result.schema)])
    return consolidate(result)


def _with_diff(output: TableSchema) -> pa.Schema:
    return output.arrow().append(pa.field(DIFF, pa.int64()))


def _subtract_in_spark(
    slot: ThreadSlot,
    opened: OpenedSession,
    found: DataFrame,
    old: LoadedRows | None,
    job: ComputeDifference,
) -> pa.Table | tuple[ObjectDone, ...]:
    """Return the rows of the difference without a time, or the objects into which executors wrote
    them."""
    output, bridge = job.output, opened.bridge
    delta = DeltaColumns(output.names, output, 0)
    nothing = LoadedRows(JobRows(output), output.arrow_updates().empty_table(), (), 0)
    # The rows of a query have no weights: each counts once.
    ones = found.selectExpr("*", f"1L AS {DIFF}")
    with subtract_old_contents(bridge, ones, (old or nothing,), (delta,)) as made:
        kept = made.drop(TIME)
        if not job.into_bucket:
            return bridge.collect(kept, lambda: _with_diff(output))
        rows_max = answer_rows_max(kept.schema, slot.collected_bytes_max)
        try:
            table = bridge.collect(kept.limit(rows_max + 1), lambda: _with_diff(output))
            if not COLLECTED.crossed(table.num_rows > rows_max):
                return table
        except Exception as error:
            if not too_large(error):
                raise
        # A large answer must never be on the driver's heap.
        return slot.parts.write(made, job.into_bucket, job.time, (delta,))
