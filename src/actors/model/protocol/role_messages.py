"""Requests of the client about roles and their rights, and their answers; part of `api`.

No message holds a password or a token: only what checks one. New fields last, with defaults.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class CreateRole(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a role. `verifier`: of its password, in PostgreSQL's form; empty: it has none. The
    password itself never travels."""

    request: int
    name: str
    login: bool = False
    verifier: str = ""


class AlterRole(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes a role: whether it may log in, its password, its tokens."""

    request: int
    name: str
    login: bool | None = None
    """None: as it is."""
    verifier: str | None = None
    """None: as it is; empty: it has no password any more."""
    add_token: bytes = b""
    """SHA-256 digest of one more token; empty: none is added. An administrator gives the role
    CONNECT with it; a role that adds its own must have it."""
    drop_tokens: bool = False
    """True if its tokens go (before one is added)."""


class DropRoles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops roles, all or none. With `if_exists` those that are not there are named in the
    answer's text, a line each."""

    request: int
    names: tuple[str, ...]
    if_exists: bool = False


class ChangeRights(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Grants rights to roles, or revokes them, all or none."""

    request: int
    roles: tuple[str, ...]
    rights: tuple[str, ...]
    """See `access.role_registry.RIGHTS`."""
    scope: Literal["service", "objects", "tables"] = "service"
    """``service``: all objects, also later ones; ``objects``: those of `names`; ``tables``: all
    tables and views that there are now."""
    names: tuple[str, ...] = ()
    revoke: bool = False


RoleStatement: TypeAlias = CreateRole | AlterRole | DropRoles | ChangeRights
"""Statements that change roles and their rights, from the grammar to the controller."""


class ListRoles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All roles with their rights. Answered by `RolesReport`."""

    request: int


class CheckRight(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answered by `RequestDone` if the session has a right on an object now, else by
    `AccessDenied`."""

    request: int
    right: str
    name: str


class RoleRight(msgspec.Struct, frozen=True, gc=False):
    """A right of a role; `on` empty: on the whole service. ``own``: it created the object."""

    right: str
    on: str = ""
    kind: str = ""
    """Kind of the object."""


class RoleStatus(msgspec.Struct, frozen=True, gc=False):
    """One role as `ListRoles` shows it."""

    name: str
    login: bool
    has_password: bool = False
    tokens: int = 0
    """Number of its tokens."""
    rights: tuple[RoleRight, ...] = ()


class RolesReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListRoles`."""

    request: int
    roles: tuple[RoleStatus, ...]
    wanted: bool = False
    """True if clients must prove a role."""
