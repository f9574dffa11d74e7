"""Runs queries on plain Spark, for comparison with views: ``python -m
actors.engine.spark.reference_spark REQUEST``.

Runs the texts of queries unchanged over Parquet files, in a process and session of its own, with
Spark's own settings. It shares only the choice of Java and the class archive with the engine: no
delta plan, no translation, no prepared step. The contents of a view should equal its answers.

REQUEST is a JSON file (`ReferenceRequest`). Each answer is written as a Parquet file. The process
prints a line for each answer and exits with status 0, or prints what failed and exits with status
2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import msgspec
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from actors.engine.spark.class_archive import archive_options, find_archive
from actors.engine.spark.java import find_java
from actors.engine.spark.session import WHOLE_ROW_GROUPS
from actors.runtime.errors import EngineUnavailable, PenstockError

STATUS_FAILED: Final = 2


class ReferenceQuery(msgspec.Struct, frozen=True):
    """The text of a query, its tables as Parquet files, and the path of its answer."""

    sql: str
    tables: dict[str, str]
    output: str


class ReferenceRequest(msgspec.Struct, frozen=True):
    """The queries to run. All temporary files are below `scratch`."""

    queries: tuple[ReferenceQuery, ...]
    scratch: str
    master: str = "local[*]"
    driver_memory: str = "768m"


def run(request: ReferenceRequest) -> None:
    """Answer all queries in order. Raises `EngineUnavailable` if there is no Java."""
    scratch = Path(request.scratch)
    java = find_java(scratch)
    if isinstance(java, EngineUnavailable):
        raise java
    os.environ["JAVA_HOME"] = str(java.home)
    # A Spark installed on the machine must not be started in place of this package's own.
    os.environ.pop("SPARK_HOME", None)
    builder = SparkSession.builder
    for key, value in _conf(request, scratch, find_archive(java)).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        for number, query in enumerate(request.queries):
            for name, path in query.tables.items():
                session.read.parquet(path).createOrReplaceTempView(name)
            answer = session.sql(query.sql).toArrow()
            pq.write_table(answer, query.output)
            print(f"{number + 1}/{len(request.queries)} {answer.num_rows} rows", flush=True)
    finally:
        session.stop()


def _conf(request: ReferenceRequest, scratch: Path, archive: Path | None) -> dict[str, str]:
    options = f"-XX:-UsePerfData -Djava.io.tmpdir={scratch} {archive_options(archive)}"
    return {
        "spark.master": request.master,
        "spark.app.name": "penstock proof",
        "spark.driver.memory": request.driver_memory,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": options.strip(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        WHOLE_ROW_GROUPS[0]: WHOLE_ROW_GROUPS[1],
        "spark.sql.shuffle.partitions": "2",
    }


def main() -> int:
    """Run the request that the argument names; return the exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m actors.engine.spark.reference_spark REQUEST.json", file=sys.stderr)
        return STATUS_FAILED
    try:
        run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ReferenceRequest))
    except (PenstockError, PySparkException, Py4JError, msgspec.MsgspecError, OSError) as error:
        text = str(error).strip().splitlines() or [""]
        print(f"the reference run failed: {type(error).__name__}: {text[0]}", file=sys.stderr)
        return STATUS_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
