"""Open sessions: which of them changed rules end, whose rows leave, and whom they may act as."""

from __future__ import annotations

from functools import partial

import pytest

from actors.control.access.access_rules import UNPROVEN, AccessRules
from actors.control.access.open_sessions import OpenSession, OpenSessions, ReadRights, may_signal
from actors.control.access.role_registry import ADMIN, READ, RoleRegistry, token_digest
from actors.control.access.session_role import (
    restore_role,
    role_choice,
    set_role,
    set_session_authorization,
)
from actors.runtime.errors import AccessDenied, InvalidUsage, SessionEnded, UnknownObject
from actors.runtime.measurement import ValueHistogram
from actors.runtime.metric_table import SESSIONS, STATEMENT_ERRORS, STATEMENT_SECONDS

TOKEN = token_digest("one")
ROLES = (
    RoleRegistry()
    .create("boss", login=True)
    .create("app", login=True)
    .create("other", login=True)
    .create("group")
    .add_token("app", TOKEN)
    .grant(("app", "group"), (READ,), ("u1",))
)


class Opened:
    """Sessions under rules that a test changes."""

    def __init__(self, registry: RoleRegistry = ROLES) -> None:
        self.now = 0
        self.sessions = OpenSessions(lambda: self.now)
        self.registry = registry
        self.sessions.apply(AccessRules(registry))
        self.ended: list[tuple[str | None, str]] = []

    def open(self, role: str | None, token: bytes = b"", door: str = "postgresql") -> OpenSession:
        session = self.sessions.open(door, role, token=token, proven=True)  # type: ignore[arg-type]
        session.on_end = lambda error: self.ended.append((session.login_role, str(error)))
        return session

    def apply(self, registry: RoleRegistry) -> None:
        self.registry = registry
        self.sessions.apply(AccessRules(registry))

    def who_ended(self) -> list[str | None]:
        return [role for role, _ in self.ended]


def test_a_session_ends_with_its_role() -> None:
    world = Opened()
    for role in ("app", "app", "other", None, UNPROVEN):
        world.open(role)
    world.apply(ROLES.drop(("app",)))
    assert world.ended == [("app", "terminating session: role app was dropped")] * 2
    # Once each.
    world.apply(world.registry.grant(("other",), (READ,), None))
    assert len(world.ended) == 2
    world.apply(world.registry.set_login("other", login=False))
    assert world.ended[2] == ("other", "terminating session: role other may no longer log in")


def test_a_new_password_or_right_ends_nothing() -> None:
    world = Opened()
    world.open("app", TOKEN)
    world.apply(ROLES.set_verifier("app", None))
    world.apply(world.registry.revoke(("app",), (READ,), ("u1",)))
    world.apply(world.registry.add_token("app", token_digest("two")))
    assert world.ended == []


def test_a_dropped_token_ends_the_sessions_that_it_opened() -> None:
    world = Opened(ROLES.add_token("app", token_digest("two")))
    for token in (TOKEN, b""):
        world.open("app", token)
    world.apply(world.registry.drop_tokens("app").add_token("app", token_digest("two")))
    ((_, text),) = world.ended
    assert "the token of role app" in text


def test_a_session_that_was_ended_hears_of_no_rules_until_its_door_has_closed_it() -> None:
    """Its door may say that it was ended, which must not stop whoever changes the rules."""
    world = Opened()
    ended, other = world.open("app", TOKEN, door="connect"), world.open("other")
    told: list[object] = []

    def hear(session: OpenSession) -> None:
        ReadRights(session).check()
        told.append(session)

    for each in (ended, other):
        each.on_rules = partial(hear, each)
    world.apply(world.registry.drop_tokens("app"))
    world.apply(world.registry.grant(("group",), (READ,), ("u2",)))
    assert told == [other] * 2
    assert world.who_ended() == ["app"]


