"""A session behind Spark Connect, used with as few calls over the wire as can be.

A frame is a description that this process keeps; a call sends it whole, with the rows and the views
that it reads. So views are not made and dropped one by one: they are sent with each text that may
name them, and exist for that call alone. A step is one call.
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
"""Rows of this size or more are sent once, not with each call."""
KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
_CHUNK_ROWS: Final = 65_536
_CHUNK_BYTES: Final = 8 * 1024 * 1024
TRIES_AGAIN: Final = 7
"""Retries of a call; with the waits between them some 3.5 s, after which the server is gone."""
_MANY: Final = 1 << 16
"""Rows of a range, more than Spark has cores."""
QUERIES_KNOWN_MAX: Final = 256
"""Bound of the texts that a session remembers to be queries."""
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_DETERMINISTIC: Final = "INVALID_NON_DETERMINISTIC_EXPRESSIONS"


class ServerCores:
    """The number of the server's cores, asked once for all sessions."""

    def __init__(self) -> None:
        self._count: int | None = None

    def count(self, session: SparkSession) -> int:
        """Return how many tasks the server's Spark runs at a time. Raises Spark's own error."""
        # A range has as many partitions as Spark has cores; no call of the server tells them.
        if self._count is None:
            numbers = session.range(_MANY).selectExpr("spark_partition_id() AS n")
            self._count = max(1, numbers.distinct().count())
        return self._count


