"""The reference: many times in one query, the failing ones found, equal ones asked once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import (
    AnalyzeStatement,
    Answer,
    ComputeDifference,
    Job,
    QueryAnalyzed,
    RowsDone,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.runtime.errors import DefiniteError
from actors.testing.engine import relation_of, table_of
from actors.testing.maintain import EngineCaller
from actors.testing.nodes import NodeRelation
from actors.testing.nondeterminism import RANK
from actors.testing.reference import ViewReference

T = TableSchema((TableColumn("a", "int"),))
PLAN = DeltaPlan(("t",), (T,), T, "select a from t", "opaque", "")


class Texts(EngineCaller):
    """Answers each branch with its table's rows; a row of 13 fails the job."""

    def __init__(self) -> None:
        super().__init__(None, "x")  # type: ignore[arg-type]
        self.jobs: list[ComputeDifference] = []
        self.ranks: tuple[int, ...] = (1,)
        """Of each candidate for a LIMIT."""

    async def run(self, job: Job) -> Answer:
        if isinstance(job, AnalyzeStatement):
            ranked = TableSchema((*T.columns, TableColumn(RANK, "int")))
            return QueryAnalyzed(job.job_id, ranked if RANK in job.sql else T)
        assert isinstance(job, ComputeDifference)
        self.jobs.append(job)
        rows: list[Any] = []
        for number, (_, given) in enumerate(job.tables):
            for row, _, diff in relation_of(given).updates:
                if row == (13,):
                    raise DefiniteError("bad luck")
                rank = self.ranks if RANK in job.sql else ()
                rows.append(((number, *row) if len(job.tables) > 1 else (*row, *rank), 0, diff))
        columns = tuple((c.name, c.type) for c in job.output.columns)
        table = table_of(NodeRelation(columns, rows))
        return RowsDone(job.job_id, len(rows), to_ipc(table))


def bag(*values: int) -> Any:
    return [Counter((value,) for value in values)]


async def test_times_are_asked_together_and_equal_ones_once() -> None:
    engine = Texts()
    reference = ViewReference(engine, PLAN)
    await reference.prepare()
    found = await reference.contents({1: bag(), 2: bag(1), 3: bag(1), 4: bag(1, 1, 2)})
    assert found == {1: {}, 2: {(1,): 1}, 3: {(1,): 1}, 4: {(1,): 2, (2,): 1}}
    (job,) = engine.jobs
    assert job.sql.count("UNION ALL") == 2
    assert "WITH `t` AS (SELECT * FROM `__1_t`) SELECT * FROM\n(\nselect a from t\n)" in job.sql
    assert [name for name, _ in job.tables] == ["__0_t", "__1_t", "__2_t"]
    assert await reference.contents({9: bag(1)}) == {9: {(1,): 1}}
    assert len(engine.jobs) == 1


async def test_times_that_raise_are_found() -> None:
    engine = Texts()
    reference = ViewReference(engine, PLAN)
    found = await reference.contents({t: bag(13 if t in (3, 4) else t) for t in range(1, 8)})
    assert [time for time, answer in found.items() if answer is None] == [3, 4]
    assert found[7] == {(7,): 1}


async def test_an_open_view_is_asked_for_its_candidates() -> None:
    engine = Texts()
    plan = msgspec.structs.replace(PLAN, sql="select a from t order by a limit 1")
    reference = ViewReference(engine, plan)
    await reference.prepare()
    assert reference.nondeterminism.kind == "limit"
    assert await reference.contents({1: bag(1)}) == {1: {(1, 1): 1}}
    assert [job.sql for job in engine.jobs] == [reference.nondeterminism.sql, plan.sql]


async def test_candidates_that_plain_spark_contradicts_are_not_used() -> None:
    """As when the library that writes their text loses an argument that it does not know."""
    engine = Texts()
    engine.ranks = (2,)
    plan = msgspec.structs.replace(PLAN, sql="select a from t order by a limit 1")
    reference = ViewReference(engine, plan)
    await reference.prepare()
    assert await reference.contents({1: bag(1)}) == {1: {(1,): 1}}
    assert reference.nondeterminism.kind == "unknown"
    assert await reference.contents({2: bag(2)}) == {2: {(2,): 1}}
    assert engine.jobs[-1].sql == plan.sql