def test_a_part_of_the_service_does_not_lose_what_it_never_had() -> None:
    world = Opened()
    inner = world.sessions.open("", "group")
    inner.on_end = lambda error: world.ended.append(("group", str(error)))
    world.apply(ROLES.grant(("group",), (READ,), ("u2",)))
    assert world.ended == []
    world.apply(world.registry.drop(("group",)))
    assert world.who_ended() == ["group"]


def test_a_role_that_went_between_proof_and_session_is_not_let_in() -> None:
    world = Opened()
    world.apply(ROLES.drop(("app",)))
    with pytest.raises(SessionEnded, match="role app was dropped"):
        world.open("app")
    assert list(world.sessions) == []


def test_rows_leave_as_long_as_they_may_be_read() -> None:
    world = Opened()
    rights = ReadRights(world.open("app"))
    rights.check()
    rights.note((("u1", "t"),))
    rights.check()
    world.apply(ROLES.revoke(("app",), (READ,), ("u1",)))
    with pytest.raises(AccessDenied, match="app may not read t"):
        rights.check()
    world.apply(ROLES)
    rights.check()
    rights.note((("u2", "u"),))
    with pytest.raises(AccessDenied, match="app may not read u"):
        rights.check()
    trusted = ReadRights(None)
    trusted.note((("u1", "t"),))
    trusted.check()


def test_no_row_of_an_ended_session_leaves() -> None:
    world = Opened()
    session = world.open("boss")
    rights = ReadRights(session)
    rights.note((("u1", "t"),))
    session.signal(end=True)
    with pytest.raises(SessionEnded, match="on request"):
        rights.check()
    # The first reason stays.
    world.apply(ROLES.create("admin", login=True).grant(("admin",), (ADMIN,), None).drop(("boss",)))
    assert len(world.ended) == 1


def test_the_first_role_goes_on_with_what_it_reads() -> None:
    world = Opened(RoleRegistry())
    session, stranger = world.open(UNPROVEN), world.open(UNPROVEN)
    session.path = "/sessions/session-1"
    rights, others = ReadRights(session), ReadRights(stranger)
    for each in (rights, others):
        each.note((("u1", "t"),))
        each.check()
    world.sessions.note_founder("/sessions/session-1", "boss")
    world.apply(RoleRegistry().create("boss", login=True))
    rights.check()
    assert (session.role, session.login_role) == ("boss", "boss")
    with pytest.raises(AccessDenied, match="requires a role"):
        others.check()


def test_administrators_and_owners_may_signal() -> None:
    world = Opened()
    app, boss = world.open("app"), world.open("boss")
    rules = world.sessions.rules
    assert may_signal(rules, "boss", app)
    assert may_signal(rules, None, app)
    assert may_signal(rules, "app", app)
    assert not may_signal(rules, "app", boss)
    assert not may_signal(rules, UNPROVEN, world.open(UNPROVEN))
    assert may_signal(AccessRules(), UNPROVEN, boss)


def test_numbers_name_the_sessions_that_are_shown() -> None:
    world = Opened()
    first, inner = world.open("app"), world.open("app", door="")
    assert world.sessions.find(first.number) is first
    for number in (inner.number, 0, 999):
        with pytest.raises(UnknownObject, match=f"no session {number}"):
            world.sessions.find(number)
    canceled = []
    first.on_cancel = lambda: canceled.append(1)
    first.signal(end=False)
    assert (canceled, first.ended) == ([1], None)
    first.close()
    first.close()
    assert list(world.sessions) == []
    # A number is not given again at once.
    assert world.open("app").number > inner.number


def test_what_runs_is_shown() -> None:
    world = Opened()
    session = world.open("app")
    world.now = 5
    with session.running("SELECT 1"):
        assert (session.statement, session.statement_ms) == ("SELECT 1", 5)
        world.now = 7
    assert (session.statement, session.statement_ms, session.since_ms) == ("", 7, 0)


