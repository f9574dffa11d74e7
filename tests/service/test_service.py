"""The whole service end to end, on the in-memory engine: no JVM."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

import actors
from actors.control.controller.controller import Controller
from actors.control.controller.replicas.replica import ConnectionLost, LinkTurn
from actors.doors.client.client import ChangeBatch, Client, TableWrite
from actors.model.plan.jobs import ExecutorMessage
from actors.model.plan.schema import DIFF, TIME
from actors.runtime.errors import (
    AbsentRow,
    AddressInUse,
    BadSettings,
    ConnectionBroken,
    DeadlineExceeded,
    DuplicateKey,
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    QueryRejected,
    ReadBelowSince,
    ReadTooFarAhead,
    ServiceExpired,
    StateDirectoryError,
    TypeMismatch,
    UnknownObject,
    ViewInError,
)
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import EngineControls, in_memory_engine
from service_house import running_service  # type: ignore[import-not-found]

BY_CARRIER = """
SELECT c.name, count(*) AS n, sum(f.delay) AS delay
FROM flights f JOIN carriers c ON f.carrier = c.carrier GROUP BY c.name
"""
FLIGHTS = {"id": "bigint", "carrier": "string", "delay": "bigint"}
CARRIERS = {"carrier": "string", "name": "string"}


def settings_of(tmp_path: Path, **changes: Any) -> Settings:
    given: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "listen": "127.0.0.1:0",
        "hold_downgrade_ms": 50,
        "maintenance_ms": 20,
    }
    given |= changes
    return draw_for_test(Settings(**given), given)


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[Client]:
    """A client of a service over TCP."""
    async with running_service(settings_of(tmp_path, **changes)) as (_, client):
        yield client


async def _objects(client: Client) -> None:
    await client.create_table("flights", FLIGHTS, ["id"])
    await client.create_table("carriers", CARRIERS, ["carrier"])
    await client.create_materialized_view("by_carrier", BY_CARRIER)


def _rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


class Model:
    """What the tables hold, and the view over them, in plain Python."""

    def __init__(self) -> None:
        self.flights: dict[int, tuple[str, int]] = {}
        self.carriers: dict[str, str] = {}

    def view(self) -> list[tuple[Any, ...]]:
        counts: Counter[str] = Counter()
        sums: Counter[str] = Counter()
        for carrier, delay in self.flights.values():
            if carrier in self.carriers:
                counts[self.carriers[carrier]] += 1
                sums[self.carriers[carrier]] += delay
        return sorted(((n, counts[n], sums[n]) for n in counts), key=repr)

    def random_change(self, dice: random.Random) -> dict[str, TableWrite]:
        """A change of one or both tables, applied here too."""
        changes: dict[str, TableWrite] = {}
        new, gone, late = [], [], []
        for id_ in dice.sample(range(30), 4):
            carrier, delay = dice.choice("ABC"), dice.randrange(100)
            if id_ not in self.flights:
                self.flights[id_] = (carrier, delay)
                new.append({"id": id_, "carrier": carrier, "delay": delay})
            elif dice.random() < 0.5:
                del self.flights[id_]
                gone.append({"id": id_})
            else:
                self.flights[id_] = (self.flights[id_][0], delay)
                late.append({"id": id_, "delay": delay})
        changes["flights"] = TableWrite(
            insert=new or None, delete=gone or None, update=late or None
        )
        if dice.random() < 0.3:
            carrier, name = dice.choice("ABC"), dice.choice(["x", "y", "z"])
            row = [{"carrier": carrier, "name": name}]
            known = carrier in self.carriers
            changes["carriers"] = TableWrite(update=row) if known else TableWrite(insert=row)
            self.carriers[carrier] = name
        return changes


async def test_every_time_reads_right_also_after_restarts(tmp_path: Path) -> None:
    dice, model = random.Random(5), Model()
    right: dict[int, list[tuple[Any, ...]]] = {}
    for life in range(3):
        async with running(tmp_path, workers=life + 1) as client:
            if life == 0:
                await _objects(client)
                await client.create_materialized_view(
                    "busy", "SELECT name FROM by_carrier WHERE n > 3"
                )
                await client.create_index("by_name", "by_carrier", ["name"])
            for _ in range(12):
                time = await client.write(model.random_change(dice))
                right[time] = model.view()
            assert _rows(await client.peek("by_carrier")) == right[max(right)]
            for time, rows in right.items():
                assert _rows(await client.peek("by_carrier", as_of=time)) == rows
                names = [(name,) for name, n, _ in rows if n > 3]
                assert _rows(await client.peek("busy", as_of=time)) == names
            for name, n, delay in right[max(right)]:
                found = await client.peek("by_carrier", key={"name": name})
                assert _rows(found) == [(name, n, delay)]


async def _follow(client: Client, from_: int | None, until: int) -> list[ChangeBatch]:
    changes = []
    stream = client.subscribe("by_carrier", from_)
    async for change in stream:
        changes.append(change)
        if change.upper > until:
            break
    await stream.aclose()
    return changes


async def test_subscribe_resumes_by_its_frontier_without_gap_or_repeat(tmp_path: Path) -> None:
    dice, model = random.Random(6), Model()
    total: Counter[tuple[Any, ...]] = Counter()
    frontier: int | None = None
    last: int | None = None
    for _life in range(3):
        async with running(tmp_path) as client:
            if frontier is None:
                await _objects(client)
            changes: list[ChangeBatch] = []
            for _ in range(4):
                time = await client.write(model.random_change(dice))
                changes += await _follow(client, frontier, time)
                frontier = changes[-1].upper
            for change in changes:
                assert last in (None, change.lower)
                last = change.upper
                for row in [] if change.table is None else change.table.to_pylist():
                    assert change.lower <= row.pop(TIME) < change.upper
                    diff = row.pop(DIFF)
                    total[tuple(row.values())] += diff
            held = sorted((r for r, n in total.items() for _ in range(n)), key=repr)
            assert held == model.view() == _rows(await client.peek("by_carrier"))
            assert frontier is not None
            with pytest.raises(ReadTooFarAhead):
                await anext(client.subscribe("by_carrier", frontier + 10**8))


@pytest.mark.usefixtures("patient_loop")
async def test_bad_input_is_named_and_disturbs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await _objects(client)
        time = await client.insert("flights", [{"id": 1, "carrier": "A", "delay": 5}])
        with pytest.raises(DuplicateKey, match="id = 1"):
            await client.insert("flights", [{"id": 2}, {"id": 1}])
        with pytest.raises(AbsentRow, match="id = 9"):
            await client.delete("flights", [{"id": 9}])
        with pytest.raises(TypeMismatch, match="column delay, row 1"):
            await client.insert("flights", pa.table({"id": [2, 3], "delay": [None, "late"]}))
        with pytest.raises(ObjectExists):
            await client.create_table("FLIGHTS", FLIGHTS)
        with pytest.raises(InvalidUsage, match="type 'blob' is not supported"):
            await client.create_table("t", {"x": "blob"})
        with pytest.raises(QueryRejected):
            await client.create_materialized_view("v", "SELECT nothing FROM flights")
        with pytest.raises(UnknownObject):
            await client.create_materialized_view("v", "SELECT * FROM nowhere")
        with pytest.raises(ObjectInUse, match="view by_carrier"):
            await client.drop("flights")
        with pytest.raises(ReadTooFarAhead):
            await client.peek("flights", as_of=time + 10**8)
        with pytest.raises(DeadlineExceeded, match="sealed only below"):
            await client.peek("by_carrier", as_of=time + 50_000, deadline_ms=1_000)
        with pytest.raises(ReadBelowSince):
            await client.peek("by_carrier", as_of=1)
        with pytest.raises(InvalidUsage, match="cannot write to"):
            await client.insert("by_carrier", [{"n": 1}])
        with pytest.raises(UnknownObject):
            await client.wait_for("nothing", time)
        assert _rows(await client.peek("flights")) == [(1, "A", 5)]


async def test_a_query_that_fails_on_its_data_is_an_error_until_they_change(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await client.create_table("t", {"id": "bigint", "d": "bigint"}, ["id"])
        await client.create_materialized_view("v", "SELECT id, 100 / d AS q FROM t")
        good = await client.insert("t", [{"id": 1, "d": 4}])
        bad = await client.insert("t", [{"id": 2, "d": 0}])
        with pytest.raises(ViewInError):
            await client.peek("v")
        assert _rows(await client.peek("v", as_of=good)) == [(1, 25.0)]
        await client.update("t", [{"id": 2, "d": 5}])
        assert _rows(await client.peek("v")) == [(1, 25.0), (2, 20.0)]
        with pytest.raises(ViewInError):
            await client.peek("v", as_of=bad)


async def test_objects_come_and_go(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        for _ in range(2):
            await _objects(client)
            await client.insert("flights", [{"id": 1, "carrier": "A", "delay": 5}])
            await client.insert("carriers", [{"carrier": "A", "name": "x"}])
            await client.create_index("by_name", "by_carrier", ["name"])
            assert _rows(await client.peek("by_carrier", key={"name": "x"})) == [("x", 1, 5)]
            assert "mode: incremental" in await client.explain("by_carrier")
            for name in ("by_name", "by_carrier", "carriers", "flights"):
                await client.drop(name)
            assert (await client.status()).objects == ()


async def test_a_slow_subscriber_is_paused_and_goes_on(tmp_path: Path) -> None:
    dice, model = random.Random(7), Model()
    async with running(tmp_path, subscribe_inflight_bytes_max=2000) as client:
        await _objects(client)
        await client.write(model.random_change(dice))
        stream = client.subscribe("flights")
        changes = [await anext(stream)]
        for _ in range(40):
            time = await client.write(model.random_change(dice))
            await client.wait_for("by_carrier", time)
        while changes[-1].upper <= time:
            changes.append(await anext(stream))
        await stream.aclose()
        assert all(a.upper == b.lower for a, b in itertools.pairwise(changes))
        total: Counter[int] = Counter()
        for change in changes:
            for row in [] if change.table is None else change.table.to_pylist():
                total[row["id"]] += row[DIFF]
        assert {id_ for id_, n in total.items() if n} == set(model.flights)


async def test_the_controller_reconnects_without_work_and_without_repeats(tmp_path: Path) -> None:
    dice, model = random.Random(8), Model()
    controls = EngineControls()

    with anyio.fail_after(200):
        service = Service(settings_of(tmp_path), engine=in_memory_engine(controls))
        async with service, await Client.in_process(service) as client:
            await _objects(client)
            await client.create_index("by_name", "by_carrier", ["name"])
            stream = client.subscribe("by_carrier")
            changes = [await anext(stream)]
            for _ in range(5):
                time = await client.write(model.random_change(dice))
                assert _rows(await client.peek("by_carrier")) == model.view()
                _lose_the_replica(service)
                while changes[-1].upper <= time:
                    changes.append(await anext(stream))
                assert _rows(await client.peek("by_carrier")) == model.view()
            await stream.aclose()
            # At its creation, to see that it can have contents, and for its steps.
            assert controls.counts["Prepare"] == 2
            assert controls.counts["Difference"] == 0
    assert all(a.upper == b.lower for a, b in itertools.pairwise(changes))
    total: Counter[tuple[Any, ...]] = Counter()
    for change in changes:
        for row in [] if change.table is None else change.table.to_pylist():
            del row[TIME]
            diff = row.pop(DIFF)
            total[tuple(row.values())] += diff
    assert sorted((r for r, n in total.items() for _ in range(n)), key=repr) == model.view()


def _lose_the_replica(service: Service) -> None:
    """The controller's connection to its replica breaks."""
    assert service._system is not None
    cell = service._system.cells["/controller"]
    assert isinstance(cell.actor, Controller)
    link = cell.actor._instance._links["r1"]
    broken = ConnectionBroken("the test broke it")
    cell.address.reply(LinkTurn(link, ConnectionLost(link.incarnation, broken)))


