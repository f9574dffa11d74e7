"""Run by `test_service_on_stores.py`: a service on the in-memory engine, until it is killed. Its
settings come as JSON; it prints that it stands by, its address, and why it halted."""

from __future__ import annotations

import json
import logging
import sys

import anyio

from actors.runtime.errors import ResourceClosed, WriterFenced
from actors.runtime.settings import Settings
from actors.service import service_of
from actors.testing.engine import in_memory_engine


def tell_standing_by() -> None:
    """Print the line that a service logs when it stands by, and no other."""
    log = logging.getLogger("penstock.persist")
    printed = logging.StreamHandler(sys.stdout)
    printed.addFilter(lambda record: record.msg == "standing by: another service owns the stores")
    log.addHandler(printed)
    log.setLevel(logging.INFO)


async def main(settings: Settings) -> None:
    async with service_of(settings, engine=in_memory_engine()) as service:
        print(service.address, flush=True)
        try:
            await service.wait_stopped()
        except WriterFenced as error:
            print(f"fenced: {error}", flush=True)
        except ResourceClosed as error:
            print(f"dropped: {error}", flush=True)


if __name__ == "__main__":
    tell_standing_by()
    anyio.run(main, Settings(**json.loads(sys.argv[1])))