def test_statements_are_counted_by_door() -> None:
    world = Opened()
    first, second = world.open("app"), world.open("app", door="client")
    part_of_the_service = world.open("app", door="")
    for session in (first, first, second, part_of_the_service):
        with session.running("SELECT 1"):
            world.now += 30
    with first.running("", counts=False):  # a message that is no statement
        world.now += 30
    for error in (AccessDenied("no"), AccessDenied("no"), SessionEnded("over")):
        with pytest.raises(type(error)), first.running("SELECT 2"):
            raise error
    world.sessions.close(second)
    found = {(each.metric, each.labels): each.value for each in world.sessions.measures()}
    durations = found.pop((STATEMENT_SECONDS, ("postgresql",)))
    assert isinstance(durations, ValueHistogram)
    assert sum(durations.counts) == 5
    assert durations.total == pytest.approx(0.06)
    durations = found.pop((STATEMENT_SECONDS, ("client",)))
    assert isinstance(durations, ValueHistogram)
    assert sum(durations.counts) == 1
    assert found == {
        (SESSIONS, ("postgresql",)): 1,
        (SESSIONS, ("client",)): 0,
        (STATEMENT_ERRORS, ("postgresql", "AccessDenied")): 2,
        (STATEMENT_ERRORS, ("postgresql", "SessionEnded")): 1,
    }


# -- acting as another role ------------------------------------------------------------------------


def test_an_administrator_may_become_any_role_and_a_role_itself() -> None:
    world = Opened()
    boss, app = world.open("boss"), world.open("app")
    set_role(boss, "APP")
    assert (boss.role, boss.session_role) == ("app", "boss")
    set_role(boss, "group")
    set_role(boss, "None")
    assert boss.role == "boss"
    set_role(app, "app")
    for name in ("boss", "other", "group"):
        with pytest.raises(AccessDenied, match=f'permission denied to set role "{name}"'):
            set_role(app, name)
    for session in (boss, app):
        with pytest.raises(InvalidUsage, match='role "nobody" does not exist'):
            set_role(session, "nobody")
    assert (boss.role, app.role) == ("boss", "app")


def test_authorization_is_checked_by_the_role_that_was_proved() -> None:
    world = Opened()
    boss, app = world.open("boss"), world.open("app")
    set_session_authorization(boss, "app")
    assert (boss.role, boss.session_role) == ("app", "app")
    with pytest.raises(AccessDenied):
        set_role(boss, "other")
    set_session_authorization(boss, "other")
    set_session_authorization(boss, None)
    assert (boss.role, boss.session_role) == ("boss", "boss")
    with pytest.raises(AccessDenied, match="set session authorization"):
        set_session_authorization(app, "boss")


def test_rows_are_read_by_the_role_that_asked_for_them() -> None:
    world = Opened()
    boss = world.open("boss")
    before = ReadRights(boss)
    set_role(boss, "group")
    after = ReadRights(boss)
    for rights in (before, after):
        rights.note((("u2", "u"),))
    before.check()
    with pytest.raises(AccessDenied, match="role group may not read u"):
        after.check()


@pytest.mark.parametrize("change", [set_role, set_session_authorization])
def test_who_is_no_administrator_any_more_acts_as_nobody_else(change: object) -> None:
    world = Opened()
    acting, other = world.open("boss"), world.open("boss")
    change(acting, "app")  # type: ignore[operator]
    world.apply(ROLES.revoke(("boss",), (ADMIN,), None))
    ((_, text),) = world.ended
    assert "boss is no longer an administrator, so it may not act as role app" in text
    assert (acting.ended is not None, other.ended is None) == (True, True)


def test_going_back_does_not_undo_that_a_role_was_proved() -> None:
    world = Opened(RoleRegistry())
    session = world.open(UNPROVEN)
    session.path = "/s"
    begun = role_choice(session)
    world.sessions.note_founder("/s", "boss")
    restore_role(session, begun)
    assert (session.role, session.session_role) == ("boss", "boss")
