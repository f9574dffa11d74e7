"""Run by `test_copy_to.py`: a service on the in-memory engine, until it is killed.

Its arguments: the state's folder, and the how many-th file of a copy is its last one."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import IO

import anyio

from actors.connectors.sinks.staging import FolderStaging
from actors.runtime.settings import load
from actors.service import Service
from actors.testing.engine import in_memory_engine


def die_at_file(count: int) -> None:
    """This process kills itself when that file was begun."""
    create, numbers = FolderStaging.create, itertools.count(1)

    def create_or_die(self: FolderStaging, name: str) -> IO[bytes]:
        file = create(self, name)
        if next(numbers) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return file

    FolderStaging.create = create_or_die  # type: ignore[assignment, method-assign]


async def main(directory: str) -> None:
    settings = load(flags={"state_dir": directory, "listen": "127.0.0.1:0"})
    async with Service(settings, engine=in_memory_engine()) as service:
        print(service.address, flush=True)
        await service.wait_stopped()


if len(sys.argv) > 2:
    die_at_file(int(sys.argv[2]))
anyio.run(main, sys.argv[1])
