"""The Spark session: measured settings for small steps, user settings on top.

`spark_conf` is the whole configuration as a dict (pure); `open_session` starts the JVM with it.
`ThreadSessions` gives each worker thread sessions of its own, one for each distinct set of
settings, so that neither settings nor temporary views of concurrent jobs can meet: a thread runs
one job at a time.
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
# With a few dozen views the second compiler took a third of two cores for minutes, for planner code
# that was hot for seconds.
COMPILE_LATE: Final = (
    "-XX:Tier4InvocationThreshold=30000 -XX:Tier4MinInvocationThreshold=8000 "
    "-XX:Tier4CompileThreshold=60000 -XX:Tier4BackEdgeThreshold=200000"
)
"""Options with which the JVM's second compiler waits six times as long."""
# A row may hold a document that names a DTD of any address, which `xpath` would fetch.
_CLOSED_XML: Final = "-Djavax.xml.accessExternalDTD= -Djavax.xml.accessExternalSchema="
"""Options with which no XML opens an address or a file."""
RESULT_SHARE: Final = 2
"""Divisor of the driver's heap: a collected answer may take one such part."""
SESSIONS_PER_THREAD_MAX: Final = 8
VERIFY_PAGES: Final = "parquet.page.verify-checksum.enabled"
"""Setting with which a damaged byte of a part is an error; without it Spark reads a wrong value."""
PARTITIONS: Final = "spark.sql.shuffle.partitions"
ADAPTIVE: Final = "spark.sql.adaptive.enabled"
SMALL_STEPS: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.maxSinglePartitionBytes": "1t",
}
"""Settings for small inputs: one partition, and no exchange because of a size estimate."""


class SlotRows(Enum):
    """How many rows a plan over slot files is for."""

    FEW = auto()
    MANY = auto()


