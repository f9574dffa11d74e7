"""Sends queries to the engine for analysis."""

from __future__ import annotations

from typing import Any

from actors.errors import PenstockError
from actors.kernel import ActorAddress
from actors.plan.jobs import AnalyzeStatement, ExecutorMessage, QueryAnalyzed, SubmitJob
from actors.spans import span
from actors.telemetry import SPARK_JOB
from actors.views.query_analysis import AnalyzeQuery, Conf, Tables


def analyzer(executor: ActorAddress[ExecutorMessage], name: str) -> AnalyzeQuery:
    """Return a function that asks an executor; its jobs are called `name` with a number."""
    asked = 0

    async def analyze(
        tables: Tables, sql: str, conf: Conf, *, translate: bool = False
    ) -> QueryAnalyzed:
        nonlocal asked
        asked += 1
        job = AnalyzeStatement(f"{name}-{asked}", tables, sql, conf, translate)
        with span(SPARK_JOB, job.job_id, ""):
            answer: Any = await executor.ask(lambda reply: SubmitJob(job, reply))
        if not isinstance(answer, QueryAnalyzed):
            raise PenstockError(f"the engine answered Analyze with {type(answer).__name__}")
        return answer

    return analyze
