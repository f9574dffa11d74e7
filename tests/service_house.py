"""A whole service on the in-memory engine, and a client of it: shared by tests of all folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
from anyio.streams.text import TextReceiveStream

from actors.doors.client.client import Client
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import EngineControls, in_memory_engine

PROGRAM = Path(__file__).with_name("copying_service.py")


@asynccontextmanager
async def running_service(
    settings: Settings, controls: EngineControls | None = None, *, limit_s: float = 200
) -> AsyncIterator[tuple[Service, Client]]:
    """Run a service for at most `limit_s` seconds; yield it with a client over TCP."""
    with anyio.fail_after(limit_s):
        async with (
            Service(settings, engine=in_memory_engine(controls)) as service,
            await Client.connect(service.address) as client,
        ):
            yield service, client


@asynccontextmanager
async def service_process(
    state: Path, *arguments: str, **settings: str
) -> AsyncIterator[tuple[Client, anyio.abc.Process]]:
    """Run `copying_service.py` until it is killed; yield a client of it, and the process."""
    command = [sys.executable, str(PROGRAM), str(state), *arguments]
    environ = os.environ | {f"PENSTOCK_{name.upper()}": text for name, text in settings.items()}
    served = await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None, env=environ)
    assert served.stdout is not None
    try:
        address = ""
        while "\n" not in address:
            address += await TextReceiveStream(served.stdout).receive()
        async with await Client.connect(address.strip()) as client:
            yield client, served
    finally:
        if served.returncode is None:
            served.kill()
        await served.wait()
        await served.aclose()
