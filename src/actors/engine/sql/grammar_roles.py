"""Grammar of roles and their rights. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.engine.sql.reader import StatementReader, list_words
from actors.engine.sql.statements import (
    AccessRight,
    AlterRoleStatement,
    CreateRoleStatement,
    CreateTokenStatement,
    DropRolesStatement,
    DropTokensStatement,
    GrantScope,
    GrantStatement,
    QualifiedName,
    RevokeStatement,
    RoleOptions,
    SecretSpan,
    ShowGrantsStatement,
    ShowRolesStatement,
)
from actors.runtime.errors import nearest_hint

_RIGHTS: Final[Mapping[str, tuple[AccessRight, ...]]] = {
    "READ": ("read",),
    "WRITE": ("write",),
    "CREATE": ("create",),
    "ADMIN": ("admin",),
    "CONNECT": ("connect",),
    "EXECUTE": ("execute code",),
    "SELECT": ("read",),
    "INSERT": ("write",),
    "UPDATE": ("write",),
    "DELETE": ("write",),
    "ALL": ("read", "write"),
}
"""Rights of this service by their words, and by those of PostgreSQL."""
_WHOLE_SERVICE: Final[tuple[AccessRight, ...]] = ("connect", "execute code")
"""Rights that are given without ON, whatever it names: PostgreSQL's CONNECT is on a database, and
any role has it."""
_OBJECT_WORDS: Final = ("TABLE", "VIEW", "SOURCE", "SINK", "INDEX")
_ROLE_OPTIONS: Final = ("LOGIN", "NOLOGIN", "PASSWORD")


def read_create_role(
    reader: StatementReader, position: int, if_not_exists: bool, *, login: bool | None = None
) -> CreateRoleStatement:
    """Take what follows CREATE ROLE; `login`: the default."""
    name = reader.name("a role's name")
    reader.take("WITH")
    return CreateRoleStatement(
        position=position,
        name=name,
        options=_role_options(reader, login),
        if_not_exists=if_not_exists,
    )


def read_alter_role(reader: StatementReader, position: int) -> AlterRoleStatement:
    """Take what follows ALTER ROLE."""
    name = reader.name("a role's name")
    reader.take("WITH")
    for word in ("SET", "RESET", "IN"):
        reader.refuse(
            word,
            problem="a role has no settings of its own",
            hint="set them in the session, or in the options of its connections",
        )
    if reader.ends():
        raise reader.unexpected(list_words(_ROLE_OPTIONS))
    return AlterRoleStatement(position=position, name=name, options=_role_options(reader, None))


def _role_options(reader: StatementReader, login: bool | None) -> RoleOptions:
    """Take a role's options to the end."""
    found: set[str] = set()
    password, no_password = None, False
    while not reader.ends():
        at = reader.position
        # PostgreSQL's older word: a password is never stored as it is.
        reader.take("ENCRYPTED")
        hint = nearest_hint(reader.peek().word, _ROLE_OPTIONS).removeprefix("; ")
        option = reader.need_any(*_ROLE_OPTIONS, hint=hint).removeprefix("NO")
        if option in found:
            raise reader.error(f"{option} is given twice", position=at)
        found.add(option)
        if option == "LOGIN":
            login = reader.tokens[reader.place - 1].word == "LOGIN"
        elif reader.take("NULL"):
            no_password = True
        else:
            # Its place is kept, so that what logs the statement can blank it.
            token = reader.peek()
            value = reader.string("a password in single quotes, or NULL")
            password = SecretSpan(token.start, token.end, value)
    return RoleOptions(login=login, password=password, no_password=no_password)


def read_drop_roles(reader: StatementReader, position: int) -> DropRolesStatement:
    """Take what follows DROP ROLE."""
    if_exists = reader.take("IF", "EXISTS")
    names = _role_names(reader)
    reader.need_end("',' or the end of the statement")
    return DropRolesStatement(position=position, names=names, if_exists=if_exists)


def _role_names(reader: StatementReader) -> tuple[str, ...]:
    names = [reader.name("a role's name")]
    while reader.take(","):
        names.append(reader.name("a role's name"))
    return tuple(names)