async def test_what_no_frame_holds_goes_in_pieces(tmp_path: Path) -> None:
    limits = {"frame_bytes_max": 1 << 18, "result_bytes_max": 1 << 17, "inline_bytes_max": 1 << 16}
    async with running(tmp_path, **limits) as client:
        await client.create_table("t", {"id": "bigint", "s": "string"}, ["id"])
        for start in range(0, 20_000, 4_000):
            ids = range(start, start + 4_000)
            await client.insert("t", pa.table({"id": list(ids), "s": [f"row {i}" for i in ids]}))
        assert (await client.peek("t")).num_rows == 20_000  # in pieces, by the stash
        count, stream = 0, client.subscribe("t")
        async for change in stream:
            count += 0 if change.table is None else change.table.num_rows
            if not change.partial:
                break
        await stream.aclose()
        assert count == 20_000
        assert _rows(await client.peek("t", key={"id": 7})) == [(7, "row 7")]


async def test_in_process_is_the_same(tmp_path: Path) -> None:
    with anyio.fail_after(200):
        service = Service(settings_of(tmp_path), engine=in_memory_engine())
        async with service, await Client.in_process(service) as client:
            await _objects(client)
            time = await client.insert("flights", [{"id": 1, "carrier": "A", "delay": 5}])
            await client.wait_for("by_carrier", time)
            assert (await client.peek("flights")).num_rows == 1
            stream = client.subscribe("flights", as_of=time, up_to=time + 1)
            changes = [change async for change in stream]
            assert changes[-1].upper == EMPTY
            (rows,) = [change.table for change in changes if change.table is not None]
            assert rows.num_rows == 1


