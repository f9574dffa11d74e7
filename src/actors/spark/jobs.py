"""Turns jobs into answers: what a worker thread of the child does with one message.

A job is a pure function of its message and of the plan prepared under its name. Every job gets
exactly one answer; failures become `JobFailed` (`actors.spark.failures`). A job that was canceled
answers ``OperationCanceled`` whatever else happened to it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
from pyspark.sql import SparkSession

from actors.errors import InvalidUsage, OperationCanceled, UnknownObject
from actors.plan.jobs import (
    AnalyzeStatement,
    Answer,
    ComputeDifference,
    EngineReady,
    InferFiles,
    Job,
    JobFailed,
    PreparePlan,
    QueryFiles,
    RehearseSteps,
    RowsDone,
    RunStep,
    SelectContents,
    TakeFiles,
)
from actors.settings import Settings
from actors.spark.difference import run_difference, run_query
from actors.spark.failures import SparkGone, make_job_failed
from actors.spark.plans import PreparedPlan, prepare
from actors.spark.prepared import PreparedSteps
from actors.spark.selecting import run_select
from actors.spark.session import ThreadSessions, name_call_site, on_loopback
from actors.spark.start import CHILD_FOLDER, OUT_FOLDER
from actors.spark.steps import ThreadSlot, rehearse, run_step
from actors.spark.taking import infer_files, take_files


class JobTicket:
    """A job inside the child. `group` names its Spark jobs, for the canceler."""

    __slots__ = ("canceled", "group", "job", "prepared")

    def __init__(self, job: Job, group: str, prepared: PreparedPlan | None) -> None:
        self.job = job
        self.group = group
        self.prepared = prepared
        self.canceled = threading.Event()


class SparkEngine:
    """The Spark session and the state that all worker threads share; its driver is in our own JVM.

    `actors.spark.remote` has the engine for a driver behind Spark Connect.
    """

    def __init__(self, session: SparkSession, settings: Settings, scratch: Path) -> None:
        self.session = session
        self.settings = settings
        self.out = scratch / OUT_FOLDER
        self.out.mkdir(parents=True, exist_ok=True)
        self._temporary = scratch / CHILD_FOLDER
        self._user = frozenset(settings.spark_conf)
        self._steps = PreparedSteps(settings, self._temporary / "slots")
        self._here = on_loopback(settings.spark_master)

    def ready(self) -> EngineReady:
        """Return the message that tells the parent that Spark is up."""
        version = str(self._jvm().java.lang.System.getProperty("java.version"))
        return EngineReady("", self.session.version, version, os.getpid(), self._process().pid)

    def slot(self) -> ThreadSlot:
        """Return a new slot, for one worker thread."""
        limits = self.settings
        inline, collected = limits.engine_inline_bytes_max, limits.engine_collected_bytes_max
        nodes, text = limits.engine_plan_nodes_max, limits.engine_statement_bytes_max
        sessions, canceled = self._sessions(), threading.Event()
        return ThreadSlot(
            sessions,
            self._steps,
            self.out,
            inline,
            collected,
            self._here,
            nodes,
            text,
            limits.engine_nesting_max,
            limits.view_tree_nodes_max,
            canceled,
        )

    def run(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Return the answer to a job. Raises `SparkGone` when Spark did not answer or has
        stopped."""
        job_id = ticket.job.job_id
        if ticket.canceled.is_set():
            ticket.prepared = None
            return _canceled(job_id)
        if (
            isinstance(ticket.job, RunStep | SelectContents | TakeFiles)
            and ticket.job.into_files
            and not self._here
        ):
            # Files that are written elsewhere may be invisible here, and be missing silently.
            ticket.job = msgspec.structs.replace(ticket.job, into_files=False)
        slot.canceled, slot.group = ticket.canceled, ticket.group
        try:
            answer = self._carry_out(slot, ticket, pool)
        except SparkGone:
            raise
        except Exception as error:
            if ticket.canceled.is_set():
                return _canceled(job_id)
            answer = make_job_failed(job_id, error, self.settings.error_text_bytes_max)
            if answer.code == "EngineLost" and self.lost():
                raise SparkGone(answer.text) from error
            return answer
        finally:
            ticket.prepared = None  # a thread that waits must not keep a forgotten plan
        if ticket.canceled.is_set():
            # The parent does not learn these paths, and could not remove the files.
            for path in answer.paths() if isinstance(answer, RowsDone) else ():
                Path(path).unlink(missing_ok=True)
            return _canceled(job_id)
        return answer

    def interrupt(self, group: str) -> None:
        """Cancel the Spark jobs of a group, running and to come, and the round that its step is
        in."""
        if (found := self._steps.rounds.find_group_to_cancel(group)) != group:
            self.session.sparkContext._jsc.sc().cancelJobGroup(found)
        self.session.sparkContext._jsc.sc().cancelJobGroupAndFutureJobs(group)

    def group_of(self, group: str) -> str:
        """Return the job group in which a step ran: its round's, if it had one, or its own
        `group`."""
        return self._steps.rounds.group_of(group)

    def progress(self, group: str) -> tuple[int, int] | None:
        """Return (tasks done, tasks) of a group's Spark jobs; None when it has none."""
        tracker = self.session.sparkContext.statusTracker()
        done = total = 0
        for number in tracker.getJobIdsForGroup(group):
            job = tracker.getJobInfo(number)
            for stage in () if job is None else job.stageIds:
                found = tracker.getStageInfo(stage)
                if found is not None:
                    done, total = done + found.numCompletedTasks, total + found.numTasks
        return (done, total) if total else None

    def wait_gone(self) -> str:
        """Wait until Spark is gone; return a text that says how."""
        return f"the JVM ended with {self._process().wait()}"

    def lost(self) -> bool:
        """Return whether Spark will do no more jobs; asked when one failed that need not have."""
        try:
            # A context can stop while its JVM lives: a cluster's master has removed the
            # application.
            return bool(self.session.sparkContext._jsc.sc().isStopped())
        except Exception:  # noqa: BLE001 - no answer to this either
            return True

    def end(self) -> None:
        """Kill the JVM, before this process ends itself."""
        self._process().kill()

    def _sessions(self) -> ThreadSessions:
        return ThreadSessions(self.session, self._user, self._temporary)

    def _carry_out(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Run the job in its job group, so that `interrupt` finds it. Raises our errors or Spark's
        own."""
        context: Any = self.session.sparkContext
        context.setJobGroup(ticket.group, type(ticket.job).__name__, interruptOnCancel=True)
        if slot.pool != pool:  # a property of this thread, here and in the JVM
            context.setLocalProperty("spark.scheduler.pool", pool)
            name_call_site(context)
            slot.pool = pool
        return run_job(slot, ticket)

    def _jvm(self) -> Any:
        return self.session._jvm

    def _process(self) -> Any:
        return cast(Any, self.session.sparkContext._gateway).proc


def run_job(slot: ThreadSlot, ticket: JobTicket) -> Answer:
    """Run the job with the sessions of `slot`. Raises our errors or Spark's own."""
    job = ticket.job
    slot.check_size(getattr(job, "sql", ""))
    match job:
        case AnalyzeStatement():
            return slot.sessions.get(job.conf, small=True).analyzed(job, slot.tree_nodes_max)
        case PreparePlan() if ticket.prepared is not None:
            bridge = slot.sessions.get(job.plan.conf, small=True)
            return prepare(bridge, ticket.prepared, job)
        case RunStep() if ticket.prepared is not None:
            return run_step(slot, ticket.prepared, job)
        case RehearseSteps() if ticket.prepared is not None:
            return rehearse(slot, ticket.prepared, job)
        case RunStep() | RehearseSteps():
            raise UnknownObject(f"no plan was prepared under the name {job.dataflow!r}")
        case ComputeDifference():
            return run_difference(slot, job)
        case QueryFiles():
            return run_query(slot, job)
        case SelectContents():
            return run_select(slot, job)
        case TakeFiles():
            return take_files(slot, job)
        case InferFiles():
            return infer_files(slot, job)
        case _:
            raise InvalidUsage(f"{type(job).__name__} is not a job that runs")


def _canceled(job_id: str) -> JobFailed:
    return JobFailed(job_id, OperationCanceled.__name__, "canceled on request")
