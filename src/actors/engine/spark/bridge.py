"""Spark sessions as jobs use them: `SessionBridge`, and `ClassicBridge` for a session in the
engine's own JVM.

`actors.engine.spark.connect` has the bridge to a session behind Spark Connect. `ClassicBridge` uses
private names of PySpark. Such names are used only here, in `actors.engine.spark.prepared_steps`,
`actors.engine.spark.connect` and `actors.engine.spark.remote`; those that differ between releases
are in `actors.engine.spark.spark_releases`.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from actors.engine.catalyst.relations import TABLE_METADATA
from actors.engine.spark.analysis import analyze
from actors.engine.spark.catalyst_front import CatalystFront
from actors.engine.spark.fragments import (
    bare_name,
    declared_json,
    numbered_json,
    spark_struct,
    struct_json,
    view_name,
)
from actors.engine.spark.java import java_object, slot_frames
from actors.engine.spark.spark_releases import arrow_schema, installed_version
from actors.engine.spark.statement_check import command_refusal, parse_statement
from actors.model.plan.jobs import (
    AnalyzeStatement,
    ParseText,
    QueryAnalyzed,
    QueryTranslation,
    StatementParsed,
    VolatileCall,
)
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import QueryRejected

LOCAL_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum size of rows that become objects in a plan, counted as often as the plan contains
them."""
BATCH_ROWS: Final = 65_536
CALL_SITE: Final = ("callSite.short", "callSite.long")
"""Spark's local properties for the call site (`org.apache.spark.util.CallSite`)."""
LOCAL_RELATION_SETTING: Final = "spark.sql.execution.arrow.localRelationThreshold"
ALWAYS_LOCAL_BYTES: Final = 1 << 40
"""Effectively no limit: `ClassicBridge.table` itself decides which rows become a local relation."""
_COMMAND: Final = "org.apache.spark.sql.catalyst.plans.logical.Command"
_SLOT_OPTIONS: Final = {
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "__globPaths__": "false",
}
"""Options for reading a slot, which override the session's settings: a missing or torn file is an
error."""


