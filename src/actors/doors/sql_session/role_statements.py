"""CREATE, ALTER and DROP of roles and tokens, GRANT, REVOKE, SHOW ROLES, SHOW GRANTS.

A password is turned into its verifier here, and a token into its digest: neither leaves the
session, except that a new token is shown to whoever asked for it, once.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable
from typing import Any, Final, Literal

import pyarrow as pa

from actors.control.access.role_registry import TOKEN_BYTES, token_digest
from actors.doors.sql_session.context import SCHEMAS, SessionContext, object_name
from actors.doors.sql_session.results import StatementResult, result_of
from actors.engine.sql.statements import (
    AlterRoleStatement,
    CreateRoleStatement,
    CreateTokenStatement,
    DropRolesStatement,
    DropTokensStatement,
    GrantScope,
    GrantStatement,
    RevokeStatement,
    RoleOptions,
    ShowGrantsStatement,
    ShowRolesStatement,
)
from actors.model.pgwire.scram import MECHANISM, SALT_BYTES, make_verifier, parse_verifier
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, ObjectExists, UnknownObject

RightScope = Literal["service", "objects", "tables"]
TOKEN_COLUMNS: Final = pa.schema([("role", pa.string()), ("token", pa.string())])
_SCOPES: Final[dict[GrantScope, RightScope]] = {
    "objects": "objects",
    "all tables": "tables",
    # All objects are in the one schema, so that a right on it is one on the service.
    "schema": "service",
    "service": "service",
}


async def create_role(context: SessionContext, statement: CreateRoleStatement) -> StatementResult:
    """Create a role; with `if_not_exists` it is a notice that there is one."""
    made = context.client.create_role(
        statement.name,
        login=bool(statement.options.login),
        verifier=verifier_of(statement.options) or "",
    )
    try:
        return _told("CREATE ROLE", await made)
    except ObjectExists as error:
        if not statement.if_not_exists:
            raise
        return StatementResult("CREATE ROLE", notices=(f"{error}, skipping",))


async def alter_role(context: SessionContext, statement: AlterRoleStatement) -> StatementResult:
    """Change whether a role may log in, or its password."""
    options = statement.options
    made = context.client.alter_role(
        statement.name, login=options.login, verifier=verifier_of(options)
    )
    return _told("ALTER ROLE", await made)


async def drop_roles(context: SessionContext, statement: DropRolesStatement) -> StatementResult:
    """Drop roles, all or none."""
    made = context.client.drop_roles(statement.names, if_exists=statement.if_exists)
    return _told("DROP ROLE", await made)


async def create_token(context: SessionContext, statement: CreateTokenStatement) -> StatementResult:
    """Give a role one more token, and return it: it is not shown again."""
    # Hexadecimal: it stands in an address of Spark Connect as it is.
    token = secrets.token_hex(TOKEN_BYTES)
    text = await context.client.alter_role(statement.role, add_token=token_digest(token))
    made = result_of("SELECT", TOKEN_COLUMNS, [(statement.role, token)])
    made.notices = _told("", text).notices
    return made


async def drop_tokens(context: SessionContext, statement: DropTokensStatement) -> StatementResult:
    """Take all its tokens from a role."""
    await context.client.alter_role(statement.role, drop_tokens=True)
    return StatementResult("DROP TOKENS")


async def grant(context: SessionContext, statement: GrantStatement) -> StatementResult:
    """Give rights to roles."""
    await _change_rights(context, statement, revoke=False)
    return StatementResult("GRANT")


async def revoke(context: SessionContext, statement: RevokeStatement) -> StatementResult:
    """Take rights from roles."""
    await _change_rights(context, statement, revoke=True)
    return StatementResult("REVOKE")


def _change_rights(
    context: SessionContext, statement: GrantStatement | RevokeStatement, *, revoke: bool
) -> Awaitable[None]:
    # ON SCHEMA and ON ALL TABLES IN SCHEMA name the one schema, or one that is not there.
    on_objects = statement.scope == "objects"
    for name in () if on_objects else statement.names:
        if fold(name[-1]) not in SCHEMAS:
            raise InvalidUsage(f"schema {'.'.join(name)} does not exist: there is public")
    return context.client.change_rights(
        statement.roles,
        statement.rights,
        scope=_SCOPES[statement.scope],
        names=[object_name(name) for name in statement.names] if on_objects else (),
        revoke=revoke,
    )


def verifier_of(options: RoleOptions) -> str | None:
    """Return the verifier of a new password; "" to take the password away, None to leave it.

    Raises:
        InvalidUsage: The password is empty, or looks like a verifier and is none.
    """
    if options.no_password:
        return ""
    if options.password is None:
        return None
    password = options.password.value
    if not password:
        raise InvalidUsage("a password must not be empty: write PASSWORD NULL for none")
    # psql's \password and other tools send the verifier, so that no server sees the password.
    if password.startswith(f"{MECHANISM}$"):
        return parse_verifier(password).text()
    return make_verifier(password, secrets.token_bytes(SALT_BYTES)).text()


def _told(tag: str, text: str) -> StatementResult:
    return StatementResult(tag, notices=tuple(line for line in text.splitlines() if line))


# -- SHOW ------------------------------------------------------------------------------------------

_ROLES: Final = pa.schema(
    [
        ("role", pa.string()),
        ("login", pa.bool_()),
        ("password", pa.bool_()),
        ("tokens", pa.int64()),
        ("rights", pa.string()),
    ]
)
_GRANTS: Final = pa.schema(
    [("role", pa.string()), ("right", pa.string()), ("on", pa.string()), ("kind", pa.string())]
)
EVERYTHING: Final = "*"
"""Shown for a right on the whole service."""


async def show_roles(context: SessionContext, _: ShowRolesStatement) -> StatementResult:
    """List all roles: whether they may log in, have a password and tokens, and their rights on the
    whole service."""
    found = (await context.client.roles()).roles
    rows: list[tuple[Any, ...]] = [
        (
            role.name,
            role.login,
            role.has_password,
            role.tokens,
            ", ".join(each.right for each in role.rights if not each.on),
        )
        for role in sorted(found, key=lambda role: fold(role.name))
    ]
    return result_of("SELECT", _ROLES, rows)


async def show_grants(context: SessionContext, statement: ShowGrantsStatement) -> StatementResult:
    """List the rights of all roles or of one, on everything or on one object.

    Raises:
        UnknownObject: There is no role of that name.
    """
    found = (await context.client.roles()).roles
    role = None if statement.role is None else fold(statement.role)
    if role is not None and role not in {fold(each.name) for each in found}:
        raise UnknownObject(f"there is no role named {statement.role!r}: SHOW ROLES lists them")
    on = fold(object_name(statement.object)) if statement.object else None
    rows: list[tuple[Any, ...]] = [
        (each.name, right.right, right.on or EVERYTHING, right.kind)
        for each in sorted(found, key=lambda each: fold(each.name))
        if role in (None, fold(each.name))
        for right in each.rights
        # A right on the whole service is one on the object, too.
        if on is None or not right.on or fold(right.on) == on
    ]
    return result_of("SELECT", _GRANTS, rows)
