"""Sessions' rights, logins, and what refusals say."""

from __future__ import annotations

import pytest

from actors.control.access.access_rules import UNPROVEN, AccessRules
from actors.control.access.role_registry import (
    ADMIN,
    CONNECT,
    CREATE,
    EXECUTE_CODE,
    READ,
    RoleRegistry,
    token_digest,
)
from actors.model.pgwire.scram import check_password, make_verifier
from actors.runtime.errors import AccessDenied

VERIFIER = make_verifier("pencil", bytes(16))
BOSS = RoleRegistry(secret=b"x" * 32).create("boss", login=True, verifier=VERIFIER)
ROLES = BOSS.create("reader", login=True).create("group").grant(["reader"], [READ], ["u1"])


def test_a_session_without_a_role_may_everything_until_roles_are_wanted() -> None:
    none = AccessRules()
    assert none.may(UNPROVEN, ADMIN)
    assert AccessRules(RoleRegistry().create("group")).may(UNPROVEN, READ, "u1")
    for rules in (AccessRules(ROLES), AccessRules(required=True)):
        assert rules.wanted
        assert not rules.may(UNPROVEN, READ, "u1")
        assert rules.may(None, ADMIN)
        with pytest.raises(AccessDenied, match="connect again as a role"):
            rules.check(UNPROVEN, READ, "u1", "t")


def test_refusals_name_the_object_the_right_and_the_grant() -> None:
    rules = AccessRules(ROLES)
    rules.check("reader", READ, "u1", "t")
    for right, id_, name, text in (
        (READ, "u2", "t", "role reader may not read t: .*GRANT READ ON t TO reader"),
        (ADMIN, "u1", "t", "neither owns nor administers t: .*GRANT ADMIN ON t TO reader"),
        (CREATE, None, "", "may not create objects: .*GRANT CREATE TO reader"),
        (ADMIN, None, "", "is not an administrator: .*GRANT ADMIN TO reader"),
        (CONNECT, None, "", "may not use Spark Connect: .*GRANT CONNECT TO reader"),
        (EXECUTE_CODE, None, "", "may not use its own code, .*GRANT EXECUTE CODE TO reader"),
    ):
        with pytest.raises(AccessDenied, match=text):
            rules.check("reader", right, id_, name)
    with pytest.raises(AccessDenied, match="role gone was dropped"):
        rules.check("gone", READ, "u1", "t")


def test_of_roles_that_cannot_log_in_there_is_a_verifier_that_no_password_fits() -> None:
    rules = AccessRules(ROLES)
    assert rules.login("BOSS").role == "boss"
    assert check_password("pencil", rules.login("boss").verifier)
    for name in ("nobody", "group", "reader"):
        found = rules.login(name)
        assert found.wanted
        assert not check_password("", found.verifier)
        # The same each time, and of the form that real ones have.
        assert found == rules.login(name)
        assert rules.login(name.upper()).verifier == found.verifier
        assert len(found.verifier.salt) == len(VERIFIER.salt)
        assert found.verifier.iterations == VERIFIER.iterations
    assert rules.login("group").role == ""
    # It depends on a secret, so that nobody can tell it from a real one.
    others = AccessRules(RoleRegistry(secret=b"y" * 32))
    assert others.login("nobody").verifier != rules.login("nobody").verifier


def test_tokens() -> None:
    digest = token_digest("secret")
    rules = AccessRules(ROLES.add_token("reader", digest))
    assert rules.token_login(digest).role == "reader"
    assert rules.token_login(token_digest("")).role is None
    assert not AccessRules().token_login(digest).wanted
