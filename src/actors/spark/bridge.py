"""A session and the few calls into the JVM that a step makes, each as few as can be.

A call through py4j takes 0.1 to 0.3 ms, a reference that is let go of another, and PySpark's own
`createDataFrame` and `sql` make dozens of them (settings, class lookups, empty arguments). This
holds what they look up again and again. It leans on names of PySpark's that are not public; the
version is pinned, and all such names are used here and in `actors.spark.analysis` only.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

BATCH_ROWS_MIN: Final = 65_536
_SLOT_OPTIONS: Final = {
    "datetimeRebaseMode": "CORRECTED",
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "mergeSchema": "false",
    "__globPaths__": "false",
}
"""How a slot is read whatever the session says: every value as it was written, and a file that
is gone or torn is an error, never no rows."""


def view_name(name: str) -> str:
    """A table's name as SQL: quoted unless it is written so already."""
    return name if name.startswith("`") else "`" + name.replace("`", "``") + "`"


@lru_cache(maxsize=1024)
def spark_struct(arrow: pa.Schema) -> StructType:
    """An Arrow schema as Spark's, all columns nullable."""
    return from_arrow_schema(arrow, prefer_timestamp_ntz=True)


@lru_cache(maxsize=1024)
def _json(arrow: pa.Schema) -> str:
    return str(spark_struct(arrow).json())


class Bridge:
    """One session of one thread."""

    def __init__(self, session: SparkSession, scratch: Path) -> None:
        self.session = session
        self.jvm: Any = session._jvm
        self.engine: Any = session._jsparkSession
        self._scratch = scratch
        self._catalog = self.engine.catalog()
        self._python = self.jvm.PythonSQLUtils
        self._class = getattr(self.jvm, "org.apache.spark.sql.classic.SparkSession")

    def activate(self) -> None:
        """Makes it the active session of this thread."""
        self._class.setActiveSession(self.engine)

    def sql(self, text: str) -> DataFrame:
        """The frame of a query text of ours (it would run a command)."""
        return DataFrame(self.engine.sql(text), self.session)

    def table(self, table: pa.Table) -> DataFrame:
        """Arrow rows as a frame: a local relation as long as they are few, else a partition a
        batch, which is decoded where it is used."""
        path = self._scratch / f"rows-{uuid.uuid4().hex}"
        cores: int = self.session.sparkContext.defaultParallelism
        rows = max(BATCH_ROWS_MIN, -(-table.num_rows // cores))
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table.combine_chunks(), max_chunksize=rows)
            batches = self._python.readArrowStreamFromFile(str(path))
        finally:
            os.unlink(path)
        made = self._python.toDataFrame(batches, _json(table.schema), self.engine)
        return DataFrame(made, self.session)

    def slot(self, path: Path, arrow: pa.Schema, names: Sequence[str]) -> DataFrame:
        """A slot file (columns by position, of these types) as a frame with these names."""
        reader = self.session.read.schema(spark_struct(arrow))
        for option, value in _SLOT_OPTIONS.items():
            reader = reader.option(option, value)
        return reader.parquet(path.as_uri()).toDF(*names)

    def collect(self, found: DataFrame, wanted: pa.Schema) -> pa.Table:
        """Runs the query: its rows, in the wanted types."""
        batches: list[pa.RecordBatch] = found._collect_as_arrow()
        if not batches:
            return wanted.empty_table()
        return pa.Table.from_batches(batches).cast(wanted)

    @contextmanager
    def views(self, frames: Mapping[str, DataFrame]) -> Iterator[None]:
        """Temporary views by these names, dropped at the end whatever happens."""
        try:
            for name, made in frames.items():
                made._jdf.createOrReplaceTempView(view_name(name))
            yield
        finally:
            for name in frames:
                self._catalog.dropTempView(view_name(name))
