"""A controller and its replicas as processes of their own: any of them is lost, and what is read
stays exact."""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from apart import Apart  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.model.plan.schema import DIFF
from actors.runtime.errors import BadSettings, InvalidUsage, PenstockError
from actors.runtime.settings import Settings
from actors.testing.postgres_server import PostgresServer
from s3_server import S3  # type: ignore[import-not-found]

_NUMBERS = itertools.count()
COLUMNS = {"id": "bigint", "k": "bigint", "v": "bigint"}
SUMS = "SELECT k, count(*) AS n, sum(v) AS s FROM t GROUP BY k"
QUICK: dict[str, Any] = {
    "heartbeat_ms": 50,
    "hold_downgrade_ms": 50,
    "index_history_ms": 200,
    "standby_ms": 100,
    # Beyond what a controller needs to be there again.
    "store_request_timeout_ms": 60_000,
}
# A slow machine may hold a controller up for seconds.
STANDBY: dict[str, Any] = {"standby": True, "takeover_ms": 30_000}

# Where the owner stands still at once, and nothing is asked of it before.
SOON: dict[str, Any] = STANDBY | {"takeover_ms": 6_000}  # expires: the owner is stopped


@pytest.fixture(
    params=["sqlite and files", pytest.param("postgres and s3", marks=pytest.mark.long)]
)
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Settings of a pair of stores that several processes share."""
    if request.param == "sqlite and files":
        return {
            "blob_url": f"file:{tmp_path}/blobs",
            "consensus_url": f"sqlite:{tmp_path}/documents.db",
        }
    server: PostgresServer = request.getfixturevalue("postgres")
    s3: S3 = request.getfixturevalue("s3")
    schema = f"roles{next(_NUMBERS)}"
    return {
        "blob_url": f"s3://{s3.new_bucket()}/penstock",
        "consensus_url": f"postgresql://bench@127.0.0.1:{server.port}/postgres?schema={schema}",
    }


class Processes:
    """The processes of one service, each started by its name."""

    def __init__(self, tmp_path: Path, urls: dict[str, str]) -> None:
        self._tmp_path = tmp_path
        self._urls = urls
        self._all: list[Apart] = []
        self._settings: dict[str, Any] = QUICK

    def start(self, name: str, role: str, **more: Any) -> Apart:
        given = {"role": role, **self._settings, **more}
        if role == "replica":
            given["cluster_listen"] = "127.0.0.1:0"
        started = Apart(self._tmp_path, self._urls, name, **given)
        self._all.append(started)
        return started

    async def replica(self, name: str, **more: Any) -> tuple[Apart, str]:
        """A replica that has registered, and its address."""
        started = self.start(name, "replica", **more)
        return started, await started.line()

    def kill_all(self) -> None:
        for each in self._all:
            each.kill()


@asynccontextmanager
async def processes(tmp_path: Path, urls: dict[str, str]) -> AsyncIterator[Processes]:
    house = Processes(tmp_path, urls)
    try:
        with anyio.fail_after(220):
            yield house
    finally:
        house.kill_all()


class Model:
    """What the table holds, and the view over it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rows: dict[int, tuple[int, int]] = {}
        self._next = 0

    async def write(self, client: Client) -> int:
        self._next += 1
        row = (self.dice.randrange(4), self.dice.randrange(100))
        time = await client.insert("t", [{"id": self._next, "k": row[0], "v": row[1]}])
        self.rows[self._next] = row
        if self.dice.random() < 0.4:
            gone = self.dice.choice(sorted(self.rows))
            time = await client.delete("t", [{"id": gone}])
            del self.rows[gone]
        return time

    async def reread(self, client: Client) -> None:
        """Take the table as it is: what was in doubt is there or not."""
        rows = (await client.peek("t")).to_pylist()
        self.rows = {row["id"]: (row["k"], row["v"]) for row in rows}
        self._next = max([self._next, *self.rows])

    async def check(self, client: Client) -> None:
        """The view, whole and by the key of its index, is what it should be."""
        wanted: dict[int, tuple[int, int]] = {}
        for k, v in self.rows.values():
            n, s = wanted.get(k, (0, 0))
            wanted[k] = (n + 1, s + v)
        whole = (await client.peek("sums")).to_pylist()
        assert {row["k"]: (row["n"], row["s"]) for row in whole} == wanted
        key = self.dice.randrange(4)
        found = (await client.peek("sums", key={"k": key})).to_pylist()
        assert [(row["n"], row["s"]) for row in found] == ([wanted[key]] if key in wanted else [])


