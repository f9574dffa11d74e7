"""Views of subscribes: who may make them, and that they end with who made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller_world import KEYED, World, started, with_row  # type: ignore[import-not-found]

from actors.control.controller.catalog.boot import load
from actors.control.controller.catalog.ddl import CatalogStore
from actors.control.controller.catalog.subscribed_views import SubscribedViews, drop_left_views
from actors.control.controller.messages import SessionClosed, SubmitRequest
from actors.model.protocol.api import (
    CreateIndex,
    CreateTable,
    CreateView,
    DropObject,
    RequestDone,
    RequestFailed,
    WriteCommitted,
    WriteTables,
)
from actors.runtime.errors import ObjectExists, StorageError, UnknownObject
from actors.testing.probe import MessageProbe, settle

COUNT = "SELECT n, count(*) AS c FROM t GROUP BY n"
NAME = "__subscribe_1f"


def followed(number: int, name: str = NAME, **given: Any) -> CreateView:
    """The request for the view of a subscribe."""
    return CreateView(number, name, COUNT, for_subscribe=True, **given)


async def names(world: World) -> list[str]:
    return [entry.name for entry in (await load(world.persist)).catalog.objects]


async def gone(world: World, name: str = NAME) -> None:
    """Waits until the catalog has no such view."""
    while name in await names(world):
        await settle()


async def test_a_view_ends_with_the_session_that_made_it(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        other = MessageProbe.start(world.system, "other")
        await world.controller.send(SubmitRequest(other.address, followed(1, NAME)))
        await other.expect(RequestDone)
        await world.ask(CreateView(world.number(), "v", COUNT), RequestDone)
        assert await names(world) == ["t", NAME, "v"]
        await world.controller.send(SessionClosed(world.session.address.path))
        await settle()
        assert NAME in await names(world), "it is the other session's"
        await world.controller.send(SessionClosed(other.address.path))
        await gone(world)
        assert await names(world) == ["t", "v"]


async def test_a_session_that_is_gone_before_its_view_was_made(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        await world.submit(followed(world.number(), NAME))
        await world.controller.send(SessionClosed(world.session.address.path))
        await world.session.expect(RequestDone, request=world.numbers)
        # The answer to the service's own statement, which nobody awaits.
        await world.session.expect(RequestDone, request=0)
        assert await names(world) == ["t"]


async def test_a_drop_that_fails_is_repeated(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        await world.ask(followed(world.number(), NAME), RequestDone)
        drop, failures = world.persist.drop_shards, [StorageError("full", determinate=True)] * 2

        async def failing(*args: Any, **extra: Any) -> bool:
            if failures:
                raise failures.pop()
            return bool(await drop(*args, **extra))

        world.persist.drop_shards = failing
        await world.controller.send(SessionClosed(world.session.address.path))
        for _ in range(2):
            await world.session.expect(RequestFailed, code="StorageError")
        await world.session.expect(RequestDone)
        assert await names(world) == ["t"]


async def test_nothing_is_built_on_it_and_its_names_are_nobodys(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        await world.ask(followed(world.number(), NAME), RequestDone)
        refused = world.refused
        index = CreateIndex(world.number(), "i", NAME, ("n",))
        assert await refused(index) == "InvalidUsage"
        above = CreateView(world.number(), "w", f"SELECT n FROM {NAME}")
        assert await refused(above) == "InvalidUsage"
        for name in ("__subscribe_", "__subscribe_x", "__other", "w"):
            assert await refused(followed(world.number(), name)) == "InvalidUsage"
        # Whoever makes a view of their own under such a name is refused, too.
        for name in (NAME + "1", "__SUBSCRIBE_1F", "__other"):
            for replace, plain in ((False, False), (True, False), (False, True)):
                made = CreateView(world.number(), name, COUNT, replace=replace, plain=plain)
                assert await refused(made) == "InvalidUsage", made
        assert await refused(CreateTable(world.number(), NAME + "1", KEYED)) == "InvalidUsage"
        state = (await load(world.persist)).states["u1"]
        assert len(state.holds) == 2, "the table's retained history, and the one view"


async def test_it_goes_with_the_table_that_it_reads(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        await world.ask(followed(world.number(), NAME), RequestDone)
        await world.ask(DropObject(world.number(), "t"), RequestDone)
        assert await names(world) == []
        await world.ask(CreateTable(world.number(), "t", KEYED), RequestDone)
        await world.ask(CreateView(world.number(), "v", COUNT), RequestDone)
        await world.ask(followed(world.number(), NAME), RequestDone)
        assert await world.refused(DropObject(world.number(), "t")) == "ObjectInUse"


async def test_there_are_so_many_at_a_time(tmp_path: Path) -> None:
    async with with_row(tmp_path, sql_followed_queries_max=1) as (world, _):
        await world.ask(followed(world.number(), NAME), RequestDone)
        more = followed(world.number(), NAME + "0")
        assert await world.refused(more) == "ResourceBusy"
        await world.ask(DropObject(world.number(), NAME), RequestDone)
        await world.ask(more, RequestDone)


async def test_contents_begin_where_it_is_said(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        for _ in range(3):
            last = await world.ask(WriteTables(world.number(), ()), WriteCommitted)
        await world.ask(followed(world.number(), NAME, as_of=time), RequestDone)
        assert (await world.created()).dataflow.as_of == time
        # A time that is not sealed yet is taken for the latest one.
        ahead = followed(world.number(), NAME + "0", as_of=last.time + 1_000)
        await world.ask(ahead, RequestDone)
        assert time < (await world.created()).dataflow.as_of <= last.time
        state = (await load(world.persist)).states["u1"]
        held = dict(state.holds)
        await world.persist.set_holds([("u1", holder, last.time) for holder in held])
        below = followed(world.number(), NAME + "1", as_of=time - 1)
        assert await world.refused(below) == "ReadBelowSince"
        assert (await load(world.persist)).states["u1"].holds.keys() == held.keys()


async def test_what_a_killed_service_left_is_dropped(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        await world.ask(CreateView(world.number(), "v", COUNT), RequestDone)
        for number in range(2):
            await world.ask(followed(world.number(), f"{NAME}{number}"), RequestDone)
        found = await load(world.persist)
        store = CatalogStore(world.persist, world.executor, world.settings)
        after = await drop_left_views(found, world.persist, store)
        assert [entry.name for entry in after.catalog.objects] == ["t", "v"]
        held = (await world.persist.state("u1")).holds
        assert len(held) == 2, "the retained history's, and that of v"
        assert await drop_left_views(after, world.persist, store) is after


async def test_owners_by_name(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        views = SubscribedViews()
        one, two = (MessageProbe.start(world.system, name).address for name in ("one", "two"))
        views.submitted(one, followed(1, NAME))
        views.submitted(two, followed(1, NAME))
        views.failed(followed(1, NAME), ObjectExists("taken"))
        views.session_closed(two.path)
        assert views.left() == []
        views.session_closed(one.path)
        assert views.left() == [(one, NAME)]
        assert views.left() == [], "its drop is under way"
        views.failed(DropObject(0, NAME), StorageError("full", determinate=True))
        assert views.left() == [(one, NAME)]
        views.failed(DropObject(0, NAME), UnknownObject("gone"))
        views.session_closed(one.path)
        assert views.left() == []
