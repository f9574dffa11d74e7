"""Runs a plan with an exchange over slot files, with and without the look at its plan; and
prepared steps of several dataflows at the same time.

A program of its own (``python prepared_lab.py FOLDER``), because it needs the inside of an
engine. Prints one JSON line: what the look says, how many of `STEPS` steps executed without it
were wrong, and how many with the engine's own settings; and what `executions` says.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from engine_child import ipc  # type: ignore[import-not-found]
from py4j.protocol import Py4JJavaError

from actors.engine.spark.bridge import ClassicBridge, SessionBridge
from actors.engine.spark.job_spans import _stages
from actors.engine.spark.jobs import JobTicket, SparkEngine
from actors.engine.spark.prepared_plan import PreparedPlan
from actors.engine.spark.prepared_steps import PreparedSteps, check_keeps_nothing
from actors.engine.spark.session import SlotRows, ThreadSessions, open_session, spark_conf
from actors.engine.spark.slot_files import SlotSet, positional
from actors.model.plan.delta import (
    ConsolidateRows,
    DeltaPlan,
    NamedInput,
    PairRows,
    PlanStratum,
    SelectColumns,
)
from actors.model.plan.jobs import JobFailed, JobRows, RowsDone, RunStep
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import from_ipc
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives

STEPS = 8
LEFT = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "bigint")))
RIGHT = TableSchema((TableColumn("k", "bigint"), TableColumn("w", "bigint")))
PAIR = PairRows(
    SelectColumns(
        NamedInput("d0", ("k", "v")), (NamedExpression("a_k", "k"), NamedExpression("a_v", "v"))
    ),
    SelectColumns(
        NamedInput("s1", ("k", "w")), (NamedExpression("b_k", "k"), NamedExpression("b_w", "w"))
    ),
    (("a_k", "b_k"),),
)
OUTPUT = TableSchema(tuple(TableColumn(name, "bigint") for name in ("a_k", "a_v", "b_k", "b_w")))
PLAN = DeltaPlan(("l", "r"), (LEFT, RIGHT), OUTPUT, "", "incremental", "",
                 (PlanStratum((), ConsolidateRows(PAIR), ()),))  # fmt: skip


class Exchanging(ThreadSessions):
    """Sessions whose plans fear for the size of a join's inputs, as Spark's own do."""

    def get(
        self, conf: Sequence[tuple[str, str]], *, small: bool, slots: SlotRows | None = None
    ) -> SessionBridge:
        bridge = super().get(conf, small=small, slots=slots)
        if slots is not None:
            bridge.session.conf.set("spark.sql.maxSinglePartitionBytes", "1")
            bridge.session.conf.set("spark.sql.sources.fileCompressionFactor", "1.0")
        return bridge


def no_look(bridge: SessionBridge, frame: Any, slots: SlotSet) -> Mapping[str, Sequence[int]]:
    return {name: range(4) for name in slots.names}


class Lab:
    def __init__(self, engine: SparkEngine, sessions: ThreadSessions, steps: PreparedSteps) -> None:
        self.engine = engine
        slot = engine.slot()
        self.slot = msgspec.structs.replace(slot, sessions=sessions, steps=steps)
        self.plan = PreparedPlan(PLAN)

    def step(self, name: str, inputs: Mapping[str, JobRows], lo: int) -> RowsDone:
        job = RunStep(name, "lab", 0, 0, dict(inputs), lo, 20)
        answer = self.engine.run(self.slot, JobTicket(job, name, self.plan), "pool")
        assert isinstance(answer, RowsDone), answer
        return answer

    def wrong(self) -> tuple[int, int]:
        """Of `STEPS` steps: how many differ from the general path, how many were prepared."""
        random_ = random.Random(1)
        wrong = prepared = 0
        for number in range(STEPS):
            inputs = {
                name: JobRows(schema, arrow=ipc(schema, [
                    (random_.randrange(4), random_.randrange(100), time, 1) for _ in range(8)
                ]))
                for name, schema, time in (("d0", LEFT, 15), ("s1", RIGHT, 3))
            }  # fmt: skip
            again = self.step(f"p{number}", inputs, 10)
            anew = self.step(f"g{number}", inputs, 0)  # at 0 nothing is prepared
            assert not anew.prepared
            prepared += again.prepared
            wrong += contents(again) != contents(anew)
        return wrong, prepared


def contents(answer: RowsDone) -> list[str]:
    assert answer.arrow is not None
    return sorted(map(repr, from_ipc(answer.arrow).to_pylist()))


class Seat:
    """A dataflow of its own with a separate thread: its rows carry its number."""

    def __init__(self, engine: SparkEngine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.slot = engine.slot()
        self.name = f"seat{number}"
        shown = SelectColumns(
            NamedInput("d0", ("k", "v")),
            (
                NamedExpression("seat", f"{number}L"),
                NamedExpression("k", "k"),
                NamedExpression("q", "60 div (v - 3)"),
            ),
        )
        output = TableSchema(tuple(TableColumn(name, "bigint") for name in ("seat", "k", "q")))
        node = ConsolidateRows(shown)
        self.plan = PreparedPlan(
            DeltaPlan(("l",), (LEFT,), output, "", "incremental", "", (PlanStratum((), node, ()),))
        )
        self.answers: list[Any] = []
        self.ticket: JobTicket | None = None
        """Of the step that is out."""

    def step(self, what: str, rows: Sequence[tuple[int, int]]) -> None:
        """One step over (k, v); what it answers is noted."""
        given = {"d0": JobRows(LEFT, arrow=ipc(LEFT, [(k, v, 15, 1) for k, v in rows]))}
        job = RunStep(f"{self.name}/{what}", self.name, 0, 0, given, 10, 20)
        self.ticket = ticket = JobTicket(job, job.job_id, self.plan)
        answer = self.engine.run(self.slot, ticket, self.name)
        self.ticket = None
        if isinstance(answer, RowsDone) and answer.arrow is not None:
            found = from_ipc(answer.arrow).to_pydict()
            good = found["seat"] == [self.number] * len(rows)
            good = good and sorted(zip(found["k"], found["q"], strict=True)) == sorted(
                (k, int(60 / (v - 3))) for k, v in rows
            )
            self.answers.append((answer.prepared, good))
        else:
            self.answers.append(answer.code if isinstance(answer, JobFailed) else str(answer))


def executions(engine: SparkEngine) -> dict[str, Any]:
    """What steps of several dataflows answer: by themselves, at the same time, one of them failing,
    and while some are cancelled."""
    seats = [Seat(engine, number) for number in range(5)]
    random_ = random.Random(2)

    def some() -> list[tuple[int, int]]:
        values = [v for v in range(9) if v != 3]
        return [(k, random_.choice(values)) for k in range(random_.randrange(1, 6))]

    def taken() -> list[Any]:
        found = [answer for seat in seats for answer in seat.answers]
        for seat in seats:
            seat.answers.clear()
        return found

    for seat in seats:
        seat.step("alone", [(1, 1)])
    found: dict[str, Any] = {"alone": taken()}
    found["stages"] = [len(_stages(engine, f"{seat.name}/alone")) for seat in seats]
    seats[2].step("failing", [(1, 3)])
    found["failing"] = taken()
    seats[2].step("after", some())
    found["after"] = taken()
    freely(seats, "free", some, lambda: True)
    found["free"] = taken()
    ended = threading.Event()
    canceler = threading.Thread(target=cancel_some, args=(engine, seats, ended))
    canceler.start()
    freely(
        seats, "canceled", some, lambda: any("OperationCanceled" in seat.answers for seat in seats)
    )
    ended.set()
    canceler.join()
    return found | {"canceled": taken()}


def freely(
    seats: Sequence[Seat],
    what: str,
    some: Callable[[], list[tuple[int, int]]],
    seen: Callable[[], bool],
) -> None:
    """Steps of all seats as fast as they go: `STEPS` of each, and on until that was seen which
    this is about, which mostly comes at once."""

    def steps(seat: Seat) -> None:
        for number in itertools.count():
            if number >= STEPS and seen():
                return
            seat.step(f"{what}{number}", some())

    threads = [threading.Thread(target=steps, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cancel_some(engine: SparkEngine, seats: Sequence[Seat], ended: threading.Event) -> None:
    """Cancels one step in several, as the child does: again and again until it has returned."""
    random_ = random.Random(3)
    while not ended.is_set():
        seat = random_.choice(seats)
        answered = sum(len(seat.answers) for seat in seats)
        if (ticket := seat.ticket) is None:
            continue
        ticket.canceled.set()
        while seat.ticket is ticket:
            engine.interrupt(ticket.group)
        while not ended.is_set() and sum(len(seat.answers) for seat in seats) < answered + 8:
            ended.wait(0.001)


def told(engine: SparkEngine, folder: Path) -> dict[str, Any]:
    """What an execution knows of its session's settings, and what is refused."""
    bridge = engine.slot().sessions.get((("spark.sql.ansi.enabled", "false"),), small=True)
    assert isinstance(bridge, ClassicBridge)
    kinds = positional(LEFT.arrow_updates())
    answer = folder / "answer"
    with closing_slots(folder, kinds) as slots:
        frame = bridge.slot(slots.path("d0"), kinds, LEFT.arrow_updates().names)
        scala = bridge.session.sparkContext._jsc.sc()
        # What other threads tell their jobs is nobody's else.
        scala.setLocalProperty("spark.sql.ansi.enabled", "true")
        cast = bridge.session.range(0, 2, 1, 1).selectExpr("CAST(concat('x', id) AS INT) AS x")
        batches = cast._jdf.toArrowBatchRdd()
        first, second = (bridge.execute_here(batches, "told", answer, 1 << 20) for _ in range(2))
        refused = []
        for plan, most in ((batches, 1), (bridge.session.range(2, numPartitions=2), 1 << 20)):
            rows = plan if plan is batches else plan._jdf.toArrowBatchRdd()
            try:
                bridge.execute_here(rows, "told", answer, most)
            except Py4JJavaError as error:
                refused.append(str(error.java_exception.getMessage()))
        context = bridge.jvm.org.apache.spark.TaskContext.get()
    return {
        "format": _format(frame),
        "twice": first == second and len(first) > 0,
        "refused": refused,
        "left": [context, answer.exists()],
    }


