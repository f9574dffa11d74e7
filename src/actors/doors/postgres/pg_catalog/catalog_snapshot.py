"""The part of this service's catalog that PostgreSQL clients see: objects, columns and roles.

The server makes a new snapshot whenever the catalog changes. PostgreSQL's own types, functions and
system relations come from `catalog_data`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

ObjectKind = Literal["table", "materialized view", "view", "index"]

FIRST_OBJECT_OID: Final = 16_384
"""PostgreSQL reserves lower OIDs for its own objects."""
_OID_SPAN: Final = 2**31 - FIRST_OBJECT_OID
# OIDs stay below 2**31, because some clients store them in a signed integer.


class CatalogColumnRow(msgspec.Struct, frozen=True):
    """A column of an object, with its Spark type."""

    name: str
    type: str
    nullable: bool = True
    comment: str = ""
    default: str = ""
    """The expression of its default; "" if it has none."""


class CatalogObjectRow(msgspec.Struct, frozen=True):
    """An object of the catalog, shown in the schema `public` and owned by the first superuser.

    The key of a table or materialized view is shown as its PRIMARY KEY, with an index.
    """

    id: str
    name: str
    kind: ObjectKind
    columns: tuple[CatalogColumnRow, ...] = ()
    key: tuple[str, ...] = ()
    comment: str = ""
    sql: str = ""
    """The query of a view."""
    on: str = ""
    """The name of the object that an index is on."""
    index_columns: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    """Names of the objects that a view reads."""


class CatalogRoleRow(msgspec.Struct, frozen=True):
    """A role, with the attributes that clients see."""

    name: str
    superuser: bool = False
    can_login: bool = True
    create_role: bool = False


class PgCatalogSnapshot(msgspec.Struct, frozen=True):
    """Everything that clients see. Different contents have different versions."""

    version: int
    objects: tuple[CatalogObjectRow, ...] = ()
    roles: tuple[CatalogRoleRow, ...] = (CatalogRoleRow("penstock", superuser=True),)
    database: str = "penstock"


class CatalogSession(msgspec.Struct, frozen=True):
    """A client's session, for session functions and `pg_stat_activity`."""

    user: str = "penstock"
    session_user: str = ""
    """Empty if it is the same as `user`."""
    process_id: int = 0
    settings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The session's settings by lower-case name, which override PostgreSQL's defaults."""
    client_address: str = ""
    client_port: int = 0
    now: str = "2000-01-01 00:00:00+00"
    """The time of the transaction, in the text format of `timestamptz`."""
    started: str = "2000-01-01 00:00:00+00"
    """When the service was started."""
    connected: str = "2000-01-01 00:00:00+00"
    state: str = "active"
    query: str = ""
    """The running statement, or the last one."""
    may_signal: bool = True
    """True if the asking session may end this session and cancel its statement."""


class SessionSignal(msgspec.Struct, frozen=True):
    """A request to end a session, or (`end` False) to cancel its statement."""

    process_id: int
    end: bool


def object_oid(identity: str, role: str = "") -> int:
    """Derive the OID of an object from its id; it is the same in every process.

    `role` distinguishes the OIDs that one object needs: its own, its row type's, its key index's.

    >>> object_oid("u1") == object_oid("u1"), object_oid("u1") == object_oid("u1", "type")
    (True, False)
    """
    digest = hashlib.blake2b(f"{role}\0{identity}".encode(), digest_size=8).digest()
    return FIRST_OBJECT_OID + int.from_bytes(digest, "big") % _OID_SPAN


class OidAssignment:
    """Assigns unique OIDs to the objects of one snapshot, even if hashes collide."""

    def __init__(self, objects: Iterable[CatalogObjectRow]) -> None:
        self._taken: set[int] = set()
        self._known: dict[tuple[str, str], int] = {}
        # Assign in the order of ids, so that the result does not depend on the order of objects.
        for identity in sorted(each.id for each in objects):
            self.oid_of(identity)

    def oid_of(self, identity: str, role: str = "") -> int:
        """Return the OID of an object or, with a `role`, of something that belongs to it."""
        # Cached, because the rows of types, keys and rules ask repeatedly.
        found = self._known.get((identity, role))
        if found is None:
            found = self._known[identity, role] = self._derive(identity, role)
            self._taken.add(found)
        return found

    def _derive(self, identity: str, role: str) -> int:
        oid = object_oid(identity, role)
        # Take the next free OID, which stays the same while the ids do.
        while oid in self._taken:
            oid = FIRST_OBJECT_OID + (oid + 1 - FIRST_OBJECT_OID) % _OID_SPAN
        return oid
