"""The in-memory engine with delays and kills by faults, and with a cache of pure results.

Analyses and checks of plans depend on the job alone; a campaign repeats the same few thousands of
times, so their answers are cached for the whole process.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from actors.model.plan.jobs import (
    AnalyzeStatement,
    Answer,
    Job,
    PlanPrepared,
    PreparePlan,
    QueryAnalyzed,
    kind_of,
)
from actors.runtime.errors import EngineLost
from actors.testing.engine import EngineControls, InMemoryExecutor
from tests.simulators.service.faults import KILL, FaultInjector

_analyses: dict[bytes, QueryAnalyzed] = {}
_checked: set[bytes] = set()


class _FaultyControls(EngineControls):
    def __init__(self, injector: FaultInjector) -> None:
        super().__init__()
        self._injector = injector

    async def held(self, job: Job) -> None:
        self.jobs.clear()
        fault = self._injector.draw("engine")
        self._injector.trace.note("engine", kind_of(job))
        if fault is None:
            return
        await asyncio.sleep(fault.delay_ms / 1000)
        if fault.kind == KILL:
            raise EngineLost("the engine was killed on purpose")


class FaultyExecutor(InMemoryExecutor):
    """The in-memory engine under faults; see the module's docstring."""

    def __init__(self, injector: FaultInjector) -> None:
        super().__init__(_FaultyControls(injector))

    def answer(self, job: Job) -> Answer:
        """Return the job's answer. Raises the errors that a job may fail with."""
        if isinstance(job, AnalyzeStatement):
            key = _key(msgspec.structs.replace(job, job_id=""))
            if key not in _analyses:
                found = super().answer(job)
                assert isinstance(found, QueryAnalyzed), found
                _analyses[key] = found
            return msgspec.structs.replace(_analyses[key], job_id=job.job_id)
        if isinstance(job, PreparePlan):
            key = _key(job.plan)
            if key not in _checked:
                super().answer(job)
                _checked.add(key)
            return PlanPrepared(job.job_id)
        return super().answer(job)


def _key(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
