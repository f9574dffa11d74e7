"""The Spark session: settings measured to suit small steps, with the user's settings on top.

`spark_conf` is the whole configuration as a dict (pure); `open_session` starts the JVM with it.
`ThreadSessions` gives each worker thread its own sessions, one for each set of settings, so that
concurrent jobs share neither settings nor temporary views; a thread runs one job at a time.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from actors.engine.spark.bridge import (
    ALWAYS_LOCAL_BYTES,
    CALL_SITE,
    LOCAL_RELATION_SETTING,
    ClassicBridge,
    SessionBridge,
)
from actors.engine.spark.class_archive import archive_options
from actors.engine.spark.engine_memory import heap_bytes
from actors.engine.spark.engine_start import CHILD_FOLDER
from actors.engine.spark.failures import is_gone
from actors.engine.spark.java import java_object
from actors.engine.spark.remote_address import on_loopback
from actors.runtime.errors import QueryRejected
from actors.runtime.settings import Settings

JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_EXECUTOR_OPTIONS: Final = "spark.executor.extraJavaOptions"
# With a few dozen views, the second compiler took a third of two cores for minutes, for planner
# code that was hot for seconds.
COMPILE_LATE: Final = (
    "-XX:Tier4InvocationThreshold=30000 -XX:Tier4MinInvocationThreshold=8000 "
    "-XX:Tier4CompileThreshold=60000 -XX:Tier4BackEdgeThreshold=200000"
)
"""Options that make the JVM's second compiler wait six times as long."""
# A row may contain a document with a DTD at any address, which `xpath` would fetch.
_CLOSED_XML: Final = "-Djavax.xml.accessExternalDTD= -Djavax.xml.accessExternalSchema="
"""Options that prevent XML from opening addresses or files."""
RESULT_SHARE: Final = 2
"""Divisor of the driver's heap: a collected answer may take this share of it."""
SESSIONS_PER_THREAD_MAX: Final = 8
VERIFY_PAGES: Final = "parquet.page.verify-checksum.enabled"
"""Setting that makes a damaged byte of a part an error; without it, Spark reads a wrong value."""
PARTITIONS: Final = "spark.sql.shuffle.partitions"
ADAPTIVE: Final = "spark.sql.adaptive.enabled"
SMALL_STEPS: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.maxSinglePartitionBytes": "1t",
}
"""Settings for small inputs: one partition, and no exchange because of an estimated size."""


class SlotRows(Enum):
    """How many rows a plan over slot files is for."""

    FEW = auto()
    MANY = auto()


