"""Kills parts of a service whose stores and Spark are far from it, and checks what is left.

Run: ``python tests/proof/far_campaign.py [--kills 12] [--seed 1] [--whole] [--connect] …``.

An S3 server, a PostgreSQL, a standalone cluster of two workers, perhaps a Spark Connect server on
it, and the service (a controller, one that stands by and a replica; with ``--whole`` one process)
run in mount namespaces of their own, in which none sees a file of another one: that is looked at.
A client writes rows to tables, some by some and now and then thousands, of which executors read
and write the views' contents. At random moments a worker, an executor, the driver of a process, the
replica, the controller that serves, the whole service or the Connect server is killed with
``kill -9``, or a store is away for ten seconds. After each, by itself and within ``--limit``
seconds, writes are acknowledged, each view has them, and a query is answered; each view and that
answer equal SQLite's over the same rows. At the end:

1. every write is there exactly once, at the time that was acknowledged;
2. each view, read AS OF several retained times, equals SQLite's answer over the rows at that time;
3. so does what subscribers accumulated, who resumed by their frontier and saw no gap.

``--demo`` plays the demo, with its proof, and ``--scripts N`` checks every N-th view script on such
a cluster and bucket, from a process that sees no file of them. Exit status 1 when anything differs
or stands still. It needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import anyio
import pyarrow as pa
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from crash_campaign import Subscriber
from far_kills import StrikeChoice
from far_load import (
    BASE_PIECES,
    PASSING,
    PLAYED,
    QUERY,
    TABLES,
    VIEWS,
    FarView,
    SqliteOracle,
    WritePlanner,
    bag_of,
    table_writes,
    unlike,
)
from far_processes import ROOT, can_be_apart
from far_world import FarWorld

from actors import Client
from actors.doors.client.client import concatenate_pieces
from actors.model.plan.schema import TIME
from actors.runtime.errors import DuplicateKey, ObjectExists, PenstockError, UnknownObject

SLOW_SECONDS: Final = 60.0
"""What takes longer is told."""
LOOK_MS: Final = 20_000  # expires: it looks again
"""A wait for a view takes no longer; then it is asked for again."""
FOLLOWED: Final = ("by_group", "highest", "sizes")
T = TypeVar("T")


class StoodStill(Exception):
    """Something did not go on within the limit."""


class FarSubscriber(Subscriber):
    """Follows a view across connections."""

    def __init__(self, view: str) -> None:
        super().__init__(view)
        self._moved = anyio.Event()

    def take(self, lower: int, upper: int, table: pa.Table | None) -> None:
        """One interval."""
        super().take(lower, upper, table)
        self._moved.set()
        self._moved = anyio.Event()

    async def until_beyond(self, time: int) -> None:
        """Wait until it has the changes at a time."""
        while self.frontier is None or self.frontier <= time:
            await self._moved.wait()

    async def follow(self, world: FarWorld) -> None:
        """Follow it until cancelled."""
        while True:
            with suppress(PenstockError, OSError):
                async with world.client() as client:
                    changes = concatenate_pieces(client.subscribe(self.view, self.frontier))
                    async for change in changes:
                        self.take(change.lower, change.upper, change.table)
            self.resumed += 1
            await anyio.sleep(0.05)


class CampaignWriter:
    """Makes each write happen once, whatever happens to the service."""

    def __init__(self, campaign: FarCampaign) -> None:
        self._campaign = campaign
        self.planner = WritePlanner(campaign.seed)
        self.times: dict[int, int] = {}
        """Time of each write that was acknowledged, by its number."""
        self.settled: set[int] = set()
        """Writes that had happened when they were made again."""
        self.moved = anyio.Event()
        self._hurried, self._large = anyio.Event(), False
        self._stopping, self._stopped = False, anyio.Event()

    async def run(self, pace: float) -> None:
        """Write until `stop`."""
        while not self._stopping:
            self.planner.next(large=self._large)
            self._large = False
            await self.write_last()
            with anyio.move_on_after(pace):
                await self._hurried.wait()
        self._stopped.set()

    def hurry(self, *, large: bool = False) -> None:
        """Let the next write begin at once."""
        self._large = self._large or large
        self._hurried.set()
        self._hurried = anyio.Event()

    async def stop(self) -> None:
        """End `run`, and make one more write, whose time is known."""
        self._stopping = True
        self.hurry()
        await self._stopped.wait()
        self.planner.next()
        await self.write_last()

    async def write_last(self) -> None:
        """Write what was planned last."""
        number = len(self.planner.writes) - 1
        changes = table_writes(self.planner.writes[number])
        again = False

        async def write(client: Client) -> None:
            nonlocal again
            try:
                self.times[number] = await client.write(changes)
            except DuplicateKey:
                if not again:
                    raise
                self.settled.add(number)
            finally:
                again = True

        await self._campaign.until_done(f"write {number}", write, wrong=(DuplicateKey,))
        self.moved.set()
        self.moved = anyio.Event()

    async def acknowledged_from(self, number: int) -> int:
        """Wait for a write of this number or a later one whose time is known; return its number."""
        while True:
            if found := [each for each in self.times if each >= number]:
                return min(found)
            await self.moved.wait()


class FarCampaign:
    """One world, all that was written there, and what is wrong."""

    def __init__(self, world: FarWorld, arguments: argparse.Namespace) -> None:
        self.world = world
        self.seed: int = arguments.seed
        self.limit: float = arguments.limit
        self.keep: Path | None = arguments.keep
        self.rng = Random(arguments.seed)
        self.writer = CampaignWriter(self)
        self.oracle = SqliteOracle()
        self.subscribers = [FarSubscriber(name) for name in FOLLOWED]
        self.errors: Counter[str] = Counter()
        """Errors that clients have met since the last strike, which went away."""
        self.wrong = 0

    def report(self, what: str, text: str) -> None:
        """Count and print what is wrong."""
        self.wrong += 1
        print(f"WRONG {what}: {text}", flush=True)

    async def until_done(
        self,
        what: str,
        work: Callable[[Client], Awaitable[T]],
        wrong: tuple[type[PenstockError], ...] = (),
    ) -> T:
        """Do something with a client until it succeeds. Raises `StoodStill` after the limit, and
        errors that are `wrong`."""
        last = "nothing serves clients"
        told, began = False, anyio.current_time()
        with anyio.move_on_after(self.limit):
            while True:
                if not told and anyio.current_time() - began > SLOW_SECONDS:
                    told = True  # it may go on before the limit, and then nobody would know
                    print(f"  slow: {what}: {last}; {await self.states()}", flush=True)
                    if self.keep is not None:
                        self.world.keep_logs(self.keep / f"slow-{began:.0f}")
                try:
                    async with self.world.client() as client:
                        return await work(client)
                except wrong:
                    raise
                except (PenstockError, OSError) as error:
                    last = f"{type(error).__name__}: {error}"
                    self.errors[type(error).__name__] += 1
                    await anyio.sleep(0.1)
        raise StoodStill(f"{what}, after {self.limit:.0f} s: {last}; {await self.states()}")

    async def states(self) -> str:
        """What the service says of its objects, for people."""
        with anyio.move_on_after(20):  # expires: then the states are left out
            with suppress(PenstockError, OSError):
                async with self.world.client() as client:
                    found = (await client.status()).objects
                    return "; ".join(str(each) for each in found)
        return "no status"

    # -- beginning -----------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Tables with many rows, and views whose first contents are read from the bucket."""
        began = anyio.current_time()
        async with self.world.client() as client:
            for name, (columns, key) in TABLES.items():
                await client.create_table(name, columns, primary_key=key)
        for _ in self.writer.planner.base():
            await self.writer.write_last()
        print(f"rows are written after {anyio.current_time() - began:.1f} s", flush=True)
        for view in VIEWS:
            await self.make_view(view)
        print(f"views are made after {anyio.current_time() - began:.1f} s", flush=True)
        await self.views_have(self.writer.times[len(self.writer.planner.writes) - 1])
        await self.compare(len(self.writer.planner.writes) - 1)
        print(
            f"they are filled and compared after {anyio.current_time() - began:.1f} s", flush=True
        )

    async def make_view(self, view: FarView) -> None:
        """Make a view, which may be there already by a call whose outcome was unknown."""

        async def make(client: Client) -> None:
            with suppress(ObjectExists):
                await client.create_materialized_view(
                    view.name, view.sql, refresh_policy=view.policy
                )

        await self.until_done(f"making {view.name}", make)

    # -- a strike ------------------------------------------------------------------------------

    async def strike(self, strikes: StrikeChoice, kind: str, every: float) -> None:
        """Kill at a random moment, and see that everything goes on."""
        self.errors.clear()
        passing = self.rng.choice([None, *PASSING])
        await anyio.sleep(self.rng.uniform(0, every))
        if passing is not None:
            await self.make_view(passing)
        self.writer.hurry(large=True)
        await anyio.sleep(self.rng.uniform(0, every / 2))
        struck = await strikes.kinds[kind]()
        began = anyio.current_time()
        print(f"killed {kind}: {struck}", flush=True)
        with anyio.move_on_after(self.limit) as scope:
            self.writer.hurry()
            number = await self.writer.acknowledged_from(len(self.writer.planner.writes))
        if scope.cancelled_caught:
            raise StoodStill(f"no write is acknowledged; {await self.states()}")
        after = [anyio.current_time() - began]
        await self.views_have(self.writer.times[number], *([passing.name] if passing else []))
        after.append(anyio.current_time() - began)
        await self.compare(number, *([passing] if passing else []))
        after.append(anyio.current_time() - began)
        if passing is not None:
            await self.drop_view(passing.name)
        told = ", ".join(f"{name} {count}×" for name, count in sorted(self.errors.items()))
        print(
            f"  writes after {after[0]:.1f} s, views after {after[1]:.1f} s, a query and all "
            f"compared after {after[2]:.1f} s; write {number}"
            + (", with a view being made" if passing else "")
            + (f"; met {told}" if told else ""),
            flush=True,
        )
        for name in self.world.ended():
            raise StoodStill(f"{name} has ended by itself")

    async def views_have(self, time: int, *more: str) -> None:
        """Wait until all views, and those named, have a time."""
        for name in [*(view.name for view in VIEWS), *more]:

            async def wait(client: Client, name: str = name) -> None:
                await client.wait_for(name, time, deadline_ms=LOOK_MS)

            await self.until_done(f"view {name} at {time}", wait)

    async def drop_view(self, name: str) -> None:
        """Drop a view, perhaps once more."""

        async def drop(client: Client) -> None:
            with suppress(UnknownObject):
                await client.drop(name)

        await self.until_done(f"dropping {name}", drop)

    async def compare(self, number: int, *more: FarView) -> None:
        """Compare all views, those given and the query at the time of a write."""
        await anyio.to_thread.run_sync(
            self.oracle.advance, self.writer.planner.writes[: number + 1]
        )
        for view in (*VIEWS, *more):
            await self.compare_view(self.oracle, view, self.writer.times[number], number)

        async def ask(client: Client) -> pa.Table:
            pieces = client.query(QUERY, as_of=self.writer.times[number], deadline_ms=200_000)
            return pa.Table.from_batches([piece async for piece in pieces])

        found = bag_of(await self.until_done("the query", ask))
        if text := unlike(self.oracle.answer(QUERY), found):
            self.report("query", f"after write {number}: {text}")

    async def compare_view(
        self, oracle: SqliteOracle, view: FarView, time: int, number: int
    ) -> None:
        """Compare a view at a time with the oracle, which is there."""

        async def peek(client: Client) -> pa.Table:
            return await client.peek(view.name, as_of=time)

        found = bag_of(await self.until_done(f"reading {view.name}", peek))
        right = await anyio.to_thread.run_sync(oracle.answer, view.sql)
        if text := unlike(right, found):
            self.report(view.name, f"after write {number}, at {time}: {text}")

    # -- the end -------------------------------------------------------------------------------

    async def check(self, count: int) -> None:
        """Compare all that is kept."""
        times = await self.times_written()
        writes = self.writer.planner.writes
        last = len(writes) - 1
        with anyio.move_on_after(self.limit) as scope:
            for subscriber in self.subscribers:
                await subscriber.until_beyond(times[last])
        if scope.cancelled_caught:
            self.report("subscribers", "one did not get to the last write")
        first = max((each.updates[0][1] for each in self.subscribers if each.updates), default=0)
        oracle = SqliteOracle()
        # The first contents of views are those of a time behind the last write of the base.
        later = range(BASE_PIECES, len(writes))
        chosen = sorted({later[(len(later) - 1) * place // count] for place in range(1, count + 1)})
        for number in chosen:
            await anyio.to_thread.run_sync(oracle.advance, writes[: number + 1])
            for view in VIEWS:
                await self.compare_view(oracle, view, times[number], number)
            for subscriber in self.subscribers:
                if times[number] >= first:
                    self.compare_subscriber(oracle, subscriber, times[number], number)
        resumed = sum(each.resumed for each in self.subscribers)
        print(
            f"{len(writes)} writes, {len(self.writer.settled)} settled by writing again; "
            f"{len(VIEWS)} views compared at {len(chosen)} times; {resumed} resumes",
            flush=True,
        )

    def compare_subscriber(
        self, oracle: SqliteOracle, subscriber: Subscriber, time: int, number: int
    ) -> None:
        """Compare what a subscriber accumulated with the oracle, which is there."""
        sql = next(view.sql for view in VIEWS if view.name == subscriber.view)
        right = Counter(
            {tuple(map(str, row)): weight for row, weight in oracle.answer(sql).items()}
        )
        if text := unlike(right, subscriber.contents(time)):
            self.report(f"subscriber of {subscriber.view}", f"after write {number}: {text}")

    async def times_written(self) -> list[int]:
        """The time of each write, by its number, as the table of numbers has them."""

        async def follow(client: Client) -> list[tuple[int, int]]:
            report = await client.status()
            since = next(each.since for each in report.objects if each.name == PLAYED)
            end = max(self.writer.times.values()) + 1
            found: list[tuple[int, int]] = []
            changes = client.subscribe(PLAYED, from_=since + 1, up_to=end)
            async for change in concatenate_pieces(changes):
                if change.table is not None:
                    found += [(row["n"], row[TIME]) for row in change.table.to_pylist()]
            return found

        found = await self.until_done("reading the numbers of writes", follow)
        counts = Counter(number for number, _ in found)
        wanted = range(len(self.writer.planner.writes))
        if sorted(counts.elements()) != list(wanted):
            self.report("writes", f"{unlike(Counter(zip(wanted)), Counter(zip(counts)))}")
        times = dict(found)
        for number, time in self.writer.times.items():
            if times.get(number) != time:
                self.report("writes", f"{number} was at {time}, and is at {times.get(number)}")
        ordered = [times.get(number, 0) for number in wanted]
        if ordered != sorted(ordered):
            self.report("writes", "their times do not grow")
        return ordered


async def follow_all(
    campaign: FarCampaign, *, task_status: TaskStatus[anyio.CancelScope] = TASK_STATUS_IGNORED
) -> None:
    """Run all subscribers until cancelled."""
    async with anyio.create_task_group() as group:
        for subscriber in campaign.subscribers:
            group.start_soon(subscriber.follow, campaign.world)
        task_status.started(group.cancel_scope)


async def kill_all(world: FarWorld, arguments: argparse.Namespace) -> int:
    """Kill, compare; the number of differences."""
    campaign = FarCampaign(world, arguments)
    strikes = StrikeChoice(world, campaign.rng)
    chosen = [kind for kind in arguments.kinds.split(",") if kind]
    unknown = [kind for kind in chosen if kind not in strikes.kinds]
    if unknown:
        raise SystemExit(f"--kinds {','.join(unknown)}: choose of {', '.join(strikes.kinds)}")
    began = anyio.current_time()
    await world.start_cluster()
    await world.start_service()
    await campaign.prepare()
    print(f"{world.assert_apart()} processes see no file of another one", flush=True)
    done: Counter[str] = Counter()
    async with anyio.create_task_group() as group:
        following = await group.start(follow_all, campaign)
        group.start_soon(campaign.writer.run, arguments.pace)
        for kind in strikes.order(arguments.kills, chosen):
            if anyio.current_time() - began > arguments.seconds:
                break
            await campaign.strike(strikes, kind, arguments.every)
            done[kind] += 1
        await campaign.writer.stop()
        await campaign.check(arguments.times)
        following.cancel()
    print(f"{done.total()} kills: {dict(done)}", flush=True)
    print(f"{world.assert_apart()} processes see no file of another one", flush=True)
    return campaign.wrong


async def run_one(world: FarWorld, arguments: argparse.Namespace) -> int:
    """Run a command of `penstock` on the cluster and the bucket; its exit status."""
    await world.start_cluster()
    settings = {
        "blob_url": world.blob_url,
        "spark_master": world.spark_master,
        "spark_driver_memory": "1g",
        "engine_inline_bytes_max": str(64 * 1024),
        "engine_collected_bytes_max": str(64 * 1024),
    }
    if arguments.demo:
        given = ["demo", "--plain", "--speed", "0", "--days", str(arguments.days)]
        given += ["--proof-times", "6"]
    else:
        scripts = sorted((ROOT / "tests" / "scripts").glob("*.view"))
        chosen = scripts[arguments.seed % arguments.scripts :: arguments.scripts]
        given = ["check-views", "--seed", str(arguments.seed), *map(str, chosen)]
    command = world.run_command("command", *given, **settings)
    await world.in_thread(command.log.wait_for, ".")
    print(f"{world.assert_apart()} processes see no file of another one", flush=True)
    seen = ""
    while not command.has_ended or command.text != seen:
        print(command.text.removeprefix(seen), end="", flush=True)
        seen = command.text
        await anyio.sleep(0.5)
    status: int = command.log.process.wait()
    return status


async def run(arguments: argparse.Namespace, ground: Path) -> int:
    """The number of differences."""
    world = FarWorld(ground, whole=arguments.whole, connect=arguments.connect)
    wrong = 1
    try:
        if arguments.demo or arguments.scripts:
            wrong = await run_one(world, arguments)
        else:
            wrong = await kill_all(world, arguments)
    except* StoodStill as errors:
        for error in errors.exceptions:
            print(f"WRONG it stands still: {error}", flush=True)
    finally:
        with anyio.CancelScope(shield=True):
            if arguments.keep is not None:
                world.keep_logs(arguments.keep)
            await world.in_thread(world.stop)
    print(f"{wrong} wrong", flush=True)
    return wrong


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="no further kill after so many of the run"
    )
    parser.add_argument("--kinds", default="", help="of these kinds alone, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="the service is one process")
    parser.add_argument("--connect", action="store_true", help="over a Spark Connect server")
    parser.add_argument("--every", type=float, default=6.0, help="seconds until a kill, at most")
    parser.add_argument("--pace", type=float, default=4.0, help="seconds between writes")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until all goes on")
    parser.add_argument("--times", type=int, default=6, help="times compared at the end")
    parser.add_argument("--demo", action="store_true", help="play the demo in place of kills")
    parser.add_argument("--days", type=int, default=12, help="days of the demo")
    parser.add_argument("--scripts", type=int, default=0, help="check every so many-th view script")
    parser.add_argument("--keep", type=Path, help="logs are written there")
    arguments = parser.parse_args()
    if not can_be_apart():
        print("processes cannot be kept apart: `unshare --mount` needs root", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="penstock-far-") as folder:
        Path(folder).chmod(0o755)
        return 1 if anyio.run(run, arguments, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
