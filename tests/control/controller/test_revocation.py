"""Rights that are revoked while requests run: what ends, with which error, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from controller_world import World, with_row  # type: ignore[import-not-found]

from actors.control.access.access_rules import UNPROVEN, AccessRules
from actors.control.access.role_registry import ADMIN, READ, RoleRegistry
from actors.control.controller.catalog.catalog import CatalogObject
from actors.control.controller.messages import SubmitRequest
from actors.control.controller.roles.revocation import (
    TRUSTED,
    HeldRights,
    RunningRequest,
    held_reads,
    held_rights,
    lost_right,
    revoked,
)
from actors.control.controller.state import NoContentsYet
from actors.model.pgwire.scram import make_verifier
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.model.protocol.api import (
    CopyTo,
    CreateTable,
    ReadObject,
    RequestDone,
    RequestFailed,
    SubscribeChanges,
    SubscribeObject,
    WaitFor,
)
from actors.model.protocol.compute import SubscribeBatch, SubscribeResponse
from actors.model.protocol.role_messages import AlterRole, ChangeRights, CreateRole, DropRoles

ROLES = RoleRegistry().create("boss", login=True).create("app", login=True)
READER = ROLES.grant(("app",), (READ,), ("u1",))
SCHEMA = TableSchema((TableColumn("id", "bigint"),))
T, U = (CatalogObject(id=id_, name=id_, kind="table", schema=SCHEMA) for id_ in ("u1", "u2"))

VERIFIER = make_verifier("pencil", bytes(16)).text()


def same(session: str, role: str | None) -> str | None:
    return role


def refused(registry: RoleRegistry, held: HeldRights) -> str:
    found = lost_right(AccessRules(registry), held)
    return "" if found is None else str(found)


def test_a_request_goes_on_while_its_role_has_all_that_it_needs() -> None:
    one, both = held_reads("app", (T,)), held_reads("app", (T, U))
    assert refused(READER, one) == ""
    assert "may not read u2" in refused(READER, both)
    assert "GRANT READ ON u1 TO app" in refused(ROLES, one)
    # By another right as well: of all objects, as owner, as administrator.
    for registry in (
        ROLES.grant(("app",), (READ,), None),
        ROLES.own("app", ("u1",)),
        ROLES.grant(("app",), (ADMIN,), ("u1",)),
        ROLES.grant(("app",), (ADMIN,), None),
    ):
        assert refused(registry, one) == ""


def test_a_dropped_role_loses_also_what_needs_no_right() -> None:
    bare = HeldRights("app")
    assert refused(ROLES, bare) == ""
    assert "app was dropped" in refused(ROLES.drop(("app",)), bare)
    assert refused(ROLES.drop(("app",)), TRUSTED) == ""
    assert "requires a role" in refused(ROLES, held_reads(UNPROVEN, (T,)))


def test_rights_on_the_whole_service_are_needed_as_well() -> None:
    copy = held_rights("boss", ((ADMIN, None),))
    assert refused(ROLES, copy) == ""
    assert "is not an administrator" in refused(ROLES.revoke(("boss",), (ADMIN,), None), copy)
    assert copy.reads == ()
    assert held_rights(None, ((READ, T),)) is TRUSTED
    assert held_reads("app", (T,)).reads == (("u1", "u1"),)


def test_those_that_end_are_told_apart_from_those_that_go_on() -> None:
    running = [
        RunningRequest("a", 1, held_reads("app", (T,))),
        RunningRequest("a", 2, held_reads("app", (U,))),
        RunningRequest("b", 1, held_reads("boss", (U,))),
        RunningRequest("c", 1, TRUSTED),
        RunningRequest("founder", 1, held_reads(UNPROVEN, (U,))),
    ]

    def role_of(session: str, role: str | None) -> str | None:
        return "boss" if session == "founder" else role

    found = [
        (each.session, each.request) for each, _ in revoked(running, AccessRules(READER), role_of)
    ]
    assert found == [("a", 2)]
    assert len(list(revoked(running, AccessRules(READER), same))) == 2


# -- the controller --------------------------------------------------------------------------------


class RightsWorld:
    """One session that asks as one role or another; its answers come in order."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def submit(self, role: str | None, kind: Any, *given: Any, **named: Any) -> int:
        number: int = self.world.number()
        request = kind(number, *given, **named)
        await self.world.controller.send(
            SubmitRequest(self.world.session.address, request, "", role)
        )
        return number

    async def done(self, kind: Any, *given: Any, **named: Any) -> None:
        number = await self.submit(None, kind, *given, **named)
        answer = await self.world.answer()
        assert isinstance(answer, RequestDone), answer
        assert answer.request == number

    async def with_reader(self) -> None:
        await self.done(CreateRole, "boss", True)
        await self.done(CreateRole, "app", True)
        await self.grant()

    async def grant(self, *, revoke: bool = False) -> None:
        await self.done(ChangeRights, ("app",), (READ,), "objects", ("t",), revoke)

    async def ended_before(self, number: int, kind: Any, *given: Any) -> str:
        """Change something; return the error with which a request ends, which comes first."""
        change = await self.submit(None, kind, *given)
        error, answer = await self.world.answer(), await self.world.answer()
        assert isinstance(error, RequestFailed), error
        assert error.request == number
        assert isinstance(answer, RequestDone), answer
        assert answer.request == change
        assert error.code == "AccessDenied"
        return error.text


