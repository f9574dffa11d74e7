"""The part of our catalog that PostgreSQL clients see: objects, columns, roles, at one version.

The door makes a snapshot from the catalog whenever that changes. Everything of PostgreSQL's own
(its types, functions, system relations) comes from `catalog_data`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

ObjectKind = Literal["table", "materialized view", "view", "index"]

FIRST_OBJECT_OID: Final = 16_384
"""PostgreSQL gives lower OIDs to its own objects alone."""
_OID_SPAN: Final = 2**31 - FIRST_OBJECT_OID
# Below 2**31, as some clients keep an OID in a signed integer.


class CatalogColumnRow(msgspec.Struct, frozen=True):
    """A column of an object, with its Spark type."""

    name: str
    type: str
    nullable: bool = True
    comment: str = ""
    default: str = ""
    """The expression of its default; empty: it has none."""


class CatalogObjectRow(msgspec.Struct, frozen=True):
    """An object of our catalog as clients are shown it: in the schema `public`, of the first
    superuser. The key of a table or materialized view appears as its PRIMARY KEY, with an index.
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
    """A role."""

    name: str
    superuser: bool = False
    can_login: bool = True
    create_role: bool = False


class PgCatalogSnapshot(msgspec.Struct, frozen=True):
    """All that is shown, at one version; another version is another content."""

    version: int
    objects: tuple[CatalogObjectRow, ...] = ()
    roles: tuple[CatalogRoleRow, ...] = (CatalogRoleRow("penstock", superuser=True),)
    database: str = "penstock"


class CatalogSession(msgspec.Struct, frozen=True):
    """A client's session, as session functions tell of it: who asks, from where, with which
    settings."""

    user: str = "penstock"
    session_user: str = ""
    """Empty: the user."""
    process_id: int = 0
    settings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Settings of the session by lower-case name, over PostgreSQL's defaults."""
    client_address: str = ""
    client_port: int = 0
    now: str = "2000-01-01 00:00:00+00"
    """The time of the transaction, as a `timestamptz` is written."""
    started: str = "2000-01-01 00:00:00+00"
    """The time at which the service was started."""
    connected: str = "2000-01-01 00:00:00+00"
    state: str = "active"
    query: str = ""
    """The statement that runs, or ran last."""
    may_signal: bool = True
    """True if the session that asks may cancel its statement, and end it."""


class SessionSignal(msgspec.Struct, frozen=True):
    """A session of a process id is to be ended, or its statement canceled."""

    process_id: int
    end: bool


def object_oid(identity: str, role: str = "") -> int:
    """Return the OID of an object from its id, the same in every process. `role` tells apart the
    OIDs that one object needs: of itself, its row type, its key's index.

    >>> object_oid("u1") == object_oid("u1"), object_oid("u1") == object_oid("u1", "type")
    (True, False)
    """
    digest = hashlib.blake2b(f"{role}\0{identity}".encode(), digest_size=8).digest()
    return FIRST_OBJECT_OID + int.from_bytes(digest, "big") % _OID_SPAN


class OidAssignment:
    """The OIDs of one snapshot's objects: each its own, also when two hashes are equal."""

    def __init__(self, objects: Iterable[CatalogObjectRow]) -> None:
        self._taken: set[int] = set()
        self._known: dict[tuple[str, str], int] = {}
        # In the order of ids: the outcome of a collision does not depend on that of objects.
        for identity in sorted(each.id for each in objects):
            self.oid_of(identity)

    def oid_of(self, identity: str, role: str = "") -> int:
        """Return the OID of an object, or of what belongs to it."""
        # Asked for again and again: by the rows of types, keys and rules.
        found = self._known.get((identity, role))
        if found is None:
            found = self._known[identity, role] = self._derive(identity, role)
            self._taken.add(found)
        return found

    def _derive(self, identity: str, role: str) -> int:
        oid = object_oid(identity, role)
        # The next free one, which is the same as long as the ids are.
        while oid in self._taken:
            oid = FIRST_OBJECT_OID + (oid + 1 - FIRST_OBJECT_OID) % _OID_SPAN
        return oid
