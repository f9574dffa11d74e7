"""Run by `test_copy_to.py`: a service on the in-memory engine, until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio

from actors.kernel import Address, System
from actors.plan.jobs import ExecutorMessage
from actors.service import Service
from actors.settings import Settings, load
from actors.testing.engine import InMemoryExecutor


def in_memory(system: System, settings: Settings, scratch: Path) -> Address[ExecutorMessage]:
    address: Address[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
    return address


async def main(directory: str) -> None:
    settings = load(flags={"state_dir": directory, "listen": "127.0.0.1:0"})
    async with Service(settings, engine=in_memory) as service:
        print(service.address, flush=True)
        await service.wait_stopped()


anyio.run(main, sys.argv[1])
