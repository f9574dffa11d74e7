"""The sessions that clients have open at all doors: who each is, what it runs, what it may do now.

The doors and the controller run in one event loop and share these objects: a door opens and closes
its sessions, and the controller publishes the rules between two of its turns. A door asks for its
rights at the place where it hands rows on. So once a REVOKE has been answered, no further row of
the object leaves, however many of them wait in buffers on the way.

A session logs in as one role (`login_role`), and may act as another one (`role`): see
`actors.control.access.session_role`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

from actors.control.access.access_rules import UNPROVEN, AccessRules
from actors.control.access.role_registry import READ
from actors.engine.sql.tokens import SqlDialect
from actors.runtime.errors import AccessDenied, PenstockError, SessionEnded, UnknownObject
from actors.runtime.measurement import Measurement, ValueHistogram
from actors.runtime.metric_table import SESSIONS, STATEMENT_ERRORS, STATEMENT_SECONDS
from actors.runtime.progress import ObjectId

SessionDoor = Literal["client", "postgresql", "connect", ""]
"""The door of a session; empty: a part of the service, which is not shown."""
ReadObjects: TypeAlias = tuple[tuple[ObjectId, str], ...]
"""Ids and names of objects whose rows an answer holds."""
NUMBER_MAX: Final = 2**31 - 1
"""Clients of PostgreSQL keep the number in a signed integer of four bytes."""


def session_loss(
    rules: AccessRules, login_role: str | None, role: str | None, token: bytes = b""
) -> str:
    """Return why a session of this role must end under these rules; "" if it may go on. Pure.

    Args:
        rules: The roles as they are now.
        login_role: The role that the session has proved.
        role: The role that it acts as.
        token: Digest of the token by which it was opened; empty: by none.
    """
    # Whoever has proved no role has none to lose: each request is checked.
    if not login_role:
        return ""
    entry = rules.registry.get(login_role)
    if entry is None:
        return f"role {login_role} was dropped"
    if not entry.login:
        return f"role {login_role} may not log in any more"
    if token and token not in entry.tokens:
        return f"the token of role {login_role} by which the session was opened was dropped"
    if role != login_role and not rules.is_free(login_role):
        return f"role {login_role} is no administrator any more, and may not act as role {role}"
    return ""


class DoorStatistics:
    """Counts of one door since the service started."""

    __slots__ = ("errors", "statements")

    def __init__(self) -> None:
        self.statements = ValueHistogram()
        """Durations of statements, in seconds."""
        self.errors: Counter[str] = Counter()
        """Statements that failed, by the class of the error."""


class OpenSession:
    """One session of a client. `OpenSessions.open` makes it."""

    def __init__(
        self,
        sessions: OpenSessions,
        number: int,
        door: SessionDoor,
        role: str | None,
        peer: str,
        token: bytes,
    ) -> None:
        self._sessions = sessions
        self.number = number
        """Number of the session; PostgreSQL's clients call it the process id."""
        self.door = door
        self.peer = peer
        self.token = token
        self.login_role = role
        """The role that the client has proved; see `access_rules`."""
        self.session_role = role
        """The role that RESET ROLE returns to: `login_role`, unless SET SESSION AUTHORIZATION has
        named another."""
        self.role = role
        """The role whose rights its requests have."""
        self.path = ""
        """Path of its `ClientSession` actor; empty: it has none of its own."""
        self.statistics = sessions.statistics_of(door)
        """Counts of its door."""
        self.since_ms = sessions.now_ms()
        self.requests = 0
        self.statement = ""
        """Text of the statement that runs, as it was sent; empty: none does."""
        self.statement_ms = self.since_ms
        """Time at which the statement began, or the last one ended."""
        self.ended: SessionEnded | None = None
        """Why the session was ended by somebody else than its client."""
        self.answer_first = False
        """True if it has itself asked for the change that ends it: it gets the answer before."""
        self.on_end: Callable[[SessionEnded], object] = lambda error: None
        """Called once when the session is to end."""
        self.on_cancel: Callable[[], object] = lambda: None
        """Called to cancel what runs."""
        self.on_rules: Callable[[], object] = lambda: None
        """Called when the rules have changed."""

    @property
    def rules(self) -> AccessRules:
        """Return the roles and rights as they are now."""
        return self._sessions.rules

    @property
    def is_listed(self) -> bool:
        """Return whether it is shown among the sessions: not once it was ended, though what it has
        may still be given back."""
        return bool(self.door) and self.ended is None

    def loss(self, rules: AccessRules) -> str:
        """Return why the session must end under these rules; "" if it may go on."""
        found = session_loss(rules, self.login_role, self.role, self.token)
        return found or session_loss(rules, self.login_role, self.session_role, self.token)

    def end(self, error: SessionEnded) -> None:
        """End the session: nothing more is handed to its client but this error. Idempotent."""
        if self.ended is None:
            # Before the door hears of it: its rows are checked against this from now on.
            self.ended = error
            self.on_end(error)

    def signal(self, *, end: bool) -> None:
        """End the session on request, or cancel what it runs."""
        if end:
            self.end(SessionEnded("terminating session on request"))
        else:
            self.on_cancel()

    def close(self) -> None:
        """Forget the session, which has ended. Idempotent."""
        self._sessions.close(self)

    def begin(self, text: str) -> None:
        """Show a statement as the one that runs; "": none does."""
        self.statement, self.statement_ms = text, self._sessions.now_ms()

    def clock_ms(self) -> float:
        """Return the monotonic clock, for `answered`."""
        return self._sessions.monotonic_ms()

    def answered(self, began_ms: float) -> None:
        """Count a statement that began at a reading of `clock_ms`."""
        self.statistics.statements.note((self._sessions.monotonic_ms() - began_ms) / 1000)

    @contextmanager
    def running(self, text: str, *, counts: bool = True) -> Iterator[None]:
        """Show a statement as the one that runs while the block does, and count its error. With
        `counts` its duration is counted, too: the block is the whole statement."""
        began_ms = self.clock_ms()
        self.begin(text)
        try:
            yield
        except PenstockError as error:
            self.statistics.errors[type(error).__name__] += 1
            raise
        finally:
            self.begin("")
            if counts:
                self.answered(began_ms)