REVOKE = (ChangeRights, ("app",), (READ,), "objects", ("t",), True)


async def test_a_subscribe_ends_before_the_revoke_is_answered(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        rights = RightsWorld(world)
        await rights.with_reader()
        number = await rights.submit("app", SubscribeObject, "t")
        flow = (await world.created()).dataflow
        assert "app may not read t" in await rights.ended_before(number, *REVOKE)
        # What the dataflow tells now is nobody's.
        world.replica.respond(SubscribeResponse(flow.id, SubscribeBatch(time, time + 1, None)))
        await rights.done(CreateTable, "later", SCHEMA)


async def test_changes_say_what_they_are_of_to_roles_alone(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        rights = RightsWorld(world)
        await rights.with_reader()
        for role, expected in (("app", ["t"]), (None, [])):
            number = await rights.submit(role, SubscribeObject, "t")
            flow = (await world.created()).dataflow
            upper = flow.as_of + 1
            batch = SubscribeBatch(flow.as_of, upper, world_rows(flow.as_of))
            world.replica.respond(SubscribeResponse(flow.id, batch))
            changes = await world.session.expect(SubscribeChanges)
            assert (changes.request, [name for _, name in changes.reads]) == (number, expected)


def world_rows(time: int) -> bytes:
    """A row of the table, as an insertion at a time."""
    return to_ipc(
        pa.table(
            {
                "id": pa.array([1], pa.int64()),
                "n": pa.array([1], pa.int32()),
                TIME: pa.array([time], pa.int64()),
                DIFF: pa.array([1], pa.int64()),
            }
        )
    )


@pytest.mark.parametrize("kind", [ReadObject, WaitFor])
async def test_what_waits_ends_too(tmp_path: Path, kind: Any) -> None:
    async with with_row(tmp_path) as (world, time):
        rights = RightsWorld(world)
        await rights.with_reader()
        ahead = time + 10_000
        given: dict[str, Any] = {"as_of": ahead} if kind is ReadObject else {"time": ahead}
        number = await rights.submit("app", kind, "t", **given)
        await rights.ended_before(number, *REVOKE)
        number = await rights.submit("boss", kind, "t", **given)
        await rights.grant()
        assert "boss was dropped" in await rights.ended_before(number, DropRoles, ("boss",))


async def test_what_waits_for_the_first_contents_of_a_source_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_row(tmp_path) as (world, _):
        rights = RightsWorld(world)
        await rights.with_reader()
        state = world.system.cells["/controller"].actor._state
        entry = state.catalog.find("t")

        def nothing_yet(_: Any) -> int:
            raise NoContentsYet(entry)

        monkeypatch.setattr(state, "latest_with_contents", nothing_yet)
        monkeypatch.setattr(state.frontiers, "upper", lambda _: 0)
        number = await rights.submit("app", ReadObject, "t")
        assert "app may not read t" in await rights.ended_before(number, *REVOKE)


async def test_a_copy_ends_with_the_right_to_administer(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        rights = RightsWorld(world)
        await rights.with_reader()
        number = await rights.submit("boss", CopyTo, "t", "copies")
        change = (ChangeRights, ("boss",), (ADMIN,), "service", (), True)
        assert "is not an administrator" in await rights.ended_before(number, *change)


async def test_others_and_other_changes_end_nothing(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        rights = RightsWorld(world)
        await rights.with_reader()
        await rights.done(CreateRole, "other", True)
        await rights.done(ChangeRights, ("other",), (READ,), "service", ())
        for role in ("boss", "other", None):
            await rights.submit(role, ReadObject, "t", as_of=time + 10_000)
        await rights.grant(revoke=True)
        await rights.done(AlterRole, "other", None, "")
        await rights.done(DropRoles, ("app",))
        assert len(world.system.cells["/controller"].actor._reads) == 3


async def test_the_first_role_keeps_what_it_has_begun(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        rights = RightsWorld(world)
        await rights.submit(UNPROVEN, ReadObject, "t", as_of=time + 10_000)
        number = await rights.submit(UNPROVEN, CreateRole, "boss", True, VERIFIER)
        answer = await world.answer()
        assert isinstance(answer, RequestDone), answer
        assert answer.request == number
