"""What sources are given by the service: the clock, the limits, a place for files, the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from actors.errors import EngineUnavailable
from actors.kernel import Clock
from actors.plan.jobs import Answer, Job
from actors.settings import Settings

RunJob: TypeAlias = Callable[[Job], Awaitable[Answer]]
"""Has the engine do a job. Raises what the executor fails a job with; who is cancelled while it
waits has the job cancelled."""


async def no_engine(job: Job) -> Answer:
    """A `RunJob` for where there is no Spark. Raises `EngineUnavailable`."""
    raise EngineUnavailable(f"{type(job).__name__}: this service was started without an engine")


class Surroundings(NamedTuple):
    """Everything outside of its own configuration that a source may need."""

    clock: Clock
    settings: Settings
    scratch: Path
    """A folder for files that need not survive the process; it may not exist yet."""
    run_job: RunJob = no_engine
    id: str = ""
    """The source's own: names what it makes outside."""
