"""A log as a source: alone over real acceptors, driven as the ingest task does; in a service."""

from __future__ import annotations

import json
import random
from collections import Counter as Bag
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from wal_nodes import TENANT, TIMELINE, Node, append, nodes  # type: ignore[import-not-found]

from actors.connectors.sources.source import (
    ConnectorContext,
    ExportFailed,
    PositionMark,
    SourceExport,
    SourceIdle,
    SourceRows,
    SourceUnreachable,
)
from actors.connectors.sources.wal import WalSource
from actors.connectors.sources.wal_config import WalConfig
from actors.doors.client.client import Client
from actors.model.plan.schema import TableColumn
from actors.model.protocol.api import SourceStatus
from actors.runtime.errors import CorruptData, InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.wal.lsn import SEGMENT_BYTES, lsn_text, parse_lsn
from service_house import running_service  # type: ignore[import-not-found]

pytestmark = pytest.mark.anyio

TABLES = {
    "orders": (TableColumn("id", "bigint", False), TableColumn("total", "decimal(12,2)")),
    "notes": (TableColumn("text", "string"),),
}
FAR = 3_600_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def order(id: int, diff: int = 1) -> bytes:
    row = {"id": id, "total": f"{id}.50"}
    return json.dumps({"table": "orders", "row": row, "diff": diff}).encode()


def note(text: str) -> bytes:
    return json.dumps({"table": "notes", "row": {"text": text}}).encode()


async def look(source: WalSource) -> None:
    """Now, not when it is time."""
    assert source._follower is not None
    await source._follower.look()


class Lab:
    """One source after another, and what is durable of what they gave."""

    def __init__(self, those: Sequence[Node], **options: Any) -> None:
        addresses = ",".join(str(node.address) for node in those)
        given: dict[str, Any] = {"tables": TABLES, "look_ms": FAR, "silence_ms": 30_000}
        self.config = WalConfig(
            acceptors=addresses, tenant=TENANT, timeline=TIMELINE, **given | options
        )
        self.bags: dict[str, Bag[tuple[Any, ...]]] = {}
        self.position: str | None = None
        self.failed: dict[str, str] = {}
        self.filled: set[str] = set()
        self.marks: list[PositionMark] = []
        self.idle = 0

    def source(self) -> WalSource:
        return WalSource(self.config, ConnectorContext(SystemClock(), Settings(), Path("/nowhere")))

    def exports(self, *names: str) -> list[SourceExport]:
        found = self.config.schemas()
        return [SourceExport(name, found[name]) for name in names or found]

    @asynccontextmanager
    async def life(self, *names: str) -> AsyncIterator[WalSource]:
        source = self.source()
        live = [each for each in self.exports(*names) if each.name not in self.failed]
        await source.open(live, self.position)
        self.waiting: list[Any] = []
        try:
            yield source
        finally:
            await source.close()

    async def step(self, source: WalSource, *, taken: bool = True) -> bool:
        """Takes one thing; whether it was a mark. `taken`: it is told of that."""
        given = await source.next()
        if isinstance(given, SourceIdle):
            self.idle += 1
        elif not isinstance(given, PositionMark):
            self.waiting.append(given)
        else:
            for each in self.waiting:
                if isinstance(each, SourceRows):
                    bag = self.bags.setdefault(each.export, Bag())
                    columns = [column.to_pylist() for column in each.updates.columns]
                    for *row, diff in zip(*columns, strict=True):
                        bag[tuple(map(str, row))] += diff
                elif isinstance(each, ExportFailed):
                    self.failed[each.export] = each.error
            self.waiting = []
            self.filled |= set(given.filled)
            self.marks.append(given)
            self.position = given.position
            if taken:
                await source.taken(given.position)
        return isinstance(given, PositionMark)

    async def until(self, source: WalSource, lsn: int) -> None:
        while self.lsn < lsn:
            await self.step(source)

    @property
    def lsn(self) -> int:
        return parse_lsn(json.loads(self.position)["lsn"]) if self.position else 0

    def ids(self) -> Bag[int]:
        return Bag({int(row[0]): count for row, count in self.bags["orders"].items() if count})


