"""The open sessions of all listeners: who each client is, what it runs, and what it may do now.

The listeners and the controller share these objects within one event loop. A listener opens and
closes its sessions; the controller publishes new rules between two of its turns. A listener checks
the rights again at the point where it sends rows to the client. So once a REVOKE has been answered,
no more rows of the object are sent, however many are buffered.

A session logs in as one role (`login_role`) and may act as another (`role`): see
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
"""The listener that a session came through; empty for a part of the service, which is not
listed."""
ReadObjects: TypeAlias = tuple[tuple[ObjectId, str], ...]
"""Ids and names of the objects whose rows an answer contains."""
NUMBER_MAX: Final = 2**31 - 1
"""PostgreSQL clients keep the session number in a signed 32-bit integer."""


def session_loss(
    rules: AccessRules, login_role: str | None, role: str | None, token: bytes = b""
) -> str:
    """Return why a session must end under these rules, or "" if it may continue. Pure.

    Args:
        rules: The roles as they are now.
        login_role: The role that the session has proved.
        role: The role that it acts as.
        token: Digest of the token that opened the session; empty if it used none.
    """
    # A session that has proved no role has none to lose: each of its requests is checked.
    if not login_role:
        return ""
    entry = rules.registry.get(login_role)
    if entry is None:
        return f"role {login_role} was dropped"
    if not entry.login:
        return f"role {login_role} may no longer log in"
    if token and token not in entry.tokens:
        return f"the token of role {login_role} that opened the session was dropped"
    if role != login_role and not rules.is_free(login_role):
        return f"role {login_role} is no longer an administrator, so it may not act as role {role}"
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
    """One client session, made by `OpenSessions.open`."""

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
        """Session number; PostgreSQL clients call it the process id."""
        self.door = door
        self.peer = peer
        self.token = token
        self.login_role = role
        """The role that the client has proved; see `access_rules`. Changes only in
        `note_founder`."""
        self.session_role = role
        """The role that RESET ROLE returns to: `login_role`, or the role named by SET SESSION
        AUTHORIZATION."""
        self.role = role
        """The role whose rights apply to its requests; SET ROLE changes it."""
        self.path = ""
        """Path of its `ClientSession` actor; empty if it has none."""
        self.statistics = sessions.statistics_of(door)
        """Counts of its door."""
        self.since_ms = sessions.now_ms()
        """Time at which the session was opened (ms since the epoch)."""
        self.requests = 0
        """Number of requests so far; its `ClientSession` counts them."""
        self.statement = ""
        """Text of the running statement as the client sent it; empty if none is running."""
        self.statement_ms = self.since_ms
        """Time at which the running statement started, or the last one ended."""
        self.ended: SessionEnded | None = None
        """Why the session was ended by someone other than its client; None until then."""
        self.answer_first = False
        """True if its own request made the change that ends it: the client gets that answer
        first."""
        self.on_end: Callable[[SessionEnded], object] = lambda error: None
        """Called once, when the session is told to end."""
        self.on_cancel: Callable[[], object] = lambda: None
        """Called to cancel whatever is running."""
        self.on_rules: Callable[[], object] = lambda: None
        """Called when the rules have changed."""

    @property
    def rules(self) -> AccessRules:
        """Return the current roles and rights."""
        return self._sessions.rules

    @property
    def is_listed(self) -> bool:
        """Return whether the session is listed. A session that was told to end no longer is, even
        while its resources are being released."""
        return bool(self.door) and self.ended is None

    def loss(self, rules: AccessRules) -> str:
        """Return why the session must end under these rules, or "" if it may continue."""
        found = session_loss(rules, self.login_role, self.role, self.token)
        return found or session_loss(rules, self.login_role, self.session_role, self.token)

    def end(self, error: SessionEnded) -> None:
        """End the session: its client gets nothing more except this error. Idempotent."""
        if self.ended is None:
            # Set before the listener is notified: from now on its rows are checked against this.
            self.ended = error
            self.on_end(error)

    def signal(self, *, end: bool) -> None:
        """End the session on request, or only cancel what it is running."""
        if end:
            self.end(SessionEnded("terminating session on request"))
        else:
            self.on_cancel()

    def close(self) -> None:
        """Remove the session, which has ended. Idempotent."""
        self._sessions.close(self)

    def begin(self, text: str) -> None:
        """Record the running statement; "" if none is running."""
        self.statement, self.statement_ms = text, self._sessions.now_ms()

    def clock_ms(self) -> float:
        """Return the monotonic clock, for `answered`."""
        return self._sessions.monotonic_ms()

    def answered(self, began_ms: float) -> None:
        """Count a statement that began at a reading of `clock_ms`."""
        self.statistics.statements.note((self._sessions.monotonic_ms() - began_ms) / 1000)

    @contextmanager
    def running(self, text: str, *, counts: bool = True) -> Iterator[None]:
        """Record a statement as running while the block executes, and count its error. With
        `counts`, also count its duration: the block is the whole statement."""
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
    """Checks, for one result, that its role may still read the objects whose rows it contains."""

    def __init__(self, session: OpenSession | None) -> None:
        """Start a result for the session's current role. None means a trusted session."""
        self._session = session
        # As in PostgreSQL, a cursor belongs to the role that opened it.
        self._role = None if session is None else session.role
        self._objects: dict[ObjectId, str] = {}
        """Names of the objects read so far, by id."""

    def note(self, objects: ReadObjects) -> None:
        """Record that the result contains rows of these objects."""
        self._objects.update(objects)

    def check(self) -> None:
        """Raise `AccessDenied` if the role may no longer read the rows, or `SessionEnded` if the
        session was ended."""
        session = self._session
        if session is None:
            return
        # A session without a role may since have become the first role.
        role = session.login_role if self._role == UNPROVEN else self._role
        if session.ended is not None:
            raise session.ended
        denied = lost_read(session.rules, role, self._objects.items())
        if denied is not None:
            raise denied


