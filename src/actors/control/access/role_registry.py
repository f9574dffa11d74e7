"""Roles and their rights: one immutable value, stored in full under one consensus key.

A role has rights on objects and rights on the whole service. Objects are referenced by id, so a
rename keeps their rights, and since ids are never reused, a dropped object leaves none behind.
Passwords and tokens are never stored, only the SCRAM verifier of a password and the digest of a
token. Pure.

>>> registry = RoleRegistry().create("boss", login=True).create("reader", login=True)
>>> registry = registry.grant(("reader",), (READ,), ("u7",))
>>> registry.allows("reader", READ, "u7"), registry.allows("reader", WRITE, "u7")
(True, False)
>>> registry.allows("boss", WRITE, "u7")  # the first role that may log in is the administrator
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.model.pgwire.scram import ScramVerifier
from actors.model.protocol.relations import check_name, fold
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    ObjectExists,
    StateDirectoryError,
    UnknownObject,
)
from actors.runtime.progress import ObjectId

ROLES_KEY: Final = "roles"
FORMAT_VERSION: Final = 1
READ: Final = "read"
WRITE: Final = "write"
CREATE: Final = "create"
ADMIN: Final = "admin"
CONNECT: Final = "connect"
"""May use Spark Connect and create its own tokens for it."""
EXECUTE_CODE: Final = "execute code"
"""May run its own code in Spark, and thereby do whatever the service's operating-system user
may."""
OWN: Final = "own"
"""Not granted: the role that creates an object gets it."""
RIGHTS: Final = (READ, WRITE, CREATE, ADMIN, CONNECT, EXECUTE_CODE)
OBJECT_RIGHTS: Final = frozenset({READ, WRITE, ADMIN})
"""Rights that exist on a single object."""
SERVICE_RIGHTS: Final = frozenset(RIGHTS) - OBJECT_RIGHTS
"""Rights that exist only on the whole service."""
TOKEN_BYTES: Final = 32
"""Number of random bytes in a token."""
_RESERVED: Final = frozenset({"public", "none", "current_user", "current_role", "session_user"})
"""Names that mean something else where SQL expects a role."""
_ChangeRights: TypeAlias = Callable[[frozenset[str], frozenset[str]], frozenset[str]]
"""Computes a role's new rights from its current rights and the rights named in the statement."""


def token_digest(token: str) -> bytes:
    """Return the digest that is stored in place of a token."""
    # One round of a fast hash is enough: a token is random and cannot be guessed.
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


class RoleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One role and its rights."""

    name: str
    login: bool = False
    """True if the role may log in."""
    verifier: ScramVerifier | None = None
    """Verifier of its password; None if it has no password."""
    tokens: tuple[bytes, ...] = ()
    """Digests of its tokens for Spark Connect."""
    rights: tuple[str, ...] = ()
    """Rights on the whole service, sorted."""
    objects: dict[ObjectId, tuple[str, ...]] = {}
    """Rights on single objects, sorted, `OWN` included."""

    def allows(self, right: str, id_: ObjectId | None) -> bool:
        """Return whether the role has a right on an object, or on the whole service if `id_` is
        None."""
        if ADMIN in self.rights:
            return True
        if id_ is None or right in SERVICE_RIGHTS:
            return right in self.rights
        here = self.objects.get(id_, ())
        # The owner or administrator of an object may do everything with it.
        return OWN in here or ADMIN in here or right in here or right in self.rights


class _RolesFormat(msgspec.Struct, frozen=True):
    """The part of the document that every version can read."""

    format: int


class _RolesDocument(msgspec.Struct, frozen=True):
    format: int
    secret: bytes
    roles: tuple[RoleEntry, ...]


class RoleRegistry(msgspec.Struct, frozen=True):
    """All roles. Each change returns a new registry."""

    roles: dict[str, RoleEntry] = {}
    """Roles by case-folded name: role names, like object names, ignore case."""
    secret: bytes = b""
    """Random key from which verifiers of nonexistent roles are derived; never shown."""

    # -- queries -----------------------------------------------------------------------------------

    @property
    def has_logins(self) -> bool:
        """Return whether any role may log in."""
        return any(entry.login for entry in self.roles.values())

    @property
    def locks_out(self) -> bool:
        """Return whether roles may log in but none of them has a password or a token to do so."""
        logins = [entry for entry in self.roles.values() if entry.login]
        return bool(logins) and not any(entry.verifier or entry.tokens for entry in logins)

    def get(self, name: str) -> RoleEntry | None:
        """Return the role with this name, or None."""
        return self.roles.get(fold(name))

    def find(self, name: str) -> RoleEntry:
        """Return the role with this name. Raises `UnknownObject`."""
        entry = self.get(name)
        if entry is None:
            raise UnknownObject(f"there is no role named {name!r}: SHOW ROLES lists them")
        return entry

    def allows(self, name: str, right: str, id_: ObjectId | None = None) -> bool:
        """Return whether a role has a right; see `RoleEntry.allows`. A role that does not exist has
        none."""
        entry = self.get(name)
        return entry is not None and entry.allows(right, id_)

    def role_of_token(self, digest: bytes) -> str | None:
        """Return the name of the role that has this token digest and may log in, or None."""
        # No constant-time comparison is needed: an attacker cannot choose a digest byte by byte.
        for entry in self.roles.values():
            if entry.login and digest in entry.tokens:
                return entry.name
        return None

    # -- roles -------------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        *,
        login: bool = False,
        verifier: ScramVerifier | None = None,
        roles_max: int | None = None,
    ) -> RoleRegistry:
        """Return a registry with one more role.

        Raises:
            ObjectExists: A role of that name exists.
            InvalidUsage: The name is reserved or invalid, or there are already `roles_max` roles.
        """
        check_name("role", name)
        if fold(name) in _RESERVED:
            raise InvalidUsage(f"role name {name!r} is reserved: choose another name")
        if self.get(name) is not None:
            raise ObjectExists(f"role {name!r} already exists")
        if roles_max is not None and len(self.roles) >= roles_max:
            raise InvalidUsage(
                f"too many roles: there are already {len(self.roles)} (roles_max); DROP ROLE one "
                "first"
            )
        # The first role that may log in is an administrator: see `set_login`.
        rights = (ADMIN,) if login and not self.has_logins else ()
        entry = RoleEntry(name=name, login=login, verifier=verifier, rights=rights)
        return self._with(entry)

    def set_login(self, name: str, *, login: bool) -> RoleRegistry:
        """Return a registry in which a role may, or may not, log in. Raises `UnknownObject`."""
        entry = self.find(name)
        rights = entry.rights
        # Once a role may log in, every client must prove a role. If this first one were not an
        # administrator, no client of that listener could grant any rights.
        if login and not self.has_logins and ADMIN not in rights:
            rights = _sorted((*rights, ADMIN))
        return self._with(replace(entry, login=login, rights=rights))

    def set_verifier(self, name: str, verifier: ScramVerifier | None) -> RoleRegistry:
        """Return a registry in which a role has this password, or none. Raises `UnknownObject`."""
        return self._with(replace(self.find(name), verifier=verifier))

    def add_token(self, name: str, digest: bytes, tokens_max: int | None = None) -> RoleRegistry:
        """Return a registry in which a role has one more token, and `CONNECT`, without which a
        token is useless. Raises `UnknownObject`, and `InvalidUsage` for too many tokens."""
        entry = self.find(name)
        if digest in entry.tokens:
            return self
        if tokens_max is not None and len(entry.tokens) >= tokens_max:
            raise InvalidUsage(
                f"too many tokens: role {entry.name} already has {len(entry.tokens)} "
                f"(role_tokens_max); DROP TOKENS FOR ROLE {entry.name} first"
            )
        return self._with(_with_connect(replace(entry, tokens=(*entry.tokens, digest))))

    def drop_tokens(self, name: str) -> RoleRegistry:
        """Return a registry in which a role has no tokens. Raises `UnknownObject`."""
        return self._with(replace(self.find(name), tokens=()))

    def drop(self, names: Iterable[str]) -> RoleRegistry:
        """Return a registry without these roles. The objects that they own remain, and only
        administrators may change them. Raises `UnknownObject`."""
        gone = {fold(self.find(name).name) for name in names}
        # A role's rights are stored in its entry, so they go with it.
        kept = {key: entry for key, entry in self.roles.items() if key not in gone}
        return replace(self, roles=kept)

    # -- rights ------------------------------------------------------------------------------------

    def grant(
        self, roles: Iterable[str], rights: Iterable[str], ids: Iterable[ObjectId] | None
    ) -> RoleRegistry:
        """Return a registry in which these roles also have these rights, on objects or (`ids` None)
        on the whole service. Raises `UnknownObject`, and `InvalidUsage` for a right that does not
        exist on objects."""
        return self._changed(roles, rights, ids, lambda old, given: old | given)

    def revoke(
        self, roles: Iterable[str], rights: Iterable[str], ids: Iterable[ObjectId] | None
    ) -> RoleRegistry:
        """Return a registry in which these roles no longer have these rights; see `grant`. Revoking
        a right on an object keeps the same right on the whole service, and whatever an owner may
        do. Revoking `CONNECT` drops the role's tokens."""
        return self._changed(roles, rights, ids, lambda old, given: old - given)

    def own(self, name: str, ids: Iterable[ObjectId]) -> RoleRegistry:
        """Return a registry in which a role owns these objects, or this registry if the role does
        not exist."""
        entry = self.get(name)
        # The role may have been dropped while its object was being created.
        if entry is None:
            return self
        objects = dict(entry.objects)
        for id_ in ids:
            objects[id_] = _sorted({*objects.get(id_, ()), OWN})
        return self._with(replace(entry, objects=objects))

    def forget(self, ids: Iterable[ObjectId]) -> RoleRegistry:
        """Return a registry without any rights on these objects, which were dropped."""
        gone = frozenset(ids)
        # Return this same registry, so that the caller need not store it.
        if not any(gone & entry.objects.keys() for entry in self.roles.values()):
            return self
        return replace(self, roles={key: _without(e, gone) for key, e in self.roles.items()})

    def prune(self, known: Iterable[ObjectId]) -> RoleRegistry:
        """Return a registry that keeps rights only on these objects."""
        named = {id_ for entry in self.roles.values() for id_ in entry.objects}
        return self.forget(named - frozenset(known))

    def _changed(
        self,
        roles: Iterable[str],
        rights: Iterable[str],
        ids: Iterable[ObjectId] | None,
        change: _ChangeRights,
    ) -> RoleRegistry:
        given = frozenset(rights)
        # Check before changing anything: a statement takes effect in full or not at all.
        objects = None if ids is None else tuple(ids)
        if objects is not None and given - OBJECT_RIGHTS:
            wrong = ", ".join(sorted(given - OBJECT_RIGHTS)).upper()
            raise InvalidUsage(
                f"{wrong} is a right on the whole service, not on an object: omit ON …"
            )
        made = self
        for name in roles:
            entry = made.find(name)
            if objects is None:
                entry = replace(entry, rights=_sorted(change(frozenset(entry.rights), given)))
            else:
                # Copy the rights once for all objects: a role may have rights on many.
                kept = dict(entry.objects)
                for id_ in objects:
                    kept[id_] = _sorted(change(frozenset(kept.get(id_, ())), given))
                    if not kept[id_]:
                        del kept[id_]
                entry = replace(entry, objects=kept)
            made = made._with(entry)
        return made

    def _with(self, entry: RoleEntry) -> RoleRegistry:
        # A role that loses the right to use tokens also loses its tokens, so that a later GRANT
        # does not revive them. So a role with tokens has the right, and logins need not check it.
        if entry.tokens and not entry.allows(CONNECT, None):
            entry = replace(entry, tokens=())
        return replace(self, roles={**self.roles, fold(entry.name): entry})

    # -- the document ------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the document to store."""
        document = _RolesDocument(FORMAT_VERSION, self.secret, tuple(self.roles.values()))
        return msgspec.msgpack.encode(document)

    @staticmethod
    def decode(data: bytes) -> RoleRegistry:
        """Decode a stored document. Raises `StateDirectoryError` (unknown format) and
        `CorruptData`, whose texts quote nothing of it."""
        try:
            # Check the format first, so that a newer document is refused as such and not as
            # corrupt.
            found = msgspec.msgpack.decode(data, type=_RolesFormat).format
            if found != FORMAT_VERSION:
                raise StateDirectoryError(
                    f"the roles have format {found}, but this version reads only format "
                    f"{FORMAT_VERSION}: use the version that wrote them"
                )
            document = msgspec.msgpack.decode(data, type=_RolesDocument)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"consensus key {ROLES_KEY!r}: {error}", determinate=True) from None
        # Versions before CONNECT existed stored tokens without it: keep those valid.
        roles = (_with_connect(entry) if entry.tokens else entry for entry in document.roles)
        return RoleRegistry({fold(entry.name): entry for entry in roles}, document.secret)


def _sorted(rights: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(rights))


def _with_connect(entry: RoleEntry) -> RoleEntry:
    if entry.allows(CONNECT, None):
        return entry
    return replace(entry, rights=_sorted((*entry.rights, CONNECT)))


def _without(entry: RoleEntry, gone: frozenset[ObjectId]) -> RoleEntry:
    if not gone & entry.objects.keys():
        return entry
    kept = {id_: rights for id_, rights in entry.objects.items() if id_ not in gone}
    return replace(entry, objects=kept)
