"""A whole service in a process of its own, as `penstock serve` runs one, for
`connectors/sources.py`.

It answers words on its standard input, one a line as JSON, with one line each: what is asked of
its engine beside what the service itself asks of it. It ends with its standard input.
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
"""One stage: a sum over 100 rows in one partition, from no file."""
_ASK_MS_MAX = 600_000


class Floor(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds of the floor, so many times in a row."""

    count: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds that Spark takes to read Parquet files and to write the same rows."""

    paths: tuple[str, ...]
    schema: TableSchema


class Engine:
    """The engine of the service in this process."""

    def __init__(self) -> None:
        self._address: ActorAddress[ExecutorMessage] | None = None

    def start(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        """As the service wants one."""
        self._address = start_spark(system, settings, scratch)
        return self._address

    async def answer(self, asked: Floor | Take) -> list[float]:
        """What was asked for."""
        if isinstance(asked, Floor):
            return [(await self._run(_floor())).spark_ms for _ in range(asked.count)]
        # As many bytes as make an answer large: it is written, not collected.
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
    """Until standard input ends."""
    engine = Engine()
    words = msgspec.json.Decoder(Floor | Take)
    async with Service(settings, engine=engine.start) as service:
        print(service.address, flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            answer = await engine.answer(words.decode(line))
            print(msgspec.json.encode(answer).decode(), flush=True)


class Served:
    """That process, from outside."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    async def ask(self, word: Floor | Take) -> list[float]:
        """Its answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(msgspec.json.encode(word).decode(), file=process.stdin, flush=True)
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        return msgspec.json.decode(line, type=list[float])

    def pause(self) -> None:
        """It stands still: nothing is read, nothing answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It goes on where it stood."""
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """One with these settings while the block lasts."""
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
