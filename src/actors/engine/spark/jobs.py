"""Turns jobs into answers: what a worker thread of the child does with one message.

A job is a pure function of its message and of the plan prepared under its name. Every job gets
exactly one answer; failures become `JobFailed` (`actors.engine.spark.failures`). A job that was
canceled answers ``OperationCanceled``, whatever else happened to it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from actors.engine.spark.analysis import check_types, result_schema
from actors.engine.spark.answer_files import FilesNotVisible, too_large, write_files
from actors.engine.spark.bucket_parts import BucketParts
from actors.engine.spark.difference import (
    lend_contents,
    open_query,
    retry_summed_first,
    return_contents,
    run_difference,
    run_query,
)
from actors.engine.spark.engine_start import CHILD_FOLDER, OUT_FOLDER
from actors.engine.spark.external_files import infer_files, read_files
from actors.engine.spark.failures import SparkGone, make_job_failed
from actors.engine.spark.java import java_object
from actors.engine.spark.prepared_plan import PreparedPlan, prepare
from actors.engine.spark.prepared_steps import PreparedSteps
from actors.engine.spark.query_engine import OWN
from actors.engine.spark.remote_address import on_loopback
from actors.engine.spark.rows import rows_done
from actors.engine.spark.session import ThreadSessions, cluster_partitions_max, name_call_site
from actors.engine.spark.steps import TREE_NODES_MAX, ThreadSlot, rehearse, run_step
from actors.model.plan.jobs import (
    AnalyzeStatement,
    Answer,
    ComputeDifference,
    EngineReady,
    InferFiles,
    Job,
    JobFailed,
    LendContents,
    ParseText,
    PreparePlan,
    QueryFiles,
    RehearseSteps,
    ReturnContents,
    RowsDone,
    RunStep,
    SelectContents,
    TakeFiles,
)
from actors.model.plan.schema import TableSchema, quote, result_type
from actors.runtime.errors import (
    ERROR_TEXT_BYTES_MAX,
    InvalidUsage,
    JobTooLarge,
    OperationCanceled,
    PenstockError,
    UnknownObject,
)
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import COLLECTED

# -- queries over full contents --------------------------------------------------------------------


def run_select(slot: ThreadSlot, job: SelectContents) -> RowsDone:
    """Return the rows of a query, with its own columns and order. Raises `QueryRejected` if it does
    not make `job.output`, `InvalidUsage` if the rows are too many, and Spark's own errors.

    A small answer is collected. An answer is written into Parquet files, so that it never passes
    through the driver's heap, if the inputs are large (`engine_collected_bytes_max`), or if Spark
    expects it to be large, or if it turns out to be; the order of the files is the order of the
    rows. If this process cannot see such files, the answer is collected, and one that is too large
    is refused.
    """
    return retry_summed_first(lambda sum_first: _run_select(slot, job, sum_first=sum_first))


def _run_select(slot: ThreadSlot, job: SelectContents, *, sum_first: bool) -> RowsDone:
    started = time.perf_counter()
    with open_query(slot, job.tables, job.conf, job.sql, sum_first=sum_first) as (opened, found):
        bridge = opened.bridge
        check_types(result_schema(found.schema), job.output, "the query", names=False)
        found = _with_months(found.toDF(*job.output.names), job.output)
        slot.check()
        large = job.into_files and COLLECTED.crossed(
            max(opened.bytes, _expected_bytes(found)) > slot.collected_bytes_max
        )
        try:
            if large:
                return _written(slot, job, found, started)
            table = bridge.collect(found, job.output.engine_arrow)
        except Exception as error:
            if large or not too_large(error):
                raise
            if not job.into_files:
                raise InvalidUsage(
                    "the result of the query takes more than spark.driver.maxResultSize: aggregate"
                    " or limit it"
                ) from None
            return _written(slot, job, found, started)
    elapsed = (time.perf_counter() - started) * 1000
    return rows_done(job.job_id, table, slot.out, slot.inline_bytes_max, elapsed)


def _with_months(found: DataFrame, output: TableSchema) -> DataFrame:
    """Return the frame with intervals of years and months as numbers of months, as in
    `engine_type`."""
    kinds = [result_type(column.type) for column in output.columns]
    if not any(map(pa.types.is_interval, kinds)):
        return found
    texts = []
    for name, kind in zip(output.names, kinds, strict=True):
        months = f"CAST(CAST({quote(name)} AS INTERVAL MONTH) AS INT) AS {quote(name)}"
        texts.append(months if pa.types.is_interval(kind) else quote(name))
    return found.selectExpr(*texts)


def _expected_bytes(found: DataFrame) -> int:
    """Return Spark's estimate of the answer's size. Only for a session in the engine's own JVM."""
    # For joins the estimate multiplies the sizes of the inputs.
    plan: Any = found._jdf.queryExecution().optimizedPlan()
    return int(str(plan.stats().sizeInBytes()))


