"""Roles and their rights, as one immutable value that is stored whole under one consensus key.

A role has rights on objects, and rights on the whole service. Objects are named by id: a rename
keeps their rights, and as ids are never used twice, nothing is left of the rights of a dropped one.
No password is here, but the SCRAM verifier of it; no token, but its digest. Pure.

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
"""Uses Spark Connect, and makes tokens of its own for it."""
EXECUTE_CODE: Final = "execute code"
"""Runs code of its own in Spark, and so does what the service's operating-system user may do."""
OWN: Final = "own"
"""Not granted: the role that creates an object has it."""
RIGHTS: Final = (READ, WRITE, CREATE, ADMIN, CONNECT, EXECUTE_CODE)
OBJECT_RIGHTS: Final = frozenset({READ, WRITE, ADMIN})
"""Rights that there are on a single object."""
SERVICE_RIGHTS: Final = frozenset(RIGHTS) - OBJECT_RIGHTS
"""Rights that there are on the whole service alone."""
TOKEN_BYTES: Final = 32
"""Length of the randomness in a token."""
_RESERVED: Final = frozenset({"public", "none", "current_user", "current_role", "session_user"})
"""Names that mean something else where a role is named in SQL."""
_ChangeRights: TypeAlias = Callable[[frozenset[str], frozenset[str]], frozenset[str]]
"""Makes the rights that a role has then of those that it has, and of those that are named."""


def token_digest(token: str) -> bytes:
    """Return what is kept of a token."""
    # One round of a fast hash is enough: a token is random, and no guess comes near it.
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


class RoleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One role."""

    name: str
    login: bool = False
    """True if it may log in."""
    verifier: ScramVerifier | None = None
    """Checks its password; None: it has none."""
    tokens: tuple[bytes, ...] = ()
    """Digests of its tokens for Spark Connect."""
    rights: tuple[str, ...] = ()
    """Rights on the whole service, sorted."""
    objects: dict[ObjectId, tuple[str, ...]] = {}
    """Rights on single objects, sorted; `OWN` among them."""

    def allows(self, right: str, id_: ObjectId | None) -> bool:
        """Return whether the role has a right on an object; `id_` None: on the whole service."""
        if ADMIN in self.rights:
            return True
        if id_ is None or right in SERVICE_RIGHTS:
            return right in self.rights
        here = self.objects.get(id_, ())
        # Who owns or administers an object may do everything with it.
        return OWN in here or ADMIN in here or right in here or right in self.rights


class _RolesFormat(msgspec.Struct, frozen=True):
    """The part of the document that every version can read."""

    format: int


class _RolesDocument(msgspec.Struct, frozen=True):
    format: int
    secret: bytes
    roles: tuple[RoleEntry, ...]


class RoleRegistry(msgspec.Struct, frozen=True):
    """All roles. Each change makes a new registry."""

    roles: dict[str, RoleEntry] = {}
    """By folded name: like names of objects, names of roles are compared without regard to case."""
    secret: bytes = b""
    """Makes the verifiers of roles that do not exist; random, and never shown."""

    # -- questions ---------------------------------------------------------------------------------

    @property
    def has_logins(self) -> bool:
        """Return whether some role may log in."""
        return any(entry.login for entry in self.roles.values())

    @property
    def locks_out(self) -> bool:
        """Return whether roles may log in, and none has a password or a token to prove it by."""
        logins = [entry for entry in self.roles.values() if entry.login]
        return bool(logins) and not any(entry.verifier or entry.tokens for entry in logins)

    def get(self, name: str) -> RoleEntry | None:
        """Return a role; None if there is none of that name."""
        return self.roles.get(fold(name))

    def find(self, name: str) -> RoleEntry:
        """Return a role. Raises `UnknownObject`."""
        entry = self.get(name)
        if entry is None:
            raise UnknownObject(f"there is no role named {name!r}: SHOW ROLES lists them")
        return entry

    def allows(self, name: str, right: str, id_: ObjectId | None = None) -> bool:
        """Return whether a role has a right; see `RoleEntry.allows`. One that is not there has
        none."""
        entry = self.get(name)
        return entry is not None and entry.allows(right, id_)

    def role_of_token(self, digest: bytes) -> str | None:
        """Return the role whose token has this digest; None if there is none that may log in."""
        # Digests need no comparison in constant time: nobody can choose one byte after the other.
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
            ObjectExists: There is one of that name.
            InvalidUsage: The name cannot be a role's, or there are `roles_max` roles.
        """
        check_name("role", name)
        if fold(name) in _RESERVED:
            raise InvalidUsage(f"role {name!r}: this name is reserved; choose another one")
        if self.get(name) is not None:
            raise ObjectExists(f"role {name!r} already exists")
        if roles_max is not None and len(self.roles) >= roles_max:
            raise InvalidUsage(
                f"there are {len(self.roles)} roles, as many as there may be (roles_max): DROP "
                "ROLE one first"
            )
        # See `set_login` for the reason.
        rights = (ADMIN,) if login and not self.has_logins else ()
        entry = RoleEntry(name=name, login=login, verifier=verifier, rights=rights)
        return self._with(entry)

    def set_login(self, name: str, *, login: bool) -> RoleRegistry:
        """Return a registry in which a role may log in, or may not. Raises `UnknownObject`."""
        entry = self.find(name)
        rights = entry.rights
        # From the first login on every client must prove a role. Were it no administrator, nobody
        # who comes by that door could give any right.
        if login and not self.has_logins and ADMIN not in rights:
            rights = _sorted((*rights, ADMIN))
        return self._with(replace(entry, login=login, rights=rights))

    def set_verifier(self, name: str, verifier: ScramVerifier | None) -> RoleRegistry:
        """Return a registry in which a role has another password, or none. Raises
        `UnknownObject`."""
        return self._with(replace(self.find(name), verifier=verifier))

    def add_token(self, name: str, digest: bytes, tokens_max: int | None = None) -> RoleRegistry:
        """Return a registry in which a role has one more token, and `CONNECT`, without which no
        token is of use. Raises `UnknownObject`, and `InvalidUsage` for too many."""
        entry = self.find(name)
        if digest in entry.tokens:
            return self
        if tokens_max is not None and len(entry.tokens) >= tokens_max:
            raise InvalidUsage(
                f"role {entry.name} has {len(entry.tokens)} tokens, as many as it may "
                f"(role_tokens_max): DROP TOKENS FOR ROLE {entry.name} first"
            )
        return self._with(_with_connect(replace(entry, tokens=(*entry.tokens, digest))))

    def drop_tokens(self, name: str) -> RoleRegistry:
        """Return a registry in which a role has no tokens. Raises `UnknownObject`."""
        return self._with(replace(self.find(name), tokens=()))

    def drop(self, names: Iterable[str]) -> RoleRegistry:
        """Return a registry without these roles and their rights. What they own stays, and is the
        administrators'. Raises `UnknownObject`."""
        gone = {fold(self.find(name).name) for name in names}
        # The rights stand with their role, so that nothing of them is left.
        kept = {key: entry for key, entry in self.roles.items() if key not in gone}
        return replace(self, roles=kept)

    # -- rights ------------------------------------------------------------------------------------

    def grant(
        self, roles: Iterable[str], rights: Iterable[str], ids: Iterable[ObjectId] | None
    ) -> RoleRegistry:
        """Return a registry in which these roles have these rights too; `ids` None: on the whole
        service. Raises `UnknownObject`, and `InvalidUsage` for a right that objects have not."""
        return self._changed(roles, rights, ids, lambda old, given: old | given)

    def revoke(
        self, roles: Iterable[str], rights: Iterable[str], ids: Iterable[ObjectId] | None
    ) -> RoleRegistry:
        """Return a registry in which these roles have these rights no more; see `grant`. A right on
        the whole service stays when that on one object goes, and so does what an owner may. With
        `CONNECT` the tokens go."""
        return self._changed(roles, rights, ids, lambda old, given: old - given)

    def own(self, name: str, ids: Iterable[ObjectId]) -> RoleRegistry:
        """Return a registry in which a role owns these objects; the same one if the role is
        gone."""
        entry = self.get(name)
        # It may have been dropped while its object was being created.
        if entry is None:
            return self
        objects = dict(entry.objects)
        for id_ in ids:
            objects[id_] = _sorted({*objects.get(id_, ()), OWN})
        return self._with(replace(entry, objects=objects))

    def forget(self, ids: Iterable[ObjectId]) -> RoleRegistry:
        """Return a registry without rights on these objects, which were dropped."""
        gone = frozenset(ids)
        # The same registry, so that nothing needs to be stored.
        if not any(gone & entry.objects.keys() for entry in self.roles.values()):
            return self
        return replace(self, roles={key: _without(e, gone) for key, e in self.roles.items()})

    def prune(self, known: Iterable[ObjectId]) -> RoleRegistry:
        """Return a registry with rights on these objects alone."""
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
        # Checked before anything is changed: a statement is carried out whole or not at all.
        objects = None if ids is None else tuple(ids)
        if objects is not None and given - OBJECT_RIGHTS:
            wrong = ", ".join(sorted(given - OBJECT_RIGHTS)).upper()
            raise InvalidUsage(
                f"{wrong} is no right on an object, but on the whole service: leave ON … out"
            )
        made = self
        for name in roles:
            entry = made.find(name)
            if objects is None:
                entry = replace(entry, rights=_sorted(change(frozenset(entry.rights), given)))
            else:
                # A role with rights on many objects is copied once for all of them.
                kept = dict(entry.objects)
                for id_ in objects:
                    kept[id_] = _sorted(change(frozenset(kept.get(id_, ())), given))
                    if not kept[id_]:
                        del kept[id_]
                entry = replace(entry, objects=kept)
            made = made._with(entry)
        return made

    def _with(self, entry: RoleEntry) -> RoleRegistry:
        # A token does not outlive the right to use it: granted again, the right revives none. So
        # who has tokens has the right, and logins need not look at it.
        if entry.tokens and not entry.allows(CONNECT, None):
            entry = replace(entry, tokens=())
        return replace(self, roles={**self.roles, fold(entry.name): entry})

    # -- the document ------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the durable document."""
        document = _RolesDocument(FORMAT_VERSION, self.secret, tuple(self.roles.values()))
        return msgspec.msgpack.encode(document)

    @staticmethod
    def decode(data: bytes) -> RoleRegistry:
        """Return the registry in a document. Raises `StateDirectoryError` (another format) and
        `CorruptData`, whose texts hold nothing of it."""
        try:
            # The format first: a document of another version is refused by name, not as corrupt.
            found = msgspec.msgpack.decode(data, type=_RolesFormat).format
            if found != FORMAT_VERSION:
                raise StateDirectoryError(
                    f"the roles have format {found}; this version knows {FORMAT_VERSION}: use the "
                    "version that wrote them"
                )
            document = msgspec.msgpack.decode(data, type=_RolesDocument)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"consensus key {ROLES_KEY!r}: {error}", determinate=True) from None
        # Tokens of a version that had no right CONNECT stay valid.
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
