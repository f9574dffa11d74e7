"""A session as jobs use it, and the one in our own JVM, with as few calls into it as can be.

`Bridge` is what the general path asks of Spark, however it is reached; `actors.spark.connect`
has the one behind Spark Connect.

A call through py4j takes 0.1 to 0.3 ms, a reference that is let go of another, and PySpark's own
`createDataFrame` and `sql` make dozens of them (settings, class lookups, empty arguments).
`ClassicBridge` holds what they look up again and again. It leans on names of PySpark's that are
not public; the version is pinned, and all such names are used here, in `actors.spark.prepared`,
`actors.spark.connect` and `actors.spark.remote` only.
"""

from __future__ import annotations

import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from py4j.java_gateway import is_instance_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from actors.catalyst.relations import TABLE_METADATA
from actors.errors import QueryRejected
from actors.plan.jobs import Translation, Volatility
from actors.plan.schema import Schema
from actors.spark.catalyst_front import CatalystFront
from actors.spark.java_classes import java_object
from actors.threshold_probes import TABLE_BATCH

_COMMAND: Final = "org.apache.spark.sql.catalyst.plans.logical.Command"
CHAR_LENGTH: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark's own key in the metadata of a column, `CharVarcharUtils`."""
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
def struct_json(arrow: pa.Schema) -> str:
    """The same, as Spark writes it."""
    return str(spark_struct(arrow).json())


@lru_cache(maxsize=1024)
def declared_json(schema: Schema) -> str:
    """A schema with the columns' own nullability, as Spark writes it."""
    struct = StructType()
    for field, column in zip(spark_struct(schema.arrow()).fields, schema.columns, strict=True):
        struct.add(field.name, field.dataType, column.nullable)
    return str(struct.json())


def numbered_json(schema: Schema, number: int) -> str:
    """Return a schema as `declared_json` has it, whose columns say the number of their table."""
    struct = StructType()
    declared = StructType.fromJson(json.loads(declared_json(schema)))
    for field, column in zip(declared.fields, schema.columns, strict=True):
        marks: dict[str, Any] = {TABLE_METADATA: number}
        if column.type.lower().startswith("char("):
            # Spark fills up what is compared with such a column.
            marks[CHAR_LENGTH] = column.type.lower()
        struct.add(field.name, field.dataType, field.nullable, marks)
    return str(struct.json())


class Bridge(ABC):
    """One session of one thread."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    @abstractmethod
    def activate(self) -> None:
        """Makes it the session of this thread for the calls that follow."""

    @property
    def spent(self) -> bool:
        """Whether it should give way to a new one: the session keeps more than it may."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Lets go of it. Never fails."""

    @abstractmethod
    def sql(self, text: str) -> DataFrame:
        """The frame of a query text of ours (it would run a command)."""

    @abstractmethod
    def query(self, text: str) -> DataFrame:
        """The frame of somebody's text, analysed and not run.

        Raises `QueryRejected` when it is a command; Spark's own error when it is refused.
        """

    @abstractmethod
    def deterministic(self, found: DataFrame) -> bool:
        """Whether Spark holds every expression of an analysed frame to be deterministic."""

    names_volatility = True
    """See `Analyzed.names_volatility`."""

    @abstractmethod
    def volatility(self, text: str, found: DataFrame) -> Volatility | None:
        """Return the call by which the answer of somebody's text, whose frame is `found`, is no
        function of its tables; None when it has none."""

    @abstractmethod
    def difference(self, found: DataFrame, other: DataFrame) -> str:
        """Return how the plans of two analysed frames differ; empty when they are one query."""

    def translate(
        self, found: DataFrame, tables: Sequence[tuple[str, Schema]], nodes_max: int
    ) -> Translation | None:
        """Return the relational plan of an analysed frame over tables (made by `numbered`); None
        where plans are not to be seen."""
        return None

    def numbered(self, schema: Schema, number: int) -> DataFrame:
        """No rows, with the columns' types and nullability, marked with the table's number."""
        return self.empty(schema)

    @abstractmethod
    def table(self, table: pa.Table) -> DataFrame:
        """Arrow rows as a frame: a local relation as long as they are few."""

    @abstractmethod
    def empty(self, schema: Schema) -> DataFrame:
        """No rows, with the columns' types and nullability."""

    @abstractmethod
    def collect(self, found: DataFrame, wanted: Callable[[], pa.Schema]) -> pa.Table:
        """Runs the query: its rows, in the types `wanted`, asked for afterwards."""

    @abstractmethod
    def views(self, frames: Mapping[str, DataFrame]) -> AbstractContextManager[None]:
        """Names that texts may use meanwhile. Gone at the end whatever happens."""


