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
"""Rights of this service by their words, and by those of PostgreSQL."""
_WHOLE_SERVICE: Final[tuple[AccessRight, ...]] = ("connect", "execute code")
"""Rights that are given without ON, whatever it names: PostgreSQL's CONNECT is on a database, and
any role has it."""
_OBJECT_WORDS: Final = ("TABLE", "VIEW", "SOURCE", "SINK", "INDEX")
_ROLE_OPTIONS: Final = ("LOGIN", "NOLOGIN", "PASSWORD")


def read_create_role(
    reader: StatementReader, position: int, if_not_exists: bool, *, login: bool = False
) -> ChangeStatement:
    """Take what follows CREATE ROLE; `login`: the default."""
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
    options = _role_options(reader)
    return change_statement(
        lambda: (AlterRole(0, name, options.login, options.verifier),),
        position=position,
        command="ALTER ROLE",
        names=((name,),),
        password=options.password,
    )


class _RoleOptions(NamedTuple):
    """Options of a role; None where none was given."""

    login: bool | None
    verifier: str | None
    """Empty for PASSWORD NULL."""
    password: SecretSpan | None


def _role_options(reader: StatementReader) -> _RoleOptions:
    """Take a role's options to the end."""
    found: set[str] = set()
    login, verifier, password = None, None, None
    while not reader.ends():
        at = reader.position
        # PostgreSQL's older word: a password is never stored as it is.
        reader.take("ENCRYPTED")
        hint = nearest_hint(reader.peek().word, _ROLE_OPTIONS).removeprefix("; ")
        word = reader.need_any(*_ROLE_OPTIONS, hint=hint)
        option = word.removeprefix("NO")
        if option in found:
            raise reader.error(f"{option} is given twice", position=at)
        found.add(option)
        if option == "LOGIN":
            login = word == option
        elif reader.take("NULL"):
            verifier = ""
        else:
            # Its place is kept, so that what logs the statement can blank it.
            token = reader.peek()
            value = reader.string("a password in single quotes, or NULL")
            password = SecretSpan(token.start, token.end, value)
    return _RoleOptions(login, verifier, password)


def read_drop_roles(reader: StatementReader, position: int) -> ChangeStatement:
    """Take what follows DROP ROLE."""
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
    """Take what follows CREATE TOKEN."""
    if if_not_exists:
        raise reader.error("a token has no name by which it could exist already")
    return CreateTokenStatement(position=position, role=_role_of_tokens(reader))


def read_drop_tokens(reader: StatementReader, position: int) -> ChangeStatement:
    """Take what follows DROP TOKENS."""
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


def read_grant(reader: StatementReader) -> ChangeStatement:
    """Take a GRANT."""
    return _read_rights(reader, "GRANT", "TO")


def read_revoke(reader: StatementReader) -> ChangeStatement:
    """Take a REVOKE."""
    return _read_rights(reader, "REVOKE", "FROM")


def _read_rights(reader: StatementReader, verb: str, stop: str) -> ChangeStatement:
    """Take a GRANT or a REVOKE; `stop`: the word before the roles."""
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
            "WITH", problem="WITH GRANT OPTION is not known", hint="who has ADMIN may grant rights"
        )
    reader.need_end("',' or the end of the statement")

    def request() -> ChangeRights:
        for schema in schemas:
            if schema[-1].lower() not in SCHEMAS:
                raise InvalidUsage(f"schema {'.'.join(schema)} does not exist: there is public")
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
) -> tuple[RightScope, tuple[QualifiedName, ...], tuple[QualifiedName, ...]]:
    """Take ``ON objects``, if these rights are on objects; `stop`: the word that follows. Return
    the scope, and the names of objects and of schemas."""
    # Rights that are not of one object, such as to create some.
    if reader.follows(stop):
        return "service", (), ()
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
        return "tables", (), reader.object_names("a schema's name") if in_schema else ()
    # All objects are in the one schema, so that a right on it is one on the service.
    if reader.take_any("SCHEMA", "DATABASE"):
        return "service", (), reader.object_names("a schema's name")
    # One name space for all kinds: the word says nothing that the name does not.
    if not reader.take("MATERIALIZED", "VIEW"):
        reader.take_any(*_OBJECT_WORDS)
    return "objects", reader.object_names("an object's name"), ()