async def test_a_stopped_service_breaks_its_clients(tmp_path: Path) -> None:
    with anyio.fail_after(200):
        async with Service(settings_of(tmp_path), engine=in_memory_engine()) as service:
            client = await Client.connect(service.address)
            service.stop()
            await service.wait_stopped()
        with pytest.raises(ConnectionBroken):
            await client.status()
        await client.aclose()


async def test_starting_refuses_by_name(tmp_path: Path) -> None:
    with anyio.fail_after(200):
        settings = settings_of(tmp_path)
        async with Service(settings, engine=in_memory_engine()) as service:
            with pytest.raises(StateDirectoryError):
                await Service(settings, engine=in_memory_engine()).__aenter__()
            taken = settings_of(tmp_path / "other", listen=service.address)
            with pytest.raises(AddressInUse):
                await Service(taken, engine=in_memory_engine()).__aenter__()
        with pytest.raises(BadSettings, match="listen"):
            await Service(settings_of(tmp_path, listen="x"), engine=in_memory_engine()).__aenter__()
        with pytest.raises(BadSettings, match="workers"):
            await Service(settings_of(tmp_path, workers=0), engine=in_memory_engine()).__aenter__()
        async with Service(settings, engine=in_memory_engine()):
            pass


async def test_a_relative_state_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark is given paths below it, and looks for relative ones below its own folder."""
    monkeypatch.chdir(tmp_path)
    given: list[Path] = []

    def engine(
        system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        given.append(scratch)
        return in_memory_engine()(system, settings, scratch)

    async with Service(settings_of(tmp_path, state_dir="state"), engine=engine):
        assert (tmp_path / "state").is_dir()
    assert given
    assert all(path.is_relative_to(tmp_path / "state") for path in given)


async def test_a_catalog_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    import msgspec

    from actors.control.controller.catalog.catalog import CATALOG_KEY
    from actors.durable.persist import CompareAndSet, PersistClient
    from actors.runtime.kernel import SystemClock

    settings = settings_of(tmp_path)
    with anyio.fail_after(200):
        persist = await PersistClient.open(Path(settings.state_dir), settings, SystemClock())
        newer = msgspec.msgpack.encode({"format": 99})
        assert await persist.compare_and_set([CompareAndSet(CATALOG_KEY, None, newer)])
        await persist.close()
        with pytest.raises(StateDirectoryError, match="format 99"):
            await Service(settings, engine=in_memory_engine()).__aenter__()


def test_the_front_door() -> None:
    assert actors.Service is Service
    assert actors.Client is Client
    assert actors.DuplicateKey is DuplicateKey
    with pytest.raises(AttributeError):
        _ = actors.nothing


async def test_it_ends_when_it_expires(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, expiration_ms=20)
    async with Service(settings, engine=in_memory_engine()) as service:
        with anyio.fail_after(200), pytest.raises(ServiceExpired, match="expiration_ms"):
            await service.wait_stopped()


async def test_all_threads_stay_on_their_core_until_the_service_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that were there before it started, too: of measures and traces, of Arrow."""
    before = os.sched_getaffinity(0)
    service = Service(settings_of(tmp_path, pin_cores=True), engine=in_memory_engine())
    if len(before) < 2:
        with pytest.raises(BadSettings, match="two cores"):
            await service.__aenter__()
        return

    def of_threads() -> set[frozenset[int]]:
        found = set()
        for each in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):
                found.add(frozenset(os.sched_getaffinity(int(each.name))))
        return found

    with ThreadPoolExecutor(1) as others:
        others.submit(int).result()
        with caplog.at_level("INFO", "penstock"):
            async with service:
                assert of_threads() == {frozenset({min(before)})}
        assert of_threads() == {frozenset(before)}
    assert f"the service runs on core {min(before)}" in caplog.text
    assert "the engine runs on cores" in caplog.text
