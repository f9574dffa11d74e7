"""Functions that send queries and plans to the engine, to analyse views and queries."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from actors.engine.views.compile import CheckPlan
from actors.engine.views.query_analysis import AnalyzeQuery, Conf, Tables
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import (
    AnalyzeStatement,
    ExecutorMessage,
    ForgetPlan,
    PreparePlan,
    QueryAnalyzed,
    SubmitJob,
)
from actors.runtime.errors import JobTooLarge, PenstockError
from actors.runtime.kernel import ActorAddress
from actors.runtime.spans import span
from actors.runtime.telemetry import SPARK_JOB


def analyzer(
    executor: ActorAddress[ExecutorMessage], name: str, *, restricted: bool = False
) -> AnalyzeQuery:
    """Return a function that has an executor analyse a query. Its jobs are named `name` plus a
    number. `restricted`: see `AnalyzeStatement`."""
    asked = 0

    async def analyze(
        tables: Tables, sql: str, conf: Conf, *, translate: bool = False
    ) -> QueryAnalyzed:
        nonlocal asked
        asked += 1
        job = AnalyzeStatement(f"{name}-{asked}", tables, sql, conf, translate, restricted)
        with span(SPARK_JOB, job.job_id, ""):
            answer: Any = await executor.ask(lambda reply: SubmitJob(job, reply))
        if not isinstance(answer, QueryAnalyzed):
            raise PenstockError(
                f"unexpected answer of the engine to AnalyzeStatement: {type(answer).__name__}"
            )
        return answer

    return analyze


def plan_checker(executor: ActorAddress[ExecutorMessage], name: str) -> CheckPlan:
    """Return a function that has an executor prepare a plan under a temporary name and then drop
    it."""
    asked = 0

    async def check(plan: DeltaPlan) -> None:
        nonlocal asked
        asked += 1
        job_id = f"{name}-{asked}"
        try:
            # a plan too large for one job is split
            with span(SPARK_JOB, job_id, ""), suppress(JobTooLarge):
                await executor.ask(
                    lambda reply: SubmitJob(PreparePlan(job_id, job_id, plan), reply)
                )
        finally:
            forget = ForgetPlan(f"{job_id}-forget", job_id)
            await executor.ask(lambda reply: SubmitJob(forget, reply))

    return check
