"""Grammar of session statements: transactions, settings, SHOW, DESCRIBE, cursors and prepared
statements. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.engine.sql.grammar_ddl import read_kind
from actors.engine.sql.grammar_query import (
    QUERY_WORDS,
    begins_query,
    read_query,
    read_query_or_subscribe,
)
from actors.engine.sql.grammar_roles import read_show_grants, read_show_roles
from actors.engine.sql.reader import NO_NAMES, StatementReader, list_words
from actors.engine.sql.statements import (
    BeginStatement,
    CloseCursorStatement,
    CommitStatement,
    DeallocateStatement,
    DeclareCursorStatement,
    DescribeStatement,
    DiscardAllStatement,
    ExecutePreparedStatement,
    FetchCursorStatement,
    NoOperationStatement,
    PrepareTextStatement,
    QualifiedName,
    ReleaseSavepointStatement,
    ResetVariableStatement,
    RollbackStatement,
    RollbackToStatement,
    SavepointStatement,
    SetTransactionStatement,
    SetVariableStatement,
    ShowColumnsStatement,
    ShowCreateStatement,
    ShownKind,
    ShowObjectsStatement,
    ShowSettingStatement,
    SqlStatement,
    TransactionModes,
    UseSchemaStatement,
)
from actors.engine.sql.tokens import SqlDialect, name_value
from actors.engine.sql.type_names import read_written_type

# -- transactions --------------------------------------------------------------------------------

_ISOLATION: Final = (
    ("SERIALIZABLE",),
    ("REPEATABLE", "READ"),
    ("READ", "COMMITTED"),
    ("READ", "UNCOMMITTED"),
)


def read_begin(reader: StatementReader) -> SqlStatement:
    """Read BEGIN or START TRANSACTION."""
    position = reader.position
    if reader.take("START"):
        reader.need("TRANSACTION")
    else:
        reader.need("BEGIN")
        reader.take_any("WORK", "TRANSACTION")
    return BeginStatement(position=position, modes=_modes(reader))


def _modes(reader: StatementReader) -> TransactionModes:
    """Read transaction modes up to the end, with or without commas between them."""
    isolation = read_only = None
    while not reader.ends():
        if reader.take("ISOLATION", "LEVEL"):
            isolation = _isolation(reader)
        elif reader.take("READ"):
            read_only = reader.need_any("ONLY", "WRITE") == "ONLY"
        # Accepted because drivers send it. In PostgreSQL it lets a serializable transaction wait.
        elif not reader.take("NOT", "DEFERRABLE") and not reader.take("DEFERRABLE"):
            raise reader.unexpected("ISOLATION LEVEL, READ ONLY or READ WRITE")
        if reader.take(",") and reader.ends():
            raise reader.unexpected("ISOLATION LEVEL, READ ONLY or READ WRITE")
    return TransactionModes(isolation=isolation, read_only=read_only)


def _isolation(reader: StatementReader) -> str:
    for words in _ISOLATION:
        if reader.take(*words):
            return " ".join(words).lower()
    raise reader.unexpected(list_words(" ".join(words) for words in _ISOLATION))


def read_commit(reader: StatementReader) -> SqlStatement:
    """Read COMMIT or END."""
    position = reader.position
    reader.need_any("COMMIT", "END")
    _end_of_transaction(reader)
    return CommitStatement(position=position)


def _end_of_transaction(reader: StatementReader) -> None:
    reader.take_any("WORK", "TRANSACTION")
    if not reader.take("AND", "NO", "CHAIN"):
        reader.refuse("AND", "CHAIN", problem="AND CHAIN is not supported", hint="use BEGIN")
    reader.need_end()


def read_rollback(reader: StatementReader) -> SqlStatement:
    """Read ROLLBACK, ROLLBACK TO SAVEPOINT or ABORT."""
    position = reader.position
    verb = reader.need_any("ROLLBACK", "ABORT")
    at = reader.place
    reader.take_any("WORK", "TRANSACTION")
    if verb == "ROLLBACK" and reader.take("TO"):
        reader.take("SAVEPOINT")
        name = reader.name("a savepoint")
        reader.need_end()
        return RollbackToStatement(position=position, name=name)
    # WORK may be written in both forms.
    reader.place = at
    _end_of_transaction(reader)
    return RollbackStatement(position=position)


def read_savepoint(reader: StatementReader) -> SqlStatement:
    """Read SAVEPOINT."""
    position = reader.position
    reader.need("SAVEPOINT")
    name = reader.name("a savepoint")
    reader.need_end()
    return SavepointStatement(position=position, name=name)


def read_release(reader: StatementReader) -> SqlStatement:
    """Read RELEASE SAVEPOINT."""
    position = reader.position
    reader.need("RELEASE")
    reader.take("SAVEPOINT")
    name = reader.name("a savepoint")
    reader.need_end()
    return ReleaseSavepointStatement(position=position, name=name)


# -- settings ------------------------------------------------------------------------------------

_SETTINGS_OF_WORDS: Final[Mapping[tuple[str, ...], str]] = {
    ("TIME", "ZONE"): "timezone",
    ("NAMES",): "client_encoding",
    ("SCHEMA",): "search_path",
    ("ROLE",): "role",
    ("SESSION", "AUTHORIZATION"): "session_authorization",
}
"""Settings with a syntax of their own: ``SET TIME ZONE 'UTC'`` has no equals sign."""


def read_set(reader: StatementReader) -> SqlStatement:
    """Read a SET statement."""
    position = reader.position
    reader.need("SET")
    spark = reader.dialect is SqlDialect.SPARK
    if spark and (reader.ends() or (reader.follows("-") and reader.peek(1).word == "V")):
        reader.place = reader.last
        return ShowSettingStatement(position=position, name="all")
    if reader.take("SESSION", "CHARACTERISTICS", "AS", "TRANSACTION"):
        return SetTransactionStatement(position=position, modes=_modes(reader), session=True)
    if reader.take("TRANSACTION"):
        return SetTransactionStatement(position=position, modes=_modes(reader))
    # A setting may have the name of any of these words.
    is_local = not _is_assigned(reader, 1) and reader.take("LOCAL")
    if not is_local and not _is_assigned(reader, 1) and reader.peek(1).word != "AUTHORIZATION":
        reader.take("SESSION")
    for words, name in _SETTINGS_OF_WORDS.items():
        if not _is_assigned(reader, len(words)) and reader.take(*words):
            # In PostgreSQL, LOCAL is the time zone of the server's configuration.
            is_default = name == "timezone" and reader.take("LOCAL")
            values = () if is_default else _values(reader)
            reader.need_end()
            return SetVariableStatement(position=position, name=name, values=values, local=is_local)
    if spark:
        return _spark_setting(reader, position)
    name = ".".join(reader.object_name("a setting's name"))
    if not reader.take("=") and not reader.take("TO"):
        raise reader.unexpected("'=' or TO")
    values = _values(reader)
    return SetVariableStatement(position=position, name=name, values=values, local=is_local)


def _is_assigned(reader: StatementReader, ahead: int) -> bool:
    """Return whether the tokens before the token `ahead` are the whole name of a setting."""
    return reader.peek(ahead).word in ("=", "TO", ".")


def _spark_setting(reader: StatementReader, position: int) -> SqlStatement:
    """Read ``key = value`` as Spark does: the value is the rest of the text, with or without
    quotes. A key alone asks for its value."""
    first = reader.place
    key = reader.extent("a setting's name", "=")
    if reader.place == first + 1 and reader.tokens[first].kind == "name":
        name = name_value(key.text)
    elif any(char.isspace() for char in key.text):
        raise reader.error("the name of a setting cannot contain blanks", position=key.start)
    else:
        name = key.text
    if not reader.take("="):
        return ShowSettingStatement(position=position, name=name)
    # Spark keeps the quotes, but no setting of this service is meant to contain them.
    if reader.peek().kind == "text" and reader.peek(1).kind == "end":
        value = reader.string()
    else:
        value = reader.rest("a value").text
    return SetVariableStatement(position=position, name=name, values=(value,))


def _values(reader: StatementReader) -> tuple[str, ...]:
    """Read the values of a setting up to the end; () for DEFAULT."""
    if reader.follows("DEFAULT") and reader.peek(1).kind == "end":
        reader.need("DEFAULT")
        return ()
    # Only a time zone can be an interval; Spark interprets the text.
    if reader.follows("INTERVAL"):
        return (reader.rest("a value").text,)
    found = reader.sequence(lambda: _value(reader))
    reader.need_end("',' or the end of the statement")
    return found


def _value(reader: StatementReader) -> str:
    token = reader.peek()
    if token.kind == "text":
        return reader.string()
    if token.kind in ("word", "name"):
        return reader.name("a value")
    sign = reader.take_any("-", "+")
    token = reader.peek()
    if token.kind != "number":
        raise reader.unexpected("a value")
    reader.place += 1
    return sign.strip("+") + token.text


def read_reset(reader: StatementReader) -> SqlStatement:
    """Read a RESET statement."""
    position = reader.position
    reader.need("RESET")
    spark = reader.dialect is SqlDialect.SPARK
    if (spark and reader.ends()) or (reader.follows("ALL") and reader.peek(1).kind == "end"):
        reader.place = reader.last
        return ResetVariableStatement(position=position, name=None)
    name = "timezone" if reader.take("TIME", "ZONE") else ""
    if reader.take("SESSION", "AUTHORIZATION"):
        name = "session_authorization"
    name = name or ".".join(reader.object_name("a setting's name or ALL"))
    reader.need_end()
    return ResetVariableStatement(position=position, name=name)


# -- SHOW, DESCRIBE, USE -------------------------------------------------------------------------

_SHOWN: Final[Mapping[tuple[str, ...], ShownKind]] = {
    ("MATERIALIZED", "VIEWS"): "materialized views",
    ("TABLES",): "tables",
    ("VIEWS",): "views",
    ("SOURCES",): "sources",
    ("SINKS",): "sinks",
    ("INDEXES",): "indexes",
    ("SCHEMAS",): "schemas",
    ("DATABASES",): "schemas",
    ("NAMESPACES",): "schemas",
}
_SHOWN_WORDS: Final = (
    *(" ".join(words) for words in _SHOWN),
    "COLUMNS",
    "CREATE",
    "ROLES",
    "GRANTS",
)


def read_show(reader: StatementReader) -> SqlStatement:
    """Read a SHOW statement."""
    position = reader.position
    reader.need("SHOW")
    for words, kind in _SHOWN.items():
        if reader.take(*words):
            return _show_objects(reader, position, kind)
    if reader.take("TABLE", "EXTENDED"):
        return _show_objects(reader, position, "tables", extended=True)
    if reader.take("COLUMNS"):
        return _show_columns(reader, position)
    if reader.take("CREATE"):
        kind_created = read_kind(reader)
        name = reader.object_name(f"the name of a {kind_created}")
        reader.need_end()
        return ShowCreateStatement(position=position, kind=kind_created, name=name)
    if reader.take("ROLES"):
        return read_show_roles(reader, position)
    if reader.take("GRANTS"):
        return read_show_grants(reader, position)
    return _show_setting(reader, position)


def _show_objects(
    reader: StatementReader, position: int, kind: ShownKind, *, extended: bool = False
) -> SqlStatement:
    on: QualifiedName = ()
    schema: QualifiedName = ()
    pattern = None
    if kind == "indexes" and reader.take_any("ON", "FROM", "IN"):
        on = reader.object_name("a table's or view's name")
    elif kind != "indexes" and reader.take_any("FROM", "IN"):
        schema = reader.object_name("a schema's name")
    # In Spark, the word LIKE is optional.
    if reader.take("LIKE") or reader.peek().kind == "text":
        pattern = reader.string("a pattern in single quotes")
    reader.need_end(f"{'ON' if kind == 'indexes' else 'FROM'}, LIKE or the end of the statement")
    return ShowObjectsStatement(
        position=position,
        kind=kind,
        schema=schema,
        object=on,
        pattern=pattern,
        extended=extended,
    )


def _show_columns(reader: StatementReader, position: int) -> SqlStatement:
    reader.need_any("FROM", "IN")
    name = reader.object_name("a table's or view's name")
    # An older form of Spark's names the schema after the table.
    if len(name) == 1 and reader.take_any("FROM", "IN"):
        name = (*reader.object_name("a schema's name"), *name)
    reader.need_end()
    return ShowColumnsStatement(position=position, object=name)


def _show_setting(reader: StatementReader, position: int) -> SqlStatement:
    if reader.take("TIME", "ZONE"):
        name = "timezone"
    elif reader.take("SESSION", "AUTHORIZATION"):
        name = "session_authorization"
    elif reader.take("TRANSACTION", "ISOLATION", "LEVEL"):
        name = "transaction_isolation"
    else:
        expected = list_words([*_SHOWN_WORDS, "a setting's name"])
        name = ".".join(reader.object_name(expected))
    reader.need_end()
    return ShowSettingStatement(position=position, name="all" if name == "ALL" else name)


def read_describe(reader: StatementReader) -> SqlStatement:
    """Read a DESCRIBE statement."""
    position = reader.position
    reader.need_any("DESCRIBE", "DESC")
    if reader.follows("QUERY") and reader.peek(1).word in QUERY_WORDS:
        reader.need("QUERY")
        return DescribeStatement(position=position, query=read_query(reader))
    # TABLE t is both a query and the name of a table; a table has comments and properties to show.
    if begins_query(reader) and not reader.follows("TABLE"):
        return DescribeStatement(position=position, query=read_query(reader))
    # A table may have the name of any of these words.
    for word in ("TABLE", "EXTENDED", "FORMATTED"):
        if reader.follows(word) and reader.peek(1).kind in ("word", "name"):
            reader.need(word)
    extended = reader.tokens[reader.place - 1].word in ("EXTENDED", "FORMATTED")
    name = reader.object_name("a table's or view's name, or a query")
    reader.need_end()
    return DescribeStatement(position=position, name=name, extended=extended)


def read_use(reader: StatementReader) -> SqlStatement:
    """Read a USE statement."""
    position = reader.position
    reader.need("USE")
    if reader.peek(1).kind in ("word", "name"):
        reader.take_any("SCHEMA", "DATABASE", "NAMESPACE")
    name = reader.object_name("a schema's name")
    reader.need_end()
    return UseSchemaStatement(position=position, name=name)


# -- cursors -------------------------------------------------------------------------------------


def read_declare(reader: StatementReader) -> SqlStatement:
    """Read a DECLARE statement."""
    position = reader.position
    reader.need("DECLARE")
    name = reader.name("a cursor", refused=NO_NAMES)
    binary = False
    while not reader.follows("CURSOR"):
        reader.refuse(
            "SCROLL", problem="scrollable cursors are not supported", hint="remove SCROLL"
        )
        if reader.take("NO"):
            reader.need("SCROLL")
            continue
        word = reader.need_any("BINARY", "INSENSITIVE", "ASENSITIVE", "CURSOR")
        binary = binary or word == "BINARY"
    reader.need("CURSOR")
    hold = reader.take("WITH", "HOLD")
    if not hold:
        reader.take("WITHOUT", "HOLD")
    reader.need("FOR")
    return DeclareCursorStatement(
        position=position,
        name=name,
        source=read_query_or_subscribe(reader),
        hold=hold,
        binary=binary,
    )


_BACKWARD: Final = ("PRIOR", "FIRST", "LAST", "ABSOLUTE", "RELATIVE", "BACKWARD")


def read_fetch(reader: StatementReader) -> SqlStatement:
    """Read a FETCH or MOVE statement."""
    position = reader.position
    verb = reader.need_any("FETCH", "MOVE")
    following = reader.peek(1)
    # In FETCH first, ``first`` is the name of a cursor.
    is_name = following.kind == "end"
    count: int | None = 1
    if not is_name and reader.follows_any(*_BACKWARD):
        raise reader.error(
            f"cursors only move forward: {reader.peek().word} is not supported",
            hint="use NEXT, FORWARD, ALL or a number",
        )
    if not is_name and not reader.take("NEXT"):
        reader.take("FORWARD")
        if reader.take("ALL"):
            count = None
        elif reader.peek().kind == "number":
            count = reader.whole_number("a number of rows")
    reader.take_any("FROM", "IN")
    name = reader.name("a cursor", refused=NO_NAMES)
    reader.need_end()
    return FetchCursorStatement(position=position, name=name, count=count, move=verb == "MOVE")


def read_close(reader: StatementReader) -> SqlStatement:
    """Read a CLOSE statement."""
    position = reader.position
    reader.need("CLOSE")
    name = None if reader.take("ALL") else reader.name("a cursor or ALL")
    reader.need_end()
    return CloseCursorStatement(position=position, name=name)


# -- prepared statements -------------------------------------------------------------------------


def _argument_type(reader: StatementReader) -> str:
    position = reader.position
    written = read_written_type(reader)
    if reader.dialect is SqlDialect.POSTGRES and written.checked:
        raise reader.error(
            f"arguments of type {written.name} are not supported: their values would not be"
            " checked",
            position=position,
            hint=f"declare it as text, and cast it to {written.name} where it is used",
        )
    return written.spark


def read_prepare(reader: StatementReader) -> SqlStatement:
    """Read a PREPARE statement. The statement to prepare is not parsed."""
    position = reader.position
    reader.need("PREPARE")
    name = reader.name("a name", refused=NO_NAMES)
    types: tuple[str, ...] = ()
    if reader.follows("("):
        inner = reader.bracketed()
        types = inner.sequence(lambda: _argument_type(inner))
        inner.need_end("',' or ')'")
    reader.need("AS")
    # It is parsed when it is executed, with its parameters.
    statement = reader.rest("a statement")
    return PrepareTextStatement(position=position, name=name, statement=statement, types=types)


def read_execute(reader: StatementReader) -> SqlStatement:
    """Read an EXECUTE statement."""
    position = reader.position
    reader.need("EXECUTE")
    name = reader.name("the name of a prepared statement")
    arguments = reader.bracketed().expressions("a value") if reader.follows("(") else ()
    reader.need_end()
    return ExecutePreparedStatement(position=position, name=name, arguments=arguments)


def read_deallocate(reader: StatementReader) -> SqlStatement:
    """Read a DEALLOCATE statement."""
    position = reader.position
    reader.need("DEALLOCATE")
    if reader.peek(1).kind != "end":
        reader.take("PREPARE")
    name = None if reader.take("ALL") else reader.name("the name of a prepared statement or ALL")
    reader.need_end()
    return DeallocateStatement(position=position, name=name)


def read_discard(reader: StatementReader) -> SqlStatement:
    """Read a DISCARD statement."""
    position = reader.position
    reader.need("DISCARD")
    word = reader.need_any("ALL", "PLANS", "SEQUENCES", "TEMP", "TEMPORARY")
    reader.need_end()
    if word == "ALL":
        return DiscardAllStatement(position=position)
    # A session has no plans, sequences or temporary tables to discard.
    return NoOperationStatement(position=position, tag=f"DISCARD {word}")


def read_listen(reader: StatementReader) -> SqlStatement:
    """Read LISTEN or UNLISTEN, which do nothing: there are no notifications."""
    position = reader.position
    verb = reader.need_any("LISTEN", "UNLISTEN")
    if verb == "LISTEN" or not reader.take("*"):
        reader.name("a channel")
    reader.need_end()
    return NoOperationStatement(position=position, tag=verb)
