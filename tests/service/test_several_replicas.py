"""A service with several replicas: any of them dies at any point, and no answer is wrong."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.control.controller.replicas.instance import REPLICAS_KEY
from actors.doors.client.client import Client
from actors.durable.persist import PersistClient
from actors.model.plan.schema import DIFF, TIME
from actors.replica.cluster import hosts
from actors.runtime.errors import BadSettings, InvalidUsage, StorageError, StoreFull, UnknownObject
from actors.runtime.kernel import restart
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import EngineControls
from service_house import running_service  # type: ignore[import-not-found]

SUMS = "SELECT k, count(*) AS n, sum(v) AS s FROM t GROUP BY k"
COLUMNS = {"id": "bigint", "k": "bigint", "v": "bigint"}


@asynccontextmanager
async def running(
    tmp_path: Path, controls: EngineControls | None = None, **changes: Any
) -> AsyncIterator[tuple[Service, Client]]:
    """A service with an engine in memory, and a client of it."""

    given: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "listen": "127.0.0.1:0",
        "hold_downgrade_ms": 50,
        "maintenance_ms": 20,
        "retry_delay_ms_min": 5,
        "standby_ms": 50,
    }
    settings = draw_for_test(Settings(**(given | changes)), changes)
    async with running_service(settings, controls) as (service, client):
        yield service, client


def parts(service: Service, replica: str) -> list[Any]:
    """The actors right below a replica's host, that may be made to crash."""
    assert service._system is not None
    return list(service._system.cells[f"/{replica}"].children.values())


def crash(service: Service, replica: str, number: int) -> bool:
    """One of its actors fails where it stands; False: it is down already."""
    found = parts(service, replica)
    if not found:
        return False
    found[number % len(found)].crash(RuntimeError("it was made to crash"))
    return True


async def connected(client: Client, names: set[str]) -> None:
    """Waits until these replicas, and no others, are there."""
    while True:
        report = await client.replicas()
        if {each.name for each in report.replicas if each.state == "connected"} == names:
            assert all(each.connections > 1 or not each.text for each in report.replicas)
            return
        await anyio.lowlevel.checkpoint()


class Model:
    """What the table holds, and the view over it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rows: dict[int, tuple[int, int]] = {}
        self.next = 0

    async def write(self, client: Client) -> int:
        """Some new rows, and some that go."""
        dice, new = self.dice, []
        for _ in range(dice.randrange(1, 4)):
            self.next += 1
            self.rows[self.next] = (dice.randrange(4), dice.randrange(100))
            k, v = self.rows[self.next]
            new.append({"id": self.next, "k": k, "v": v})
        time = await client.insert("t", new)
        if dice.random() < 0.4:
            gone = dice.choice(sorted(self.rows))
            del self.rows[gone]
            time = await client.delete("t", [{"id": gone}])
        return time

    def view(self) -> dict[int, tuple[int, int]]:
        """By key: the count and the sum."""
        found: dict[int, tuple[int, int]] = {}
        for k, v in self.rows.values():
            n, s = found.get(k, (0, 0))
            found[k] = (n + 1, s + v)
        return found


async def check(client: Client, model: Model) -> None:
    """The view, whole and by key, is what it should be."""
    whole = await client.peek("sums")
    found = {row["k"]: (row["n"], row["s"]) for row in whole.to_pylist()}
    assert found == model.view()
    key = model.dice.randrange(4)
    looked_up = (await client.peek("sums", key={"k": key})).to_pylist()
    wanted = model.view().get(key)
    assert [(row["n"], row["s"]) for row in looked_up] == ([wanted] if wanted else [])


async def objects(client: Client) -> None:
    await client.create_table("t", COLUMNS, ["id"])
    await client.create_materialized_view("sums", SUMS)
    await client.create_index("sums_by_k", "sums", ["k"])


async def crash_when_up(service: Service, replica: str, number: int) -> None:
    """As `crash`, of one that has just died when some of it is there again."""
    while not crash(service, replica, number):
        await anyio.lowlevel.checkpoint()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(3))
async def test_replicas_die_at_any_point_and_no_answer_is_wrong(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "RESTART", restart(restarts_max=10, within_ms=60_000, delay_ms=1))
    model = Model(seed)
    sums: Counter[tuple[int, int, int]] = Counter()
    uppers: list[tuple[int, int]] = []
    async with running(tmp_path, replicas=3, workers=2) as (service, client):
        await objects(client)

        async def follow(until: dict[str, int]) -> None:
            async for change in client.subscribe("sums"):
                uppers.append((change.lower, change.upper))
                for row in [] if change.table is None else change.table.to_pylist():
                    sums[row["k"], row["n"], row["s"]] += row[DIFF]
                    assert change.lower <= row[TIME] < change.upper
                if change.upper > until.get("time", 1 << 62):
                    return

        until: dict[str, int] = {}
        crashes = 0
        async with anyio.create_task_group() as group:
            group.start_soon(follow, until)
            for turn in range(30):
                time = await model.write(client)
                if model.dice.random() < 0.4:
                    name = f"r{model.dice.randrange(3) + 1}"
                    await crash_when_up(service, name, model.dice.randrange(100))
                    crashes += 1
                if turn == 15:  # all of them at once
                    for name in ("r1", "r2", "r3"):
                        crashes += crash(service, name, turn)
                await check(client, model)
            until["time"] = time = await model.write(client)
            await client.wait_for("sums", time)
        assert crashes > 8
        assert {key: (n, s) for (key, n, s), diff in sums.items() if diff} == model.view()
        assert set(sums.values()) <= {0, 1}
        assert all(a[1] == b[0] for a, b in itertools.pairwise(uppers))
        await connected(client, {"r1", "r2", "r3"})
        assert service._system is not None
        assert sum(service._system.cells[f"/r{n}"].crashes for n in (1, 2, 3)) > 5


async def test_one_replica_computes_and_the_others_follow(tmp_path: Path) -> None:
    """The engine's work does not grow with the replicas, but for the races that are lost."""
    controls, model = EngineControls(), Model(4)
    steps = 30
    settings = {"replicas": 3, "standby_ms": 5_000}
    async with running(tmp_path, controls, **settings) as (service, client):
        await objects(client)
        await client.wait_for("sums", await model.write(client))
        before = controls.counts["Step"]
        for _ in range(steps):
            await client.wait_for("sums", await model.write(client))
        assert controls.counts["Step"] - before <= 2 * steps
        await check(client, model)
        status = next(o for o in (await client.status()).objects if o.name == "sums_by_k")
        clusters = service._clusters
        assert clusters is not None
        found = (await clusters.statistics()).workers
        assert {worker.replica for worker in found} == {"r1", "r2", "r3"}
        held = sum(index.rows for worker in found for index in worker.indexes)
        assert 0 < status.held_rows < held, "rows count once"


