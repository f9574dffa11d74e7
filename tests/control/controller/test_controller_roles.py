"""Roles in the controller: each request is checked, and changes are durable before the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from controller_world import KEYED, World, change, started  # type: ignore[import-not-found]
from msgspec.structs import replace

from actors.control.access.access_rules import UNPROVEN, AccessRules, RoleLogin, TokenLogin
from actors.control.access.role_registry import ADMIN, CREATE, READ, RoleRegistry
from actors.control.controller.catalog.boot import load
from actors.control.controller.catalog.catalog import CatalogSnapshot
from actors.control.controller.messages import FindLogin, FindToken, SubmitRequest
from actors.control.controller.roles.request_rights import check_request, needed_rights
from actors.model.pgwire.scram import make_verifier
from actors.model.protocol import api
from actors.model.protocol.api import (
    CreateIndex,
    CreateTable,
    CreateView,
    DropObject,
    ReadStatus,
    RequestDone,
    RequestFailed,
    StatusReport,
    WriteCommitted,
    WriteTables,
)
from actors.model.protocol.role_messages import (
    AlterRole,
    ChangeRights,
    CheckRight,
    CreateRole,
    DropRoles,
    ListRoles,
    RolesReport,
)
from actors.runtime.errors import AccessDenied, InvalidUsage, StorageError
from actors.testing.probe import MessageProbe

VERIFIER = make_verifier("pencil", bytes(16)).text()


class RolesWorld:
    """Requests of one session as one role or another."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def ask(self, role: str | None, kind: Any, *given: Any, **named: Any) -> Any:
        """Return the answer to a request of a role."""
        request = kind(self.world.number(), *given, **named)
        sent = SubmitRequest(self.world.session.address, request, "", role)
        await self.world.controller.send(sent)
        return await self.world.answer()

    async def done(self, role: str | None, kind: Any, *given: Any, **named: Any) -> str:
        """Return the text of an answer that says that the request is done."""
        answer = await self.ask(role, kind, *given, **named)
        assert isinstance(answer, RequestDone), answer
        return answer.text

    async def code(self, role: str | None, kind: Any, *given: Any, **named: Any) -> str:
        """Return the error of a request."""
        answer = await self.ask(role, kind, *given, **named)
        assert isinstance(answer, RequestFailed), answer
        return answer.code

    async def rights(self, name: str) -> list[tuple[str, str]]:
        """Return (right, object) of a role."""
        report = await self.ask(None, ListRoles)
        assert isinstance(report, RolesReport)
        (found,) = [role for role in report.roles if role.name == name]
        return sorted((right.right, right.on) for right in found.rights)


