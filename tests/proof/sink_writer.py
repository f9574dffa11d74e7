"""Run by `sink_campaign.py`: a process that makes a stream and sinks it, until it is killed.

``sink_writer.py PLACE [drain]``. What the shard holds follows from the times alone (`updates_at`),
so that whoever looks later knows. Prints each upper that a sink has told to be durable. With
``drain`` it makes no more than is needed to end where there is no error, and ends when all sinks
stand at the shard's upper. ``PENSTOCK_KILL_AT=N``: kills itself at the N-th fsync or link of the
service's own files (a sink's, a part's), with half of the commits between two of them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import anyio
import pyarrow as pa

from actors.connectors.sink_task import SinkTask
from actors.connectors.sinks.delta import DeltaConfig
from actors.connectors.sinks.kinds import SinkConfig
from actors.connectors.sinks.messages import SinkEnded, SinkProgress, SinkWork
from actors.connectors.sinks.parquet import ParquetConfig
from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.runtime.kernel import Actor, ActorSystem, SystemClock
from actors.runtime.settings import Settings

SCHEMA: Final = TableSchema((TableColumn("a", "bigint"), TableColumn("b", "string")))
SHARD: Final = "s"
SINKS: Final[dict[str, SinkConfig]] = {
    "changes": DeltaConfig("changes", "changes", creation="c"),
    "current": DeltaConfig("current", "current", creation="c"),
    "files": ParquetConfig("files", creation="c"),
}
CYCLE: Final = 40
"""Times after which errors come again: from `ERROR_FROM` until before `ERROR_UNTIL`."""
ERROR_FROM: Final = 20
ERROR_UNTIL: Final = 23
Update = tuple[Any, ...]


def updates_at(time: int) -> list[Update]:
    """What changes at a time: rows come, in copies, and some that came earlier go."""
    copies = 1 + time % 3
    found: list[Update] = [(time % 17, f"v{time % 5}" if time % 4 else None, time, copies)]
    if time >= 7:
        a, b, _, _ = updates_at(time - 7)[0]
        found.append((a, b, time, -1))
    return found


def errors_at(time: int) -> list[tuple[str, int]]:
    """Errors that come (1) or go (-1) at a time."""
    moment = time % CYCLE
    return [("bad", 1)] if moment == ERROR_FROM else [("bad", -1)] if moment == ERROR_UNTIL else []


def shifted(time: int) -> int:
    """The time at which a sink writes what changed at a time."""
    moment = time % CYCLE
    return time + ERROR_UNTIL - moment if ERROR_FROM <= moment < ERROR_UNTIL else time


def tables_of(lower: int, upper: int) -> list[pa.Table]:
    """The updates of some times, errors apart."""
    shape = SCHEMA.arrow_updates()
    rows = [
        dict(zip(shape.names, u, strict=True)) for t in range(lower, upper) for u in updates_at(t)
    ]
    failed = [
        {"a": None, "b": None, TIME: time, DIFF: diff, ERROR: text}
        for time in range(lower, upper)
        for text, diff in errors_at(time)
    ]
    found = [pa.Table.from_pylist(rows, schema=shape)]
    if failed:
        with_errors = shape.append(pa.field(ERROR, pa.string()))
        found.append(pa.Table.from_pylist(failed, schema=with_errors))
    return found


def settings_of(place: Path) -> Settings:
    return Settings(
        sink_dir=str(place / "out"),
        sink_commit_ms=5,
        sink_frontier_ms=50,
        sink_bytes_max=20_000,
        inline_part_bytes_max=1_000,
        inline_bytes_per_shard_max=3_000,
        batches_per_shard_max=6,
        retain_history_ms=1,
    )


class Owner(Actor[Any]):
    """Starts the sinks, and prints what they tell."""

    def __init__(self, persist: PersistClient, settings: Settings, place: Path) -> None:
        self._persist = persist
        self._settings = settings
        self._place = place
        self.uppers: dict[str, int] = {}

    async def on_start(self) -> None:
        for name, config in SINKS.items():
            work = SinkWork(name, name, SHARD, SCHEMA, config, 0)
            scratch = self._place / "scratch" / name
            self.ctx.spawn(
                lambda work=work, scratch=scratch: SinkTask(  # type: ignore[misc]
                    work,
                    1,
                    self._persist,
                    self._settings,
                    self.ctx.self,
                    scratch,
                    writable=True,
                ),
                name,
            )

    def receive(self, message: Any) -> None:
        match message:
            case SinkProgress(id=name, upper=upper):
                self.uppers[name] = upper
                print(name, upper, flush=True)
            case SinkEnded(id=name, error=error):
                print(name, "ended", error, flush=True)
                os._exit(3)


def kill_at(number: int) -> None:
    """Kills this process at that operation."""
    done = 0

    def trap(real: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **given)

        return call

    os.fsync, os.link = trap(os.fsync), trap(os.link)


async def main(place: Path, drain: bool) -> None:
    clock, settings = SystemClock(), settings_of(place)
    persist = await PersistClient.open(place / "state", settings, clock)
    if SHARD not in await persist.list_shards():
        await persist.create_shards([NewShard(SHARD, SCHEMA, holds={"us": 0})])
    upper = await persist.upper(SHARD)
    last = max(upper, 1) + CYCLE - max(upper, 1) % CYCLE
    async with ActorSystem(clock=clock) as system:
        owner = Owner(persist, settings, place)
        system.spawn(lambda: owner, "owner")
        while not drain or upper < last:
            step = 1 + system.random.randrange(5)
            until = min(upper + step, last) if drain else upper + step
            parts = [
                part
                for table in tables_of(upper, until)
                for part in await persist.write_parts(SHARD, table)
            ]
            done = await persist.append([ShardAppend(SHARD, upper, until, tuple(parts))])
            assert isinstance(done, AppendCommitted)
            upper = until
            if len(owner.uppers) == len(SINKS):  # they have their own holds
                await persist.set_hold(SHARD, "us", upper - 1)
            await persist.maintain(SHARD)
            if system.random.random() < 0.2:
                await anyio.sleep(0.01)
        while set(owner.uppers.values()) != {upper} or len(owner.uppers) < len(SINKS):
            await anyio.sleep(0.01)
        print("drained", upper, flush=True)
        os._exit(0)  # as it would be killed: nothing is put in order


if __name__ == "__main__":
    if "PENSTOCK_KILL_AT" in os.environ:
        kill_at(int(os.environ["PENSTOCK_KILL_AT"]))
    anyio.run(main, Path(sys.argv[1]), sys.argv[2:] == ["drain"])