async def test_the_first_contents_are_made_once(tmp_path: Path) -> None:
    controls, model = EngineControls(), Model(5)
    async with running(tmp_path, controls, replicas=3) as (_, client):
        await client.create_table("t", COLUMNS, ["id"])
        for _ in range(5):
            time = await model.write(client)
        await client.create_materialized_view("sums", SUMS)
        await client.wait_for("sums", time)
        await connected(client, {"r1", "r2", "r3"})
        whole = [job for job in controls.jobs if job.job_id.endswith("/whole")]
        assert len(whole) == 1
        await check(client, model)


async def test_replicas_are_added_and_dropped_while_the_service_runs(tmp_path: Path) -> None:
    model = Model(6)
    async with running(tmp_path, replicas=2) as (service, client):
        await objects(client)
        await client.wait_for("sums", await model.write(client))
        report = await client.replicas(add="late")
        assert [each.name for each in report.replicas] == ["r1", "r2", "late"]
        await connected(client, {"r1", "r2", "late"})
        for name in ("r1", "r2"):
            report = await client.replicas(drop=name)
            assert name not in [each.name for each in report.replicas]
        await client.wait_for("sums", await model.write(client))
        await check(client, model)
        scratch = tmp_path / "state" / "scratch" / "cluster"
        assert [place.name for place in scratch.iterdir()] == ["late"]
        assert not [a for a in service.actors() if a.path.startswith(("/r1", "/r2"))]
        # A name may come again.
        await client.replicas(add="r1")
        await connected(client, {"late", "r1"})
        await client.replicas(drop="late")
        await check(client, model)
        for wrong, text in (
            ({"add": "r1"}, "already"),
            ({"add": "no/name"}, "letters and digits"),
            ({"drop": "r1"}, "the last replica"),
            ({"add": "r7", "drop": "r1"}, "in one request"),
        ):
            with pytest.raises(InvalidUsage, match=text):
                await client.replicas(**wrong)
        with pytest.raises(UnknownObject, match="replica r9 does not exist"):
            await client.replicas(drop="r9")
        for name in ("r2", "r3", "r4", "r5"):
            await client.replicas(add=name)
        with pytest.raises(InvalidUsage, match="limit 5"):
            await client.replicas(add="r6")


async def test_the_command_shows_and_changes_replicas(tmp_path: Path) -> None:
    async def penstock(service: Service, *arguments: str) -> tuple[int, str, str]:
        command = [
            sys.executable,
            "-m",
            "actors.doors.commands.cli",
            "replicas",
            "--connect",
            service.address,
        ]
        done = await anyio.run_process([*command, *arguments], check=False)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    async with running(tmp_path, replicas=2) as (service, client):
        await objects(client)
        await connected(client, {"r1", "r2"})
        status, text, _ = await penstock(service)
        assert status == 0
        heading, *lines = [line.split() for line in text.splitlines()]
        assert heading == ["replica", "state", "connects", "reporting", "lag"]
        assert [line[:3] for line in lines] == [["r1", "connected", "1"], ["r2", "connected", "1"]]
        assert (await penstock(service, "--add", "more"))[0] == 0
        await connected(client, {"r1", "r2", "more"})
        status, text, _ = await penstock(service, "--drop", "r1", "--json")
        assert [each["name"] for each in json.loads(text)] == ["r2", "more"]
        status, _, error = await penstock(service, "--drop", "r1")
        assert (status, error.split(":")[:2]) == (2, ["penstock", " UnknownObject"])