def read_create_token(
    reader: StatementReader, position: int, if_not_exists: bool
) -> CreateTokenStatement:
    """Take what follows CREATE TOKEN."""
    if if_not_exists:
        raise reader.error("a token has no name by which it could exist already")
    return CreateTokenStatement(position=position, role=_role_of_tokens(reader))


def read_drop_tokens(reader: StatementReader, position: int) -> DropTokensStatement:
    """Take what follows DROP TOKENS."""
    return DropTokensStatement(position=position, role=_role_of_tokens(reader))


def _role_of_tokens(reader: StatementReader) -> str:
    reader.need("FOR")
    reader.take_any("ROLE", "USER")
    name = reader.name("a role's name")
    reader.need_end()
    return name


def read_show_roles(reader: StatementReader, position: int) -> ShowRolesStatement:
    """Take what follows SHOW ROLES."""
    reader.need_end()
    return ShowRolesStatement(position=position)


def read_show_grants(reader: StatementReader, position: int) -> ShowGrantsStatement:
    """Take what follows SHOW GRANTS."""
    on = reader.object_name("an object's name") if reader.take("ON") else ()
    role = None
    if reader.take("FOR"):
        reader.take_any("ROLE", "USER")
        role = reader.name("a role's name")
    reader.need_end("FOR a role or the end of the statement" if on else "ON an object, FOR a role")
    return ShowGrantsStatement(position=position, object=on, role=role)


def read_grant(reader: StatementReader) -> GrantStatement:
    """Take a GRANT."""
    position = reader.position
    reader.need("GRANT")
    rights = _rights(reader)
    scope, names = _scope(reader, "TO", rights)
    reader.need("TO")
    roles = _role_names(reader)
    reader.refuse(
        "WITH", problem="WITH GRANT OPTION is not known", hint="who has ADMIN may grant rights"
    )
    reader.need_end("',' or the end of the statement")
    return GrantStatement(position=position, rights=rights, scope=scope, roles=roles, names=names)


def read_revoke(reader: StatementReader) -> RevokeStatement:
    """Take a REVOKE."""
    position = reader.position
    reader.need("REVOKE")
    rights = _rights(reader)
    scope, names = _scope(reader, "FROM", rights)
    reader.need("FROM")
    roles = _role_names(reader)
    reader.take_any("CASCADE", "RESTRICT")
    reader.need_end("',' or the end of the statement")
    return RevokeStatement(position=position, rights=rights, scope=scope, roles=roles, names=names)


def _rights(reader: StatementReader) -> tuple[AccessRight, ...]:
    found: dict[AccessRight, None] = {}
    while True:
        word = reader.need_any(*_RIGHTS, hint="a role is no member of another one")
        if word == "ALL":
            reader.take("PRIVILEGES")
        elif word == "EXECUTE":
            # PostgreSQL's right of this name is on a function, and says less.
            reader.need("CODE")
        found |= dict.fromkeys(_RIGHTS[word])
        if not reader.take(","):
            return tuple(found)


def _scope(
    reader: StatementReader, stop: str, rights: tuple[AccessRight, ...]
) -> tuple[GrantScope, tuple[QualifiedName, ...]]:
    """Take ``ON objects``, if these rights are on objects; `stop`: the word that follows."""
    # Rights that are not of one object, such as to create some.
    if reader.follows(stop):
        return "service", ()
    if not reader.take("ON"):
        raise reader.unexpected(f"',', ON or {stop}")
    for right in _WHOLE_SERVICE:
        if right in rights:
            raise reader.error(
                f"{right.upper()} is no right on an object, but on the whole service",
                hint="leave ON … out",
            )
    if reader.take("ALL", "TABLES"):
        in_schema = reader.take("IN", "SCHEMA")
        return "all tables", reader.object_names("a schema's name") if in_schema else ()
    if reader.take_any("SCHEMA", "DATABASE"):
        return "schema", reader.object_names("a schema's name")
    # One name space for all kinds: the word says nothing that the name does not.
    if not reader.take("MATERIALIZED", "VIEW"):
        reader.take_any(*_OBJECT_WORDS)
    return "objects", reader.object_names("an object's name")
