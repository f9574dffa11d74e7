"""Grammar of roles and their rights. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from actors.engine.sql.object_names import SCHEMAS, object_name
from actors.engine.sql.reader import StatementReader, list_words
from actors.engine.sql.statements import (
    ChangeStatement,
    CreateTokenStatement,
    QualifiedName,
    SecretSpan,
    ShowGrantsStatement,
    ShowRolesStatement,
    change_statement,
)
from actors.model.protocol.role_messages import AlterRole, ChangeRights, CreateRole, DropRoles
from actors.runtime.errors import InvalidUsage, ObjectExists, nearest_hint

AccessRight: TypeAlias = Literal["read", "write", "create", "admin", "connect", "execute code"]
RightScope: TypeAlias = Literal["service", "objects", "tables"]
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
"""The rights, by the service's own words and by PostgreSQL's."""
_WHOLE_SERVICE: Final[tuple[AccessRight, ...]] = ("connect", "execute code")
"""Rights that are granted without ON. An ON after them is ignored: PostgreSQL's CONNECT names a
database, and every role has it."""
_OBJECT_WORDS: Final = ("TABLE", "VIEW", "SOURCE", "SINK", "INDEX")
_ROLE_OPTIONS: Final = ("LOGIN", "NOLOGIN", "PASSWORD")


def read_create_role(
    reader: StatementReader, position: int, if_not_exists: bool, *, login: bool = False
) -> ChangeStatement:
    """Read the rest of a CREATE ROLE. `login`: whether the role may log in by default."""
    name = reader.name("a role's name")
    reader.take("WITH")
    options = _role_options(reader)
    may_log_in = login if options.login is None else options.login
    return change_statement(
        lambda: (CreateRole(0, name, may_log_in),),
        position=position,
        command="CREATE ROLE",
        names=((name,),),
        skipped=(ObjectExists,) if if_not_exists else (),
        password=options.password,
    )


def read_alter_role(reader: StatementReader, position: int) -> ChangeStatement:
    """Read the rest of an ALTER ROLE."""
    name = reader.name("a role's name")
    reader.take("WITH")
    for word in ("SET", "RESET", "IN"):
        reader.refuse(
            word,
            problem="settings of a role are not supported",
            hint="set them in the session, or in the options of the role's connections",
        )
    if reader.ends():
        raise reader.unexpected(list_words(_ROLE_OPTIONS))
    options = _role_options(reader)
    return change_statement(
        lambda: (AlterRole(0, name, options.login, options.verifier),),
        position=position,
        command="ALTER ROLE",
        names=((name,),),
        password=options.password,
    )


class _RoleOptions(NamedTuple):
    """The options of a role; None for those that are not given."""

    login: bool | None
    verifier: str | None
    """The verifier of the password; empty for PASSWORD NULL."""
    password: SecretSpan | None


def _role_options(reader: StatementReader) -> _RoleOptions:
    """Read the options of a role up to the end."""
    found: set[str] = set()
    login, verifier, password = None, None, None
    while not reader.ends():
        at = reader.position
        # An older word of PostgreSQL's; a password is never stored in plain text anyway.
        reader.take("ENCRYPTED")
        hint = nearest_hint(reader.peek().word, _ROLE_OPTIONS).removeprefix("; ")
        word = reader.need_any(*_ROLE_OPTIONS, hint=hint)
        option = word.removeprefix("NO")
        if option in found:
            raise reader.error(f"option {option} is given twice", position=at)
        found.add(option)
        if option == "LOGIN":
            login = word == option
        elif reader.take("NULL"):
            verifier = ""
        else:
            # Keep the password's offsets, so that a log of the statement can redact it.
            token = reader.peek()
            value = reader.string("a password in single quotes, or NULL")
            password = SecretSpan(token.start, token.end, value)
    return _RoleOptions(login, verifier, password)


def read_drop_roles(reader: StatementReader, position: int) -> ChangeStatement:
    """Read the rest of a DROP ROLE."""
    if_exists = reader.take("IF", "EXISTS")
    names = _role_names(reader)
    reader.need_end("',' or the end of the statement")
    return change_statement(
        lambda: (DropRoles(0, names, if_exists),),
        position=position,
        command="DROP ROLE",
        names=tuple((name,) for name in names),
    )


def _role_names(reader: StatementReader) -> tuple[str, ...]:
    return reader.sequence(lambda: reader.name("a role's name"))


def read_create_token(
    reader: StatementReader, position: int, if_not_exists: bool
) -> CreateTokenStatement:
    """Read the rest of a CREATE TOKEN."""
    if if_not_exists:
        raise reader.error("IF NOT EXISTS is not supported for tokens: they have no names")
    return CreateTokenStatement(position=position, role=_role_of_tokens(reader))


def read_drop_tokens(reader: StatementReader, position: int) -> ChangeStatement:
    """Read the rest of a DROP TOKENS."""
    role = _role_of_tokens(reader)
    return change_statement(
        lambda: (AlterRole(0, role, drop_tokens=True),),
        position=position,
        command="DROP TOKENS",
        names=((role,),),
    )


def _role_of_tokens(reader: StatementReader) -> str:
    reader.need("FOR")
    reader.take_any("ROLE", "USER")
    name = reader.name("a role's name")
    reader.need_end()
    return name


def read_show_roles(reader: StatementReader, position: int) -> ShowRolesStatement:
    """Read the rest of a SHOW ROLES."""
    reader.need_end()
    return ShowRolesStatement(position=position)


def read_show_grants(reader: StatementReader, position: int) -> ShowGrantsStatement:
    """Read the rest of a SHOW GRANTS."""
    on = reader.object_name("an object's name") if reader.take("ON") else ()
    role = None
    if reader.take("FOR"):
        reader.take_any("ROLE", "USER")
        role = reader.name("a role's name")
    reader.need_end("FOR a role or the end of the statement" if on else "ON an object, FOR a role")
    return ShowGrantsStatement(position=position, object=on, role=role)


def read_grant(reader: StatementReader) -> ChangeStatement:
    """Read a GRANT statement."""
    return _read_rights(reader, "GRANT", "TO")


def read_revoke(reader: StatementReader) -> ChangeStatement:
    """Read a REVOKE statement."""
    return _read_rights(reader, "REVOKE", "FROM")


def _read_rights(reader: StatementReader, verb: str, stop: str) -> ChangeStatement:
    """Read a GRANT or REVOKE statement. `stop`: the word before the roles."""
    position = reader.position
    reader.need(verb)
    rights = _rights(reader)
    scope, names, schemas = _scope(reader, stop, rights)
    reader.need(stop)
    roles = _role_names(reader)
    if verb == "REVOKE":
        reader.take_any("CASCADE", "RESTRICT")
    else:
        reader.refuse(
            "WITH",
            problem="WITH GRANT OPTION is not supported",
            hint="only roles with ADMIN can grant rights",
        )
    reader.need_end("',' or the end of the statement")

    def request() -> ChangeRights:
        for schema in schemas:
            if schema[-1].lower() not in SCHEMAS:
                raise InvalidUsage(f"schema {'.'.join(schema)} does not exist (available: public)")
        objects = tuple(map(object_name, names))
        return ChangeRights(0, roles, rights, scope, objects, revoke=verb == "REVOKE")

    return change_statement(
        lambda: (request(),),
        position=position,
        command=verb,
        names=(*names, *schemas, *((role,) for role in roles)),
    )


def _rights(reader: StatementReader) -> tuple[AccessRight, ...]:
    found: dict[AccessRight, None] = {}
    while True:
        word = reader.need_any(*_RIGHTS, hint="membership in roles is not supported")
        if word == "ALL":
            reader.take("PRIVILEGES")
        elif word == "EXECUTE":
            # PostgreSQL's EXECUTE is a right on a function, which means less than EXECUTE CODE.
            reader.need("CODE")
        found |= dict.fromkeys(_RIGHTS[word])
        if not reader.take(","):
            return tuple(found)


def _scope(
    reader: StatementReader, stop: str, rights: tuple[AccessRight, ...]
) -> tuple[RightScope, tuple[QualifiedName, ...], tuple[QualifiedName, ...]]:
    """Read ``ON objects`` if the rights are rights on objects. `stop`: the word that follows.
    Return the scope, and the names of the objects and of the schemas."""
    # Rights that do not concern an object, such as the right to create one.
    if reader.follows(stop):
        return "service", (), ()
    if not reader.take("ON"):
        raise reader.unexpected(f"',', ON or {stop}")
    for right in _WHOLE_SERVICE:
        if right in rights:
            raise reader.error(
                f"{right.upper()} is a right on the whole service, not on an object",
                hint="remove ON …",
            )
    if reader.take("ALL", "TABLES"):
        in_schema = reader.take("IN", "SCHEMA")
        return "tables", (), reader.object_names("a schema's name") if in_schema else ()
    # All objects are in one schema, so a right on the schema is a right on all objects.
    if reader.take_any("SCHEMA", "DATABASE"):
        return "service", (), reader.object_names("a schema's name")
    # All kinds of objects share one namespace, so the word for the kind adds nothing.
    if not reader.take("MATERIALIZED", "VIEW"):
        reader.take_any(*_OBJECT_WORDS)
    return "objects", reader.object_names("an object's name"), ()
