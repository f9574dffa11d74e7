"""`penstock` with the in-memory engine: for pages that show how a service is started."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import actors.service
from actors.commands import cli
from actors.kernel import ActorAddress, ActorSystem
from actors.plan.jobs import ExecutorMessage
from actors.settings import Settings
from actors.testing.engine import InMemoryExecutor


def in_memory(
    system: ActorSystem, settings: Settings, scratch: Path
) -> ActorAddress[ExecutorMessage]:
    address: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
    return address


actors.service.Service = functools.partial(  # type: ignore[misc, assignment]
    actors.service.Service, engine=in_memory
)
cli.main()