def _format(frame: Any) -> str:
    scan = frame._jdf.queryExecution().executedPlan().collectLeaves().apply(0)
    return str(scan.relation().fileFormat().getClass().getSimpleName())


@contextmanager
def closing_slots(folder: Path, kinds: Any) -> Iterator[SlotSet]:
    slots = SlotSet(folder / "told", {"d0": kinds}, 1 << 16)
    try:
        yield slots
    finally:
        slots.abandon()


def main(folder: Path) -> None:
    logging.getLogger("SQLQueryContextLogger").disabled = True
    settings = for_short_lives(Settings(spark_master="local[2]"))
    session = open_session(spark_conf(settings, folder), folder)
    engine = SparkEngine(session, settings, folder)
    bad = Exchanging(session, frozenset(), folder / "child")
    good = ThreadSessions(session, frozenset(), folder / "child")
    looked = PreparedSteps(settings, folder / "looked")
    refused = Lab(engine, bad, looked)
    found: dict[str, Any] = {
        "refused": [*refused.wrong(), looked.reasons(refused.plan.serial)],
        "blind": Lab(engine, bad, PreparedSteps(settings, folder / "blind", no_look)).wrong(),
        "sound": Lab(
            engine, good, PreparedSteps(settings, folder / "sound", check_keeps_nothing)
        ).wrong(),
    }
    found["executions"] = executions(engine)
    found["told"] = told(engine, folder)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