async def test_a_single_replica_is_shown_and_lives_with_the_service(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        await client.create_table("t", COLUMNS, ["id"])
        (only,) = (await client.replicas()).replicas
        assert (only.name, only.connections) == ("r1", 1)
        with pytest.raises(InvalidUsage, match="replicas = 2"):
            await client.replicas(add="r2")
        with pytest.raises(InvalidUsage, match="the last replica"):
            await client.replicas(drop="r1")


def test_settings_that_cannot_be() -> None:
    with pytest.raises(BadSettings, match="must not exceed 5"):
        Settings(replicas=6).check()
    with pytest.raises(BadSettings, match="cluster_listen"):
        Settings(replicas=2, cluster_listen="127.0.0.1:0").check()


async def test_relations_of_the_workers_tell_of_every_replica(tmp_path: Path) -> None:
    async with running(tmp_path, replicas=3, workers=2) as (_, client):
        await connected(client, {"r1", "r2", "r3"})
        await objects(client)
        time = await client.insert("t", [{"id": n, "k": n % 2, "v": n} for n in range(9)])
        await client.wait_for("sums", time)
        names = {"r1", "r2", "r3"}
        rows = (await client.peek("penstock.frontiers")).to_pylist()
        found = Counter((row["replica"], row["worker"]) for row in rows)
        assert found.keys() == set(itertools.product(names, range(2)))
        assert set(found.values()) == {2}, "a view and an index each"
        one = await client.peek(
            "penstock.dataflows",
            where=[("replica", "=", "r2")],
            columns=["replica", "name"],
            order_by=["name desc"],
        )
        assert one.to_pylist() == [
            {"replica": "r2", "name": "sums_by_k"},
            {"replica": "r2", "name": "sums"},
        ]
        few = await client.peek("penstock.reconciliation", order_by=["replica desc"], limit=1)
        assert few["replica"].to_pylist() == ["r3"]
        await client.replicas(drop="r2")
        await connected(client, {"r1", "r3"})
        left = await client.peek("penstock.frontiers")
        assert set(left["replica"].to_pylist()) == {"r1", "r3"}


async def test_replicas_that_were_added_or_dropped_are_so_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, replicas=3) as (_, client):
        await objects(client)
        await connected(client, {"r1", "r2", "r3"})
        await client.replicas(add="extra")
        await client.replicas(drop="r1")
        await client.replicas(drop="r3")
        for wrong in ({"add": "extra"}, {"drop": "r1"}, {"add": "not a name"}):
            with pytest.raises(InvalidUsage):
                await client.replicas(**wrong)
        time = await client.insert("t", [{"id": 1, "k": 1, "v": 7}])
    async with running(tmp_path, replicas=3) as (_, client):
        await connected(client, {"r2", "extra"})
        rows = (await client.peek("sums", as_of=time)).to_pylist()
        assert rows == [{"k": 1, "n": 1, "s": 7}]
        await client.replicas(drop="r2")
    async with running(tmp_path, replicas=3) as (_, client):
        await connected(client, {"extra"})
        await client.replicas(add="r1")
        await connected(client, {"extra", "r1"})
    # The last word counts: here it is the setting's.
    async with running(tmp_path, replicas=2) as (_, client):
        await connected(client, {"r1", "r2"})
        await client.replicas(drop="r1")
    async with running(tmp_path, replicas=2) as (_, client):
        await connected(client, {"r2"})


async def test_a_change_that_cannot_be_made_durable_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = PersistClient.compare_and_set, StoreFull("no space", determinate=True)
    broken: list[StorageError] = []

    async def compare_and_set(self: PersistClient, ops: Any) -> bool:
        if broken and ops[0].key == REPLICAS_KEY:
            raise broken[0]
        return await real(self, ops)

    monkeypatch.setattr(PersistClient, "compare_and_set", compare_and_set)
    async with running(tmp_path, replicas=2) as (_, client):
        await connected(client, {"r1", "r2"})
        broken.append(full)
        with pytest.raises(StoreFull):
            await client.replicas(add="more")
        with pytest.raises(StoreFull):
            await client.replicas(drop="r1")
        await connected(client, {"r1", "r2"})
        broken.clear()
        await client.replicas(add="more")
        await client.replicas(drop="r1")
        await connected(client, {"more", "r2"})