FEW_ROWS_STEPS: Final = {
    # On few rows each step begins anew: an operator that generates its projections, or looks for
    # expressions in common, does so in every task, and classes of a plan's own stay cold.
    # Interpreted operators are the same classes for all plans.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.subexpressionElimination.enabled": "false",
}
"""Settings for plans over slot files of few rows, on top of `SLOT_STEPS`."""
SLOT_STEPS: Final = {
    "spark.sql.adaptive.enabled": "false",
    # A slot's length when it is planned says nothing of its rows. Estimates that multiply such
    # lengths soon exceed any limit, and exchanges come back: the factor makes them next to nothing.
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
"""Settings for plans over slot files, on top of `SMALL_STEPS` and above all others."""
# A footer's bounds know neither NaN, which is the greatest number to Spark, nor that -0.0 is 0.0: a
# filter on them loses rows that pass. Parts are left out by our own statistics, which know both.
WHOLE_ROW_GROUPS: Final = ("spark.sql.parquet.filterPushdown", "false")
"""Setting of every session, above all others: no filter on the bounds in a footer."""
# Spark would put variables of the environment and properties into a text before it parses it.
PLAIN_TEXTS: Final = ("spark.sql.variable.substitute", "false")
"""Setting of every session, above all others: a text means what is written."""
CONNECT_PLUGIN: Final = "org.apache.spark.sql.connect.SparkConnectPlugin"
CONNECT_TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""Variable of the environment from which the server takes its token: a setting would be shown to
every client."""
_PLAN_BYTES_SPARE: Final = 1024 * 1024
"""Room in a message for what the gateway adds to a plan beside rows."""
# A server may have been started with any others, and a view must not mean something else for it.
CONNECT_SETTINGS: Final = {
    VERIFY_PAGES: "true",
    # Plans that the server's driver would keep hold the rows that were sent with them.
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
"""Settings of every session behind Spark Connect, below `Settings.spark_conf`."""


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
"""Settings that `spark-defaults.conf` does not change: what a view means, and what the engine is
built on. `Settings.spark_conf` may."""
NO_DEFAULTS: Final[Mapping[str, str]] = {}


def spark_conf(
    settings: Settings,
    scratch: Path,
    class_archive: str = "",
    defaults: Mapping[str, str] = NO_DEFAULTS,
) -> dict[str, str]:
    """Return the configuration of the engine: ours, then the user's `defaults` but for what is
    `NEEDED`, then `Settings.spark_conf` on top.

    `class_archive` is the path of the archive that its JVM may start from; empty if there is none.
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
        # Not by the user's defaults: the gateway alone is to reach the server.
        user = {k: v for k, v in user.items() if k not in ours or k in settings.spark_conf}
    conf |= user
    conf[PLAIN_TEXTS[0]] = PLAIN_TEXTS[1]
    return conf | ({"spark.plugins": plugins} if plugins else {})


def own_conf(settings: Settings, scratch: Path) -> dict[str, str]:
    """Return our own settings of the engine, without the driver's Java options."""
    conf = {
        "spark.master": settings.spark_master,
        "spark.app.name": "penstock",
        "spark.driver.memory": settings.spark_driver_memory,
        # An answer lies on the heap several times: Spark's own limit of 1g would be none.
        "spark.driver.maxResultSize": str(result_bytes_max(settings.spark_driver_memory)),
        # A task whose stack overflows fails alone; by default it would end the JVM.
        "spark.executor.killOnFatalError.depth": "0",
        "spark.submit.deployMode": "client",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The history kept for a UI that is off is memory for nothing.
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
        # With the default of 100 compiled classes many views evict each other's code.
        "spark.sql.codegen.cache.maxEntries": "4000",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        LOCAL_RELATION_SETTING: str(ALWAYS_LOCAL_BYTES),
        "spark.sql.artifact.isolation.enabled": "false",
    }
    # The executors of a cluster on loopback are given the driver's address: it must be one, too.
    if on_loopback(settings.spark_master):
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if settings.spark_master.startswith("local"):
        # Spark's default of 200 partitions costs more than most large steps themselves.
        conf["spark.sql.shuffle.partitions"] = str(local_cores(settings.spark_master))
    return conf


def far_partitions_max(settings: Settings) -> int:
    """Return the bound of an exchange's partitions on a cluster; 0 if all of Spark is one JVM."""
    return (
        0 if settings.spark_master.startswith("local") else settings.engine_shuffle_partitions_max
    )


def connect_conf(settings: Settings) -> dict[str, str]:
    """Return the settings of the Spark Connect server inside our own JVM, behind the gateway."""
    rows_max = settings.connect_message_bytes_max + settings.connect_inline_bytes_max
    return {
        "spark.plugins": CONNECT_PLUGIN,
        # On loopback and with a token: only the gateway is to reach it.
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.grpc.maxInboundMessageSize": str(rows_max + _PLAN_BYTES_SPARE),
        "spark.connect.session.manager.defaultSessionTimeout": (
            f"{settings.connect_session_idle_ms}ms"
        ),
        "spark.connect.execute.manager.detachedTimeout": f"{settings.connect_detached_ms}ms",
    }


def result_bytes_max(memory: str) -> int:
    """Return how large an answer may be with so much memory for the driver; see `heap_bytes`."""
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
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # before the JVM looks for another address
    spark = SparkConf(loadDefaults=False)
    for key, value in conf.items():
        spark.set(key, value)
    context = SparkContext(conf=spark)
    context.setLogLevel("ERROR")
    session: Any = SparkSession(context)
    java_object(context._gateway, "CancelChecks").install(session._jsparkSession)
    return session


class ThreadSessions:
    """The sessions of one worker thread, by settings; bounded, the least recently used go first."""

    adapts = True
    """True if large jobs on a cluster may be adapted while they run."""

    def __init__(
        self,
        root: SparkSession,
        user: frozenset[str],
        scratch: Path,
        far_partitions_max: int = 0,
    ) -> None:
        """Take the session to open others of.

        `user`: names of the settings that the user has chosen, which ours do not replace.
        `far_partitions_max`: bound of the partitions of a large job's exchanges; 0: not set here.
        """
        self._root = root
        self._far_partitions_max = far_partitions_max
        self._scratch = scratch
        self._user = user
        self._sessions: OrderedDict[tuple[Any, ...], SessionBridge] = OrderedDict()

    def get(
        self, conf: Sequence[tuple[str, str]], *, small: bool, slots: SlotRows | None = None
    ) -> SessionBridge:
        """Return a session with `conf`, made the active one of this thread.

        `slots` is for plans over slot files. Raises `QueryRejected` when Spark refuses a setting.
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
        if not small and self._far_partitions_max:
            self._follow_cores(made, frozenset(name for name, _ in conf) | self._user)
        return made

    def _follow_cores(self, made: SessionBridge, chosen: frozenset[str]) -> None:
        """Have exchanges of a large job make as many partitions as the cluster has cores now:
        executors come, and go."""
        if PARTITIONS not in chosen:
            count = str(min(max(2, made.cores()), self._far_partitions_max))
            if made.partitions != count:
                made.session.conf.set(PARTITIONS, count)
                made.partitions = count

    def drop(self) -> None:
        """Close all sessions; those asked for next are new."""
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
        elif self.adapts and self._far_partitions_max and ADAPTIVE not in self._user:
            # Over the network a better plan, and fewer partitions than cores, save more than it
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
