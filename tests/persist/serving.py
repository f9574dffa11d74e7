"""Run by `test_service_on_stores.py`: a service on the in-memory engine, until it is killed. Its
settings come as JSON; it prints its address, and why it halted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio

from actors.errors import WriterFenced
from actors.kernel import ActorAddress, ActorSystem
from actors.plan.jobs import ExecutorMessage
from actors.service import Service
from actors.settings import Settings
from actors.testing.engine import InMemoryExecutor


def in_memory(
    system: ActorSystem, settings: Settings, scratch: Path
) -> ActorAddress[ExecutorMessage]:
    address: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
    return address


async def main(settings: Settings) -> None:
    async with Service(settings, engine=in_memory) as service:
        print(service.address, flush=True)
        try:
            await service.wait_stopped()
        except WriterFenced as error:
            print(f"fenced: {error}", flush=True)


if __name__ == "__main__":
    anyio.run(main, Settings(**json.loads(sys.argv[1])))