async def test_each_change_once_over_lives_and_acceptors_that_go(tmp_path: Path) -> None:
    dice = random.Random(4)
    async with nodes(tmp_path) as those:
        wanted: Bag[int] = Bag()
        lab = Lab(those)
        end = 0
        for round_ in range(12):
            lines = []
            for number in range(round_ * 100, round_ * 100 + dice.choice((1, 100))):
                there = [id for id in wanted if wanted[id]] if dice.random() < 0.3 else []
                id = dice.choice(there) if there else number
                wanted[id] += -1 if there else 1
                lines.append(order(id, -1 if there else 1))
            end = await append(those, lines)
            for _ in range(dice.randrange(3)):
                async with lab.life() as source:  # killed before or behind a mark
                    if lab.lsn < end and not await lab.step(source) and dice.random() < 0.5:
                        await lab.step(source, taken=dice.random() < 0.5)
            node = those[dice.randrange(3)]
            async with lab.life() as source:
                if lab.lsn < end:
                    await lab.step(source)
                await node.down()
                if dice.random() < 0.5:
                    await lab.until(source, end)
                await node.up()
        async with lab.life() as source:
            await lab.until(source, end)
            assert lab.ids() == +wanted
            assert lab.ids().total() > 100
            lag = source.lag()
            assert (lag.known, lag.bytes_behind, lag.ms_behind) == (lsn_text(end), 0, 0)


