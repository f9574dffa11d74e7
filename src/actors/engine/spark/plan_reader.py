"""The engine's own JVM next to a Spark Connect server: it reads plans and executes prepared steps.

A server does not show its plans. The engine's own Spark, with the same settings and empty tables of
the same types, reads a text as the server does. A text that uses what only the server has (such as
its own functions) gets no plan here. Small steps of a view that was read here are also prepared
here (`actors.engine.spark.prepared_steps`); the server would plan them again each time. The first
query that needs the JVM starts it. If the JVM exits, the child is replaced as a whole, as in any
other engine.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from actors.engine.spark.analysis import analyze
from actors.engine.spark.bridge import ClassicBridge
from actors.engine.spark.failures import is_gone, short_text
from actors.engine.spark.java import java_object
from actors.engine.spark.session import ThreadSessions, open_session, spark_conf
from actors.model.plan.jobs import AnalyzeStatement, ParseText, QueryAnalyzed, StatementParsed
from actors.runtime.errors import AccessDenied, EngineUnavailable, QueryRejected
from actors.runtime.settings import Settings

READ_SETTINGS: Final = "spark.sql."
"""Prefix of the settings that may change the meaning of a text."""
STARTS_MAX: Final = 3
"""Maximum number of starts: one may fail for lack of memory, but Java may also never start."""
ENDING_SECONDS: Final = 2.0
"""Time for a killed JVM to exit, which may have to release gigabytes."""
_UNCHECKED: Final = (
    "only administrators may run this query, because it cannot be checked what it reaches"
)
_BLIND: Final = "plans are not visible over Spark Connect unless the engine has its own Java"


class PlanReader:
    """Reads plans for all worker threads of a child, one query at a time, and provides sessions for
    their prepared steps."""

    def __init__(
        self,
        settings: Settings,
        scratch: Path,
        base: Mapping[str, str],
        class_archive: str,
        no_java: str,
    ) -> None:
        """Store what a start needs. `base`: the settings of the server's sessions. `no_java`: why
        there is no Java here; "" if there is one."""
        own = {key: value for key, value in base.items() if key.startswith(READ_SETTINGS)}
        self._user = frozenset(settings.spark_conf)
        # One core is enough, since nothing that is executed here is a job.
        self._settings = msgspec.structs.replace(settings, spark_master="local[1]", spark_conf=own)
        self._scratch = scratch
        self._archive = class_archive
        # Why no JVM can be started; "" as long as that may work.
        self._no_java = no_java
        self._lock = threading.Lock()
        # The sessions for reading; None until the JVM has started.
        self._sessions: ThreadSessions | None = None
        # The JVM's first session; None until it has started.
        self._root: SparkSession | None = None

    def read(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed | str:
        """Return the result of `analyze` for a query that the server accepts, or the reason why
        there is none here. Raises `AccessDenied` for a restricted query without a result."""
        # A server may have its own functions of any name, and does not show plans.
        answer = self._read(job, nodes_max)
        if job.restricted and isinstance(answer, str):
            raise AccessDenied(f"{_UNCHECKED}: {answer}")
        return answer

    def _read(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed | str:
        if self._no_java:
            return f"{_BLIND}: {self._no_java}"
        with self._lock:
            try:
                analyzed = analyze(self._bridge(job.conf), job, nodes_max)
            except EngineUnavailable as error:
                # Kept as the reason for all later queries; the start is not tried again.
                self._no_java = str(error)
                return f"{_BLIND}: {error}"
            except (PySparkException, QueryRejected) as error:
                if is_gone(error):
                    raise
                return f"only the server can read it: {short_text(str(error))}"
        return f"only the server knows {analyzed.missing}" if analyzed.missing else analyzed

    def parsed(self, job: ParseText) -> StatementParsed:
        """Parse a text and return the names in it. Raises `AccessDenied` if there is
        no Java to parse it, and Spark's error if the text is invalid."""
        with self._lock:
            if not self._no_java:
                try:
                    return self._bridge(job.conf).parsed(job)
                except EngineUnavailable as error:
                    self._no_java = str(error)
        raise AccessDenied(f"{_UNCHECKED}: {_BLIND} ({self._no_java})")

    def _bridge(self, conf: tuple[tuple[str, str], ...]) -> ClassicBridge:
        """Return a session for reading. The first call starts the JVM. Raises `EngineUnavailable`
        if no start succeeds."""
        if self._sessions is None:
            self._sessions = self._opened()
        bridge = self._sessions.get(conf, small=True)
        assert isinstance(bridge, ClassicBridge)
        return bridge

    def step_sessions(self) -> ThreadSessions:
        """Return new sessions for the prepared steps of one thread. Raises `EngineUnavailable` if
        there is no Java here."""
        with self._lock:
            if self._no_java:
                raise EngineUnavailable(self._no_java)
            return self._opened()

    def cancel(self, group: str) -> None:
        """Cancel the execution of a group's prepared step, if there is one."""
        if self._root is not None:
            java_object(self._root.sparkContext._gateway, "DriverExecution").cancel(group)

    def ended(self) -> bool:
        """Return whether the JVM was started and has exited; called after a call has failed."""
        process = self._process()
        if process is None:
            return False
        try:
            # A JVM that was killed closes its sockets some time before it exits.
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill the JVM, if there is one."""
        process = self._process()
        if process is not None:
            process.kill()

    def _process(self) -> Any:
        return None if self._root is None else cast(Any, self._root.sparkContext._gateway).proc

    def _opened(self) -> ThreadSessions:
        """Return the sessions of one thread. The first call starts the JVM. Raises
        `EngineUnavailable` if no start succeeds."""
        if self._root is None:
            self._root = self._started()
        return ThreadSessions(self._root, self._user, self._scratch)

    def _started(self) -> SparkSession:
        conf = spark_conf(self._settings, self._scratch, self._archive)
        for start in range(1, STARTS_MAX + 1):
            try:
                return open_session(conf, self._scratch)
            except Exception as error:  # noqa: BLE001 - whatever it was, views can do without
                if start == STARTS_MAX:
                    text = f"it did not start in {start} attempts ({short_text(str(error))})"
                    raise EngineUnavailable(text) from None
        raise AssertionError("a start returns or raises")
