"""The context that the service gives its sources: the clock, the settings, a folder, the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from actors.errors import EngineUnavailable
from actors.kernel import ActorClock
from actors.plan.jobs import Answer, Job
from actors.settings import Settings

RunJob: TypeAlias = Callable[[Job], Awaitable[Answer]]
"""Runs a job of the engine. Raises the executor's errors; a cancelled caller cancels the job."""


async def no_engine(job: Job) -> Answer:
    """Refuse every job, in a service without Spark. Raises `EngineUnavailable`."""
    raise EngineUnavailable(f"{type(job).__name__}: this service was started without an engine")


class ConnectorContext(NamedTuple):
    """All that a source needs besides its configuration."""

    clock: ActorClock
    settings: Settings
    scratch: Path
    """Folder for files that need not survive the process; it may not exist yet."""
    run_job: RunJob = no_engine
    id: str = ""
    """Id of the source, for the names of its external resources."""