FEW_ROWS_STEPS: Final = {
    # With few rows, each step starts cold: operators that generate projections or look for common
    # expressions do so in every task, and classes generated for a plan never become hot.
    # Interpreted operators use the same classes for all plans.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.subexpressionElimination.enabled": "false",
}
"""Settings for plans over slot files of few rows, in addition to `SLOT_STEPS`."""
SLOT_STEPS: Final = {
    "spark.sql.adaptive.enabled": "false",
    # The length of a slot at planning time says nothing about its rows. Estimates that multiply
    # such lengths soon exceed any limit, and exchanges come back; this factor makes the lengths
    # negligible.
    "spark.sql.sources.fileCompressionFactor": "1e-12",
    "spark.sql.maxPlanStringLength": "1m",
    # These would move a join below the hint that keeps its input in one partition.
    "spark.sql.optimizer.excludedRules": ",".join(
        f"org.apache.spark.sql.{rule}"
        for rule in (
            "catalyst.optimizer.PushDownLeftSemiAntiJoin",
            "catalyst.optimizer.PushLeftSemiLeftAntiThroughJoin",
            "execution.planmerging.MergeSubplans",
        )
    ),
}
"""Settings for plans over slot files, in addition to `SMALL_STEPS`. They override all others."""
# The bounds in a footer know neither NaN, which is the greatest number in Spark, nor that -0.0
# equals 0.0, so a filter on them loses rows. Penstock skips parts by its own statistics, which
# handle both.
WHOLE_ROW_GROUPS: Final = ("spark.sql.parquet.filterPushdown", "false")
"""Setting of every session, which overrides all others: no filter on the bounds in a footer."""
# Otherwise Spark would substitute environment variables and properties in a text before parsing it.
PLAIN_TEXTS: Final = ("spark.sql.variable.substitute", "false")
"""Setting of every session, which overrides all others: texts are taken literally."""
CONNECT_PLUGIN: Final = "org.apache.spark.sql.connect.SparkConnectPlugin"
CONNECT_TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""Environment variable from which the server takes its token. A setting would be visible to every
client."""
_PLAN_BYTES_SPARE: Final = 1024 * 1024
"""Room in a message for what the gateway adds to a plan in addition to rows."""
# A server may have been started with any other settings, and a view must not mean something else
# because of them.
CONNECT_SETTINGS: Final = {
    VERIFY_PAGES: "true",
    # Plans that the server's driver would keep contain the rows that were sent with them.
    "spark.connect.session.planCache.enabled": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.artifact.isolation.enabled": "false",
    "spark.sql.caseSensitive": "false",
    "spark.sql.connect.serverStacktrace.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.pyspark.jvmStacktrace.enabled": "false",
    "spark.sql.runSQLOnFiles": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    PLAIN_TEXTS[0]: PLAIN_TEXTS[1],
}
"""Settings of every session behind Spark Connect, which `Settings.spark_conf` overrides."""


NEEDED: Final = frozenset(
    {
        *CONNECT_SETTINGS,
        LOCAL_RELATION_SETTING,
        f"spark.hadoop.{VERIFY_PAGES}",
        "spark.app.name",
        "spark.driver.maxResultSize",
        "spark.driver.memory",
        "spark.executor.killOnFatalError.depth",
        "spark.local.dir",
        "spark.master",
        "spark.scheduler.mode",
        "spark.sql.catalogImplementation",
        "spark.sql.execution.arrow.pyspark.enabled",
        "spark.sql.parquet.outputTimestampType",
        "spark.sql.warehouse.dir",
        "spark.submit.deployMode",
    }
) - {"spark.sql.adaptive.enabled"}
"""Settings that `spark-defaults.conf` cannot change, since they define what a view means or the
engine relies on them. `Settings.spark_conf` can change them."""
NO_DEFAULTS: Final[Mapping[str, str]] = {}


def spark_conf(
    settings: Settings,
    scratch: Path,
    class_archive: str = "",
    defaults: Mapping[str, str] = NO_DEFAULTS,
) -> dict[str, str]:
    """Return the configuration of the engine: Penstock's own, then the user's `defaults` except for
    what is `NEEDED`, then `Settings.spark_conf`.

    `class_archive`: the path of the archive with which its JVM may start; "" if there is none.
    """
    conf = own_conf(settings, scratch)
    plugins = ",".join(
        filter(
            None,
            (
                CONNECT_PLUGIN if settings.connect_listen else "",
                settings.spark_conf.get("spark.plugins", defaults.get("spark.plugins", "")),
            ),
        )
    )
    below = {name: value for name, value in defaults.items() if name not in NEEDED}
    user = below | dict(settings.spark_conf)
    temporary = scratch / CHILD_FOLDER / "tmp"
    options = (
        "-XX:+UseParallelGC -XX:+ExitOnOutOfMemoryError -XX:-UsePerfData -Xss4m "
        f"{COMPILE_LATE} {_CLOSED_XML} -Djava.io.tmpdir={temporary} -Dderby.system.home={temporary}"
    )
    given = (options, archive_options(class_archive), user.pop(JAVA_OPTIONS, ""))
    conf[JAVA_OPTIONS] = " ".join(filter(None, given))
    if not settings.spark_master.startswith("local"):
        conf[_EXECUTOR_OPTIONS] = f"{_CLOSED_XML} {user.pop(_EXECUTOR_OPTIONS, '')}".strip()
    if settings.connect_listen:
        ours = connect_conf(settings)
        conf |= ours
        # The user's defaults cannot change these: only the gateway may reach the server.
        user = {k: v for k, v in user.items() if k not in ours or k in settings.spark_conf}
    conf |= user
    conf[PLAIN_TEXTS[0]] = PLAIN_TEXTS[1]
    return conf | ({"spark.plugins": plugins} if plugins else {})


def own_conf(settings: Settings, scratch: Path) -> dict[str, str]:
    """Return Penstock's own settings for the engine, without the driver's Java options."""
    conf = {
        "spark.master": settings.spark_master,
        "spark.app.name": "penstock",
        "spark.driver.memory": settings.spark_driver_memory,
        # An answer is on the heap several times, so Spark's own limit of 1g would be no limit at
        # all.
        "spark.driver.maxResultSize": str(result_bytes_max(settings.spark_driver_memory)),
        # If the stack of a task overflows, only the task fails; by default the JVM would exit.
        "spark.executor.killOnFatalError.depth": "0",
        "spark.submit.deployMode": "client",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The UI is off, so the history kept for it only wastes memory.
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "1000",
        "spark.sql.ui.retainedExecutions": "5",
        "spark.scheduler.mode": "FAIR",
        # Large pages cost more than a small step itself, and so does adaptive execution.
        "spark.buffer.pageSize": "256k",
        "spark.broadcast.blockSize": "128k",
        "spark.local.dir": str(scratch / CHILD_FOLDER / "local"),
        "spark.sql.warehouse.dir": str(scratch / CHILD_FOLDER / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.runSQLOnFiles": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        f"spark.hadoop.{VERIFY_PAGES}": "true",
        # With the default of 100 compiled classes, many views evict each other's code.
        "spark.sql.codegen.cache.maxEntries": "4000",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        LOCAL_RELATION_SETTING: str(ALWAYS_LOCAL_BYTES),
        "spark.sql.artifact.isolation.enabled": "false",
    }
    # The executors of a cluster on loopback get the driver's address, which must also be on
    # loopback.
    if on_loopback(settings.spark_master):
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if settings.spark_master.startswith("local"):
        # Spark's default of 200 partitions costs more than most large steps themselves.
        conf["spark.sql.shuffle.partitions"] = str(local_cores(settings.spark_master))
    return conf


def cluster_partitions_max(settings: Settings) -> int:
    """Return the maximum number of an exchange's partitions on a cluster; 0 if all of Spark is one
    JVM."""
    return (
        0 if settings.spark_master.startswith("local") else settings.engine_shuffle_partitions_max
    )


def connect_conf(settings: Settings) -> dict[str, str]:
    """Return the settings of the Spark Connect server inside the engine's JVM, behind the
    gateway."""
    rows_max = settings.connect_message_bytes_max + settings.connect_inline_bytes_max
    return {
        "spark.plugins": CONNECT_PLUGIN,
        # On loopback and with a token, so that only the gateway can reach it.
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.grpc.maxInboundMessageSize": str(rows_max + _PLAN_BYTES_SPARE),
        "spark.connect.session.manager.defaultSessionTimeout": (
            f"{settings.connect_session_idle_ms}ms"
        ),
        "spark.connect.execute.manager.detachedTimeout": f"{settings.connect_detached_ms}ms",
    }


def result_bytes_max(memory: str) -> int:
    """Return the maximum size of an answer for a driver with this much memory (see
    `heap_bytes`)."""
    return heap_bytes(memory) // RESULT_SHARE


def name_call_site(context: Any) -> None:
    """Name the call site of RDDs that this thread makes."""
    # Otherwise Spark would search the stack for it, for each RDD.
    for name in CALL_SITE:
        context.setLocalProperty(name, "penstock")


def local_cores(master: str) -> int:
    """Return the cores of a local master: ``local``, ``local[4]``, ``local[*]``, ``local[4,2]``."""
    given = master.removeprefix("local").strip("[]").split(",")[0]
    if given == "*":
        return os.cpu_count() or 1
    return int(given) if given.isdigit() else 1


def open_session(conf: dict[str, str], scratch: Path) -> SparkSession:
    """Start the JVM and the one SparkContext of this process."""
    for name in ("local", "warehouse", "tmp"):
        (scratch / CHILD_FOLDER / name).mkdir(parents=True, exist_ok=True)
    if on_loopback(conf["spark.master"]):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # Set before the JVM looks for another address.
    spark = SparkConf(loadDefaults=False)
    for key, value in conf.items():
        spark.set(key, value)
    context = SparkContext(conf=spark)
    context.setLogLevel("ERROR")
    session: Any = SparkSession(context)
    java_object(context._gateway, "CancelChecks").install(session._jsparkSession)
    return session


class ThreadSessions:
    """The sessions of one worker thread, by settings. Their number is limited; the least recently
    used is closed first."""

    adapts = True
    """True if large jobs on a cluster may use adaptive execution."""

    def __init__(
        self,
        root: SparkSession,
        user: frozenset[str],
        scratch: Path,
        cluster_partitions_max: int = 0,
    ) -> None:
        """Take the session from which to open others.

        `user`: the names of the settings that the user has chosen, which Penstock's own do not
        replace. `cluster_partitions_max`: the maximum number of partitions of a large job's
        exchanges; 0 leaves it unset.
        """
        self._root = root
        self._cluster_partitions_max = cluster_partitions_max
        self._scratch = scratch
        self._user = user
        # The open sessions by their settings, the least recently used first.
        self._sessions: OrderedDict[tuple[Any, ...], SessionBridge] = OrderedDict()

    def get(
        self, conf: Sequence[tuple[str, str]], *, small: bool, slots: SlotRows | None = None
    ) -> SessionBridge:
        """Return a session with `conf`, and make it the active one of this thread.

        `slots`: for a plan over slot files. Raises `QueryRejected` if Spark rejects a setting.
        """
        key = (*sorted(conf), small, slots)
        made = self._sessions.pop(key, None)
        if made is not None and made.needs_replacement:
            made.close()
            made = None
        if made is None:
            made = self._bridge(self._open(conf, small=small, slots=slots))
        self._sessions[key] = made
        while len(self._sessions) > SESSIONS_PER_THREAD_MAX:
            self._sessions.popitem(last=False)[1].close()
        made.activate()
        if not small and self._cluster_partitions_max:
            self._follow_cores(made, frozenset(name for name, _ in conf) | self._user)
        return made

    def _follow_cores(self, made: SessionBridge, chosen: frozenset[str]) -> None:
        """Give the exchanges of a large job as many partitions as the cluster has cores now, since
        executors come and go."""
        if PARTITIONS not in chosen:
            count = str(min(max(2, made.cores()), self._cluster_partitions_max))
            if made.partitions != count:
                made.session.conf.set(PARTITIONS, count)
                made.partitions = count

    def drop(self) -> None:
        """Close all sessions; later calls of `get` open new ones."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _bridge(self, session: SparkSession) -> SessionBridge:
        return ClassicBridge(session, self._scratch)

    def _new_session(self) -> SparkSession:
        return self._root.newSession()

    def _open(
        self, conf: Sequence[tuple[str, str]], *, small: bool, slots: SlotRows | None
    ) -> SparkSession:
        session = self._new_session()
        if small:
            for name, value in SMALL_STEPS.items():
                if name not in self._user:
                    session.conf.set(name, value)
        elif self.adapts and self._cluster_partitions_max and ADAPTIVE not in self._user:
            # Over the network, a better plan and fewer partitions than cores save more than it
            # costs to find them.
            session.conf.set(ADAPTIVE, "true")
        for name, value in conf:
            try:
                session.conf.set(name, value)
            except PySparkException as error:
                if is_gone(error):
                    raise
                text = str(error).splitlines()[0]
                raise QueryRejected(f"setting {name} = {value!r}: {text}") from None
        # After the user's settings, which must not replace these.
        if slots is not None:
            few = FEW_ROWS_STEPS if slots is SlotRows.FEW else {}
            for name, value in (SLOT_STEPS | few).items():
                session.conf.set(name, value)
        session.conf.set(*WHOLE_ROW_GROUPS)
        session.conf.set(*PLAIN_TEXTS)
        return session