class ReadRights:
    """The right of one result's rows to be handed on: what they are of, and for whom."""

    def __init__(self, session: OpenSession | None) -> None:
        """Begin a result that the session's present role reads. None: a session that is trusted."""
        self._session = session
        # As in PostgreSQL, a cursor belongs to the role that has opened it.
        self._role = None if session is None else session.role
        self._objects: dict[ObjectId, str] = {}

    def note(self, objects: ReadObjects) -> None:
        """Note that the result has rows of these objects."""
        self._objects.update(objects)

    def check(self) -> None:
        """Raise `AccessDenied` if the rows must not be handed on any more, `SessionEnded` if the
        session was ended."""
        session = self._session
        if session is None:
            return
        # One that had proved no role may have become the first one since.
        role = session.login_role if self._role == UNPROVEN else self._role
        if session.ended is not None:
            raise session.ended
        denied = lost_read(session.rules, role, self._objects.items())
        if denied is not None:
            raise denied


def lost_read(
    rules: AccessRules, role: str | None, objects: Iterable[tuple[ObjectId, str]]
) -> AccessDenied | None:
    """Return the refusal of a read of these objects; None if the role may read them all. Pure."""
    for id_, name in objects:
        if not rules.may(role, READ, id_):
            return AccessDenied(rules.refusal(role, READ, name))
    return None


