"""Grammar of statements that change rows: INSERT, UPDATE, DELETE, MERGE and COPY. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from actors.engine.sql.grammar_query import (
    begins_query,
    read_flag,
    read_query,
    read_query_or_subscribe,
    refuse_queries,
)
from actors.engine.sql.reader import StatementReader, list_words
from actors.engine.sql.statements import (
    ColumnAssignment,
    ConflictClause,
    CopyFormat,
    CopyOptions,
    CopyStatement,
    DeleteStatement,
    InsertStatement,
    MergeClause,
    MergeMatch,
    MergeStatement,
    QualifiedName,
    QueryStatement,
    TextSpan,
    UpdateStatement,
    WrittenRows,
)
from actors.engine.sql.tokens import SqlDialect
from actors.runtime.errors import SqlSyntaxError

_MERGE_HINT: Final = "use MERGE INTO"


def _refuse_returning(reader: StatementReader) -> None:
    reader.refuse(
        "RETURNING",
        problem="RETURNING is not supported here",
        hint="read the rows with a SELECT in the same transaction",
    )


# Clauses of a query, which cannot follow RETURNING.
_NO_CLAUSES: Final = ("FROM", "WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "UNION", "WINDOW")


def _returning(reader: StatementReader) -> tuple[TextSpan, ...]:
    """Read ``RETURNING expression, …``, which is PostgreSQL's. Return () if it does not come
    next."""
    if reader.dialect is not SqlDialect.POSTGRES:
        _refuse_returning(reader)
    if not reader.take("RETURNING"):
        return ()
    first = reader.place
    found = reader.sequence(lambda: reader.extent("a column or an expression", ",", *_NO_CLAUSES))
    # A query would not see the rows at the time of the statement.
    refuse_queries(
        reader,
        first,
        problem="RETURNING cannot contain a query",
        hint="use a SELECT in the same transaction",
    )
    return found


# -- INSERT --------------------------------------------------------------------------------------


def read_insert(reader: StatementReader) -> InsertStatement:
    """Read an INSERT statement."""
    position = reader.position
    reader.need("INSERT")
    reader.refuse(
        "OVERWRITE",
        problem="INSERT OVERWRITE is not supported",
        hint="use DELETE FROM and INSERT INTO, in one transaction",
    )
    reader.need("INTO")
    # Spark's INSERT INTO TABLE t; a table may also be named ``table``.
    if reader.follows("TABLE") and not reader.peek(1).word.startswith((".", "(")):
        reader.take("TABLE")
    table = reader.object_name("a table's name")
    alias = reader.name("an alias") if reader.take("AS") else None
    columns = None
    if reader.follows("(") and not _is_query_in_brackets(reader):
        columns = reader.column_names()
    reader.refuse("BY", problem="INSERT BY NAME is not supported", hint="list the columns")
    rows = query = None
    default_values = reader.follows("DEFAULT")
    if default_values:
        if columns is not None:
            raise reader.error(
                "DEFAULT VALUES cannot follow a list of columns", hint="remove the list"
            )
        reader.need("DEFAULT", "VALUES")
    elif not reader.follows("VALUES") or (rows := _rows(reader)) is None:
        query = _inserted_query(reader)
    conflict = _conflict(reader)
    returning = _returning(reader)
    reader.need_end()
    return InsertStatement(
        position=position,
        table=table,
        alias=alias,
        columns=columns,
        rows=rows,
        query=query,
        conflict=conflict,
        returning=returning,
        default_values=default_values,
    )


def _conflict(reader: StatementReader) -> ConflictClause | None:
    position = reader.position
    if not reader.take("ON", "CONFLICT"):
        return None
    columns: tuple[str, ...] = ()
    reader.refuse(
        "ON",
        problem="constraints cannot be referred to by name",
        hint="list the columns of the PRIMARY KEY",
    )
    if reader.follows("("):
        columns = reader.column_names()
    reader.need("DO")
    if reader.take("NOTHING"):
        return ConflictClause(position=position, columns=columns)
    reader.need("UPDATE", "SET")
    found = _assignments(reader, "WHERE", "RETURNING")
    condition = reader.extent("a condition", "RETURNING") if reader.take("WHERE") else None
    return ConflictClause(
        position=position, columns=columns, assignments=found, condition=condition
    )


def _is_query_in_brackets(reader: StatementReader) -> bool:
    """Return whether the next bracket holds a query rather than column names."""
    ahead = 0
    while reader.peek(ahead).word == "(":
        ahead += 1
    # A column may have the name of a keyword; a comma or a bracket then follows it.
    is_name = reader.peek(ahead + 1).word in (",", ")")
    return reader.peek(ahead).word in ("SELECT", "WITH", "VALUES", "FROM", "TABLE") and not is_name


def _rows(reader: StatementReader) -> tuple[tuple[TextSpan, ...], ...] | None:
    """Read ``VALUES (…), (…)`` up to the end. Return None, with nothing read, if VALUES is only the
    start of a query."""
    begin = reader.place
    reader.need("VALUES")
    rows = []
    while reader.follows("("):
        rows.append(reader.bracketed().expressions("a value"))
        if not reader.take(","):
            break
        if reader.ends():
            raise reader.unexpected("'(' and values")
    ends = reader.ends() or reader.follows("ON", "CONFLICT") or reader.follows("RETURNING")
    # Spark accepts rows without brackets, and VALUES as one side of a UNION.
    if ends and rows and reader.tokens[reader.place - 1].word != ",":
        return tuple(rows)
    reader.place = begin
    return None


def _inserted_query(reader: StatementReader) -> QueryStatement:
    if not begins_query(reader):
        raise reader.unexpected("VALUES or a query")
    begin = reader.place
    # Keywords of PostgreSQL's, which its dialect cannot use as unquoted names.
    while reader.dialect is SqlDialect.POSTGRES and not reader.ends():
        if reader.follows("ON", "CONFLICT") or reader.follows("RETURNING"):
            return read_query(reader.part(begin, reader.place))
        reader.place = reader.partners.get(reader.place, reader.place) + 1
    reader.place = begin
    return read_query(reader)


# -- UPDATE, DELETE ------------------------------------------------------------------------------


def read_update(reader: StatementReader) -> UpdateStatement:
    """Read an UPDATE statement."""
    position = reader.position
    reader.need("UPDATE")
    table = reader.object_name("a table's name")
    alias = reader.alias()
    reader.need("SET")
    # FROM and RETURNING end the assignments, so that the errors below name them.
    assignments = _assignments(reader, "WHERE", "FROM", "RETURNING")
    reader.refuse("FROM", problem="UPDATE … FROM is not supported", hint=_MERGE_HINT)
    where, returning = _where(reader)
    return UpdateStatement(
        position=position,
        table=table,
        assignments=assignments,
        alias=alias,
        where=where,
        returning=returning,
    )


def _where(reader: StatementReader) -> tuple[TextSpan | None, tuple[TextSpan, ...]]:
    """Read ``WHERE condition RETURNING expressions`` up to the end. Both parts are optional."""
    where = reader.extent("a condition", "RETURNING") if reader.take("WHERE") else None
    returning = _returning(reader)
    reader.need_end(
        "the end of the statement" if returning else "WHERE or the end of the statement"
    )
    return where, returning


def _assignments(reader: StatementReader, *stops: str) -> tuple[ColumnAssignment, ...]:
    """Read ``column = value, …`` up to one of `stops`."""

    def assignment() -> ColumnAssignment:
        reader.refuse(
            "(",
            problem="assigning a row to several columns is not supported",
            hint="write column = value for each column",
        )
        parts = [reader.name("a column")]
        while reader.take("."):
            parts.append(reader.name("a name after the dot"))
        reader.need("=")
        return ColumnAssignment(tuple(parts), reader.extent("a value", ",", *stops))

    return reader.sequence(assignment)


def read_delete(reader: StatementReader) -> DeleteStatement:
    """Read a DELETE statement."""
    position = reader.position
    reader.need("DELETE", "FROM")
    table = reader.object_name("a table's name")
    alias = reader.alias("RETURNING")
    reader.refuse("USING", problem="DELETE … USING is not supported", hint=_MERGE_HINT)
    where, returning = _where(reader)
    return DeleteStatement(
        position=position, table=table, alias=alias, where=where, returning=returning
    )


def read_truncate(reader: StatementReader) -> DeleteStatement:
    """Read a TRUNCATE statement, which is a DELETE of all rows."""
    position = reader.position
    reader.need("TRUNCATE")
    reader.take("TABLE")
    table = reader.object_name("a table's name")
    reader.refuse(
        ",",
        problem="TRUNCATE supports one table only",
        hint="truncate several tables in one transaction",
    )
    reader.refuse("PARTITION", problem="partitions are not supported", hint="use DELETE")
    # Ignored: columns have no sequences, and no table refers to another.
    reader.take("RESTART", "IDENTITY")
    reader.take("CONTINUE", "IDENTITY")
    reader.take("RESTRICT")
    return DeleteStatement(position=position, table=table, truncates=True)


# -- MERGE ---------------------------------------------------------------------------------------


def read_merge(reader: StatementReader) -> MergeStatement:
    """Read a MERGE statement."""
    position = reader.position
    reader.need("MERGE")
    reader.refuse(
        "WITH", "SCHEMA", problem="SCHEMA EVOLUTION is not supported", hint="use ALTER TABLE"
    )
    reader.need("INTO")
    table = reader.object_name("a table's name")
    alias = reader.alias()
    reader.need("USING")
    source_name = source_query = source_rows = None
    if reader.follows("("):
        inner = reader.bracketed()
        source_query = read_query(inner)
        if source_query.as_of is None and not source_query.pins:
            source_rows = _written_rows(StatementReader.of(source_query.query))
    else:
        source_name = reader.object_name("a table, a view, or a query in brackets")
    source_alias = reader.alias()
    reader.need("ON")
    on = reader.extent("a condition", "WHEN")
    clauses = []
    while reader.follows("WHEN"):
        clauses.append(_merge_clause(reader))
    if not clauses:
        raise reader.unexpected("WHEN")
    _refuse_returning(reader)
    reader.need_end("WHEN or the end of the statement")
    return MergeStatement(
        position=position,
        table=table,
        on=on,
        clauses=tuple(clauses),
        alias=alias,
        source_name=source_name,
        source_query=source_query,
        source_rows=source_rows,
        source_alias=source_alias,
    )


def _written_rows(reader: StatementReader) -> WrittenRows | None:
    """Read ``SELECT * FROM (VALUES (…), (…)) AS v(a, b)``. Return None for any other query."""
    if not reader.take("SELECT", "*", "FROM") or not reader.follows("(", "VALUES", "("):
        return None
    inside = reader.bracketed()
    try:
        rows = _rows(inside)
        named = reader.alias() is not None and reader.follows("(")
        names = reader.column_names() if named else ()
    except SqlSyntaxError:
        return None  # Spark reports the error.
    is_whole = rows is not None and inside.ends() and reader.ends()
    return WrittenRows(names, rows) if rows and names and is_whole else None


def _merge_clause(reader: StatementReader) -> MergeClause:
    position = reader.position
    reader.need("WHEN")
    match = _merge_match(reader)
    condition = reader.extent("a condition", "THEN") if reader.take("AND") else None
    if not reader.take("THEN"):
        raise reader.unexpected("AND or THEN" if condition is None else "THEN")
    # Each kind of match has rows on one side only, which limits its actions.
    inserts = match == "not matched"
    fields: dict[str, Any] = {"action": "nothing"}
    if reader.take("DO", "NOTHING"):
        pass
    elif inserts and reader.take("INSERT"):
        fields = _merge_insert(reader)
    elif not inserts and reader.take("DELETE"):
        fields = {"action": "delete"}
    elif not inserts and reader.take("UPDATE", "SET"):
        fields = _merge_update(reader)
    else:
        raise reader.unexpected("INSERT" if inserts else "UPDATE SET or DELETE")
    return MergeClause(position=position, match=match, condition=condition, **fields)


def _merge_match(reader: StatementReader) -> MergeMatch:
    if reader.take("MATCHED"):
        return "matched"
    reader.need("NOT", "MATCHED")
    if reader.take("BY", "SOURCE"):
        return "not matched by source"
    if reader.take("BY"):
        reader.need_any("TARGET")
    return "not matched"


def _merge_update(reader: StatementReader) -> dict[str, Any]:
    if reader.take("*"):
        return {"action": "update all"}
    return {"action": "update", "assignments": _assignments(reader, "WHEN", "RETURNING")}


def _merge_insert(reader: StatementReader) -> dict[str, Any]:
    if reader.take("*"):
        return {"action": "insert all"}
    # Without a list of columns there is a value for each column of the table, whose number is not
    # known here.
    at = reader.position
    columns = reader.column_names() if reader.follows("(") else ()
    reader.need("VALUES")
    values = reader.bracketed().expressions("a value")
    if columns and len(columns) != len(values):
        raise reader.error(
            f"INSERT has {len(columns)} columns and {len(values)} values", position=at
        )
    return {"action": "insert", "columns": columns, "values": values}


# -- COPY ----------------------------------------------------------------------------------------

_FORMATS: Final[Mapping[str, CopyFormat]] = {"text": "text", "csv": "csv", "binary": "binary"}
_BINARY_HAS_NONE: Final = ("delimiter", "null", "header", "quote", "escape")


def read_copy(reader: StatementReader) -> CopyStatement:
    """Read a COPY statement."""
    position = reader.position
    reader.need("COPY")
    options = _CopyOptionsReader()
    # COPY BINARY t is the oldest form, which PostgreSQL still accepts.
    is_name = reader.peek(1).kind in ("word", "name") and reader.peek(1).word not in ("FROM", "TO")
    if reader.follows("BINARY") and is_name:
        options.take(reader, "format", lambda: _old_format(reader))
    table: QualifiedName | None = None
    columns = source = None
    if reader.follows("("):
        source = read_query_or_subscribe(reader.bracketed())
    else:
        table = reader.object_name("a table's name, or a query in brackets")
        columns = reader.column_names() if reader.follows("(") else None
    at = reader.position
    word = reader.need_any("FROM", "TO")
    if word == "FROM" and source is not None:
        raise reader.error("a query can only be copied TO STDOUT", position=at)
    if not reader.take("STDIN" if word == "FROM" else "STDOUT"):
        raise reader.unexpected(
            "STDIN" if word == "FROM" else "STDOUT",
            hint="COPY cannot use files on the server: use CREATE SOURCE to read them, CREATE SINK"
            " to write them",
        )
    if reader.follows("WITH", "(") or reader.follows("("):
        reader.take("WITH")
        options.read_list(reader.bracketed())
    else:
        reader.take("WITH")
        options.read_old(reader)
    reader.need_end("options of COPY or the end of the statement")
    return CopyStatement(
        position=position,
        direction="from" if word == "FROM" else "to",
        table=table,
        columns=columns,
        source=source,
        options=options.made(reader),
    )


def _old_format(reader: StatementReader) -> str:
    return reader.need_any("BINARY", "CSV").lower()


class _CopyOptionsReader:
    """The options of a COPY that were read."""

    def __init__(self) -> None:
        # Value of each option, and the offset in the statement that its errors point at.
        self._values: dict[str, Any] = {}
        self._positions: dict[str, int] = {}

    def take(self, reader: StatementReader, option: str, read: Callable[[], Any]) -> None:
        """Read the value of an option. Raises `SqlSyntaxError` if the option was already given."""
        position = reader.position
        if option in self._values:
            raise reader.error(f"option {option.upper()} is given twice")
        self._values[option], self._positions[option] = read(), position

    def read_list(self, reader: StatementReader) -> None:
        """Read the options of ``WITH (…)``."""
        reader.sequence(lambda: self._one(reader))
        reader.need_end("',' or ')'")

    def _one(self, reader: StatementReader) -> None:
        position = reader.position
        word = reader.need_any("FORMAT", *_COPY_TEXTS, "HEADER", "ENCODING")
        match word:
            case "FORMAT":
                self.take(reader, "format", lambda: _format(reader))
            case "HEADER":
                self.take(reader, "header", lambda: _header(reader))
            case "ENCODING":
                self.take(reader, "encoding", lambda: _encoding(reader))
            # All others take a string.
            case _:
                self.take(reader, _COPY_TEXTS[word], reader.string)
        # Errors about the value point at the option.
        self._positions[_COPY_TEXTS.get(word, word.lower())] = position

    def read_old(self, reader: StatementReader) -> None:
        """Read options in the syntax from before PostgreSQL 9: ``CSV HEADER NULL AS ''``."""
        while not reader.ends():
            if reader.follows_any("BINARY", "CSV"):
                self.take(reader, "format", lambda: _old_format(reader))
            elif reader.follows("HEADER"):
                self.take(reader, "header", lambda: reader.take("HEADER"))
            else:
                word = reader.need_any("BINARY", "CSV", "HEADER", *_COPY_TEXTS)
                reader.take("AS")
                self.take(reader, _COPY_TEXTS[word], reader.string)

    def made(self, reader: StatementReader) -> CopyOptions:
        """Return the options, completed with the defaults of the format. Raises `SqlSyntaxError`
        for values that cannot be combined."""
        given = self._values
        format_: CopyFormat = given.get("format", "text")
        self._check(reader, format_)
        is_csv = format_ == "csv"
        quote = given.get("quote", '"')
        return CopyOptions(
            format=format_,
            delimiter=given.get("delimiter", "," if is_csv else "\t"),
            null=given.get("null", "" if is_csv else "\\N"),
            header=bool(given.get("header", False)),
            header_match=given.get("header") == "match",
            quote=quote,
            escape=given.get("escape", quote),
        )

    def _check(self, reader: StatementReader, format_: CopyFormat) -> None:
        # The rules of PostgreSQL's ProcessCopyOptions, which its clients expect.
        for option in ("quote", "escape"):
            if option in self._values and format_ != "csv":
                raise self._wrong(reader, option, "is only for the format csv")
        for option in _BINARY_HAS_NONE:
            if option in self._values and format_ == "binary":
                raise self._wrong(reader, option, "cannot be used with the format binary")
        for option in ("delimiter", "quote", "escape"):
            value = self._values.get(option)
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
                raise self._wrong(reader, option, "must be a single ASCII character")
        # Otherwise one row could be read as two, or a NULL as two columns.
        null = self._values.get("null", "")
        if "\r" in null or "\n" in null:
            raise self._wrong(reader, "null", "cannot contain a line break")
        delimiter = self._values.get("delimiter")
        if delimiter is not None and (delimiter in null or delimiter == self._values.get("quote")):
            raise self._wrong(
                reader, "delimiter", "must not occur in NULL and must differ from QUOTE"
            )

    def _wrong(self, reader: StatementReader, option: str, problem: str) -> Exception:
        return reader.error(f"option {option.upper()} {problem}", position=self._positions[option])


_COPY_TEXTS: Final[Mapping[str, str]] = {
    "DELIMITER": "delimiter",
    "DELIMITERS": "delimiter",
    "NULL": "null",
    "QUOTE": "quote",
    "ESCAPE": "escape",
}
"""Options whose value is a string."""


def _format(reader: StatementReader) -> CopyFormat:
    token = reader.peek()
    name = reader.string() if token.kind == "text" else reader.name("a format")
    found = _FORMATS.get(name.lower())
    if found is None:
        raise reader.error(
            f"unknown format {name!r}",
            hint=f"use {list_words(_FORMATS)}",
            position=token.start,
        )
    return found


def _header(reader: StatementReader) -> bool | str:
    return "match" if reader.take("MATCH") else read_flag(reader)


def _encoding(reader: StatementReader) -> str:
    position, name = reader.position, reader.string()
    if name.upper().replace("-", "") not in ("UTF8", "UNICODE"):
        raise reader.error(f"unsupported encoding {name!r}", hint="use UTF8", position=position)
    return name
