"""A session behind Spark Connect, used with as few calls over the wire as possible.

A frame is a description that this process keeps; a call sends it in full, with the rows and views
that it reads. So views are not created and dropped one by one: they are sent with each text that
may name them, and exist only for that call. A step is a single call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.dataframe import DataFrame
from pyspark.sql.connect.plan import SQL, LocalRelation, LogicalPlan, SubqueryAlias

from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.failures import condition_of
from actors.engine.spark.fragments import bare_name, declared_json, struct_json, view_name
from actors.engine.spark.plan_reader import PlanReader
from actors.engine.spark.remote_analysis import analyze_remotely
from actors.engine.spark.session import SlotRows, ThreadSessions
from actors.engine.spark.spark_releases import another_session, send_rows_ahead
from actors.model.plan.jobs import AnalyzeStatement, ParseText, QueryAnalyzed, StatementParsed
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import OperationCanceled, QueryRejected

SENT_AHEAD_BYTES: Final = 1024 * 1024
"""Rows of at least this size are sent once instead of with each call."""
KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
_CHUNK_ROWS: Final = 65_536
_CHUNK_BYTES: Final = 8 * 1024 * 1024
TRIES_AGAIN: Final = 7
"""Number of retries of a call. With the waits between them they take about 3.5 s, after which the
server counts as gone."""
_MANY: Final = 1 << 16
"""Number of rows of a range, more than Spark has cores."""
QUERIES_KNOWN_MAX: Final = 256
"""Maximum number of texts that a session remembers to be queries."""
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_DETERMINISTIC: Final = "INVALID_NON_DETERMINISTIC_EXPRESSIONS"


class ServerCores:
    """The number of the server's cores, requested once for all sessions."""

    def __init__(self) -> None:
        # The number, once it is known.
        self._count: int | None = None

    def count(self, session: SparkSession) -> int:
        """Return how many tasks the server's Spark runs at a time. Raises Spark's own error."""
        # A range has as many partitions as Spark has cores. The server has no call that returns the
        # number.
        if self._count is None:
            numbers = session.range(_MANY).selectExpr("spark_partition_id() AS n")
            self._count = max(1, numbers.distinct().count())
        return self._count


