"""The durable roles: changes are queued, and carried out strictly one at a time.

Each makes a new registry of the last durable one and stores it by compare-and-set, under a key of
its own beside the catalog's. Rights are checked against it (`ControllerState.access`) only when it
is durable, and only then the client is told.

Whoever creates an object owns it. That is noted at once in memory, as the creator may use the
object with its very next request, and stored soon after: a crash in between leaves the object to
the administrators.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import msgspec

from actors.control.access.access_rules import UNPROVEN, AccessRules
from actors.control.access.role_registry import CONNECT, OWN, RIGHTS, ROLES_KEY, RoleRegistry
from actors.control.controller.catalog.boot import load_roles
from actors.control.controller.catalog.catalog import SOURCE_TABLE, TABLE, VIEW, CatalogObject
from actors.control.controller.roles.request_rights import object_named
from actors.control.controller.state import ControllerState, reply_error, to_penstock_error
from actors.durable.persist import CompareAndSet
from actors.model.pgwire.scram import ScramVerifier, parse_verifier
from actors.model.protocol.api import RequestDone
from actors.model.protocol.role_messages import (
    AlterRole,
    ChangeRights,
    CreateRole,
    DropRoles,
    ListRoles,
    RoleRight,
    RolesReport,
    RoleStatement,
    RoleStatus,
)
from actors.runtime.errors import (
    AccessDenied,
    InvalidUsage,
    PenstockError,
    StorageError,
    WriterFenced,
)
from actors.runtime.kernel import ActorAddress, RetryLoop
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.controller")

ChangeRegistry: TypeAlias = Callable[[RoleRegistry], RoleRegistry]
_DIGEST_BYTES: Final = 32
_READABLE: Final = frozenset({TABLE, SOURCE_TABLE, VIEW})


class RolesStored(msgspec.Struct, frozen=True, gc=False):
    """The running change has ended: with an error, or durably."""

    error: PenstockError | None = None
    read_back: tuple[RoleRegistry, int | None] | None = None
    """The durable record, if the error left it open whether the change was made."""


class _QueuedChange(msgspec.Struct, frozen=True, gc=False):
    """A change, and who is told of its end (None: nobody)."""

    change: ChangeRegistry
    session: ActorAddress[Any] | None = None
    request: int = 0
    text: str = ""
    """Answer to the client."""
    name: str = ""
    """Role that is created or altered."""
    unproven: bool = False
    """True if the session has proved no role."""
    trusted: bool = False
    """True if it came by the administrators' own listener, by which it always may."""