async def make_objects(client: Client) -> None:
    await client.create_table("t", COLUMNS, ["id"])
    await client.create_materialized_view("sums", SUMS)
    await client.create_index("sums_by_k", "sums", ["k"])


async def until_replicas(client: Client, wanted: Callable[[dict[str, str]], bool]) -> None:
    """Wait until the states of the replicas, by name, are as wanted."""
    while True:
        report = await client.replicas()
        if wanted({each.name: each.state for each in report.replicas}):
            return
        await anyio.sleep(0.02)


def connected(*names: str) -> Callable[[dict[str, str]], bool]:
    return lambda states: states == dict.fromkeys(names, "connected")


@pytest.mark.long
async def test_replicas_are_lost_added_and_dropped_at_will(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    model = Model(1)
    async with processes(tmp_path, urls) as house:
        first, at_first = await house.replica("r1")
        controller = house.start("c", "controller")
        async with await Client.connect(await controller.line()) as client:
            await make_objects(client)
            await until_replicas(client, connected(at_first))
            for _ in range(3):
                await model.write(client)
                await model.check(client)
            second, at_second = await house.replica("r2")
            await until_replicas(client, connected(at_first, at_second))
            for turn in range(20):
                await model.write(client)
                if turn == 7:
                    first.kill()
                await model.check(client)
            await until_replicas(
                client, lambda states: states == {at_first: "connecting", at_second: "connected"}
            )
            # Without any replica tables are written, and views wait.
            second.kill()
            await model.write(client)
            third, at_third = await house.replica("r3")
            await model.check(client)
            await client.replicas(drop=at_first)
            await client.replicas(drop=at_second)
            await until_replicas(client, connected(at_third))
            # A stop in order removes the registration; one that is dropped ends by itself.
            _, at_fourth = await house.replica("r4")
            await until_replicas(client, connected(at_third, at_fourth))
            await client.replicas(drop=at_third)
            assert (await third.line()).startswith(
                f"dropped: the registration of replica {at_third}"
            )
            assert third.wait() == 0
            await until_replicas(client, connected(at_fourth))
            await model.write(client)
            await model.check(client)
            with pytest.raises(InvalidUsage, match="penstock serve --role replica"):
                await client.replicas(add="more")


@pytest.mark.long
async def test_a_standby_controller_takes_over_the_replicas_that_are_there(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    """The first one is killed while it writes and a client follows the view."""
    model = Model(2)
    sums: Counter[tuple[int, int, int]] = Counter()
    async with processes(tmp_path, urls) as house:
        replicas = [house.start(name, "replica") for name in ("r1", "r2")]
        first = house.start("c1", "controller")
        addresses = [await each.line() for each in replicas]
        owner = await first.line()
        second = house.start("c2", "controller", **STANDBY)
        assert (await second.line()).startswith("standing by")
        async with await Client.connect(owner) as client:
            await make_objects(client)
            await until_replicas(client, connected(*addresses))
            for _ in range(5):
                upper = await model.write(client)
                await model.check(client)

            async def follow() -> None:
                with suppress(PenstockError):
                    async for change in client.subscribe("sums"):
                        table = change.table
                        for row in [] if table is None else table.to_pylist():
                            sums[row["k"], row["n"], row["s"]] += row[DIFF]
                        if not change.partial:
                            followed.append(change.upper)

            async def write() -> None:
                with suppress(PenstockError):
                    while True:
                        await model.write(client)
                        if len(model.rows) > 20:
                            enough.set()

            followed: list[int] = []
            enough = anyio.Event()
            async with anyio.create_task_group() as group:
                group.start_soon(follow)
                group.start_soon(write)
                await enough.wait()
                first.kill()
        async with await Client.connect(await second.line()) as client:
            await model.write(client)
            await model.reread(client)
            await until_replicas(client, connected(*addresses))
            await model.check(client)
            # What was followed before goes on where it ended.
            upper = await model.write(client)
            async for change in client.subscribe("sums", followed[-1]):
                for row in [] if change.table is None else change.table.to_pylist():
                    sums[row["k"], row["n"], row["s"]] += row[DIFF]
                if change.upper > upper:
                    break
            whole = (await client.peek("sums")).to_pylist()
            assert {key for key, diff in sums.items() if diff} == {
                (row["k"], row["n"], row["s"]) for row in whole
            }
        assert all(each.is_running for each in replicas)


@pytest.mark.long
@pytest.mark.parametrize("urls", ["postgres and s3"], indirect=True)
async def test_a_controller_that_was_only_slow_commands_no_replica(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    model = Model(3)
    async with processes(tmp_path, urls) as house:
        replica = house.start("r1", "replica")
        slow = house.start("c1", "controller")
        address = await replica.line()
        async with await Client.connect(await slow.line()) as client:
            await make_objects(client)
            await until_replicas(client, connected(address))
            await model.write(client)
            await model.check(client)
        successor = house.start("c2", "controller", **SOON)
        assert (await successor.line()).startswith("standing by")
        # Nobody but PostgreSQL holds locks of the store: a process that is stopped in the midst of
        # a transaction of SQLite would stop all others.
        slow.signal(signal.SIGSTOP)
        async with await Client.connect(await successor.line()) as client:
            await until_replicas(client, connected(address))
            await model.write(client)
            slow.signal(signal.SIGCONT)
            for _ in range(5):
                await model.write(client)
                await model.check(client)
            assert (await slow.line()).startswith("fenced: another service took over")
            assert slow.wait() == 0
            await model.check(client)
        assert replica.is_running


async def test_what_no_role_can_be_is_refused_with_what_to_do(tmp_path: Path) -> None:
    stores = {"blob_url": "file:/b", "consensus_url": "sqlite:/d"}
    for role, wrong, text in (
        ("replica", {"cluster_listen": "127.0.0.1:0"}, "needs consensus_url and blob_url"),
        ("controller", stores | {"blob_url": "mem:x"}, "stores that all processes"),
        ("controller", stores | {"replicas": 2}, "a process of its own"),
        ("controller", stores | {"cluster_listen": "127.0.0.1:0"}, "are only for a replica"),
        ("replica", stores, "needs cluster_listen"),
        (
            "replica",
            stores | {"cluster_listen": "x:1", "standby": True},
            "is only for a controller",
        ),
        ("replica", stores | {"cluster_listen": "x:1", "pg_listen": "y:1"}, "serves no clients"),
    ):
        with pytest.raises(BadSettings, match=text):
            Settings(role=role, **wrong).check()  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("urls", ["sqlite and files"], indirect=True)
async def test_a_source_goes_on_at_another_replica_when_its_own_is_lost(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    async with processes(tmp_path, urls) as house:
        replicas = {name: house.start(name, "replica") for name in ("r1", "r2")}
        controller = house.start("c", "controller")
        at = {await each.line(): each for each in replicas.values()}
        async with await Client.connect(await controller.line()) as client:
            await until_replicas(client, connected(*at))
            await client.create_source("n", {"kind": "counter", "rate": 200})
            await client.create_materialized_view("c", "SELECT count(*) AS n FROM n")

            async def until_beyond(count: int) -> None:
                while True:
                    found = sorted(row["counter"] for row in (await client.peek("n")).to_pylist())
                    assert found == list(range(1, len(found) + 1)), "each row once"
                    if len(found) > count:
                        break
                while (await client.peek("c")).to_pylist()[0]["n"] <= count:
                    await anyio.sleep(0.05)

            await until_beyond(0)
            rows = (await client.peek("penstock.dataflows")).to_pylist()
            [running] = {row["replica"] for row in rows if row["name"] == "n"}
            assert {row["replica"] for row in rows if row["name"] == "c"} == set(at)
            before = (await client.peek("c")).to_pylist()[0]["n"]
            at[running].kill()
            await until_beyond(before + 50)
            rows = (await client.peek("penstock.dataflows")).to_pylist()
            [other] = {row["replica"] for row in rows if row["name"] == "n"}
            assert other != running
            # The one that is back runs no source beside it.
            house.start("r3", "replica")
            await until_replicas(client, lambda each: [*each.values()].count("connected") == 2)
            await until_beyond(before + 100)
            rows = (await client.peek("penstock.dataflows")).to_pylist()
            assert {row["replica"] for row in rows if row["name"] == "n"} == {other}
            assert (await client.status()).objects
