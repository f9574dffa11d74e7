"""Requests about roles and their rights, and the answers; part of the protocol in `api`.

No message contains a password or a token, only what is needed to verify one. New fields come last
and have defaults.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class CreateRole(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a role.

    `verifier` is the verifier of its password in PostgreSQL's form, "" for no password. The
    password itself is never sent.
    """

    request: int
    name: str
    login: bool = False
    verifier: str = ""


class AlterRole(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes a role's right to log in, its password or its tokens."""

    request: int
    name: str
    login: bool | None = None
    """None leaves it unchanged."""
    verifier: str | None = None
    """None leaves the password unchanged; "" removes it."""
    add_token: bytes = b""
    """SHA-256 digest of a token to add; empty for none. If an administrator adds it, the role gets
    the right CONNECT; a role that adds its own token must have that right."""
    drop_tokens: bool = False
    """True to drop all its tokens first."""


class DropRoles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops roles, all or none.

    With `if_exists`, unknown roles are ignored; the answer's text names them, one per line.
    """

    request: int
    names: tuple[str, ...]
    if_exists: bool = False


class ChangeRights(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Grants rights to roles, or revokes them; all or none."""

    request: int
    roles: tuple[str, ...]
    rights: tuple[str, ...]
    """Names of rights in `access.role_registry.RIGHTS`."""
    scope: Literal["service", "objects", "tables"] = "service"
    """``service``: all objects, including future ones; ``objects``: those in `names`; ``tables``:
    all tables and views that exist now."""
    names: tuple[str, ...] = ()
    revoke: bool = False


RoleStatement: TypeAlias = CreateRole | AlterRole | DropRoles | ChangeRights
"""Statements that change roles and their rights. The grammar creates them and the controller
executes them."""


class ListRoles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks for all roles with their rights. Answered by `RolesReport`."""

    request: int


class CheckRight(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Checks a right of the session on an object.

    Answered by `RequestDone` if the session has the right, otherwise by `AccessDenied`.
    """

    request: int
    right: str
    name: str


class RoleRight(msgspec.Struct, frozen=True, gc=False):
    """A right of a role on the object `on`, "" for the whole service.

    The right ``own`` means that the role created the object.
    """

    right: str
    on: str = ""
    kind: str = ""
    """Kind of the object."""


class RoleStatus(msgspec.Struct, frozen=True, gc=False):
    """One role, in a `RolesReport`."""

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
    """True if clients must log in as a role."""