def _written(slot: ThreadSlot, job: SelectContents, found: DataFrame, started: float) -> RowsDone:
    files = write_files(found, None, slot.out)
    elapsed = (time.perf_counter() - started) * 1000
    return RowsDone(job.job_id, sum(file.rows for file in files), spark_ms=elapsed, files=files)


# -- jobs ------------------------------------------------------------------------------------------

NO_TASK: Final = -1
"""Number that stands for no task."""


class TaskCounts(NamedTuple):
    """The tasks of the Spark jobs of one job."""

    done: int
    total: int
    executors: int | None
    """None if the driver executes the tasks."""
    running: int


class JobTicket:
    """A job inside the child. `group` names its Spark jobs, so that they can be canceled."""

    __slots__ = ("bytes", "canceled", "group", "job", "prepared", "refusal", "traced")

    def __init__(
        self,
        job: Job,
        group: str,
        prepared: PreparedPlan | None,
        *,
        traced: bool = False,
        frame_bytes: int = 0,
    ) -> None:
        """`traced`: the job came with a trace context. `frame_bytes`: the size of its frame."""
        self.job = job
        self.bytes = frame_bytes
        self.traced = traced
        self.group = group
        self.prepared = prepared
        # Set when the job is canceled.
        self.canceled = threading.Event()
        self.refusal = ""
        """Why this process itself canceled the job; "" if it did not."""

    def refuse(self, why: str) -> None:
        """Cancel the job, which then fails with `JobTooLarge` for this reason."""
        self.refusal = why
        self.canceled.set()

    def canceled_answer(self) -> JobFailed:
        """Return the answer to the job after it was canceled."""
        code, text = OperationCanceled.__name__, "canceled on request"
        if self.refusal:
            code, text = JobTooLarge.__name__, self.refusal
        return JobFailed(self.job.job_id, code, text)