class SessionBridge(ABC):
    """A Spark session, used by a single thread."""

    partitions = ""
    """The number of partitions of an exchange that was set for the session; "" if none was."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    def cores(self) -> int:
        """Return how many tasks Spark runs at a time, as far as it tells; else 1."""
        return 1

    def columns_read(self, found: DataFrame) -> dict[str, frozenset[str]]:
        """Return the columns that the optimised plan reads from each function over Arrow batches,
        by the function's name; {} if the plan is not visible."""
        return {}

    def has_class(self, name: str) -> bool:
        """Return whether Spark's JVM has a class; True if it cannot be asked."""
        return True

    @abstractmethod
    def activate(self) -> None:
        """Make this session the active one of the calling thread."""

    @property
    def needs_replacement(self) -> bool:
        """Return whether the session holds more data than it should and must be replaced."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the session. Never fails."""

    @abstractmethod
    def sql(self, text: str) -> DataFrame:
        """Return the frame of one of the engine's own texts. A command would be run."""

    @abstractmethod
    def query(self, text: str) -> DataFrame:
        """Return the frame of a user's text, which is analysed but not run.

        Raises `QueryRejected` if it is a command, and Spark's own error if Spark rejects it.
        """

    @abstractmethod
    def deterministic(self, found: DataFrame) -> bool:
        """Return whether Spark considers every expression of an analysed frame deterministic."""

    @abstractmethod
    def analyzed(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
        """Return Spark's analysis of a query (see `actors.engine.spark.analysis`)."""

    @abstractmethod
    def parsed(self, job: ParseText) -> StatementParsed:
        """Return what a text names (see `actors.engine.spark.statement_check`). Raises Spark's own
        error if it cannot be parsed, and `AccessDenied` if it cannot be checked."""

    @abstractmethod
    def table(self, table: pa.Table, uses: int = 1) -> DataFrame:
        """Return Arrow rows as a frame, a local relation if they are few. `uses`: how often a plan
        reads them."""

    @abstractmethod
    def empty(self, schema: TableSchema) -> DataFrame:
        """Return a frame without rows, with the columns' types and nullability."""

    @abstractmethod
    def collect(self, found: DataFrame, wanted: Callable[[], pa.Schema]) -> pa.Table:
        """Run the query and return its rows, cast to `wanted()`, which is called after the run."""

    @abstractmethod
    def views(self, frames: Mapping[str, DataFrame]) -> AbstractContextManager[None]:
        """Name frames as views while the context is open, and always drop the names at its end."""


_FUNCTION: Final = "MapInArrow"
_NARROWING: Final = ("Project", "Aggregate")
"""Operators whose output contains only the columns that they name."""


def _names(attributes: Any) -> list[str]:
    return [str(attributes.apply(n).name()) for n in range(attributes.size())]


class ClassicBridge(SessionBridge):
    """A session in the engine's own JVM, used by a single thread."""

    def __init__(self, session: SparkSession, scratch: Path) -> None:
        super().__init__(session)
        # A call through py4j takes 0.1 to 0.3 ms, releasing a reference takes another one, and
        # PySpark's own `createDataFrame` and `sql` make dozens of calls. These are the objects that
        # they would look up each time.
        self.jvm: Any = session._jvm
        self.engine: Any = session._jsparkSession
        self._scratch = scratch
        self._catalog = self.engine.catalog()
        self._python = self.jvm.PythonSQLUtils
        self._class = getattr(self.jvm, "org.apache.spark.sql.classic.SparkSession")
        # Translator of queries; made at the first `translate`.
        self._front: CatalystFront | None = None
        # The properties of tasks; read at the first `execute_here`.
        self._task_properties: Any = None

    def cores(self) -> int:
        """Return how many tasks Spark runs at a time (see `SessionBridge.cores`)."""
        return int(self.session.sparkContext.defaultParallelism)

    def columns_read(self, found: DataFrame) -> dict[str, frozenset[str]]:
        """Return the columns that the plan reads (see `SessionBridge.columns_read`)."""
        read: dict[str, frozenset[str]] = {}

        def visit(node: Any, above: frozenset[str] | None) -> None:
            """Visit a node. `above`: the columns of its output that the nodes above read; None for
            all."""
            name = str(node.nodeName())
            children = node.children()
            # The plan of a subquery is inside an expression, and may read the same source.
            inner = node.subqueries()
            for number in range(inner.size()):
                visit(inner.apply(number), None)
            if name == _FUNCTION:
                function = str(node.productElement(0).name())
                names = frozenset(_names(node.output())) if above is None else above
                read[function] = read.get(function, frozenset()) | names
                return
            own = frozenset(_names(node.references().toSeq()))
            if name in _NARROWING:
                below: frozenset[str] | None = own
            elif name == "Filter" and above is not None:
                below = above | own
            else:
                below = None
            for number in range(children.size()):
                visit(children.apply(number), below)

        visit(found._jdf.queryExecution().optimizedPlan(), None)
        return read

    def has_class(self, name: str) -> bool:
        """Return whether the JVM has a class (see `SessionBridge.has_class`)."""
        loader = self.jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
        try:
            self.jvm.java.lang.Class.forName(name, False, loader)
        except Py4JJavaError:
            return False
        return True

    def activate(self) -> None:
        """Make this session the active one of the calling thread (see `SessionBridge.activate`)."""
        self._class.setActiveSession(self.engine)

    def close(self) -> None:
        """Release the session (see `SessionBridge.close`). The JVM's garbage collector frees it."""

    def sql(self, text: str) -> DataFrame:
        """Return the frame of one of the engine's own texts (see `SessionBridge.sql`)."""
        return DataFrame(self.engine.sql(text), self.session)

    def query(self, text: str) -> DataFrame:
        """Return the frame of a user's text (see `SessionBridge.query`)."""
        state = self.engine.sessionState()
        # With SKIP a command is analysed without being executed, unlike in `SparkSession.sql`.
        mode = self.jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()
        execution = state.executePlan(state.sqlParser().parsePlan(text), mode)
        execution.assertAnalyzed()
        plan = execution.analyzed()
        if is_instance_of(self.session._sc._gateway, plan, _COMMAND):
            raise QueryRejected(command_refusal(str(plan.nodeName()), text))
        made = self.jvm.org.apache.spark.sql.classic.Dataset.ofRows(self.engine, plan)
        return DataFrame(made, self.session)

    def deterministic(self, found: DataFrame) -> bool:
        """Return whether a frame is deterministic (see `SessionBridge.deterministic`)."""
        plan: Any = found._jdf.queryExecution().analyzed()
        return bool(plan.deterministic())

    def analyzed(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
        """Return Spark's analysis of a query (see `SessionBridge.analyzed`)."""
        return analyze(self, job, nodes_max)

    def parsed(self, job: ParseText) -> StatementParsed:
        """Return what a text names (see `SessionBridge.parsed`)."""
        return parse_statement(self, job)

    def tables(self, found: DataFrame) -> tuple[int, ...]:
        """Return the numbers of the tables (made by `numbered`) that an analysed frame reads, in
        the order of its plan. Raises `QueryRejected` if it reads anything else."""
        plan = found._jdf.queryExecution().analyzed()
        numbers: str = self.java("PlanInspector").tables(plan, TABLE_METADATA)
        if numbers.startswith("!"):
            raise QueryRejected(
                f"the query reads {numbers[1:]}, which is not a table of the service; use CREATE"
                " SOURCE to ingest it first"
            )
        return tuple(map(int, filter(None, numbers.split(","))))

    def volatility(self, text: str, found: DataFrame) -> VolatileCall | None:
        """Return the call that makes the result of a user's text, whose frame is `found`, depend on
        more than its tables; None if there is none."""
        parser = self.engine.sessionState().sqlParser()
        inspector = self.java("PlanInspector")
        call: str = inspector.volatileCall(parser, text, found._jdf.queryExecution().analyzed())
        if not call:
            return None
        # The first character tells the kind of call: `@` time, session or release, `?` randomness,
        # `&` the clock in a temporal filter.
        return VolatileCall(call[1:], clock=call[0] in "@&", temporal=call[0] == "&")

    def table(self, table: pa.Table, uses: int = 1) -> DataFrame:
        """Return Arrow rows as a frame: a local relation if they are few, else a partition per
        batch, which is decoded where it is used."""
        # The rows of a local relation are objects on the driver's heap, several times their size
        # here, and once more in each place of a plan that has a projection or filter over them.
        local = table.nbytes * uses <= LOCAL_BYTES_MAX
        path = self._scratch / f"rows-{uuid.uuid4().hex}"
        cores: int = self.session.sparkContext.defaultParallelism
        # Each batch becomes a partition: even many rows make no more partitions than there are
        # cores.
        rows = max(BATCH_ROWS, -(-table.num_rows // cores))
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table.combine_chunks(), max_chunksize=rows)
            batches = self._python.readArrowStreamFromFile(str(path))
        finally:
            os.unlink(path)
        conf = self.engine.conf()
        if not local:
            # `toDataFrame` decides by this setting of the session.
            conf.set(LOCAL_RELATION_SETTING, "0")
        try:
            made = self._python.toDataFrame(batches, struct_json(table.schema), self.engine)
        finally:
            if not local:
                conf.set(LOCAL_RELATION_SETTING, str(ALWAYS_LOCAL_BYTES))
        return DataFrame(made, self.session)

    def empty(self, schema: TableSchema) -> DataFrame:
        """Return a frame without rows (see `SessionBridge.empty`)."""
        kind = self.engine.parseDataType(declared_json(schema))
        rows = self.engine.createDataFrame(self.jvm.java.util.ArrayList(), kind)
        return DataFrame(rows, self.session)

    def translate(
        self, found: DataFrame, tables: Mapping[int, tuple[str, TableSchema]], nodes_max: int
    ) -> QueryTranslation:
        """Return the relational plan of an analysed frame over `tables` (made by `numbered`)."""
        # Made lazily, since it asks the JVM for all functions of the session.
        if self._front is None:
            self._front = CatalystFront(self)
        return self._front.translate(found, tables, nodes_max)

    def numbered(self, schema: TableSchema, number: int) -> DataFrame:
        """Return a frame without rows, with the columns' types and nullability, marked with the
        number of the table."""
        kind = self.engine.parseDataType(numbered_json(schema, number))
        rows = self.engine.createDataFrame(self.jvm.java.util.ArrayList(), kind)
        return DataFrame(rows, self.session)

    def java(self, name: str) -> Any:
        """Return an object of one of the engine's Java classes (see `java_object`)."""
        return java_object(self.session._sc._gateway, name)

    def slot(self, path: Path, arrow: pa.Schema, names: Sequence[str]) -> DataFrame:
        """Return a slot file (columns by position, of these types) as a frame with these names."""
        reader = self.session.read.schema(spark_struct(arrow))
        for option, value in _SLOT_OPTIONS.items():
            reader = reader.option(option, value)
        made = slot_frames(self.session._sc._gateway).of(
            self.engine, reader.parquet(path.as_uri())._jdf
        )
        return DataFrame(made, self.session).toDF(*names)

    def collect(self, found: DataFrame, wanted: Callable[[], pa.Schema]) -> pa.Table:
        """Run the query and return its rows (see `SessionBridge.collect`)."""
        batches: list[pa.RecordBatch] = found._collect_as_arrow()
        shape = wanted()
        return pa.Table.from_batches(batches).cast(shape) if batches else shape.empty_table()

    def arrow_schema(self, found: DataFrame) -> pa.Schema:
        """Return the schema of a frame's Arrow batches as the JVM makes them."""
        kinds = self.jvm.org.apache.spark.sql.util.ArrowUtils
        zone = self.session.conf.get("spark.sql.session.timeZone")
        schema = arrow_schema(kinds, found._jdf.schema(), zone, installed_version())
        return pa.ipc.read_schema(pa.py_buffer(bytes(schema.serializeAsMessage())))

    def execute_here(self, batches: Any, group: str, answer: Path, bytes_max: int) -> bytes:
        """Execute an RDD of byte strings in the driver (`DriverExecution`), computing it again, and
        return the concatenated bytes, which pass through the file `answer`.

        Args:
            batches: The JVM's RDD, of one partition.
            group: Name by which the execution can be cancelled.
            answer: A file of the caller's, which is gone afterwards.
            bytes_max: A larger result is an error.

        Raises:
            Exception: Spark's own error.
        """
        told = self._properties_of_tasks()
        try:
            self.java("DriverExecution").run(batches, group, told, str(answer), bytes_max)
            return answer.read_bytes()
        finally:
            answer.unlink(missing_ok=True)

    def _properties_of_tasks(self) -> Any:
        """Return the properties that Spark's own execution of a query passes to its tasks."""
        if self._task_properties is None:
            properties = self.jvm.java.util.Properties()
            for name, value in self.session.conf.getAll.items():
                if name.startswith("spark."):
                    properties.setProperty(name, value)
            for name in CALL_SITE:
                properties.setProperty(name, "penstock")
            self._task_properties = properties
        return self._task_properties

    @contextmanager
    def views(self, frames: Mapping[str, DataFrame]) -> Iterator[None]:
        """Name frames as temporary views while the context is open (see `SessionBridge.views`)."""
        try:
            for name, made in frames.items():
                made._jdf.createOrReplaceTempView(view_name(name))
            yield
        finally:
            for name in frames:
                self._catalog.dropTempView(bare_name(name))  # This call does not parse the name.