class OpenSessions:
    """All sessions, and the rules that they are under."""

    def __init__(
        self, now_ms: Callable[[], int], monotonic_ms: Callable[[], float] | None = None
    ) -> None:
        """`now_ms` tells the time: ms since 1970. `monotonic_ms` measures durations; None: the same
        clock does."""
        self.now_ms = now_ms
        self.monotonic_ms = monotonic_ms or now_ms
        self._statistics: dict[SessionDoor, DoorStatistics] = {}
        self.rules = AccessRules()
        self._open: dict[int, OpenSession] = {}
        self._numbers = 0

    def __iter__(self) -> Iterator[OpenSession]:
        """Yield the sessions that are shown, by number."""
        return iter([each for each in self._open.values() if each.is_listed])

    def statistics_of(self, door: SessionDoor) -> DoorStatistics:
        """Return the counts of a door."""
        return self._statistics.setdefault(door, DoorStatistics())

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of the doors."""
        listed = Counter(each.door for each in self)
        for door, found in self._statistics.items():
            # The service's own requests come by no door.
            if not door:
                continue
            yield Measurement(SESSIONS, listed[door], (door,))
            yield Measurement(STATEMENT_SECONDS, found.statements, (door,))
            for kind, count in found.errors.items():
                yield Measurement(STATEMENT_ERRORS, count, (door, kind))

    def next_number(self) -> int:
        """Return a number that no session has. Numbers are not used again until all were: a late
        cancel must not meet another client's statement."""
        while True:
            self._numbers = self._numbers % NUMBER_MAX + 1
            if self._numbers not in self._open:
                return self._numbers

    def open(
        self,
        door: SessionDoor,
        role: str | None,
        peer: str = "",
        *,
        number: int = 0,
        token: bytes = b"",
        proven: bool = False,
    ) -> OpenSession:
        """Open a session.

        Args:
            door: Where the client came in.
            role: The role that it has proved; see `access_rules`.
            peer: Its address, for people.
            number: Its number, by `next_number`; 0: a new one.
            token: Digest of the token that it has shown.
            proven: True if the role must still be one that may log in.

        Raises:
            SessionEnded: The role was dropped, or may not log in, since it was proved.
        """
        number = number or self.next_number()
        made = OpenSession(self, number, door, role, peer, token)
        lost = made.loss(self.rules) if proven else ""
        if lost:
            raise SessionEnded(f"terminating session: {lost}")
        self._open[number] = made
        return made

    def close(self, session: OpenSession) -> None:
        """Forget a session. Idempotent."""
        if self._open.get(session.number) is session:
            del self._open[session.number]

    def find(self, number: int) -> OpenSession:
        """Return the session of a number. Raises `UnknownObject`."""
        found = self._open.get(number)
        if found is None or not found.is_listed:
            raise UnknownObject(
                f"there is no session {number}: penstock.sessions lists those that are open"
            )
        return found

    def note_founder(self, path: str, role: str) -> None:
        """Let the session with this `ClientSession` go on as the first role, which it has made: it
        knows its password."""
        for each in self._open.values():
            if each.path == path and each.login_role == UNPROVEN:
                each.login_role = each.session_role = each.role = role

    def apply(self, rules: AccessRules, asker: str = "") -> None:
        """Put all sessions under these rules, and end those that may not go on. `asker`: path of
        the `ClientSession` that has asked for the change."""
        # All of them at once: no row leaves under the old rules once one session is told.
        before, self.rules = self.rules, rules
        for each in list(self._open.values()):
            # One that was ended is there until its door has closed it.
            if each.ended is not None:
                continue
            lost = each.loss(rules)
            # One that had no such right before, as a part of the service, does not lose it.
            if lost and lost != each.loss(before):
                each.answer_first = bool(asker) and each.path == asker
                each.end(SessionEnded(f"terminating session: {lost}"))
            else:
                each.on_rules()


def may_signal(rules: AccessRules, role: str | None, target: OpenSession) -> bool:
    """Return whether a role may cancel a session's statement, or end it: an administrator may, and
    a role its own."""
    if rules.is_free(role):
        return True
    # By the role that was proved: one that acts as another stays its own.
    return bool(role) and role == target.login_role


def dialect_of(door: SessionDoor) -> SqlDialect:
    """Return the dialect of the statements that come in by a door."""
    return SqlDialect.POSTGRES if door == "postgresql" else SqlDialect.SPARK