class ConnectBridge(SessionBridge):
    """One session of one thread, behind Spark Connect. `tag` returns the current job's tag."""

    def __init__(
        self, session: SparkSession, tag: Callable[[], str], reader: PlanReader, cores: ServerCores
    ) -> None:
        super().__init__(session)
        self.reader = reader
        self._tag = tag
        self._frames: dict[str, DataFrame] = {}
        self._kept = 0
        self._queries: set[str] = set()
        self._cores = cores

    def activate(self) -> None:
        """See `SessionBridge.activate`. Later calls carry the job's tag."""
        self.session.clearTags()
        self.session.addTag(self._tag())

    @property
    def needs_replacement(self) -> bool:
        """See `SessionBridge.needs_replacement`."""
        return self._kept > KEPT_BYTES_MAX

    def close(self) -> None:
        """See `SessionBridge.close`. The server ends what still runs in the session."""
        self.session.stop()  # logs what fails, and raises nothing

    def cores(self) -> int:
        """See `SessionBridge.cores`."""
        return self._cores.count(self.session)

    def sql(self, text: str) -> DataFrame:
        """See `SessionBridge.sql`."""
        lowered = text.lower()
        read = [
            SubqueryAlias(frame._plan, _alias(name))
            for name, frame in self._frames.items()
            if _may_be_named(name, lowered)
        ]
        return DataFrame(SQL(text, views=read), self.session)

    def query(self, text: str) -> DataFrame:
        """See `SessionBridge.query`."""
        # The check puts the text in parentheses, where a semicolon does not parse.
        bare = text.strip().rstrip(";")
        if bare not in self._queries:
            self._check_query(bare)
            if len(self._queries) >= QUERIES_KNOWN_MAX:
                self._queries.clear()
            self._queries.add(bare)
        found = self.sql(bare)
        _ = found.schema  # asks the server; kept by the frame
        return found

    def _check_query(self, text: str) -> None:
        """Raise `QueryRejected` for a command, Spark's own error for any other text that is no
        query."""
        try:
            # A command does not parse in parentheses, so that none is ever run.
            _ = self.sql(f"({text}\n)").schema
        except ParseException:
            if self._is_statement(text):
                raise QueryRejected(f"a view is a query; this is a command: {text[:200]}") from None
            raise

    def deterministic(self, found: DataFrame) -> bool:
        """See `SessionBridge.deterministic`."""
        # Spark refuses a join on an expression that is not deterministic, by an error of that name.
        one = self.session.range(1)
        try:
            _ = one.alias("a").join(one.alias("b"), found.exists()).schema
        except PySparkException as error:
            if condition_of(error) == _NOT_DETERMINISTIC:
                return False
            raise
        return True

    def analyzed(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
        """See `SessionBridge.analyzed`."""
        return analyze_remotely(self, job, nodes_max)

    def parsed(self, job: ParseText) -> StatementParsed:
        """See `SessionBridge.parsed`. A server shows no parsed plans: our own JVM parses."""
        return self.reader.parsed(job)

    def table(self, table: pa.Table, uses: int = 1) -> DataFrame:
        """See `SessionBridge.table`."""
        rows: LogicalPlan = LocalRelation(table, schema=struct_json(table.schema))
        if table.num_rows and table.nbytes >= SENT_AHEAD_BYTES:
            # The server keeps these rows until the session ends: the session is spent by their
            # bytes.
            self._kept += table.nbytes
            rows = send_rows_ahead(self.session, rows, _CHUNK_ROWS, _CHUNK_BYTES)
        return DataFrame(rows, self.session)

    def empty(self, schema: TableSchema) -> DataFrame:
        """See `SessionBridge.empty`."""
        return DataFrame(LocalRelation(None, schema=declared_json(schema)), self.session)

    def collect(self, found: DataFrame, wanted: Callable[[], pa.Schema]) -> pa.Table:
        """See `SessionBridge.collect`."""
        table, _ = found._to_table()
        return table.cast(wanted())

    @contextmanager
    def views(self, frames: Mapping[str, DataFrame]) -> Iterator[None]:
        """See `SessionBridge.views`. The frames are sent along with each text that may name
        them."""
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
    """Return a view's name as the server takes it."""
    # The server parses the name to make the view, and not to drop it: a quoted view would stay.
    bare = bare_name(name)
    return bare if _WORD.fullmatch(bare) else view_name(name)


def _may_be_named(name: str, lowered: str) -> bool:
    """Return whether a text (in lower case) may name a view; True for names with odd characters."""
    bare = name.strip("`")
    return not bare.isascii() or "`" in bare or bare.lower() in lowered


class ConnectSessions(ThreadSessions):
    """The sessions of one worker thread, behind Spark Connect. `base`: settings of each of them."""

    # A server's interrupt cancels the Spark jobs of its moment: an adaptive query that is between
    # two stages answers that it is canceled, and its next stage holds the server's cores for good.
    adapts = False

    def __init__(
        self,
        root: SparkSession,
        user: frozenset[str],
        scratch: Path,
        base: Mapping[str, str],
        reader: PlanReader,
        cores: ServerCores,
        far_partitions_max: int = 0,
    ) -> None:
        super().__init__(root, user, scratch, far_partitions_max)
        self._base = base
        self._cores = cores
        self._reader = reader
        self._own: ThreadSessions | None = None
        """Sessions of our own JVM, for prepared steps."""
        self._tag = ""
        self._current: ConnectBridge | None = None
        self._over = False

    def get(
        self, conf: Sequence[tuple[str, str]], *, small: bool, slots: SlotRows | None = None
    ) -> SessionBridge:
        """See `ThreadSessions.get`. Plans over slot files are those of our own JVM: the server's
        cannot be looked at, nor executed without a job. Raises `EngineUnavailable` for these where
        there is no Java here."""
        if slots is not None:
            if self._own is None:
                self._own = self._reader.step_sessions()
            return self._own.get(conf, small=small, slots=slots)
        made = super().get(conf, small=small, slots=slots)
        assert isinstance(made, ConnectBridge)
        self._current = made
        # Tested after the session was kept: either `end`, on another thread, closes it, or this.
        if self._over:
            made.close()
            raise OperationCanceled("the engine ends")
        return made

    def end(self) -> None:
        """Close all sessions and refuse new ones. Called from any thread."""
        # Before `drop`: a session that is opened meanwhile closes itself in `get`.
        self._over = True
        self.drop()

    def begin(self, tag: str) -> None:
        """Tag all that is run from now on with `tag`."""
        self._tag = tag
        # A cancel must not interrupt the session of an earlier job.
        self._current = None

    def interrupt(self, tag: str) -> None:
        """Interrupt what runs under `tag`. Called from any thread."""
        # Read once: the worker thread may replace it.
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
    """Set settings, all in one call. Raises Spark's own error."""
    session.conf._set_all(dict(conf), silent=False)
