"""A JVM of our own beside a Spark Connect server: it analyses queries, and runs none.

A server shows no plans. Our own Spark, with the same settings and empty tables of the same types,
reads a text as the server does; a text that uses what only the server knows (a function of its own)
has no plan here. The first query that needs the JVM starts it. A child whose JVM has ended is
replaced as a whole, as that of any other engine.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from pyspark.errors import PySparkException

from actors.errors import EngineUnavailable, QueryRejected
from actors.plan.jobs import AnalyzeStatement, QueryAnalyzed
from actors.settings import Settings
from actors.spark.analysis import analyze
from actors.spark.bridge import ClassicBridge
from actors.spark.failures import is_gone, short_text
from actors.spark.session import ThreadSessions, open_session, spark_conf

READ_SETTINGS: Final = "spark.sql."
"""Prefix of the settings under which a text may mean something else."""
STARTS_MAX: Final = 3
"""Starts that are tried: one may fail for want of memory, but Java may also never start."""
ENDING_SECONDS: Final = 2.0
"""Time for a killed JVM to end: it may have gigabytes to give back."""
_BLIND: Final = "no plans are seen over Spark Connect without a Java of our own"


class PlanReader:
    """Reads plans for all worker threads of a child, one query at a time."""

    def __init__(
        self,
        settings: Settings,
        scratch: Path,
        base: Mapping[str, str],
        class_archive: str,
        no_java: str,
    ) -> None:
        """Keep what a start needs. `base`: the settings of the server's sessions. `no_java`: the
        reason why there is no Java here; empty if there is one."""
        own = {key: value for key, value in base.items() if key.startswith(READ_SETTINGS)}
        # One core is enough: no query is run here.
        self._settings = msgspec.structs.replace(settings, spark_master="local[1]", spark_conf=own)
        self._scratch = scratch
        self._archive = class_archive
        self._no_java = no_java
        self._lock = threading.Lock()
        self._sessions: ThreadSessions | None = None
        self._process: Any = None

    def read(self, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed | str:
        """Return what `analyze` says of a query that the server accepts, or the reason why there is
        no answer here."""
        if self._no_java:
            return f"{_BLIND}: {self._no_java}"
        with self._lock:
            try:
                if self._sessions is None:
                    self._sessions = self._opened()
                bridge = self._sessions.get(job.conf, small=True)
                assert isinstance(bridge, ClassicBridge)
                analyzed = analyze(bridge, job, nodes_max)
            except EngineUnavailable as error:
                # Kept as the reason for all later queries: it is not tried again.
                self._no_java = str(error)
                return f"{_BLIND}: {error}"
            except (PySparkException, QueryRejected) as error:
                if is_gone(error):
                    raise
                return f"only the server can read it: {short_text(str(error))}"
        return f"only the server knows {analyzed.missing}" if analyzed.missing else analyzed

    def ended(self) -> bool:
        """Return whether the JVM was started and has ended; asked when a call has failed."""
        if self._process is None:
            return False
        try:
            # A JVM that was killed closes its sockets some time before it has ended.
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill the JVM, if there is one."""
        if self._process is not None:
            self._process.kill()

    def _opened(self) -> ThreadSessions:
        """Start the JVM and return its sessions. Raises `EngineUnavailable` when no start
        succeeds."""
        conf = spark_conf(self._settings, self._scratch, self._archive)
        for start in range(1, STARTS_MAX + 1):
            try:
                session = open_session(conf, self._scratch)
                break
            except Exception as error:  # noqa: BLE001 - whatever it was, views can do without
                if start == STARTS_MAX:
                    text = f"it does not start, tried {start} times ({short_text(str(error))})"
                    raise EngineUnavailable(text) from None
        self._process = session.sparkContext._gateway.proc
        return ThreadSessions(session, frozenset(self._settings.spark_conf), self._scratch)
