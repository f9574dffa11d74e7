"""Makes the spans of a traced job in the engine's process: one for the job, and one for each Spark
stage.

The spans travel with the job's answer, and the service exports them as spans of this process. So no
span of an answered job is lost, none is left without its parent when this process dies, and nothing
is imported here that exports spans. For a job that fails, only the service makes spans.

A prepared step has no stages: it runs in the driver (`DriverExecution.java`). A server behind Spark
Connect is not asked for stages.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import msgspec

from actors.engine.spark.jobs import JobTicket, SparkEngine
from actors.engine.spark.remote_address import is_remote
from actors.model.plan.jobs import Answer, ComputeDifference, JobSpan, JobTrace, RowsDone, RunStep
from actors.runtime.telemetry import (
    BYTES,
    ENGINE_JOB,
    ENGINE_STAGE,
    JOB,
    PREPARED,
    READ_BYTES,
    READ_ROWS,
    ROWS,
    RUN_MS,
    SHUFFLE_BYTES,
    SPARK_MS,
    STAGE,
    STAGES,
    TASKS,
)

STAGES_MAX: Final = 64
EVENTS_MS_MAX: Final = 1_000
"""Maximum time to wait for Spark's record of stages, which lags behind by the events that are not
processed yet."""


def is_traced(ticket: JobTicket) -> bool:
    """Return whether the answer to a job must carry a trace."""
    return ticket.traced and isinstance(ticket.job, RunStep | ComputeDifference)


def traced(engine: SparkEngine, group: str, interval_ns: tuple[int, int], answer: Answer) -> Answer:
    """Return the answer with its trace. `group` names the job's Spark jobs."""
    if not isinstance(answer, RowsDone):
        return answer
    start, end = interval_ns
    try:
        stages = [] if is_remote(engine.settings.spark_master) else _stages(engine, group)
    except Exception as error:  # noqa: BLE001 - an account that is missing fails no job
        print(
            f"{answer.job_id}: cannot read its stages: {error}"[:300], file=sys.stderr, flush=True
        )
        stages = []
    whole = JobSpan(
        ENGINE_JOB.name,
        start,
        end,
        {
            JOB: answer.job_id,
            ROWS: answer.rows,
            BYTES: len(answer.arrow or b""),
            SPARK_MS: round(answer.spark_ms, 3),
            PREPARED: answer.prepared,
            STAGES: len(stages),
        },
    )
    inner = [_stage_span(found, start, end) for found in stages[:STAGES_MAX]]
    spans = (whole, *(span for span in inner if span is not None))
    return msgspec.structs.replace(answer, trace=JobTrace(os.getpid(), spans))


def _stages(engine: SparkEngine, group: str) -> list[Any]:
    """Return Spark's record of each stage of the group, in order."""
    context: Any = engine.session.sparkContext
    scala = context._jsc.sc()
    scala.listenerBus().waitUntilEmpty(EVENTS_MS_MAX)
    tracker = context.statusTracker()
    numbers: set[int] = set()
    for job in tracker.getJobIdsForGroup(group):
        found = tracker.getJobInfo(job)
        numbers |= set(() if found is None else found.stageIds)
    store = scala.statusStore()
    return [store.lastStageAttempt(number) for number in sorted(numbers)]


def _place(name: str) -> str:
    """Return the name of a stage: the call, and its file without the folders above it."""
    called, _, where = name.partition(" at ")
    return f"{called} at {where.rpartition('/')[2]}"[:120] if where else name[:120]


def _stage_span(stage: Any, start: int, end: int) -> JobSpan | None:
    """Return the span of a stage that has run; None for one that was skipped."""
    submitted, completed = stage.submissionTime(), stage.completionTime()
    if submitted.isEmpty() or completed.isEmpty():
        return None  # Skipped, since its output already existed.
    # Spark's clock has whole milliseconds, so the span is clipped to that of its job.
    first = min(max(start, submitted.get().getTime() * 1_000_000), end)
    last = max(first, min(end, completed.get().getTime() * 1_000_000))
    return JobSpan(
        ENGINE_STAGE.name,
        first,
        last,
        {
            STAGE: f"{stage.stageId()} {_place(stage.name())}",
            TASKS: stage.numTasks(),
            READ_BYTES: stage.inputBytes(),
            READ_ROWS: stage.inputRecords(),
            SHUFFLE_BYTES: stage.shuffleWriteBytes(),
            RUN_MS: stage.executorRunTime(),
        },
        parent=0,
    )