class ConnectBridge(SessionBridge):
    """A session behind Spark Connect, used by a single thread. `tag` returns the tag of the current
    job."""

    def __init__(
        self, session: SparkSession, tag: Callable[[], str], reader: PlanReader, cores: ServerCores
    ) -> None:
        super().__init__(session)
        self.reader = reader
        self._tag = tag
        # The frames that texts may name, by view; set while `views` is open.
        self._frames: dict[str, DataFrame] = {}
        # Bytes of rows that the server keeps for the session.
        self._kept = 0
        # Texts that are known to be queries.
        self._queries: set[str] = set()
        self._cores = cores

    def activate(self) -> None:
        """Make this session the active one (see `SessionBridge.activate`). Later calls carry the
        job's tag."""
        self.session.clearTags()
        self.session.addTag(self._tag())

    @property
    def needs_replacement(self) -> bool:
        """Return whether the server keeps too many rows for the session (see
        `SessionBridge.needs_replacement`)."""
        return self._kept > KEPT_BYTES_MAX

    def close(self) -> None:
        """Release the session (see `SessionBridge.close`). The server ends whatever still runs in
        it."""
        self.session.stop()  # Logs failures and raises nothing.

    def cores(self) -> int:
        """Return how many tasks the server runs at a time (see `SessionBridge.cores`)."""
        return self._cores.count(self.session)

    def sql(self, text: str) -> DataFrame:
        """Return the frame of one of the engine's own texts (see `SessionBridge.sql`)."""
        lowered = text.lower()
        read = [
            SubqueryAlias(frame._plan, _alias(name))
            for name, frame in self._frames.items()
            if _may_be_named(name, lowered)
        ]
        return DataFrame(SQL(text, views=read), self.session)

    def query(self, text: str) -> DataFrame:
        """Return the frame of a user's text (see `SessionBridge.query`)."""
        # The check puts the text in parentheses, where a semicolon does not parse.
        bare = text.strip().rstrip(";")
        if bare not in self._queries:
            self._check_query(bare)
            if len(self._queries) >= QUERIES_KNOWN_MAX:
                self._queries.clear()
            self._queries.add(bare)
        found = self.sql(bare)
        _ = found.schema  # Asks the server; the frame keeps the answer.
        return found

    def _check_query(self, text: str) -> None:
        """Raise `QueryRejected` for a command, and Spark's own error for any other text that is not
        a query."""
        try:
            # A command does not parse in parentheses, so no command is ever run.
            _ = self.sql(f"({text}\n)").schema
        except ParseException:
            if self._is_statement(text):
                raise QueryRejected(f"expected a query, found a command: {text[:200]}") from None
            raise

    def deterministic(self, found: DataFrame) -> bool:
        """Return whether a frame is deterministic (see `SessionBridge.deterministic`)."""
        # Spark rejects a join on an expression that is not deterministic, with an error of that
        # name.
        one = self.session.range(1)
        try:
            _ = one.alias("a").join(one.alias("b"), found.exists()).schema
        except PySparkException as error:
            if condition_of(error) == _NOT_DETERMINISTIC:
                return False
            raise
        return True

    def analyzed(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
        """Return the server's analysis of a query (see `SessionBridge.analyzed`)."""
        return analyze_remotely(self, job, nodes_max)

    def parsed(self, job: ParseText) -> StatementParsed:
        """Return what a text names (see `SessionBridge.parsed`). The server shows no parsed plans,
        so the engine's own JVM parses the text."""
        return self.reader.parsed(job)

    def table(self, table: pa.Table, uses: int = 1) -> DataFrame:
        """Return Arrow rows as a frame (see `SessionBridge.table`)."""
        rows: LogicalPlan = LocalRelation(table, schema=struct_json(table.schema))
        if table.num_rows and table.nbytes >= SENT_AHEAD_BYTES:
            # The server keeps these rows until the session ends, so the session is replaced when
            # they are too many.
            self._kept += table.nbytes
            rows = send_rows_ahead(self.session, rows, _CHUNK_ROWS, _CHUNK_BYTES)
        return DataFrame(rows, self.session)

    def empty(self, schema: TableSchema) -> DataFrame:
        """Return a frame without rows (see `SessionBridge.empty`)."""
        return DataFrame(LocalRelation(None, schema=declared_json(schema)), self.session)

    def collect(self, found: DataFrame, wanted: Callable[[], pa.Schema]) -> pa.Table:
        """Run the query and return its rows (see `SessionBridge.collect`)."""
        table, _ = found._to_table()
        return table.cast(wanted())

    @contextmanager
    def views(self, frames: Mapping[str, DataFrame]) -> Iterator[None]:
        """Name frames as views while the context is open (see `SessionBridge.views`). The frames
        are sent with each text that may name them."""
        before = self._frames
        self._frames = before | dict(frames)
        try:
            yield
        finally:
            self._frames = before

    def _is_statement(self, text: str) -> bool:
        """Return whether Spark can parse a text."""
        try:
            # EXPLAIN does not run the statement.
            self.session.sql(f"EXPLAIN {text}")
        except PySparkException:
            return False
        return True


def _alias(name: str) -> str:
    """Return the name of a view in the form that the server accepts."""
    # The server parses the name when it creates the view but not when it drops it, so a quoted view
    # would never be dropped.
    bare = bare_name(name)
    return bare if _WORD.fullmatch(bare) else view_name(name)


def _may_be_named(name: str, lowered: str) -> bool:
    """Return whether a text (in lower case) may name a view; True for names with unusual
    characters."""
    bare = name.strip("`")
    return not bare.isascii() or "`" in bare or bare.lower() in lowered


class ConnectSessions(ThreadSessions):
    """The sessions of one worker thread behind Spark Connect. `base`: the settings of each
    session."""

    # An interrupt cancels the Spark jobs that run at that moment. If an adaptive query is between
    # two stages, the server answers that it is canceled, but its next stage keeps the server's
    # cores forever.
    adapts = False

    def __init__(
        self,
        root: SparkSession,
        user: frozenset[str],
        scratch: Path,
        base: Mapping[str, str],
        reader: PlanReader,
        cores: ServerCores,
        cluster_partitions_max: int = 0,
    ) -> None:
        super().__init__(root, user, scratch, cluster_partitions_max)
        self._base = base
        self._cores = cores
        self._reader = reader
        self._own: ThreadSessions | None = None
        """Sessions of the engine's own JVM, for prepared steps."""
        # Tag of the current job.
        self._tag = ""
        # Session of the current job; None before the job opens one.
        self._current: ConnectBridge | None = None
        # True once `end` was called.
        self._over = False

    def get(
        self, conf: Sequence[tuple[str, str]], *, small: bool, slots: SlotRows | None = None
    ) -> SessionBridge:
        """Return a session (see `ThreadSessions.get`). Plans over slot files belong to the engine's
        own JVM, since the server's plans can be neither inspected nor executed without a job.
        Raises `EngineUnavailable` for these if there is no Java here."""
        if slots is not None:
            if self._own is None:
                self._own = self._reader.step_sessions()
            return self._own.get(conf, small=small, slots=slots)
        made = super().get(conf, small=small, slots=slots)
        assert isinstance(made, ConnectBridge)
        self._current = made
        # Tested after the session was recorded: it is closed either here or by `end`, on another
        # thread.
        if self._over:
            made.close()
            raise OperationCanceled("the engine is shutting down")
        return made

    def end(self) -> None:
        """Close all sessions and refuse new ones. Called from any thread."""
        # Before `drop`, so that a session that is opened meanwhile closes itself in `get`.
        self._over = True
        self.drop()

    def begin(self, tag: str) -> None:
        """Tag everything that runs from now on with `tag`."""
        self._tag = tag
        # A cancellation must not interrupt the session of an earlier job.
        self._current = None

    def interrupt(self, tag: str) -> None:
        """Interrupt what runs under `tag`. Called from any thread."""
        # Read only once, since the worker thread may replace it.
        current = self._current
        if current is not None:
            current.session.interruptTag(tag)

    def _bridge(self, session: SparkSession) -> SessionBridge:
        return ConnectBridge(session, lambda: self._tag, self._reader, self._cores)

    def _new_session(self) -> SparkSession:
        session = another_session(self._root)
        set_retries(session)
        set_settings(session, self._base)
        return session


def set_retries(session: Any, tries_again: int = TRIES_AGAIN) -> None:
    """Set how often a call is retried while the server does not answer."""
    policy = DefaultPolicy(
        max_retries=tries_again, initial_backoff=50, backoff_multiplier=2.0, max_backoff=1000
    )
    session.client.set_retry_policies([policy])


def set_settings(session: Any, conf: Mapping[str, str]) -> None:
    """Set settings, all in a single call. Raises Spark's own error."""
    session.conf._set_all(dict(conf), silent=False)