class SparkEngine:
    """The Spark session and the state that all worker threads share; the driver is in the engine's
    own JVM.

    `actors.engine.spark.remote` has the engine for a driver behind Spark Connect.
    """

    def __init__(
        self,
        session: SparkSession,
        settings: Settings,
        scratch: Path,
        connect_token: str = "",
        chosen: frozenset[str] | None = None,
    ) -> None:
        """Take the session.

        `connect_token`: the token of the JVM's Spark Connect server; "" if it has none. `chosen`:
        the names of the settings that the user has chosen; None for those of `Settings.spark_conf`.
        """
        self.session = session
        self.settings = settings
        self._connect_token = connect_token
        self.scratch = scratch
        self.out = scratch / OUT_FOLDER
        self.out.mkdir(parents=True, exist_ok=True)
        self._temporary = scratch / CHILD_FOLDER
        self._user = frozenset(settings.spark_conf) if chosen is None else chosen
        self._steps = PreparedSteps(settings, self._temporary / "slots")
        self._here = on_loopback(settings.spark_master)
        self._parts = BucketParts(settings)

    def ready(self) -> EngineReady:
        """Return the message that tells the parent that Spark is up."""
        version = str(self._jvm().java.lang.System.getProperty("java.version"))
        port = self._connect_port() if self._connect_token else 0
        return EngineReady(
            "",
            self.session.version,
            version,
            os.getpid(),
            self._process().pid,
            port,
            self._connect_token,
        )

    def slot(self) -> ThreadSlot:
        """Return a new slot for one worker thread."""
        limits = self.settings
        inline, collected = limits.engine_inline_bytes_max, limits.engine_collected_bytes_max
        sessions, canceled = self._sessions(), threading.Event()
        return ThreadSlot(
            sessions,
            self._steps,
            self.out,
            inline,
            collected,
            self._here,
            limits.engine_plan_nodes_max,
            self._parts,
            canceled,
        )

    def run(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Return the answer to a job. Raises `SparkGone` if Spark did not answer or has stopped."""
        job_id = ticket.job.job_id
        if ticket.canceled.is_set():
            ticket.prepared = None
            return ticket.canceled_answer()
        slot.canceled, slot.group = ticket.canceled, ticket.group
        try:
            answer = self._carry_out_here(slot, ticket, pool)
        except SparkGone:
            raise
        except Exception as error:
            if ticket.canceled.is_set():
                return ticket.canceled_answer()
            answer = make_job_failed(job_id, error, ERROR_TEXT_BYTES_MAX)
            # Once a context has stopped, the loss of its parts may raise any kind of error.
            if not isinstance(error, PenstockError) and self.lost():
                raise SparkGone(answer.text) from error
            return answer
        finally:
            ticket.prepared = None  # An idle thread must not keep a forgotten plan alive.
        if ticket.canceled.is_set():
            # The parent does not learn these paths, so it could not remove the files.
            for path in answer.paths() if isinstance(answer, RowsDone) else ():
                Path(path).unlink(missing_ok=True)
            return ticket.canceled_answer()
        return answer

    def _carry_out_here(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Run the job, with files for its answer only if files that Spark writes are visible
        here."""
        if self._here:
            slot.files_here = True
            try:
                return self._carry_out(slot, ticket, pool)
            except FilesNotVisible as error:
                print(
                    f"answers are no longer written to files: {error}", file=sys.stderr, flush=True
                )
                self._here = False
        slot.files_here = False
        if isinstance(ticket.job, RunStep | SelectContents | TakeFiles) and ticket.job.into_files:
            # Files that are written elsewhere may be invisible here, and would be missing silently.
            ticket.job = msgspec.structs.replace(ticket.job, into_files=False)
        return self._carry_out(slot, ticket, pool)

    def interrupt(self, group: str) -> None:
        """Cancel what runs for a group: its current and future Spark jobs, and the execution of its
        prepared step."""
        context = self.session.sparkContext
        java_object(context._gateway, "DriverExecution").cancel(group)
        context._jsc.sc().cancelJobGroupAndFutureJobs(group)

    def interrupt_clients(self) -> None:
        """Cancel what runs for clients of Spark Connect, in an engine in which no steps of views
        run."""
        if self._connect_token and self.settings.query_engine == OWN:
            self.session.sparkContext.cancelAllJobs()

    def progress(self, group: str) -> TaskCounts | None:
        """Return the tasks of a group's Spark jobs; None if it has none."""
        context = self.session.sparkContext
        tracker = context.statusTracker()
        done = total = running = 0
        for number in tracker.getJobIdsForGroup(group):
            job = tracker.getJobInfo(number)
            for stage in () if job is None else job.stageIds:
                found = tracker.getStageInfo(stage)
                if found is not None:
                    done, total = done + found.numCompletedTasks, total + found.numTasks
                    running += found.numActiveTasks
        if not total:
            return None
        scala = context._jsc.sc()
        # The driver is one of these.
        executors = None if scala.isLocal() else scala.getExecutorMemoryStatus().size() - 1
        return TaskCounts(done, total, executors, running)

    def add_task(self) -> bool:
        """Let a local Spark run one more task at a time; return False if Spark is not local."""
        scala = self.session.sparkContext._jsc.sc()
        if not scala.isLocal():
            return False
        # The scheduler counts a free core for each task that ends, but does not know this number.
        # It gives the core to the pool with the fewest running tasks, which is that of the job that
        # waits.
        jvm: Any = self._jvm()
        ended = jvm.org.apache.spark.TaskState.FINISHED()
        scala.schedulerBackend().statusUpdate(NO_TASK, ended, jvm.java.nio.ByteBuffer.allocate(0))
        return True

    def wait_gone(self) -> str:
        """Wait until Spark is gone; return a text that says how it ended."""
        return f"the JVM exited with status {self._process().wait()}"

    def lost(self) -> bool:
        """Return whether Spark will run no more jobs; called after a job failed unexpectedly."""
        try:
            # A context can stop while its JVM is alive, when a cluster's master removes the
            # application.
            return bool(self.session.sparkContext._jsc.sc().isStopped())
        except Exception:  # noqa: BLE001 - no answer to this either
            return True

    def end(self) -> None:
        """Kill the JVM before this process ends itself."""
        self._process().kill()

    def _sessions(self) -> ThreadSessions:
        return ThreadSessions(
            self.session, self._user, self._temporary, cluster_partitions_max(self.settings)
        )

    def _carry_out(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Run the job in its job group, so that `interrupt` finds it. Raises errors of Penstock or
        of Spark."""
        context: Any = self.session.sparkContext
        context.setJobGroup(ticket.group, type(ticket.job).__name__, interruptOnCancel=True)
        if slot.pool != pool:  # A property of this thread, here and in the JVM.
            context.setLocalProperty("spark.scheduler.pool", pool)
            name_call_site(context)
            slot.pool = pool
        return run_job(slot, ticket)

    def _connect_port(self) -> int:
        """Return the port that the JVM's Spark Connect server uses."""
        service = getattr(self._jvm(), "org.apache.spark.sql.connect.service.SparkConnectService$")
        return int(getattr(service, "MODULE$").localPort())

    def _jvm(self) -> Any:
        return self.session._jvm

    def _process(self) -> Any:
        return cast(Any, self.session.sparkContext._gateway).proc


def run_job(slot: ThreadSlot, ticket: JobTicket) -> Answer:
    """Run the job with the sessions of `slot`. Raises errors of Penstock or of Spark."""
    job = ticket.job
    slot.check_size(getattr(job, "sql", ""))
    match job:
        case AnalyzeStatement():
            return slot.sessions.get(job.conf, small=True).analyzed(job, TREE_NODES_MAX)
        case ParseText():
            return slot.sessions.get(job.conf, small=True).parsed(job)
        case PreparePlan() if ticket.prepared is not None:
            bridge = slot.sessions.get(job.plan.conf, small=True)
            return prepare(bridge, ticket.prepared, job)
        case RunStep() if ticket.prepared is not None:
            return run_step(slot, ticket.prepared, job)
        case RehearseSteps() if ticket.prepared is not None:
            return rehearse(slot, ticket.prepared, job)
        case RunStep() | RehearseSteps():
            raise UnknownObject(f"no plan is prepared for dataflow {job.dataflow!r}")
        case ComputeDifference():
            return run_difference(slot, job)
        case QueryFiles():
            return run_query(slot, job)
        case SelectContents():
            return run_select(slot, job)
        case LendContents():
            return lend_contents(slot, job)
        case ReturnContents():
            return return_contents(slot, job)
        case TakeFiles():
            return read_files(slot, job)
        case InferFiles():
            return infer_files(slot, job)
        case _:
            raise InvalidUsage(f"{type(job).__name__} is not a job that can run")