async def test_a_source_of_a_log_without_changes_is_readable(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as those:
        await append(those, [])
        lab = Lab(those)
        async with lab.life() as source:
            while not lab.idle:
                await lab.step(source)
        assert len(lab.marks) == 1


async def test_what_acceptors_may_remove_is_durable_here(tmp_path: Path) -> None:
    async with nodes(tmp_path) as those:
        end = await append(those, [order(1), order(2)])
        begin = [node.timeline.acceptor.state.remote_consistent_lsn for node in those]
        assert max(begin) < end

        def told() -> list[int]:
            return [node.timeline.acceptor.state.remote_consistent_lsn for node in those]

        lab = Lab(those, look_ms=10)
        async with lab.life() as source:
            while lab.lsn < end:
                await lab.step(source, taken=False)
            idle = lab.idle
            while lab.idle < idle + 1:
                await lab.step(source)
            for _ in range(2):  # two looks at least
                await look(source)
            assert told() == begin
            await source.taken(lab.position or "")
            await look(source)
            assert told() == [end] * 3
        quiet = Lab(those, feedback=False)
        more = await append(those, [order(3)])
        async with quiet.life() as source:
            await quiet.until(source, more)
            await look(source)
            assert told() == [end] * 3
        async with lab.life() as source:  # another life says it again, of itself
            await lab.until(source, more)
        async with lab.life() as source:
            await look(source)
            assert told() == [more] * 3


async def test_what_stops_it_comes_when_all_before_is_durable(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as those:
        before = await append(those, [order(1), order(2)])
        await append(those, [json.dumps({"table": "gone", "row": {}}).encode(), order(3)])
        lab = Lab(those)
        async with lab.life() as source:
            while lab.lsn < before:
                await lab.step(source, taken=False)
            async with anyio.create_task_group() as group:
                raised = anyio.Event()

                async def stopped() -> None:
                    with pytest.raises(SourceUnreachable, match="to table 'gone', which is not"):
                        await source.next()
                    raised.set()

                group.start_soon(stopped)
                await anyio.wait_all_tasks_blocked()
                assert not raised.is_set(), "what was given is not durable yet"
                await source.taken(lab.position or "")
                await raised.wait()
        async with lab.life() as source:
            with pytest.raises(SourceUnreachable, match="to table 'gone', which is not") as failed:
                await lab.step(source)
            assert "undeclared=skip" in failed.value.hint
        assert lab.ids() == Bag([1, 2])


async def test_a_table_that_was_added_is_filled_from_the_begin(tmp_path: Path) -> None:
    async with nodes(tmp_path) as those:
        lines = [note(f"n{number}") if number % 3 else order(number) for number in range(300)]
        end = await append(those, lines[:200])
        lab = Lab(those)
        async with lab.life("orders") as source:
            await lab.until(source, end)
        end = await append(those, lines[200:])
        async with lab.life() as source:
            await lab.step(source)  # killed while it is filled
        assert "notes" not in lab.bags or "notes" in lab.filled
        async with lab.life() as source:
            await lab.until(source, end)
        assert lab.filled == {"notes"}
        assert lab.bags["notes"] == Bag((f"n{number}",) for number in range(300) if number % 3)
        assert lab.ids() == Bag(range(0, 300, 3))
        async with lab.life("orders") as source:
            await lab.until(source, await append(those, [order(999)]))
        assert lab.ids() == Bag([*range(0, 300, 3), 999])


async def test_a_table_that_went_and_comes_again_is_new(tmp_path: Path) -> None:
    """Also when nothing came meanwhile, and no acceptor is there."""
    async with nodes(tmp_path) as those:
        end = await append(those, [order(1), note("a")])
        lab = Lab(those)
        async with lab.life() as source:
            await lab.until(source, end)
        for node in those:
            await node.down()
        async with lab.life("orders") as source:
            assert await lab.step(source)
        for node in those:
            await node.up()
        del lab.bags["notes"]
        await append(those, [])
        async with lab.life() as source:
            while not lab.filled:
                await lab.step(source)
        assert (lab.filled, lab.bags["notes"]) == ({"notes"}, Bag([("a",)]))
        assert lab.ids() == Bag([1])


async def test_a_begin_that_was_removed(tmp_path: Path) -> None:
    """The log begins in a later segment: what was before is as if it had been removed."""
    begin = 3 * SEGMENT_BYTES + 40
    async with nodes(tmp_path) as those:
        end = await append(those, [order(1), note("x")], begin)
        lab = Lab(those)
        async with lab.life() as source:
            with pytest.raises(
                SourceUnreachable, match="no acceptor keeps the log from 0/1000028 any more"
            ):
                await lab.step(source)
        later = Lab(those, start_lsn=lsn_text(begin))
        async with later.life() as source:
            await later.until(source, end)
        assert later.ids() == Bag([1])
        # One table is as far as that; the other needs what is no longer there.
        lab.position = json.dumps(
            {"lsn": lsn_text(end), "timeline": TIMELINE, "tables": ["orders"]}
        )
        more = await append(those, [order(2), note("y")])
        async with lab.life() as source:
            await lab.until(source, more)
        assert lab.failed.keys() == {"notes"}
        assert "no acceptor keeps the log from 0/1000028" in lab.failed["notes"]
        assert lab.filled == {"notes"}, "its error can be read"
        assert lab.ids() == Bag([2])


async def test_what_is_said_when_it_is_made(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as those:
        lab = Lab(those)
        with pytest.raises(InvalidUsage, match="push something first, which creates the timeline"):
            await lab.source().describe(None)
        await append(those, [order(1)])
        assert [each.name for each in await lab.source().describe(None)] == ["orders", "notes"]
        [only] = await lab.source().describe({"orders": ["total"]})
        assert only.schema.names == ("id",)
        with pytest.raises(InvalidUsage, match=r"no table 'other' .available: orders, notes"):
            await lab.source().describe({"other": []})
        await those[0].down()
        await lab.source().describe(None)
        await those[1].down()
        with pytest.raises(
            SourceUnreachable, match="no acceptor responds: cannot connect"
        ) as failed:
            await lab.source().describe(None)
        assert "penstock wal status" in failed.value.hint
        async with lab.life() as source:
            with pytest.raises(
                SourceUnreachable,
                match="cannot read the log from 0/1000028: cannot connect to acceptor",
            ):
                await lab.step(source)


async def test_an_acceptor_that_is_down_is_noted(tmp_path: Path) -> None:
    async with nodes(tmp_path) as those:
        end = await append(those, [order(1)])
        lab = Lab(those)
        async with lab.life() as source:
            await lab.until(source, end)
            await those[2].down()
            assert source.lag().notes == ()
            await look(source)
            [told] = source.lag().notes
            assert told.startswith("1 of 3 acceptors fail: cannot connect to acceptor")


async def test_acceptors_that_wait_for_a_writer_are_noted(tmp_path: Path) -> None:
    """All were restarted, and what they saved trails behind what was committed."""
    async with nodes(tmp_path) as those:
        end = await append(those, [order(1)])
        lab = Lab(those)
        async with lab.life() as source:
            await lab.until(source, end)
        for node in those:
            await node.down()
            await node.up()
            assert node.timeline.acceptor.commit_lsn < end
        async with lab.life() as source:
            await lab.step(source)
            assert lab.idle == 1
            [told] = source.lag().notes
            assert f"everything before {lsn_text(end)} was read: they were restarted" in told
            assert source.lag().bytes_behind == 0
            end = await append(those, [order(2)])
            await lab.until(source, end)
            assert source.lag().notes == ()
        assert lab.ids() == Bag([1, 2])


# -- in a service ---------------------------------------------------------------------------------


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Client]:
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        source_tick_ms=50,
        retry_delay_ms_min=20,
        retry_delay_ms_max=200,
    )
    async with running_service(settings) as (_, client):
        yield client


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():
        await anyio.sleep(0.02)


async def status(client: Client) -> SourceStatus:
    (found,) = await client.sources()
    return found


async def test_in_a_service(tmp_path: Path) -> None:
    """Its tables and a view; an added table; a row that does not fit; a retraction of nothing."""
    async with nodes(tmp_path / "wal") as those:
        lines = [order(number % 50) for number in range(200)] + [note("a")]
        end = await append(those, lines)
        options = {
            "kind": "wal",
            "acceptors": ",".join(str(node.address) for node in those),
            "tenant": TENANT,
            "timeline": TIMELINE,
            "tables": {
                "orders": {"id": "bigint not null", "total": "decimal(12,2)"},
                "notes": {"text": "string"},
            },
        }

        async def read(client: Client, name: str, column: str) -> Bag[Any]:
            return Bag((await client.peek(name))[column].to_pylist())

        async with running(tmp_path) as client:
            await client.create_source("log", options, {"orders": "orders_in"})
            sql = "SELECT id, count(*) AS n FROM orders_in GROUP BY id"
            await client.create_materialized_view("n", sql)

            async def at(lsn: int) -> bool:
                told = (await status(client)).statistics
                return told is not None and f'"{lsn_text(lsn)}"' in (told.position_committed or "")

            await until(lambda: at(end))
            assert await read(client, "orders_in", "id") == Bag(n % 50 for n in range(200))
            told = (await status(client)).statistics
            assert told is not None
            assert (told.messages, told.rows_inserted) == (201, 200)
            assert (told.position_known, told.lag_bytes) == (lsn_text(end), 0)
            upper = (await status(client)).upper

            async def ticks() -> bool:
                return (await status(client)).upper > upper

            await until(ticks)
            await client.alter_source("log", ["notes"])
            await until(lambda: _holds(read(client, "notes", "text"), Bag(["a"])))
            await client.drop("notes")
            await client.alter_source("log", ["notes"])
            await until(lambda: _holds(read(client, "notes", "text"), Bag(["a"])))
        end = await append(those, [order(7, -1)] * 5)
        async with running(tmp_path) as client:
            await until(lambda: at(end))
            with pytest.raises(CorruptData, match="invalid data"):
                await client.peek("orders_in")
            end = await append(those, [order(7)])
            await until(lambda: at(end))
            found = await read(client, "orders_in", "id")
            assert found == Bag({n: 4 for n in range(50) if n != 7})
            await append(those, [b'{"table": "notes", "row": {"text": 5}}', order(1)])

            async def failed() -> bool:
                tables = {each.name: each.health for each in (await status(client)).tables}
                assert tables["orders_in"].status == "running"
                return "Expected `str | null`, got `int`" in (tables["notes"].error or "")

            await until(failed)
            assert (await read(client, "orders_in", "id"))[1] == 5
            await append(those, [order(1), b'{"table": "other", "row": {"text": 5}}', order(1)])

            async def stalled() -> bool:
                health = (await status(client)).health
                return health.status == "stalled" and "to table 'other'" in (health.error or "")

            await until(stalled)
            assert (await read(client, "orders_in", "id"))[1] == 6, "what is before it is taken"


async def _holds(found: Awaitable[Bag[Any]], wanted: Bag[Any]) -> bool:
    return await found == wanted
