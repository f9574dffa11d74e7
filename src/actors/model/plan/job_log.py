"""The current jobs of an engine and the last ones that ended, for display. Pure.

The owner of the log reports what happens to each job, with the times. Current jobs are bounded by
the engine's own limits; of the jobs that have ended, the last `ended_max` are kept.
"""

from __future__ import annotations

from collections import deque

import msgspec

from actors.model.plan.jobs import Answer, Job, JobProgress, RowsDone, kind_of
from actors.runtime.errors import OperationCanceled, PenstockError
from actors.runtime.measurement import ValueHistogram


class JobNote(msgspec.Struct, frozen=True, gc=False):
    """One job. `asked_ms` is wall clock time; `waited_ms` and `ms` are durations."""

    id: str
    kind: str
    state: str
    asked_ms: int
    waited_ms: float
    ms: float | None = None
    """Time since it was passed to the engine; None if it has not been."""
    spark_ms: float | None = None
    rows: int | None = None
    tasks_done: int | None = None
    tasks: int | None = None
    error: str | None = None

    @property
    def dataflow(self) -> str:
        """Return the dataflow that requested the job: the first part of its id."""
        return self.id.partition("/")[0]


class _Running(msgspec.Struct):
    kind: str
    asked_ms: int
    asked: float
    started: float | None = None
    tasks: tuple[int, int] | None = None


class JobLog:
    """The jobs of one engine."""

    def __init__(self, ended_max: int) -> None:
        self._running: dict[str, _Running] = {}
        """The current jobs by id, oldest first."""
        self._ended: deque[JobNote] = deque(maxlen=ended_max)
        """The last jobs that ended, oldest first."""
        self.outcomes = {"done": 0, "failed": 0, "canceled": 0}
        """Number of jobs that have ended, by outcome."""
        self.waited = ValueHistogram()
        """Seconds that ended jobs waited until they went to the engine."""
        self.took = ValueHistogram()
        """Seconds that they were in it."""

    def asked(self, job: Job, now_ms: int, monotonic_ms: float) -> None:
        """Record a new job."""
        self._running[job.job_id] = _Running(kind_of(job), now_ms, monotonic_ms)

    def started(self, job_id: str, monotonic_ms: float) -> None:
        """Record that a job was passed to the engine, for the first time or again."""
        found = self._running.get(job_id)
        if found is not None:
            found.started = monotonic_ms

    def progressed(self, progress: JobProgress) -> None:
        """Record the progress of a job."""
        found = self._running.get(progress.job_id)
        if found is not None:
            found.tasks = (progress.tasks_done, progress.tasks)

    def ended(self, job_id: str, monotonic_ms: float, result: Answer | PenstockError | str) -> None:
        """Record a job's answer, or its error or the error's class."""
        found = self._running.pop(job_id, None)
        if found is None:
            return
        state, error = "done", None
        if not isinstance(result, Answer):
            error = result if isinstance(result, str) else type(result).__name__
            state = "canceled" if error == OperationCanceled.__name__ else "failed"
        made = result if isinstance(result, RowsDone) else None
        note = _note(job_id, found, monotonic_ms, state)
        self.outcomes[state] += 1
        self.waited.note(note.waited_ms / 1000)
        if note.ms is not None:
            self.took.note(note.ms / 1000)
        self._ended.append(
            msgspec.structs.replace(
                note,
                spark_ms=None if made is None else made.spark_ms,
                rows=None if made is None else made.rows,
                error=error,
            )
        )

    def notes(self, monotonic_ms: float) -> tuple[JobNote, ...]:
        """Return the current jobs, oldest first, then the ended ones, latest first."""
        there = [
            _note(id_, found, monotonic_ms, "waiting" if found.started is None else "running")
            for id_, found in self._running.items()
        ]
        return (*there, *reversed(self._ended))


def _note(id_: str, found: _Running, monotonic_ms: float, state: str) -> JobNote:
    started = found.started
    done, total = found.tasks or (None, None)
    return JobNote(
        id_,
        found.kind,
        state,
        found.asked_ms,
        (monotonic_ms if started is None else started) - found.asked,
        None if started is None else monotonic_ms - started,
        tasks_done=done,
        tasks=total,
    )
