"""Which jobs an engine has, and which it had last."""

from __future__ import annotations

from actors.model.plan.job_log import JobLog
from actors.model.plan.jobs import ForgetPlan, JobProgress, RowsDone
from actors.runtime.errors import DefiniteError, OperationCanceled


def job(name: str) -> ForgetPlan:
    return ForgetPlan(name, "")


def test_a_job_waits_runs_and_ends() -> None:
    log = JobLog(2)
    log.asked(job("u1/0/1/step"), 500, 10.0)
    log.asked(job("u2/0/1/step"), 501, 11.0)
    log.started("u1/0/1/step", 14.0)
    log.progressed(JobProgress("u1/0/1/step", 2, 8))
    first, second = log.notes(20.0)
    assert (first.dataflow, first.kind, first.state) == ("u1", "Forget", "running")
    assert (first.asked_ms, first.waited_ms, first.ms) == (500, 4.0, 6.0)
    assert (first.tasks_done, first.tasks) == (2, 8)
    assert (second.state, second.waited_ms, second.ms) == ("waiting", 9.0, None)
    log.ended("u1/0/1/step", 30.0, RowsDone("u1/0/1/step", 7, b"", spark_ms=3.5))
    log.ended("u2/0/1/step", 31.0, OperationCanceled("gone"))
    canceled, done = log.notes(99.0)
    assert (canceled.state, canceled.ms, canceled.waited_ms) == ("canceled", None, 20.0)
    assert (done.state, done.ms, done.spark_ms, done.rows) == ("done", 16.0, 3.5, 7)


def test_only_so_many_that_ended_are_kept_and_an_end_counts_once() -> None:
    log = JobLog(2)
    for number in range(4):
        log.asked(job(str(number)), 0, 0.0)
        log.ended(str(number), 1.0, DefiniteError("x"))
        log.ended(str(number), 2.0, OperationCanceled("late"))
    assert [(note.id, note.state, note.error) for note in log.notes(9.0)] == [
        ("3", "failed", "DefiniteError"),
        ("2", "failed", "DefiniteError"),
    ]
