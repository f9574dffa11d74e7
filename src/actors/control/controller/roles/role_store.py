"""The durable roles: changes are queued and carried out strictly one at a time.

Each change makes a new registry from the last durable one and stores it by compare-and-set, under
its own key next to the catalog's. Only once it is durable are rights checked against it
(`ControllerState.access`), and only then is the client told.

The creator of an object owns it. Ownership takes effect in memory immediately, since the creator's
very next request may use the object, and is stored soon after. A crash in between leaves the object
to the administrators.
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
    """The running change has ended, with an error or durably."""

    error: PenstockError | None = None
    read_back: tuple[RoleRegistry, int | None] | None = None
    """The durable record, if the error left it open whether the change was made."""


class _QueuedChange(msgspec.Struct, frozen=True, gc=False):
    """A queued change, and the session to answer (None: nobody)."""

    change: ChangeRegistry
    session: ActorAddress[Any] | None = None
    request: int = 0
    text: str = ""
    """Text of the answer."""
    name: str = ""
    """Role that is created or altered."""
    unproven: bool = False
    """True if the session has proved no role."""
    trusted: bool = False
    """True if the session came through the administrators' own listener, where a role is never
    required."""


class RoleStore:
    """The queue of changes to roles."""

    def __init__(self, state: ControllerState, registry: RoleRegistry, seqno: int | None) -> None:
        """Start from the durable roles."""
        self._state = state
        # Drop rights on objects that no longer exist, for example because of a crash right after a
        # drop.
        self._durable = registry.prune(entry.id for entry in state.catalog.objects)
        self._seqno = seqno
        """Sequence number of the roles' key; None if it was never written."""
        self._queue: deque[_QueuedChange] = deque()
        """Changes to carry out, in order."""
        self._current: tuple[_QueuedChange, RoleRegistry] | None = None
        """The running change and the registry that it stores; None between two changes."""
        self._founders: dict[str, str] = {}
        """Role of each session that created the first role that may log in, by the session's
        path."""
        self.on_rules: Callable[[AccessRules, str], object] = state.sessions.apply
        """Called with new rules, before the client that changed them is answered, and with the path
        of its session."""
        self._owned: list[tuple[str, tuple[ObjectId, ...]]] = []
        """Owners of new objects that are not stored yet, each with the objects' ids."""
        self._publish()

    def _publish(self, asker: str = "") -> None:
        """Check requests from now on against the durable registry and the owners that are not
        stored yet."""
        required = self._state.settings.roles_required
        rules = AccessRules(self._with_owners(), required)
        if rules != self._state.access:
            self._state.access = rules
            self.on_rules(rules, asker)

    def _with_owners(self) -> RoleRegistry:
        """Return the durable registry with the owners added that are not stored yet."""
        registry = self._durable
        for role, ids in self._owned:
            registry = registry.own(role, ids)
        return registry

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, session: ActorAddress[Any], request: RoleStatement, role: str | None) -> None:
        """Queue a change for a session of this role. Raises `UnknownObject` and `InvalidUsage` for
        a request that is wrong in any state."""
        change, text = self._change_of(request, role)
        name = request.name if isinstance(request, CreateRole | AlterRole) else ""
        unproven, trusted = role == UNPROVEN, role is None
        self._queue.append(
            _QueuedChange(change, session, request.request, text, name, unproven, trusted)
        )
        self._next()

    def role_of(self, session: str, role: str | None) -> str | None:
        """Return the current role of a session that connected with this role."""
        founder = self._founders.get(session) if role == UNPROVEN else None
        # The session that created the first role knows its password, and continues as that role.
        known = founder is not None and self._state.access.registry.get(founder) is not None
        return founder if known else role

    def session_closed(self, session: str) -> None:
        """Forget a closed session."""
        self._founders.pop(session, None)

    def report(self, request: ListRoles) -> RolesReport:
        """Return all roles as the next request would be checked."""
        access, catalog = self._state.access, self._state.catalog
        # By name, since clients do not know ids.
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
        """Record the owner of new objects."""
        ids = tuple(entry.id for entry in entries)
        # Objects of sessions without a role belong to the administrators.
        if not role or not ids:
            return
        self._owned.append((role, ids))
        self._publish()
        # Every change stores the recorded owners, so this one adds nothing.
        self._queue.append(_QueuedChange(lambda registry: registry))
        self._next()

    def dropped(self, entries: Iterable[CatalogObject]) -> None:
        """Drop the rights on objects that were dropped."""
        ids = frozenset(entry.id for entry in entries)
        self._owned = [
            (role, left)
            for role, own in self._owned
            if (left := tuple(id_ for id_ in own if id_ not in ids))
        ]
        # Check first: most services have no roles and nothing to store.
        if self._durable.forget(ids) != self._durable or self._current or self._queue:
            self._queue.append(_QueuedChange(lambda registry: registry.forget(ids)))
            self._next()

    # -- changes -----------------------------------------------------------------------------------

    def _change_of(self, request: RoleStatement, role: str | None) -> tuple[ChangeRegistry, str]:
        """Return the change that a request of this role makes, with its answer."""
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
                text = f"role {request.name} now has CONNECT, which it needs to use its token"
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
            raise InvalidUsage(f"unknown right {wrong[0]!r}: expected one of {', '.join(RIGHTS)}")
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
        """Start the next change unless one is running."""
        while self._current is None and self._queue:
            queued = self._queue.popleft()
            # Apply it to the current registry: earlier changes may have been refused.
            try:
                changed = queued.change(self._with_owners())
                if not queued.trusted:
                    self._check_logins(changed)
                data = self._encoded(changed)
            except PenstockError as error:
                self._failed(queued, error)
                continue
            # There is nothing to store, for example because the role already has the right.
            if changed == self._durable:
                self._ended(queued)
                continue
            if changed.has_logins and not self._durable.has_logins:
                queued = self._founding(queued)
            self._current = queued, changed
            self._state.ctx.effect(lambda data=data: self._store(data), done=lambda done: done)  # type: ignore[misc]

    def _check_logins(self, changed: RoleRegistry) -> None:
        """Raise `InvalidUsage` for a change after which nobody could log in."""
        # With certificates a role can be proved without a password.
        if self._state.settings.tls_authority or self._durable.locks_out:
            return
        if changed.locks_out:
            raise InvalidUsage(
                "nobody could log in afterwards: clients would have to log in as a role, but no "
                "role with LOGIN has a password or a token; set a PASSWORD, or CREATE TOKEN FOR "
                "ROLE, before ALTER ROLE … LOGIN"
            )

    def _founding(self, queued: _QueuedChange) -> _QueuedChange:
        """Return the change that creates the first role that may log in, with its notice."""
        text = (
            f"{queued.name} is the first role that may log in, so it becomes an administrator; "
            "from now on every client must prove a role"
        )
        if queued.unproven and queued.session is not None:
            self._founders[queued.session.path] = queued.name
        return msgspec.structs.replace(queued, text=text)

    def _encoded(self, registry: RoleRegistry) -> bytes:
        data, limit = registry.encode(), self._state.settings.roles_bytes_max
        if len(data) > limit:
            raise InvalidUsage(
                f"roles and rights would take {len(data)} bytes (limit {limit}, roles_bytes_max): "
                "GRANT a right on the whole service instead of on many objects"
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
        # The change may or may not be durable: `stored` decides from the record read back.
        return RolesStored(error, await self._read_back())

    async def _read_back(self) -> tuple[RoleRegistry, int | None]:
        retry = RetryLoop(self._state.settings)
        # Retried forever: every later change would fail if our seqno were not the durable one.
        while True:
            try:
                return await load_roles(self._state.persist)
            except StorageError as error:
                log.warning("cannot read the roles back, retrying: %s", error)
            await retry.pause()

    def stored(self, message: RolesStored) -> None:
        """Handle the end of a change."""
        assert self._current is not None
        (queued, changed), self._current = self._current, None
        error = message.error
        if message.read_back is not None:
            found, self._seqno = message.read_back
            if self._seqno is not None:
                self._durable = found
            # The stored record is the wanted one: only the answer was lost.
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
        # Owners in the durable record need not be added to it any more.
        self._owned = [each for each in self._owned if not self._is_stored(*each)]
        if queued.session is not None and queued.session.path in self._founders:
            path = queued.session.path
            self._state.sessions.note_founder(path, self._founders[path])
        # Publish before answering: the client may rely on it that a revoked right is gone.
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
            log.warning("owners or rights of objects could not be stored: %s", error)

    def describe(self) -> str:
        """Return the number of roles as readable text."""
        return f"{len(self._state.access.registry.roles)} roles"


def _verifier(text: str) -> ScramVerifier | None:
    return parse_verifier(text) if text else None


def _alteration(request: AlterRole, settings: Settings, *, by_itself: bool) -> ChangeRegistry:
    """Return the change. `by_itself` means that the request comes from a role that is not an
    administrator."""
    if request.add_token and len(request.add_token) != _DIGEST_BYTES:
        raise InvalidUsage(f"invalid token digest: expected {_DIGEST_BYTES} bytes")
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
            # Check it here and not on arrival: a REVOKE may be ahead of it in the queue.
            if by_itself and not registry.allows(request.name, CONNECT):
                raise AccessDenied(AccessRules(registry).refusal(request.name, CONNECT))
            registry = registry.add_token(request.name, request.add_token, settings.role_tokens_max)
        return registry

    return change