def lost_read(
    rules: AccessRules, role: str | None, objects: Iterable[tuple[ObjectId, str]]
) -> AccessDenied | None:
    """Return the refusal of a read of these objects, or None if the role may read all of them.
    Pure."""
    for id_, name in objects:
        if not rules.may(role, READ, id_):
            return AccessDenied(rules.refusal(role, READ, name))
    return None


class OpenSessions:
    """All open sessions and the rules that apply to them."""

    def __init__(
        self, now_ms: Callable[[], int], monotonic_ms: Callable[[], float] | None = None
    ) -> None:
        """Create an empty set. `now_ms` returns the time in ms since the epoch, and `monotonic_ms`
        measures durations (None: by the same clock)."""
        self.now_ms = now_ms
        self.monotonic_ms = monotonic_ms or now_ms
        self._statistics: dict[SessionDoor, DoorStatistics] = {}
        self.rules = AccessRules()
        """Roles and rights in force; `apply` replaces them."""
        self._open: dict[int, OpenSession] = {}
        """Sessions by number, including ended ones that their listener has not closed yet."""
        self._numbers = 0
        """The last number given out."""

    def __iter__(self) -> Iterator[OpenSession]:
        """Yield the listed sessions, in the order in which they were opened."""
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
        """Return an unused session number. A number is reused only after all others, so that a late
        cancel request cannot hit another client's statement."""
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
            door: The listener that the client came through.
            role: The role that the client has proved; see `access_rules`.
            peer: The client's address, for display.
            number: A number from `next_number`; 0 takes a new one.
            token: Digest of the token that the client presented.
            proven: True to check that the role may still log in.

        Raises:
            SessionEnded: The role was dropped, or lost LOGIN, after the client proved it.
        """
        number = number or self.next_number()
        made = OpenSession(self, number, door, role, peer, token)
        lost = made.loss(self.rules) if proven else ""
        if lost:
            raise SessionEnded(f"terminating session: {lost}")
        self._open[number] = made
        return made

    def close(self, session: OpenSession) -> None:
        """Remove a session. Idempotent."""
        if self._open.get(session.number) is session:
            del self._open[session.number]

    def find(self, number: int) -> OpenSession:
        """Return the listed session with this number. Raises `UnknownObject`."""
        found = self._open.get(number)
        if found is None or not found.is_listed:
            raise UnknownObject(
                f"there is no session {number}: penstock.sessions lists the open ones"
            )
        return found

    def note_founder(self, path: str, role: str) -> None:
        """Let the session of this `ClientSession` continue as the first role, which it created: it
        knows the role's password."""
        for each in self._open.values():
            if each.path == path and each.login_role == UNPROVEN:
                each.login_role = each.session_role = each.role = role

    def apply(self, rules: AccessRules, asker: str = "") -> None:
        """Apply new rules to all sessions and end those that may not continue. `asker` is the path
        of the `ClientSession` whose request changed the rules."""
        # Replace the rules for all sessions first, so that no row is sent under the old ones after
        # the first session is notified.
        before, self.rules = self.rules, rules
        for each in list(self._open.values()):
            # An ended session stays here until its listener closes it.
            if each.ended is not None:
                continue
            lost = each.loss(rules)
            # A session that never had the right, as a part of the service, does not lose it.
            if lost and lost != each.loss(before):
                each.answer_first = bool(asker) and each.path == asker
                each.end(SessionEnded(f"terminating session: {lost}"))
            else:
                each.on_rules()


def may_signal(rules: AccessRules, role: str | None, target: OpenSession) -> bool:
    """Return whether a role may cancel a session's statement or end the session: administrators may
    for any session, a role for its own."""
    if rules.is_free(role):
        return True
    # Compare with the proved role: a session that acts as another role still belongs to its own.
    return bool(role) and role == target.login_role


def dialect_of(door: SessionDoor) -> SqlDialect:
    """Return the SQL dialect of statements that come through a listener."""
    return SqlDialect.POSTGRES if door == "postgresql" else SqlDialect.SPARK
