"""Runs a query over whole contents, as it is written: its own columns, in its own order.

A small answer is collected. One over large inputs (`engine_collected_bytes_max`), one that Spark
expects to be large, or that turns out to be, is made into Parquet files, whose order is the order
of the rows, so that it never passes through the driver's heap. Where this process cannot see such
files the answer is collected, and one that is too large is refused.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from actors.engine.spark.analysis import check_types, result_schema
from actors.engine.spark.difference import open_query, retry_apart
from actors.engine.spark.files import too_large, write_files
from actors.engine.spark.rows import done
from actors.engine.spark.steps import ThreadSlot
from actors.engine.spark.translate import quote
from actors.model.plan.jobs import RowsDone, SelectContents
from actors.model.plan.schema import TableSchema, result_type
from actors.runtime.errors import InvalidUsage
from actors.runtime.threshold_probes import COLLECTED


def run_select(slot: ThreadSlot, job: SelectContents) -> RowsDone:
    """Return the query's rows. Raises `QueryRejected` when it does not make `job.output`,
    `InvalidUsage` when they are too many, and Spark's own errors."""
    return retry_apart(lambda apart: _run_select(slot, job, apart=apart))


def _run_select(slot: ThreadSlot, job: SelectContents, *, apart: bool) -> RowsDone:
    started = time.perf_counter()
    with open_query(slot, job.tables, job.conf, job.sql, apart=apart) as (opened, found):
        bridge = opened.bridge
        check_types(result_schema(found.schema), job.output, "the query", names=False)
        found = _with_months(found.toDF(*job.output.names), job.output)
        slot.check()
        large = job.into_files and COLLECTED.crossed(
            max(opened.bytes, _expected_bytes(found)) > slot.collected_bytes_max
        )
        try:
            if large:
                return _written(slot, job, found, started)
            table = bridge.collect(found, job.output.engine_arrow)
        except Exception as error:
            if large or not too_large(error):
                raise
            if not job.into_files:
                raise InvalidUsage(
                    "the answer of the query takes more than spark.driver.maxResultSize: "
                    "aggregate or limit it"
                ) from None
            return _written(slot, job, found, started)
    elapsed = (time.perf_counter() - started) * 1000
    return done(job.job_id, table, slot.out, slot.inline_bytes_max, elapsed)


def _with_months(found: DataFrame, output: TableSchema) -> DataFrame:
    """Return the frame with intervals of years and months as numbers of months, as `engine_type`
    has them."""
    kinds = [result_type(column.type) for column in output.columns]
    if not any(map(pa.types.is_interval, kinds)):
        return found
    texts = []
    for name, kind in zip(output.names, kinds, strict=True):
        months = f"CAST(CAST({quote(name)} AS INTERVAL MONTH) AS INT) AS {quote(name)}"
        texts.append(months if pa.types.is_interval(kind) else quote(name))
    return found.selectExpr(*texts)


def _expected_bytes(found: DataFrame) -> int:
    """Return Spark's estimate of the answer's size. Only for a session in our own JVM."""
    # For joins the estimate multiplies the sizes of the inputs.
    plan: Any = found._jdf.queryExecution().optimizedPlan()
    return int(str(plan.stats().sizeInBytes()))


def _written(slot: ThreadSlot, job: SelectContents, found: DataFrame, started: float) -> RowsDone:
    files = write_files(found, None, slot.out)
    elapsed = (time.perf_counter() - started) * 1000
    return RowsDone(job.job_id, sum(file.rows for file in files), spark_ms=elapsed, files=files)
