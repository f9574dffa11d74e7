"""A little of the campaign of rights, and that it notices holes, which are planted here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import fuzz_rights
import pytest
from function_calls import CALLABLE, CallDrawer, Canaries
from fuzz_functions import wrong_calls
from fuzz_rights import RightsBroken, RoundCounts, run_round
from rights_connect import run_connect_round
from rights_model import ADMIN, READ, WRITE, ModelObject, ModelRole, RightsModel

from actors.control.access.access_rules import AccessRules
from actors.control.access.role_registry import RoleEntry, RoleRegistry
from actors.control.controller.roles import request_rights
from actors.doors.connect_gateway import gateway
from actors.doors.connect_gateway.plan_guard import PlanGuard

STATEMENTS = 200
SEED = 11
PLANTED = range(30, 40)
"""Seeds of rounds, of which one at least meets each planted hole."""


def outcomes(counts: RoundCounts) -> dict[str, int]:
    """Statements by outcome."""
    found: dict[str, int] = {}
    for kind, number in counts.kinds.items():
        outcome = kind.rpartition(": ")[2]
        found[outcome] = found.get(outcome, 0) + number
    return found


@pytest.mark.parametrize("run", [run_round, run_connect_round])
async def test_a_round_finds_nothing(run: Callable[..., Awaitable[RoundCounts]]) -> None:
    counts = await run(SEED, STATEMENTS)
    assert counts.statements >= STATEMENTS
    found = outcomes(counts)
    assert found["denied"] > STATEMENTS // 10, found
    assert found["done"] > STATEMENTS // 10, found


async def broken(run: Callable[..., Awaitable[RoundCounts]] = run_round) -> str:
    """What the first rounds find."""
    with pytest.raises(RightsBroken) as found:
        for seed in PLANTED:
            await run(seed, STATEMENTS)
    return str(found.value).partition("\n")[0]


# -- planted holes ---------------------------------------------------------------------------------


async def test_one_who_may_read_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    allows = RoleEntry.allows
    monkeypatch.setattr(
        RoleEntry, "allows", lambda role, right, id_: right == READ or allows(role, right, id_)
    )
    assert "may not: read on" in await broken()


@pytest.mark.second
async def test_a_write_without_its_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = request_rights.needed_rights
    monkeypatch.setattr(
        request_rights,
        "needed_rights",
        lambda *given: (need for need in needed(*given) if need[0] != WRITE),
    )
    assert "may not: write on" in await broken()


@pytest.mark.second
async def test_rows_in_an_error_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    canaries: list[str] = []
    canary, refusal = fuzz_rights.RightsRound.canary, AccessRules.refusal

    def noted(self: Any) -> str:
        canaries.append(canary(self))
        return canaries[-1]

    monkeypatch.setattr(fuzz_rights.RightsRound, "canary", noted)
    monkeypatch.setattr(
        AccessRules, "refusal", lambda self, *given: f"{refusal(self, *given)} {canaries[0]}"
    )
    assert "was shown CNR" in await broken()


@pytest.mark.second
async def test_a_grant_that_gives_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = RoleRegistry.grant
    monkeypatch.setattr(
        RoleRegistry,
        "grant",
        lambda self, roles, rights, ids: grant(self, roles, {*rights, READ}, ids),
    )
    assert "roles are other ones" in await broken()


@pytest.mark.second
async def test_a_service_that_refuses_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    allows = RoleEntry.allows
    monkeypatch.setattr(
        RoleEntry,
        "allows",
        lambda role, right, id_: ADMIN in role.rights and allows(role, right, id_),
    )
    assert "was refused what it may do" in await broken()


async def test_code_that_comes_to_spark_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "check_form", lambda *_: None)
    assert "what is for those who may run code" in await broken(run_connect_round)


@pytest.mark.second
@pytest.mark.parametrize("what", ["texts", "settings", "tokens"])
async def test_other_holes_of_spark_connect_are_found(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def nothing(*_: Any) -> None: ...

    if what == "texts":
        monkeypatch.setattr(PlanGuard, "check", nothing)
    elif what == "settings":
        monkeypatch.setattr(gateway, "check_settings", lambda *_: None)
    else:
        monkeypatch.setattr(RoleRegistry, "role_of_token", lambda *_: "boss")
    said = {"tokens": "a valid token"}.get(what, "may")
    assert said in await broken(run_connect_round)


# -- the model -------------------------------------------------------------------------------------


def test_the_model_of_rights() -> None:
    model = RightsModel()
    model.roles |= {"ann": ModelRole("ann"), "bob": ModelRole("bob", rights={"connect"}, tokens=1)}
    table = ModelObject("t", "table", rows={1: (1, "o", f"CNR{1:010x}"), 9: (9, "o", "x")})
    model.add("ann", table)
    view = ModelObject("v", "view", sources=(table,), above=5)
    plain = ModelObject("p", "plain view", sources=(view, table))
    for each in (view, plain):
        model.add("ann", each)
    assert view.contents() == {9: (9, "o", "x")}
    assert [on.name for _, on in model.reads(plain) if on is not None] == ["v", "t"]
    assert model.visible("ann") == {f"CNR{1:010x}"}
    assert model.visible("bob") == set()
    model.change_rights(["bob"], {READ}, [view])
    assert model.allows("bob", model.reads(view))
    assert not model.allows("bob", model.reads(plain))
    model.change_rights(["bob"], {READ}, [table])
    assert model.visible("bob") == {f"CNR{1:010x}"}
    model.change_rights(["bob"], {"connect"}, None, revoke=True)
    assert model.roles["bob"].tokens == 0
    model.drop(table, *model.dependents(table))
    assert model.objects == {}
    assert not model.allows("nobody", [])


# -- functions -------------------------------------------------------------------------------------


def test_lines_of_a_trace_are_judged() -> None:
    canaries = Canaries("/tmp/c", 4711, ("secret",))
    opened = 'openat(AT_FDCWD, "{}", O_RDONLY) = 5'
    wrong = [
        opened.format("/tmp/c/canaryfile.xml"),
        opened.format("/opt/x"),
        opened.format("/etc/resolv.conf"),
        'execve("/usr/bin/id", ["id"]) = 0',
        "clone(child_stack=NULL, flags=CLONE_VM|CLONE_VFORK|SIGCHLD) = 5",
        "connect(5, {sa_family=AF_INET, sin_port=htons(4711)}, 16) = 0",
        "connect(5, {sa_family=AF_INET, sin_port=htons(53)}, 16) = 0",
        'stat("/x/CanaryType.class") = -1',
    ]
    right = [
        opened.format("/usr/lib/x.jar"),
        opened.format("/state/scratch/x"),
        "clone(child_stack=NULL, flags=CLONE_VM|CLONE_THREAD|CLONE_FS) = 5",
        "connect(5, {sa_family=AF_INET, sin_port=htons(80)}, 16) = 0",
    ]
    assert wrong_calls([*wrong, *right], canaries, ("/usr/", "/state")) == wrong


def test_calls_of_all_functions_name_canaries() -> None:
    drawer = CallDrawer(Random(1), Canaries("/tmp/c", 4711, ("secret",)))
    calls = [drawer.call(name) for name in CALLABLE]
    assert len(CALLABLE) > 400
    named = [call for call in calls if "canary" in call.lower()]
    assert len(named) > len(calls) // 4
    assert "secret" not in "".join(calls)
    changed = {drawer.example("upper('a')") for _ in range(50)}
    assert {"upper('a')"} < changed
