"""Roles and rights: single rules, and any order of changes against a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.control.access.role_registry import (
    ADMIN,
    CONNECT,
    CREATE,
    EXECUTE_CODE,
    FORMAT_VERSION,
    OWN,
    READ,
    RIGHTS,
    SERVICE_RIGHTS,
    WRITE,
    RoleRegistry,
    token_digest,
)
from actors.model.pgwire.scram import make_verifier
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    ObjectExists,
    StateDirectoryError,
    UnknownObject,
)

VERIFIER = make_verifier("pencil", bytes(16))


def with_roles(*names: str) -> RoleRegistry:
    """A registry with these roles, none of which may log in."""
    registry = RoleRegistry()
    for name in names:
        registry = registry.create(name)
    return registry


def test_the_first_role_that_may_log_in_is_the_administrator() -> None:
    registry = with_roles("group")
    assert not registry.has_logins
    registry = registry.create("boss", login=True).create("other", login=True)
    assert registry.allows("boss", ADMIN)
    assert not registry.allows("other", ADMIN)
    # Also one that could not log in before.
    late = with_roles("late").set_login("late", login=True)
    assert late.allows("late", ADMIN)
    assert not registry.set_login("group", login=True).allows("group", ADMIN)


def test_names_are_compared_without_regard_to_case_and_keep_their_spelling() -> None:
    registry = with_roles("Ann").grant(["ANN"], [READ], ["u1"])
    assert registry.find("ann").name == "Ann"
    assert registry.allows("aNN", READ, "u1")
    with pytest.raises(ObjectExists):
        registry.create("ann")


@pytest.mark.parametrize(
    "name", ["", " a", "public", "PUBLIC", "none", "penstock.x", "__a", "a\nb"]
)
def test_names_that_roles_cannot_have(name: str) -> None:
    with pytest.raises(InvalidUsage):
        RoleRegistry().create(name)


def test_rights_on_objects_and_on_everything() -> None:
    registry = with_roles("a", "b").grant(["a"], [READ, WRITE], ["u1", "u2"])
    assert registry.allows("a", WRITE, "u2")
    assert not registry.allows("a", READ, "u3")
    assert not registry.allows("a", READ, None)
    assert not registry.allows("b", READ, "u1")
    registry = registry.grant(["b"], [READ], None)
    assert registry.allows("b", READ, "u3")
    assert not registry.allows("b", WRITE, "u3")
    # Who administers an object may do everything with it, and nothing with others.
    registry = registry.grant(["b"], [ADMIN], ["u9"])
    assert registry.allows("b", WRITE, "u9")
    assert not registry.allows("b", WRITE, "u1")
    assert not registry.allows("b", ADMIN, None)
    revoked = registry.revoke(["a"], [READ, WRITE], ["u1", "u2"])
    assert revoked.find("a").objects == {}


@pytest.mark.parametrize("right", [CREATE, CONNECT, EXECUTE_CODE])
def test_some_rights_are_on_the_service_alone(right: str) -> None:
    registry = with_roles("a").own("a", ["u1"])
    with pytest.raises(InvalidUsage, match=f"{right.upper()} is a right on the whole service"):
        registry.grant(["a"], [READ, right], ["u1"])
    # Neither an owner has it, nor an object's administrator.
    assert not registry.grant(["a"], [ADMIN], ["u2"]).allows("a", right, "u2")
    assert not registry.allows("a", right, "u1")
    assert registry.grant(["a"], [right], None).allows("a", right)
    assert registry.grant(["a"], [ADMIN], None).allows("a", right)


def test_owners_may_do_everything_until_the_object_is_dropped() -> None:
    registry = with_roles("a").own("a", ["u5"]).grant(["a"], [READ], ["u6"])
    assert all(registry.allows("a", right, "u5") for right in (READ, WRITE, ADMIN))
    assert not registry.allows("a", CREATE, "u5")
    # A REVOKE takes what was granted: an owner stays one.
    assert registry.revoke(["a"], [READ, WRITE, ADMIN], ["u5"]).allows("a", READ, "u5")
    dropped = registry.forget(["u5"])
    assert not dropped.allows("a", READ, "u5")
    assert dropped.allows("a", READ, "u6")
    assert registry.prune(["u5"]).find("a").objects == {"u5": (OWN,)}
    assert registry.own("nobody", ["u7"]) == registry


def test_tokens_are_of_roles_that_may_log_in_and_bounded() -> None:
    digests = [token_digest(f"t{number}") for number in range(3)]
    registry = with_roles("a").add_token("a", digests[0], 2).add_token("a", digests[1], 2)
    assert registry.role_of_token(digests[0]) is None
    registry = registry.set_login("a", login=True)
    assert registry.role_of_token(digests[0]) == "a"
    assert registry.role_of_token(digests[2]) is None
    assert registry.add_token("a", digests[0], 2) == registry
    with pytest.raises(InvalidUsage, match="role_tokens_max"):
        registry.add_token("a", digests[2], 2)
    assert registry.drop_tokens("a").role_of_token(digests[0]) is None


def test_a_token_comes_with_connect_and_goes_with_it() -> None:
    digest = token_digest("t")
    boss = RoleRegistry().create("boss", login=True).add_token("boss", digest)
    assert boss.find("boss").rights == (ADMIN,)
    registry = boss.create("a", login=True).add_token("a", token_digest("u"))
    assert registry.find("a").rights == (CONNECT,)
    assert not registry.allows("a", EXECUTE_CODE)
    gone = registry.revoke(["a"], [CONNECT], None)
    assert gone.role_of_token(token_digest("u")) is None
    # Granted again, the right brings back no token that was lost.
    assert gone.grant(["a"], [CONNECT], None).find("a").tokens == ()
    # An administrator has it by ADMIN, and loses it with that.
    assert boss.revoke(["boss"], [CONNECT], None).role_of_token(digest) == "boss"
    assert boss.revoke(["boss"], [ADMIN], None).role_of_token(digest) is None


def test_tokens_of_a_former_version_stay_valid_and_give_no_right_to_run_code() -> None:
    digest = token_digest("t")
    former = {
        "format": FORMAT_VERSION,
        "secret": b"s" * 32,
        "roles": [
            {"name": "boss", "login": True, "tokens": [digest], "rights": [ADMIN]},
            {"name": "a", "login": True, "tokens": [token_digest("u")], "rights": [CREATE]},
            {"name": "b", "login": True, "rights": []},
        ],
    }
    registry = RoleRegistry.decode(msgspec.msgpack.encode(former))
    assert registry.role_of_token(digest) == "boss"
    assert registry.role_of_token(token_digest("u")) == "a"
    rights = {name: entry.rights for name, entry in registry.roles.items()}
    assert rights == {"boss": (ADMIN,), "a": (CONNECT, CREATE), "b": ()}
    assert RoleRegistry.decode(registry.encode()) == registry


def test_roles_are_bounded_and_dropped() -> None:
    registry = with_roles("a", "b")
    with pytest.raises(InvalidUsage, match="roles_max"):
        registry.create("c", roles_max=2)
    assert set(registry.drop(["A"]).roles) == {"b"}
    refused: list[Callable[[], RoleRegistry]] = [
        lambda: registry.drop(["a", "x"]),
        lambda: registry.grant(["x"], [READ], None),
        lambda: registry.set_login("x", login=True),
        lambda: registry.set_verifier("x", VERIFIER),
    ]
    for change in refused:
        with pytest.raises(UnknownObject, match="no role named 'x'"):
            change()


def test_the_document_comes_back_and_holds_no_password() -> None:
    registry = RoleRegistry(secret=b"s" * 32).create("a", login=True, verifier=VERIFIER)
    registry = registry.grant(["a"], [READ], ["u1"]).own("a", ["u2"])
    data = registry.encode()
    assert RoleRegistry.decode(data) == registry
    assert b"pencil" not in data
    with pytest.raises(StateDirectoryError, match="format 9"):
        RoleRegistry.decode(msgspec.msgpack.encode({"format": FORMAT_VERSION + 8}))
    with pytest.raises(CorruptData):
        RoleRegistry.decode(b"\xc1")


# -- any order of changes --------------------------------------------------------------------------

NAMES, IDS = ("a", "b", "c"), ("u1", "u2", "u3")
names = st.sampled_from(NAMES)
rights = st.sets(st.sampled_from(RIGHTS), min_size=1)
object_rights = st.sets(st.sampled_from((READ, WRITE, ADMIN)), min_size=1)
ids = st.sets(st.sampled_from(IDS), min_size=1)
changes = st.one_of(
    st.tuples(st.just("create"), names),
    st.tuples(st.just("drop"), names),
    st.tuples(st.sampled_from(("grant", "revoke")), names, rights, st.none()),
    st.tuples(st.sampled_from(("grant", "revoke")), names, object_rights, ids),
    st.tuples(st.just("own"), names, ids),
    st.tuples(st.just("forget"), ids),
)


class PlainModel:
    """What is given, as a set: (role, right, id or None)."""

    def __init__(self) -> None:
        self.roles: set[str] = set()
        self.given: set[tuple[str, str, str | None]] = set()

    def change(self, kind: str, *given: Any) -> None:
        match kind, *given:
            case "create", name:
                self.roles.add(name)
            case "drop", name:
                self.roles.discard(name)
                self.given = {each for each in self.given if each[0] != name}
            case "grant" | "revoke", name, added, on:
                cells = {(name, right, each) for right in added for each in on or (None,)}
                if name in self.roles:
                    self.given = self.given | cells if kind == "grant" else self.given - cells
            case "own", name, on:
                if name in self.roles:
                    self.given |= {(name, OWN, each) for each in on}
            case "forget", on:
                self.given = {each for each in self.given if each[2] not in on}

    def allows(self, name: str, right: str, on: str | None) -> bool:
        has = {each[1:] for each in self.given if each[0] == name}
        if (ADMIN, None) in has or (right, None) in has:
            return True
        return on is not None and right not in SERVICE_RIGHTS and bool({OWN, ADMIN, right} & {
            each for each, there in has if there == on
        })  # fmt: skip


def changed(registry: RoleRegistry, kind: str, *given: Any) -> RoleRegistry:
    match kind:
        case "create":
            return registry.create(*given)
        case "drop":
            return registry.drop(given)
        case "grant" | "revoke":
            return getattr(registry, kind)([given[0]], *given[1:])  # type: ignore[no-any-return]
    return getattr(registry, kind)(*given)  # type: ignore[no-any-return]


@given(st.lists(changes, max_size=30))
def test_rights_are_those_of_a_plain_model(made: list[tuple[Any, ...]]) -> None:
    registry, model = RoleRegistry(), PlainModel()
    for change in made:
        try:
            after = changed(registry, *change)
        except (UnknownObject, ObjectExists):
            continue
        registry = after
        model.change(*change)
        for name in NAMES:
            for right in RIGHTS:
                for on in (*IDS, None):
                    assert registry.allows(name, right, on) == model.allows(name, right, on)
    assert RoleRegistry.decode(registry.encode()) == registry
