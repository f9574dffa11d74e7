"""A whole service in a separate process, run as by `penstock serve`, for `sources`.

It reads words from its standard input, one JSON value per line, and answers each with one line. So
a benchmark can give jobs to the service's engine in addition to the service's own. The process ends
when its standard input closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from actors import Service, Settings
from actors.model.plan.jobs import (
    Answer,
    ExecutorMessage,
    Job,
    QueryFiles,
    RowsDone,
    SubmitJob,
    TakeFiles,
)
from actors.model.plan.schema import TableSchema
from actors.runtime.kernel import ActorAddress, ActorSystem, ReplySlot
from actors.service import start_spark

FLOOR = "SELECT id % 10 AS k, sum(id) AS s FROM range(0, 100, 1, 1) GROUP BY id % 10"
"""A one-stage query: a sum over 100 rows in one partition, without files."""
_ASK_MS_MAX = 600_000


class Floor(msgspec.Struct, frozen=True, tag=True):
    """Asks for the milliseconds of `count` runs of the floor query."""

    count: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """Asks for the milliseconds that Spark takes to read Parquet files and write the same rows."""

    paths: tuple[str, ...]
    schema: TableSchema


class Engine:
    """The engine of the service in this process."""

    def __init__(self) -> None:
        self._address: ActorAddress[ExecutorMessage] | None = None

    def start(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        """Start the engine. The service calls this."""
        self._address = start_spark(system, settings, scratch)
        return self._address

    async def answer(self, asked: Floor | Take) -> list[float]:
        """Return the measurements that were asked for."""
        if isinstance(asked, Floor):
            return [(await self._run(_floor())).spark_ms for _ in range(asked.count)]
        # Makes the answer count as large, so that it is written to files instead of collected.
        names = asked.schema.names
        job = TakeFiles(uuid.uuid4().hex, asked.paths, "parquet", asked.schema, names, (), 1 << 40)
        done = await self._run(job)
        for path in done.paths():
            os.unlink(path)
        return [done.spark_ms]

    async def _run(self, job: Job) -> RowsDone:
        def make(reply: ReplySlot[Answer]) -> ExecutorMessage:
            return SubmitJob(job, reply)

        assert self._address is not None, "the service was started"
        answer = await self._address.ask(make, _ASK_MS_MAX)
        assert isinstance(answer, RowsDone), answer
        return answer


def _floor() -> QueryFiles:
    return QueryFiles(uuid.uuid4().hex, FLOOR, ())


async def serve(settings: Settings) -> None:
    """Run the service until standard input closes."""
    engine = Engine()
    words = msgspec.json.Decoder(Floor | Take)
    async with Service(settings, engine=engine.start) as service:
        print(service.address, flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            answer = await engine.answer(words.decode(line))
            print(msgspec.json.encode(answer).decode(), flush=True)


class Served:
    """The service's process as its parent sees it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    async def ask(self, word: Floor | Take) -> list[float]:
        """Send a request and return its answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(msgspec.json.encode(word).decode(), file=process.stdin, flush=True)
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        return msgspec.json.decode(line, type=list[float])

    def pause(self) -> None:
        """Pause the process: it neither reads nor answers anything."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process."""
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """Run a service with these settings while the block lasts."""
    given: Sequence[str] = [msgspec.json.encode(settings).decode()]
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, __file__, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = await anyio.to_thread.run_sync(process.stdout.readline)
        if not address:
            raise RuntimeError(f"the service ended with {process.wait()}")
        yield Served(process, address.strip())
    finally:
        with anyio.CancelScope(shield=True):
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
            await anyio.to_thread.run_sync(process.wait)


if __name__ == "__main__":
    anyio.run(
        serve,
        msgspec.convert(msgspec.json.decode(sys.argv[1]), Settings),
        backend_options={"use_uvloop": True},
    )
