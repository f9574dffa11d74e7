"""What a child tells of a job comes before its answer, whatever the threads do meanwhile; and what
jobs leave behind is freed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from actors.engine.spark import child as module
from actors.engine.spark.child import LEFTOVER_BYTES_MAX, LEFTOVER_JOBS_MAX, EngineChild
from actors.engine.spark.jobs import JobTicket, TaskCounts
from actors.model.plan.jobs import AnalyzeStatement, Answer, JobFailed, JobProgress
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_S

CHANCES = 5


class Sent:
    """A wire that keeps what is sent, and waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.answers: list[Answer] = []
        self.frame_bytes = 0

    def send(self, answer: Answer) -> int:
        with self._changed:
            self.answers.append(answer)
            self._changed.notify_all()
        return 0

    def wait(self, kind: type[Any], job_id: str) -> None:
        with self._changed:
            found = self._changed.wait_for(
                lambda: any(isinstance(a, kind) and a.job_id == job_id for a in self.answers),
                PATIENCE_S,
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
        assert self.ends[ticket.job.job_id].wait(PATIENCE_S)
        return JobFailed(ticket.job.job_id, "OperationCanceled", "")

    def progress(self, group: str) -> TaskCounts:
        if group.startswith("first"):
            self.ends["first"].set()
            self.sent.wait(JobFailed, "first")
        self.far += 1
        return TaskCounts(self.far, 99, None, running=1)

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


class Leftover:
    """A Java object that was called: its method refers to it."""

    def __init__(self) -> None:
        self.itself = self


class Leaving(Asked):
    """An engine each of whose jobs leaves something."""

    def __init__(self, sent: Sent) -> None:
        super().__init__(sent)
        self.settings = Settings(engine_jobs_in_flight_max=1)
        self.left: list[weakref.ref[Leftover]] = []

    def run(self, slot: None, ticket: JobTicket, pool: str) -> Answer:
        self.left.append(weakref.ref(Leftover()))
        return JobFailed(ticket.job.job_id, "OperationCanceled", "")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Python's collector does nothing of its own accord."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("frame_bytes", "due"),
    [(LEFTOVER_BYTES_MAX // 2, 3), (LEFTOVER_BYTES_MAX + 1, 1), (0, LEFTOVER_JOBS_MAX)],
)
@pytest.mark.usefixtures("uncollected")
def test_what_jobs_leave_is_freed_after_large_ones_or_many(frame_bytes: int, due: int) -> None:
    sent = Sent()
    sent.frame_bytes = frame_bytes
    engine = Leaving(sent)
    given: tuple[Any, Any] = sent, engine
    child = EngineChild(*given)
    child.start()

    def run(number: int) -> None:
        child._accept(AnalyzeStatement(f"{number}", (), "SELECT 1"))
        sent.wait(JobFailed, f"{number}")

    for number in range(due - 1):
        run(number)
        assert engine.left[0]() is not None
    # The thread collects before it takes the next job. A collection of another thread's, which an
    # earlier test has left running, would make this one do nothing: so it has several chances.
    for number in range(due - 1, CHANCES * due + 1):
        run(number)
        if number >= due and not any(each() for each in engine.left[:due]):
            break
    assert [each() for each in engine.left[:due]] == [None] * due
