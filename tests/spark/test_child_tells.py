"""What a child tells of a job comes before its answer, whatever the threads do meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from actors.plan.jobs import AnalyzeStatement, Answer, JobFailed, JobProgress
from actors.settings import Settings
from actors.spark import child as module
from actors.spark.child import EngineChild
from actors.spark.jobs import JobTicket

WAIT_S = 60


class Sent:
    """A wire that keeps what is sent, and waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.answers: list[Answer] = []

    def send(self, answer: Answer) -> None:
        with self._changed:
            self.answers.append(answer)
            self._changed.notify_all()

    def wait(self, kind: type[Any], job_id: str) -> None:
        with self._changed:
            found = self._changed.wait_for(
                lambda: any(isinstance(a, kind) and a.job_id == job_id for a in self.answers),
                WAIT_S,
            )
        assert found, (kind, job_id, self.answers)


class Asked:
    """An engine whose jobs run until they are let go; what it is asked about the first of them
    it answers when that one is over."""

    def __init__(self, sent: Sent) -> None:
        self.settings = Settings(engine_jobs_in_flight_max=2)
        self.sent = sent
        self.ends = {"first": threading.Event(), "second": threading.Event()}
        self.far = 0

    def slot(self) -> None:
        return None

    def run(self, slot: None, ticket: JobTicket, pool: str) -> Answer:
        assert self.ends[ticket.job.job_id].wait(WAIT_S)
        return JobFailed(ticket.job.job_id, "OperationCanceled", "")

    def progress(self, group: str) -> tuple[int, int]:
        if group.startswith("first"):
            self.ends["first"].set()
            self.sent.wait(JobFailed, "first")
        self.far += 1
        return self.far, 99

    def wait_gone(self) -> str:
        threading.Event().wait()
        return ""


def test_nothing_is_told_of_a_job_behind_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.001)
    sent = Sent()
    engine: Any = Asked(sent)
    wire: Any = sent
    child = EngineChild(wire, engine)
    child.start()
    child._accept(AnalyzeStatement("first", (), "SELECT 1"))
    sent.wait(JobFailed, "first")
    child._accept(AnalyzeStatement("second", (), "SELECT 1"))
    sent.wait(JobProgress, "second")
    engine.ends["second"].set()
    sent.wait(JobFailed, "second")
    assert [a for a in sent.answers if a.job_id == "first"] == [
        JobFailed("first", "OperationCanceled", "")
    ]
    *told, last = [a for a in sent.answers if a.job_id == "second"]
    assert all(isinstance(a, JobProgress) for a in told)
    assert isinstance(last, JobFailed)
