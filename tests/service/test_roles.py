"""A controller and replicas as services of their own on the same stores, in one process of a test:
what a takeover keeps, who is let in, what is computed once. Processes that die are in
`durable/persist/test_roles_apart.py`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from test_secured_service import secured  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.model.plan.jobs import ExecutorMessage
from actors.model.protocol.compute import CreateInstance, Hello
from actors.replica.cluster import connect
from actors.runtime.errors import (
    AuthenticationFailed,
    BadSettings,
    ConnectionBroken,
    InvalidUsage,
    WriterFenced,
)
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress
from actors.service import Service, advertised_address, service_of
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import EngineControls, InMemoryExecutor

COLUMNS = {"id": "bigint", "k": "bigint"}
COUNTS = "SELECT k, count(*) AS n FROM t GROUP BY k"


class Roles:
    """Services on the same stores; `controls` are of the engines of all replicas."""

    def __init__(self, tmp_path: Path, base: Settings, given: dict[str, Any]) -> None:
        self.controls = EngineControls()
        self._tmp_path = tmp_path
        self._base = base
        self._given = given

    def settings(self, name: str, role: str, **more: Any) -> Settings:
        given = {"state_dir": str(self._tmp_path / name), "role": role, **more}
        chosen = msgspec.structs.replace(self._base, **given)
        return draw_for_test(chosen, {**self._given, **given})

    def _engine(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        controls = self.controls if settings.role == "replica" else None
        address: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(controls), "engine")
        return address

    def controller(self, name: str = "c") -> Service:
        return service_of(self.settings(name, "controller"), engine=self._engine)

    def replica(self, name: str, **more: Any) -> Service:
        settings = self.settings(name, "replica", **{"cluster_listen": "127.0.0.1:0", **more})
        return service_of(settings, engine=self._engine)


@asynccontextmanager
async def roles(tmp_path: Path, base: Settings | None = None) -> AsyncIterator[Roles]:
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "blob_url": f"file:{tmp_path}/blobs",
        "consensus_url": f"sqlite:{tmp_path}/documents.db",
        "heartbeat_ms": 20,
        "store_poll_ms": 20,
        "hold_downgrade_ms": 50,
        "retry_delay_ms_min": 5,
    }
    chosen = msgspec.structs.replace(base or Settings(), **given)
    with anyio.fail_after(200), pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.control.controller.readiness.FRESH_MS", 1)
        yield Roles(tmp_path, chosen, given)


async def make(client: Client) -> None:
    await client.create_table("t", COLUMNS, ["id"])
    await client.create_materialized_view("counts", COUNTS)
    await client.create_index("counts_by_k", "counts", ["k"])


async def counted(client: Client) -> dict[int, int]:
    whole = {row["k"]: row["n"] for row in (await client.peek("counts")).to_pylist()}
    for k, n in whole.items():
        assert (await client.peek("counts", key={"k": k})).to_pylist() == [{"k": k, "n": n}]
    return whole


async def ready(service: Service) -> None:
    while (await service.readiness()).not_ready:
        await anyio.sleep(0.01)


async def test_a_takeover_keeps_what_runs_on_the_replicas(tmp_path: Path) -> None:
    async with roles(tmp_path) as house, house.replica("r") as replica:
        assert (await replica.readiness()).not_ready == ["controller"]
        async with house.controller("c1") as first, await Client.connect(first.address) as client:
            await make(client)
            await client.insert("t", [{"id": i, "k": i % 3} for i in range(9)])
            assert await counted(client) == {0: 3, 1: 3, 2: 3}
            await ready(replica)
            jobs = len(house.controls.jobs)
            # The newer one takes over, as one that stood by does.
            async with house.controller("c2") as second:
                with pytest.raises(WriterFenced, match="took over the stores"):
                    await first.wait_stopped()
                async with await Client.connect(second.address) as other:
                    assert await counted(other) == {0: 3, 1: 3, 2: 3}
                    statistics = await replica._clusters.statistics()  # type: ignore[union-attr]
                    assert [each.dataflows_reused for each in statistics.workers] == [2, 2]
                    assert len(house.controls.jobs) == jobs, "nothing was computed anew"
                    await other.insert("t", [{"id": 9, "k": 0}])
                    assert await counted(other) == {0: 4, 1: 3, 2: 3}
                    components = (await replica.readiness()).components
                    assert "commanded by epoch 2, process" in components["controller"].state


async def test_the_first_contents_are_computed_by_one_replica(tmp_path: Path) -> None:
    async with roles(tmp_path) as house:
        async with (
            house.replica("r1") as one,
            house.replica("r2") as two,
            house.controller() as controller,
            await Client.connect(controller.address) as client,
        ):
            await ready(one)
            await ready(two)
            await client.create_table("t", COLUMNS, ["id"])
            await client.insert("t", [{"id": i, "k": i % 3} for i in range(9)])
            await client.create_materialized_view("counts", COUNTS)
            await client.create_index("counts_by_k", "counts", ["k"])
            assert await counted(client) == {0: 3, 1: 3, 2: 3}
            wanted = {one.address, two.address}

            async def running() -> set[str]:
                rows = (await client.peek("penstock.dataflows")).to_pylist()
                return {r["replica"] for r in rows if r["name"] == "counts_by_k"}

            while await running() != wanted:
                await anyio.sleep(0.01)
        whole = [job for job in house.controls.jobs if job.job_id.endswith("/whole")]
        assert len(whole) == 1


async def test_a_replica_serves_the_owner_of_its_stores_alone(tmp_path: Path) -> None:
    base = secured(tmp_path)
    async with roles(tmp_path, base) as house, house.replica("r") as replica:
        settings = house.settings("x", "controller")
        unknown = msgspec.structs.replace(settings, cluster_token_file=settings.token_file)
        with pytest.raises(AuthenticationFailed):
            await connect(replica.address, unknown)
        with pytest.raises(ConnectionBroken):
            await connect(replica.address, Settings())
        async with (
            house.controller() as controller,
            await Client.connect(controller.address, settings=settings) as client,
        ):
            await make(client)
            await client.insert("t", [{"id": 1, "k": 1}])
            assert await counted(client) == {1: 1}
            for owner, kind in (("", InvalidUsage), ("another", WriterFenced)):
                stranger = await connect(replica.address, settings)
                await stranger.send(Hello("n" + owner, owner))
                await stranger.send(CreateInstance(settings.workers))
                with pytest.raises(kind):
                    await stranger.receive()
                await stranger.close()
            # It has displaced nobody.
            assert [each.connections for each in (await client.replicas()).replicas] == [1]
            assert await counted(client) == {1: 1}


async def test_where_a_replica_is_reached(tmp_path: Path) -> None:
    place = NetworkAddress("0.0.0.0", 6875)
    assert advertised_address(place, Settings(cluster_advertise="b")) == "b:6875"
    assert advertised_address(NetworkAddress(path="/run/r.sock"), Settings()) == "unix:/run/r.sock"
    with pytest.raises(BadSettings, match="set cluster_advertise"):
        advertised_address(place, Settings())
    async with roles(tmp_path) as house:
        with pytest.raises(BadSettings, match="needs TLS and tokens"):
            async with house.replica("r", cluster_listen="0.0.0.0:0"):
                pass
        socket = f"unix:{tmp_path}/r.sock"
        async with (
            house.replica("r", cluster_listen=socket) as replica,
            house.controller() as controller,
            await Client.connect(controller.address) as client,
        ):
            assert replica.address == socket
            await make(client)
            await client.insert("t", [{"id": 1, "k": 1}])
            assert await counted(client) == {1: 1}


async def test_a_successor_moves_sources_and_the_former_replica_drops_them(tmp_path: Path) -> None:
    """The first of two replicas by name runs them, when nobody has chosen before."""

    async def running_at(client: Client) -> set[str]:
        rows = (await client.peek("penstock.dataflows")).to_pylist()
        return {row["replica"] for row in rows if row["name"] == "n"}

    a, b = f"unix:{tmp_path}/a.sock", f"unix:{tmp_path}/b.sock"
    async with (
        roles(tmp_path) as house,
        house.replica("b", cluster_listen=b),
        house.controller("c1") as first,
        await Client.connect(first.address) as client,
    ):
        await client.create_source("n", {"kind": "counter", "rate": 1_000})
        async with house.replica("a", cluster_listen=a) as other:
            await ready(other)
            assert await running_at(client) == {b}, "it stays where it is"
            async with (
                house.controller("c2") as second,
                await Client.connect(second.address) as client,
            ):
                while await running_at(client) != {a}:
                    await anyio.sleep(0.01)
                found = (await client.peek("n")).to_pylist()
                numbers = sorted(row["counter"] for row in found)
                assert numbers == list(range(1, len(numbers) + 1))


class Turmoil:
    """Controllers that take over from one another, and replicas that come and go, while one writes
    and reads."""

    def __init__(self, house: Roles, seed: int) -> None:
        self.dice = random.Random(seed)
        self._house = house
        self._names = itertools.count(1)
        self._replicas: list[AsyncExitStack] = []
        self._controller = AsyncExitStack()
        self._rows: dict[int, int] = {}
        self.client: Client | None = None

    async def add_replica(self) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(self._house.replica(f"r{next(self._names)}"))
        self._replicas.append(stack)

    async def drop_replica(self) -> None:
        if len(self._replicas) > 1:
            await self._replicas.pop(self.dice.randrange(len(self._replicas))).aclose()

    async def take_over(self) -> None:
        """A new controller; the former one may still write while that starts."""
        former, self._controller = self._controller, AsyncExitStack()
        service = await self._controller.enter_async_context(
            self._house.controller(f"c{next(self._names)}")
        )
        self.client = await self._controller.enter_async_context(
            await Client.connect(service.address)
        )
        await former.aclose()

    async def write(self) -> None:
        assert self.client is not None
        for _ in range(self.dice.randrange(1, 4)):
            if self._rows and self.dice.random() < 0.3:
                gone = self.dice.choice(sorted(self._rows))
                await self.client.delete("t", [{"id": gone}])
                del self._rows[gone]
            else:
                row = {"id": next(self._names), "k": self.dice.randrange(4)}
                await self.client.insert("t", [row])
                self._rows[row["id"]] = row["k"]

    async def check(self) -> None:
        assert self.client is not None
        assert await counted(self.client) == Counter(self._rows.values())

    async def stop(self) -> None:
        for each in (self._controller, *self._replicas):
            await each.aclose()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("seed", range(6))
async def test_takeovers_and_replicas_in_any_order(tmp_path: Path, seed: int) -> None:
    async with roles(tmp_path) as house:
        world = Turmoil(house, seed)
        try:
            await world.add_replica()
            await world.take_over()
            assert world.client is not None
            await make(world.client)
            for _ in range(25):
                await world.write()
                match world.dice.randrange(8):
                    case 0:
                        await world.add_replica()
                    case 1:
                        await world.drop_replica()
                    case 2 | 3:
                        await world.take_over()
                    case _:
                        await world.check()
            await world.check()
        finally:
            await world.stop()