class RoleStore:
    """The queue of changes of roles."""

    def __init__(self, state: ControllerState, registry: RoleRegistry, seqno: int | None) -> None:
        """Begin with the durable roles."""
        self._state = state
        # Of objects that were dropped just before a crash: nobody can name them any more.
        self._durable = registry.prune(entry.id for entry in state.catalog.objects)
        self._seqno = seqno
        self._queue: deque[_QueuedChange] = deque()
        self._current: tuple[_QueuedChange, RoleRegistry] | None = None
        self._founders: dict[str, str] = {}
        """Roles of sessions that created the first one that may log in, by the session's path."""
        self.on_rules: Callable[[AccessRules, str], object] = state.sessions.apply
        """Told of changed rules before the client that has changed them, whose session's path is
        given, too."""
        self._owned: list[tuple[str, tuple[ObjectId, ...]]] = []
        """Owners of new objects that are not stored yet."""
        self._publish()

    def _publish(self, asker: str = "") -> None:
        """Let requests be checked against the durable registry, and the owners that are not stored
        yet."""
        required = self._state.settings.roles_required
        rules = AccessRules(self._with_owners(), required)
        if rules != self._state.access:
            self._state.access = rules
            self.on_rules(rules, asker)

    def _with_owners(self) -> RoleRegistry:
        """Return the durable registry, and in it the owners that are not stored yet."""
        registry = self._durable
        for role, ids in self._owned:
            registry = registry.own(role, ids)
        return registry

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, session: ActorAddress[Any], request: RoleStatement, role: str | None) -> None:
        """Queue a change for a session of this role. Raises `UnknownObject` and `InvalidUsage` for
        what is wrong in any case."""
        change, text = self._change_of(request, role)
        name = request.name if isinstance(request, CreateRole | AlterRole) else ""
        unproven, trusted = role == UNPROVEN, role is None
        self._queue.append(
            _QueuedChange(change, session, request.request, text, name, unproven, trusted)
        )
        self._next()

    def role_of(self, session: str, role: str | None) -> str | None:
        """Return the role of a session, which came with this one."""
        founder = self._founders.get(session) if role == UNPROVEN else None
        # Whoever created the first role knows its password, and goes on as that role.
        known = founder is not None and self._state.access.registry.get(founder) is not None
        return founder if known else role

    def session_closed(self, session: str) -> None:
        """Forget a session."""
        self._founders.pop(session, None)

    def report(self, request: ListRoles) -> RolesReport:
        """Return all roles, as the next request would be checked."""
        access, catalog = self._state.access, self._state.catalog
        # By names, as clients know no ids.
        found = []
        for entry in access.registry.roles.values():
            rights = [RoleRight(right) for right in entry.rights]
            for id_, given in entry.objects.items():
                on = catalog.get(id_)
                if on is not None:
                    rights += [RoleRight(right, on.name, on.kind) for right in given]
            has_password = entry.verifier is not None
            status = RoleStatus(
                entry.name, entry.login, has_password, len(entry.tokens), tuple(rights)
            )
            found.append(status)
        return RolesReport(request.request, tuple(found), access.wanted)

    def created(self, role: str | None, entries: Iterable[CatalogObject]) -> None:
        """Note who has created objects."""
        ids = tuple(entry.id for entry in entries)
        # Sessions without a role leave their objects to the administrators.
        if not role or not ids:
            return
        self._owned.append((role, ids))
        self._publish()
        # Every change stores the owners that are noted, so that this one has nothing to add.
        self._queue.append(_QueuedChange(lambda registry: registry))
        self._next()

    def dropped(self, entries: Iterable[CatalogObject]) -> None:
        """Forget the rights on objects that were dropped."""
        ids = frozenset(entry.id for entry in entries)
        self._owned = [
            (role, left)
            for role, own in self._owned
            if (left := tuple(id_ for id_ in own if id_ not in ids))
        ]
        # Asked first: most services have no roles, and need not store that.
        if self._durable.forget(ids) != self._durable or self._current or self._queue:
            self._queue.append(_QueuedChange(lambda registry: registry.forget(ids)))
            self._next()

    # -- changes -----------------------------------------------------------------------------------

    def _change_of(self, request: RoleStatement, role: str | None) -> tuple[ChangeRegistry, str]:
        """Return the change that a request of this role asks for, and the answer to it."""
        settings = self._state.settings
        match request:
            case CreateRole(_, name, login, verifier):
                made = _verifier(verifier)
                return (
                    lambda registry: registry.create(
                        name, login=login, verifier=made, roles_max=settings.roles_max
                    )
                ), ""
            case AlterRole():
                access = self._state.access
                by_itself = not access.is_free(role)
                change = _alteration(request, settings, by_itself=by_itself)
                connects = access.registry.allows(request.name, CONNECT)
                text = f"role {request.name} has CONNECT from now on, to use its token"
                return change, text if request.add_token and not connects else ""
            case DropRoles(_, names, if_exists):
                registry = self._durable
                known = [name for name in names if not if_exists or registry.get(name) is not None]
                absent = [name for name in names if name not in known]
                text = "\n".join(f"role {name!r} does not exist, skipping" for name in absent)
                return (lambda registry: registry.drop(known)), text
            case ChangeRights():
                return self._change_of_rights(request), ""

    def _change_of_rights(self, request: ChangeRights) -> ChangeRegistry:
        if wrong := [right for right in request.rights if right not in RIGHTS]:
            raise InvalidUsage(f"there is no right {wrong[0]!r}; there are {', '.join(RIGHTS)}")
        ids = self._ids(request)

        def change(registry: RoleRegistry) -> RoleRegistry:
            make = registry.revoke if request.revoke else registry.grant
            return make(request.roles, request.rights, ids)

        return change

    def _ids(self, request: ChangeRights) -> tuple[ObjectId, ...] | None:
        catalog = self._state.catalog
        if request.scope == "service":
            return None
        if request.scope == "tables":
            return tuple(entry.id for entry in catalog.objects if entry.kind in _READABLE)
        return tuple(object_named(catalog, name).id for name in request.names)

    def _next(self) -> None:
        """Begin the next change, unless one runs."""
        while self._current is None and self._queue:
            queued = self._queue.popleft()
            # Made of what is there now: changes before it may have been refused.
            try:
                changed = queued.change(self._with_owners())
                if not queued.trusted:
                    self._check_logins(changed)
                data = self._encoded(changed)
            except PenstockError as error:
                self._failed(queued, error)
                continue
            # Nothing to store, as for a right that the role has already.
            if changed == self._durable:
                self._ended(queued)
                continue
            if changed.has_logins and not self._durable.has_logins:
                queued = self._founding(queued)
            self._current = queued, changed
            self._state.ctx.effect(lambda data=data: self._store(data), done=lambda done: done)  # type: ignore[misc]

    def _check_logins(self, changed: RoleRegistry) -> None:
        """Raise `InvalidUsage` for a change after which nobody could log in."""
        # By a certificate a role is proved without a password.
        if self._state.settings.tls_authority or self._durable.locks_out:
            return
        if changed.locks_out:
            raise InvalidUsage(
                "nobody could log in any more: every client would have to prove a role, and no "
                "role with LOGIN would have a password or a token; give one a PASSWORD, or CREATE "
                "TOKEN FOR ROLE before ALTER ROLE … LOGIN"
            )

    def _founding(self, queued: _QueuedChange) -> _QueuedChange:
        """Return the change that makes the first role that may log in, with its notice."""
        text = (
            f"{queued.name} is the first role that may log in, so it is an administrator; from now "
            "on every client must prove a role"
        )
        if queued.unproven and queued.session is not None:
            self._founders[queued.session.path] = queued.name
        return msgspec.structs.replace(queued, text=text)

    def _encoded(self, registry: RoleRegistry) -> bytes:
        data, limit = registry.encode(), self._state.settings.roles_bytes_max
        if len(data) > limit:
            raise InvalidUsage(
                f"all roles and their rights would take {len(data)} bytes, more than {limit} "
                "(roles_bytes_max): GRANT a right on the whole service in place of many objects"
            )
        return data

    async def _store(self, data: bytes) -> RolesStored:
        persist, seqno = self._state.persist, self._seqno
        try:
            if await persist.compare_and_set([CompareAndSet(ROLES_KEY, seqno, data)]):
                return RolesStored()
            error: PenstockError = WriterFenced(
                f"the roles are no longer at seqno {seqno}: another service changed them; nothing "
                "was done",
                determinate=True,
            )
        except Exception as fault:  # noqa: BLE001 - each is the client's answer
            error = to_penstock_error(fault)
        if error.determinate:
            return RolesStored(error)
        # It may be durable or not: the record that is read back decides (`stored`).
        return RolesStored(error, await self._read_back())

    async def _read_back(self) -> tuple[RoleRegistry, int | None]:
        retry = RetryLoop(self._state.settings)
        # Retried forever: with another seqno than the durable one every later change would fail.
        while True:
            try:
                return await load_roles(self._state.persist)
            except StorageError as error:
                log.warning("the roles cannot be read back, trying again: %s", error)
            await retry.pause()

    def stored(self, message: RolesStored) -> None:
        """Take the end of a change."""
        assert self._current is not None
        (queued, changed), self._current = self._current, None
        error = message.error
        if message.read_back is not None:
            found, self._seqno = message.read_back
            if self._seqno is not None:
                self._durable = found
            # What is durable is what was to be stored: the answer alone was lost.
            if found == changed:
                error = None
        elif error is None:
            self._durable = changed
            self._seqno = 0 if self._seqno is None else self._seqno + 1
        if error is None:
            self._ended(queued)
        else:
            self._failed(queued, error)
        self._next()

    def _ended(self, queued: _QueuedChange) -> None:
        # An owner that is in the durable record need not be added to it any more.
        self._owned = [each for each in self._owned if not self._is_stored(*each)]
        if queued.session is not None and queued.session.path in self._founders:
            path = queued.session.path
            self._state.sessions.note_founder(path, self._founders[path])
        # Before the answer: whoever is told that a right is gone may rely on it.
        self._publish("" if queued.session is None else queued.session.path)
        if queued.session is not None:
            queued.session.reply(RequestDone(queued.request, queued.text))

    def _is_stored(self, role: str, ids: tuple[ObjectId, ...]) -> bool:
        entry = self._durable.get(role)
        return entry is None or all(OWN in entry.objects.get(id_, ()) for id_ in ids)

    def _failed(self, queued: _QueuedChange, error: PenstockError) -> None:
        self._publish()
        if queued.session is not None:
            if queued.name and not self._durable.has_logins:
                self._founders.pop(queued.session.path, None)
            reply_error(queued.session, queued.request, error)
        else:
            log.warning("owners or rights of objects are not stored: %s", error)

    def describe(self) -> str:
        """Return the number of roles, for people."""
        return f"{len(self._state.access.registry.roles)} roles"


def _verifier(text: str) -> ScramVerifier | None:
    return parse_verifier(text) if text else None


def _alteration(request: AlterRole, settings: Settings, *, by_itself: bool) -> ChangeRegistry:
    """Return the change. `by_itself`: a role asks for it that is no administrator."""
    if request.add_token and len(request.add_token) != _DIGEST_BYTES:
        raise InvalidUsage(f"the digest of a token has {_DIGEST_BYTES} bytes")
    verifier = None if request.verifier is None else _verifier(request.verifier)

    def change(registry: RoleRegistry) -> RoleRegistry:
        registry.find(request.name)
        if request.login is not None:
            registry = registry.set_login(request.name, login=request.login)
        if request.verifier is not None:
            registry = registry.set_verifier(request.name, verifier)
        if request.drop_tokens:
            registry = registry.drop_tokens(request.name)
        if request.add_token:
            # Here, and not when it came: a REVOKE may stand before it in the queue.
            if by_itself and not registry.allows(request.name, CONNECT):
                raise AccessDenied(AccessRules(registry).refusal(request.name, CONNECT))
            registry = registry.add_token(request.name, request.add_token, settings.role_tokens_max)
        return registry

    return change
