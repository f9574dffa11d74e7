"""Runs a query over whole contents, as it is written: its own columns, in its own order.

A small answer is collected. One over large inputs (`engine_collected_bytes_max`), one that Spark
expects to be large, or that turns out to be, is made into Parquet files, whose order is the order
of the rows, so that it never passes through the driver's heap. Where this process cannot see such
files the answer is collected, and one that is too large is refused.
"""

from __future__ import annotations

import time
from typing import Any

from pyspark.sql import DataFrame

from actors.errors import InvalidUsage
from actors.plan.jobs import RowsDone, SelectContents
from actors.spark.analysis import check_types, output_schema
from actors.spark.difference import open_contents, retry_apart
from actors.spark.files import too_large, write_files
from actors.spark.rows import done
from actors.spark.steps import ThreadSlot
from actors.threshold_probes import COLLECTED


def run_select(slot: ThreadSlot, job: SelectContents) -> RowsDone:
    """Return the query's rows. Raises `QueryRejected` when it does not make `job.output`,
    `InvalidUsage` when they are too many, and Spark's own errors."""
    return retry_apart(lambda apart: _run_select(slot, job, apart=apart))


def _run_select(slot: ThreadSlot, job: SelectContents, *, apart: bool) -> RowsDone:
    started = time.perf_counter()
    with open_contents(slot, job.tables, job.conf, apart=apart) as opened:
        bridge = opened.bridge
        found = bridge.query(job.sql)
        check_types(output_schema(found.schema), job.output, "the query", names=False)
        found = found.toDF(*job.output.names)
        slot.check()
        large = job.into_files and COLLECTED.crossed(
            max(opened.bytes, _expected_bytes(found)) > slot.collected_bytes_max
        )
        try:
            if large:
                return _written(slot, job, found, started)
            table = bridge.collect(found, job.output.arrow)
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


def _expected_bytes(found: DataFrame) -> int:
    """Return Spark's estimate of the answer's size. Only for a session in our own JVM."""
    # For joins the estimate multiplies the sizes of the inputs.
    plan: Any = found._jdf.queryExecution().optimizedPlan()
    return int(str(plan.stats().sizeInBytes()))


def _written(slot: ThreadSlot, job: SelectContents, found: DataFrame, started: float) -> RowsDone:
    files = write_files(found, None, slot.out)
    elapsed = (time.perf_counter() - started) * 1000
    return RowsDone(job.job_id, sum(file.rows for file in files), spark_ms=elapsed, files=files)