async def test_rights_are_checked_and_kept_over_a_restart(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(UNPROVEN, CreateTable, "t", KEYED)
        text = await roles.done(None, CreateRole, "boss", True, VERIFIER)
        assert "boss is the first role that may log in" in text
        assert await roles.done("boss", CreateRole, "app", True) == ""
        assert await roles.code("app", CreateTable, "u", KEYED) == "AccessDenied"
        row = (change("t", {"id": 1, "n": 1}),)
        assert await roles.code("app", WriteTables, row) == "AccessDenied"
        assert await roles.code("app", DropObject, "t") == "AccessDenied"
        assert await roles.code("app", CheckRight, "read", "t") == "AccessDenied"
        assert isinstance(await roles.ask("app", ReadStatus), StatusReport)
        grant = ("app",), ("read", "write"), "objects", ("T",)
        assert await roles.code("app", ChangeRights, *grant) == "AccessDenied"
        await roles.done("boss", ChangeRights, *grant)
        assert isinstance(await roles.ask("app", WriteTables, row), WriteCommitted)
        await roles.done("app", CheckRight, "read", "t")
        assert await roles.code("app", DropObject, "t") == "AccessDenied"

        await world.start("again")
        assert await roles.rights("app") == [("read", "t"), ("write", "t")]
        await roles.done("app", CheckRight, "write", "t")
        await roles.done("boss", ChangeRights, *grant, revoke=True)
        assert await roles.code("app", WriteTables, row) == "AccessDenied"
        assert await roles.rights("app") == []


async def test_creators_own_and_dropped_objects_leave_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(None, CreateRole, "boss", True, VERIFIER)
        await roles.done(None, CreateRole, "maker", True)
        await roles.done(None, CreateRole, "app", True)
        await roles.done("boss", ChangeRights, ("maker",), ("create",))
        await roles.done("maker", CreateTable, "t", KEYED)
        # An owner gives rights on the object, and no others.
        await roles.done("maker", ChangeRights, ("app",), ("read",), "objects", ("t",))
        assert await roles.code("maker", ChangeRights, ("app",), ("read",)) == "AccessDenied"
        assert await roles.rights("maker") == [("create", ""), ("own", "t")]
        assert await roles.rights("app") == [("read", "t")]

        await world.start("again")
        await roles.done("maker", CheckRight, "admin", "t")
        await roles.done("maker", DropObject, "t")
        assert await roles.rights("app") == []
        # The same name later is another object.
        await roles.done("boss", CreateTable, "t", KEYED)
        assert await roles.code("app", CheckRight, "read", "t") == "AccessDenied"
        assert await roles.code("maker", CheckRight, "read", "t") == "AccessDenied"
        found = (await load(world.persist)).roles
        assert found.find("app").objects == {}


async def test_the_first_role_closes_the_door_behind_everybody_but_its_maker(
    tmp_path: Path,
) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(UNPROVEN, CreateRole, "group")
        await roles.done(UNPROVEN, CreateTable, "t", KEYED)
        await roles.done(UNPROVEN, CreateRole, "boss", True, VERIFIER)
        # This session goes on as the role that it has made; all others must prove one.
        await roles.done(UNPROVEN, CreateTable, "u", KEYED)
        assert await roles.rights("boss") == [("admin", ""), ("own", "u")]
        other = MessageProbe.start(world.system, "other-session")
        await world.controller.send(SubmitRequest(other.address, ListRoles(1), "", UNPROVEN))
        assert (await other.expect(RequestFailed)).code == "AccessDenied"
        await roles.done(UNPROVEN, AlterRole, "boss", login=False)
        assert await roles.code(None, DropRoles, ("nobody",)) == "UnknownObject"
        text = await roles.done(None, DropRoles, ("nobody", "group"), if_exists=True)
        assert text == "role 'nobody' does not exist, skipping"


async def test_roles_change_their_own_password_and_nothing_else(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(None, CreateRole, "boss", True, VERIFIER)
        await roles.done(None, CreateRole, "app", True)
        await roles.done("app", AlterRole, "APP", verifier=VERIFIER, drop_tokens=True)
        assert await roles.code("app", AlterRole, "app", login=True) == "AccessDenied"
        assert await roles.code("app", AlterRole, "boss", verifier="") == "AccessDenied"
        await roles.done("boss", DropRoles, ("app",))
        assert await roles.code("app", ReadStatus) == "AccessDenied"
        assert await roles.code("app", AlterRole, "app", verifier="") == "AccessDenied"


async def test_tokens_are_an_administrators_to_give_or_of_who_may_connect(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(None, CreateRole, "boss", True, VERIFIER)
        await roles.done(None, CreateRole, "app", True)
        added = {"add_token": bytes(32)}
        assert await roles.code("app", AlterRole, "app", **added) == "AccessDenied"
        text = await roles.done("boss", AlterRole, "app", **added)
        assert text == "role app now has CONNECT, which it needs to use its token"
        assert await roles.rights("app") == [("connect", "")]
        # Once it has it, its tokens are its own affair, and nobody else's.
        assert await roles.done("app", AlterRole, "app", add_token=b"1" * 32) == ""
        assert await roles.code("app", AlterRole, "boss", **added) == "AccessDenied"

        async def login(digest: bytes) -> TokenLogin:
            found: TokenLogin = await world.controller.ask(lambda reply: FindToken(digest, reply))
            return found

        assert await login(bytes(32)) == TokenLogin(True, "app", runs_code=False)
        await roles.done(None, ChangeRights, ("app",), ("execute code",))
        assert await login(bytes(32)) == TokenLogin(True, "app", runs_code=True)
        await roles.done(None, ChangeRights, ("app",), ("connect",), revoke=True)
        assert await login(bytes(32)) == TokenLogin(True, None, runs_code=False)
        assert await roles.code("app", AlterRole, "app", **added) == "AccessDenied"


async def test_a_token_that_waits_behind_a_revoke_is_refused(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(None, CreateRole, "boss", True, VERIFIER)
        await roles.done(None, CreateRole, "app", True)
        await roles.done(None, ChangeRights, ("app",), ("connect",))
        other = MessageProbe.start(world.system, "other-session")
        revoke = ChangeRights(1, ("app",), ("connect",), revoke=True)
        for request, role in ((revoke, None), (AlterRole(2, "app", add_token=bytes(32)), "app")):
            await world.controller.send(SubmitRequest(other.address, request, "", role))
        assert (await other.expect(RequestDone)).request == 1
        assert (await other.expect(RequestFailed)).code == "AccessDenied"
        assert await roles.rights("app") == []


async def test_doors_are_told_how_users_come_in(tmp_path: Path) -> None:
    async with started(tmp_path, roles_required=True) as world:
        roles = RolesWorld(world)

        async def login(name: str) -> RoleLogin:
            found: RoleLogin = await world.controller.ask(lambda reply: FindLogin(name, reply))
            return found

        assert (await login("app")).wanted
        assert await roles.code(UNPROVEN, CreateRole, "app", True, VERIFIER) == "AccessDenied"
        mock = await login("app")
        await roles.done(None, CreateRole, "app", True, VERIFIER)
        found = await login("app")
        assert (found.verifier.text(), found.role) == (VERIFIER, "app")
        await roles.done(None, DropRoles, ("app",))
        # The secret behind verifiers of nobody is kept with the roles.
        await world.start("again")
        assert await login("app") == mock


async def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    async with started(tmp_path, roles_max=1, roles_bytes_max=600, role_tokens_max=1) as world:
        roles = RolesWorld(world)
        assert await roles.code(None, CreateRole, "a", False, "pencil") == "InvalidUsage"
        await roles.done(None, CreateRole, "a")
        assert await roles.code(None, CreateRole, "A") == "ObjectExists"
        assert await roles.code(None, CreateRole, "b") == "InvalidUsage"
        assert await roles.code(None, AlterRole, "a", add_token=b"short") == "InvalidUsage"
        await roles.done(None, AlterRole, "a", add_token=bytes(32))
        assert await roles.code(None, AlterRole, "a", add_token=b"1" * 32) == "InvalidUsage"
        await roles.done(None, AlterRole, "a", add_token=b"1" * 32, drop_tokens=True)
        assert await roles.code(None, ChangeRights, ("a",), ("fly",)) == "InvalidUsage"
        grant = ("a",), ("read",), "objects", ("nothing",)
        assert await roles.code(None, ChangeRights, *grant) == "UnknownObject"
        for number in range(60):
            await roles.done(None, CreateTable, f"t{number}", KEYED)
        assert await roles.code(None, ChangeRights, ("a",), ("read",), "tables") == "InvalidUsage"
        assert await roles.rights("a") == [("connect", "")]
        await roles.done(None, ChangeRights, ("a",), ("read",))


async def test_a_lost_answer_of_the_store_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        store = world.persist.compare_and_set

        async def lost(ops: Any) -> bool:
            await store(ops)
            raise StorageError("the answer was lost", determinate=False)

        monkeypatch.setattr(world.persist, "compare_and_set", lost)
        await roles.done(None, CreateRole, "a")

        async def failed(ops: Any) -> bool:
            raise StorageError("nothing was done", determinate=False)

        monkeypatch.setattr(world.persist, "compare_and_set", failed)
        assert await roles.code(None, CreateRole, "b") == "StorageError"
        monkeypatch.undo()
        await roles.done(None, CreateRole, "b")
        report = await roles.ask(None, ListRoles)
        assert [role.name for role in report.roles] == ["a", "b"]


# -- the rules alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(api.Request), ids=lambda kind: kind.__name__)
def test_a_role_without_rights_may_only_look(kind: type[Any]) -> None:
    """Every kind of request: those that change something, or read rows, need a right."""
    free = {
        "DescribeQuery", "EndRequest", "ExplainQuery", "ExplainView", "ListActors", "ListRoles",
        "ListSources", "ReadStatus", "RunQuery",
    }  # fmt: skip
    registry = RoleRegistry().create("boss", login=True).create("nobody", login=True)
    access, catalog = AccessRules(registry), _catalog()
    request = _example(kind)
    check_request(access, catalog, None, request)
    check_request(access, catalog, "boss", request)
    if kind.__name__ in free:
        check_request(access, catalog, "nobody", request)
    else:
        with pytest.raises(AccessDenied):
            check_request(access, catalog, "nobody", request)
    if kind is not api.EndRequest:
        for role in (UNPROVEN, "dropped"):
            with pytest.raises(AccessDenied):
                check_request(access, catalog, role, request)


def test_an_index_is_read_by_the_right_on_what_it_is_on() -> None:
    needed = list(needed_rights(_catalog(), api.ReadObject(1, "i")))
    assert [(right, entry.name) for right, entry in needed if entry is not None] == [(READ, "t")]
    made = list(needed_rights(_catalog(), CreateIndex(1, "j", "t", ("k",))))
    assert [right for right, _ in made] == ["create", READ]


def test_the_view_of_a_subscribe_is_read_by_the_rights_on_what_its_query_reads() -> None:
    found, name = _catalog(), "__subscribe_1"
    view = msgspec.structs.replace(
        found.find("t"), id="u9", name=name, kind="view", depends=("u1",)
    )
    catalog = CatalogSnapshot((*found.objects, view), 5)
    needed = {
        (right, None if entry is None else entry.name)
        for right, entry in needed_rights(catalog, api.SubscribeObject(1, name))
    }
    # Its owner would keep what the query reads.
    assert needed == {(READ, "t"), (READ, name)}


async def test_what_reaches_outside_is_for_administrators_by_each_request(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(None, CreateRole, "boss", login=True, verifier=VERIFIER)
        await roles.done("boss", CreateTable, "t", KEYED)
        await roles.done("boss", CreateTable, "u", KEYED)
        await roles.done("boss", CreateRole, "app", login=True, verifier=VERIFIER)
        await roles.done("boss", ChangeRights, ("app",), (CREATE,))
        await roles.done("boss", ChangeRights, ("app",), (READ,), "objects", ("t",))
        call = "SELECT reflect('a', 'b') AS v FROM t"
        requests: tuple[tuple[type[Any], tuple[Any, ...], dict[str, Any]], ...] = (
            (api.RunQuery, (), {}),
            (api.DescribeQuery, (), {}),
            (api.ExplainQuery, (), {}),
            (CreateView, ("v",), {}),
            (CreateView, ("p",), {"plain": True}),
            (CreateView, ("__subscribe_1f",), {"for_subscribe": True}),
        )
        for kind, names, given in requests:
            assert await roles.code("app", kind, *names, call, **given) == "AccessDenied", kind
            # What its query reads counts, too.
            text = "SELECT max(n) AS v FROM u"
            assert await roles.code("app", kind, *names, text, **given) == "AccessDenied", kind
            answer = await roles.ask("boss", kind, *names, call, **given)
            assert getattr(answer, "code", "") != "AccessDenied"
        # A plain view is inlined: its query is that of whoever reads it.
        await roles.done("boss", CreateView, "q", "SELECT max(n) AS v FROM t", plain=True)
        assert "mode: " in await roles.done("app", api.ExplainQuery, "SELECT v FROM q")
        await roles.done("app", CreateView, "w", "SELECT v + 0 AS v FROM q")


async def test_settings_of_a_view_are_an_allow_list_for_everybody(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        roles = RolesWorld(world)
        await roles.done(None, CreateTable, "t", KEYED)
        for name in ("spark.sql.catalog.p", "spark.sql.variable.substitute", "other"):
            for kind, names in ((CreateView, ("v",)), (api.ExplainQuery, ())):
                text = "SELECT max(n) AS v FROM t"
                answer = await roles.ask(None, kind, *names, text, conf={name: "x"})
                assert answer.code == "InvalidUsage"
                assert f"setting {name!r} belongs to the service" in answer.text
        conf = {"spark.sql.ansi.enabled": "true"}
        await roles.done(None, CreateView, "v", "SELECT max(n) AS v FROM t", conf=conf)


def test_only_the_view_of_a_subscribe_needs_no_right_to_create() -> None:
    registry = RoleRegistry().create("boss", login=True).create("app", login=True)
    access = AccessRules(registry)
    name = "__subscribe_1f"
    followed = CreateView(1, name, "SELECT 1 AS a", as_of=5, for_subscribe=True)
    check_request(access, _catalog(), "app", followed)
    assert list(needed_rights(_catalog(), CreateView(1, name, "SELECT 1"))) == [(CREATE, None)]
    more: tuple[dict[str, Any], ...] = (
        {"name": "v"},
        {"name": "__subscribe_"},
        {"plain": True},
        {"replace": True},
        {"conf": {"spark.sql.ansi.enabled": "false"}},
        {"retain_history_ms": 1},
        {"target_lag_ms": 1},
        {"comment": "mine"},
    )
    for each in more:
        with pytest.raises(InvalidUsage, match="of a subscribe"):
            check_request(access, _catalog(), "app", replace(followed, **each))


def _catalog() -> CatalogSnapshot:
    from actors.control.controller.catalog.catalog import CatalogObject

    def entry(number: int, name: str, kind: str, *depends: str) -> CatalogObject:
        id_ = f"u{number}"
        return CatalogObject(id=id_, name=name, kind=kind, schema=KEYED, depends=depends)

    entries = (
        entry(1, "t", "table"),
        entry(2, "i", "index", "u1"),
        entry(3, "t", "source"),
        entry(4, "t", "sink", "u1"),
    )
    return CatalogSnapshot(entries, 5)


def _example(kind: type[Any]) -> Any:
    given = {
        "name": "t", "on": "t", "schema": KEYED, "kind": "x", "configuration": b"",
        "key": ("k",), "sql": "SELECT 1", "time": 1, "target": 1, "table": "t", "path": "p",
        "format": "csv", "destination": "d", "add": (), "names": ("t",), "roles": ("nobody",),
        "rights": (ADMIN,), "right": READ, "changes": (api.TableChange("t"),), "number": 1,
    }  # fmt: skip
    fields = kind.__struct_fields__
    made = {name: given[name] for name in fields if name in given}
    return kind(request=1, **made)