class ClassicBridge(Bridge):
    """One session of one thread, in our own JVM."""

    def __init__(self, session: SparkSession, scratch: Path) -> None:
        super().__init__(session)
        self.jvm: Any = session._jvm
        self.engine: Any = session._jsparkSession
        self._scratch = scratch
        self._catalog = self.engine.catalog()
        self._python = self.jvm.PythonSQLUtils
        self._class = getattr(self.jvm, "org.apache.spark.sql.classic.SparkSession")
        self._front: CatalystFront | None = None

    def activate(self) -> None:
        """See `Bridge.activate`."""
        self._class.setActiveSession(self.engine)

    def close(self) -> None:
        """See `Bridge.close`: the JVM collects it."""

    def sql(self, text: str) -> DataFrame:
        """See `Bridge.sql`."""
        return DataFrame(self.engine.sql(text), self.session)

    def query(self, text: str) -> DataFrame:
        """See `Bridge.query`."""
        state = self.engine.sessionState()
        mode = self.jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()
        execution = state.executePlan(state.sqlParser().parsePlan(text), mode)
        execution.assertAnalyzed()
        plan = execution.analyzed()
        if is_instance_of(self.session._sc._gateway, plan, _COMMAND):
            raise QueryRejected(
                f"a view is a query; this is a command ({plan.nodeName()}): {text.strip()[:200]}"
            )
        made = self.jvm.org.apache.spark.sql.classic.Dataset.ofRows(self.engine, plan)
        return DataFrame(made, self.session)

    def deterministic(self, found: DataFrame) -> bool:
        """See `Bridge.deterministic`."""
        plan: Any = found._jdf.queryExecution().analyzed()
        return bool(plan.deterministic())

    def volatility(self, text: str, found: DataFrame) -> Volatility | None:
        """See `Bridge.volatility`."""
        parser = self.engine.sessionState().sqlParser()
        inspector = self.java("PlanInspector")
        call: str = inspector.volatileCall(parser, text, found._jdf.queryExecution().analyzed())
        return Volatility(call[1:], clock=call[0] == "@") if call else None

    def difference(self, found: DataFrame, other: DataFrame) -> str:
        """See `Bridge.difference`."""
        plans = (each._jdf.queryExecution().analyzed() for each in (found, other))
        return str(self.java("PlanInspector").difference(*plans))

    def table(self, table: pa.Table) -> DataFrame:
        """Arrow rows as a frame: a local relation as long as they are few, else a partition a
        batch, which is decoded where it is used."""
        path = self._scratch / f"rows-{uuid.uuid4().hex}"
        cores: int = self.session.sparkContext.defaultParallelism
        rows = max(TABLE_BATCH.limit, -(-table.num_rows // cores))
        TABLE_BATCH.crossed(table.num_rows > rows)
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table.combine_chunks(), max_chunksize=rows)
            batches = self._python.readArrowStreamFromFile(str(path))
        finally:
            os.unlink(path)
        made = self._python.toDataFrame(batches, struct_json(table.schema), self.engine)
        return DataFrame(made, self.session)

    def empty(self, schema: Schema) -> DataFrame:
        """See `Bridge.empty`."""
        kind = self.engine.parseDataType(declared_json(schema))
        rows = self.engine.createDataFrame(self.jvm.java.util.ArrayList(), kind)
        return DataFrame(rows, self.session)

    def translate(
        self, found: DataFrame, tables: Sequence[tuple[str, Schema]], nodes_max: int
    ) -> Translation | None:
        """See `Bridge.translate`."""
        if self._front is None:  # it asks for all functions of the session
            self._front = CatalystFront(self)
        return self._front.translate(found, tables, nodes_max)

    def numbered(self, schema: Schema, number: int) -> DataFrame:
        """See `Bridge.numbered`."""
        kind = self.engine.parseDataType(numbered_json(schema, number))
        rows = self.engine.createDataFrame(self.jvm.java.util.ArrayList(), kind)
        return DataFrame(rows, self.session)

    def java(self, name: str) -> Any:
        """Return an object of a Java class of ours (see `java_object`)."""
        return java_object(self.session._sc._gateway, name)

    def slot(self, path: Path, arrow: pa.Schema, names: Sequence[str]) -> DataFrame:
        """A slot file (columns by position, of these types) as a frame with these names."""
        reader = self.session.read.schema(spark_struct(arrow))
        for option, value in _SLOT_OPTIONS.items():
            reader = reader.option(option, value)
        return reader.parquet(path.as_uri()).toDF(*names)

    def collect(self, found: DataFrame, wanted: Callable[[], pa.Schema]) -> pa.Table:
        """See `Bridge.collect`."""
        batches: list[pa.RecordBatch] = found._collect_as_arrow()
        shape = wanted()
        return pa.Table.from_batches(batches).cast(shape) if batches else shape.empty_table()

    @contextmanager
    def views(self, frames: Mapping[str, DataFrame]) -> Iterator[None]:
        """See `Bridge.views`: temporary views."""
        try:
            for name, made in frames.items():
                made._jdf.createOrReplaceTempView(view_name(name))
            yield
        finally:
            for name in frames:
                self._catalog.dropTempView(view_name(name))
