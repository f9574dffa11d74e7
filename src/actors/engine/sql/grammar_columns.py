"""Grammar of the columns of a table: types, constraints, defaults. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from actors.engine.sql.grammar_query import refuse_queries
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import TextSpan
from actors.engine.sql.tokens import SqlDialect
from actors.engine.sql.type_names import read_written_type
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.runtime.errors import InvalidUsage

_REFUSED_CONSTRAINTS: Final = {
    "GENERATED": "columns are not GENERATED",
    "UNIQUE": "UNIQUE is not kept; a table has one PRIMARY KEY",
    "CHECK": "CHECK is not kept",
    "REFERENCES": "foreign keys are not kept",
    "FOREIGN": "foreign keys are not kept",
    "COLLATE": "columns have no COLLATE",
}


class ColumnDefinition(NamedTuple):
    """A column as defined. `type` is Spark's type text, whatever the dialect."""

    position: int
    name: str
    type: str
    not_null: bool
    comment: str | None
    default: TextSpan | None


def columns_schema(columns: Sequence[ColumnDefinition], key: tuple[str, ...] = ()) -> TableSchema:
    """Return columns as a schema; those of the PRIMARY KEY are NOT NULL."""
    return TableSchema(
        tuple(
            TableColumn(each.name, each.type, not (each.not_null or each.name in key))
            for each in columns
        ),
        key,
    )


class ColumnList:
    """Columns that were read; no two have the same name in another case."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Each column's name by itself in lower case."""
        self._columns: list[ColumnDefinition] = []

    def add(self, reader: StatementReader, column: ColumnDefinition) -> None:
        """Add a column. Raises `SqlSyntaxError` if its name is there."""
        # Spark resolves names in any case: two such columns would be ambiguous.
        if column.name.lower() in self.names:
            problem = f"the column {column.name!r} is there twice"
            raise reader.error(problem, position=column.position)
        self.names[column.name.lower()] = column.name
        self._columns.append(column)

    def found(self) -> tuple[ColumnDefinition, ...]:
        """Return the columns in order."""
        return tuple(self._columns)


class _KeyReader:
    """The PRIMARY KEY of a table that is read; there is at most one."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.position = 0

    def take(self, reader: StatementReader, names: tuple[str, ...], position: int) -> None:
        """Note the key. Raises `SqlSyntaxError` if there is one already, or a name stands twice."""
        if self.names:
            raise reader.error("a table has one PRIMARY KEY", position=position)
        lowered = [name.lower() for name in names]
        if len(set(lowered)) < len(lowered):
            raise reader.error("the PRIMARY KEY names a column twice", position=position)
        self.names, self.position = names, position


def read_table_elements(
    reader: StatementReader,
) -> tuple[tuple[ColumnDefinition, ...], tuple[str, ...]]:
    """Take columns and the PRIMARY KEY to the end."""
    columns = ColumnList()
    key = _KeyReader()
    while True:
        position = reader.position
        if _begins_constraint(reader):
            # Constraints and columns may be mixed.
            _table_constraint(reader, key)
        else:
            columns.add(reader, read_column(reader, key))
        if not reader.take(","):
            break
        # Else the error would be that a column needs a type.
        if reader.ends():
            raise reader.unexpected("a column")
    reader.need_end("NOT NULL, DEFAULT, PRIMARY KEY, COMMENT, ',' or ')'")
    if not columns.names:
        raise reader.error("a table needs a column", position=position)
    # When all columns are read: the key may stand before them.
    for name in key.names:
        if name.lower() not in columns.names:
            raise reader.error(
                f"the PRIMARY KEY names {name!r}, which is no column", position=key.position
            )
    return columns.found(), tuple(columns.names[name.lower()] for name in key.names)


def _begins_constraint(reader: StatementReader) -> bool:
    """Return whether a table's constraint comes next; a column may have the name ``primary``."""
    second, third = reader.peek(1).word, reader.peek(2).word
    match reader.peek().word:
        case "PRIMARY":
            return second == "KEY"
        case "CONSTRAINT":
            return third in ("PRIMARY", "UNIQUE", "CHECK", "FOREIGN")
        case "UNIQUE" | "CHECK":
            return second == "("
        case "FOREIGN":
            return second == "KEY"
    return False


def _table_constraint(reader: StatementReader, key: _KeyReader) -> None:
    if reader.take("CONSTRAINT"):
        reader.name("a constraint's name")
    position = reader.position
    _refuse_constraint(reader)
    reader.need("PRIMARY", "KEY")
    key.take(reader, reader.column_names(), position)


def _refuse_constraint(reader: StatementReader) -> None:
    if (problem := _REFUSED_CONSTRAINTS.get(reader.peek().word)) is not None:
        raise reader.error(problem)


def read_column(reader: StatementReader, key: _KeyReader | None) -> ColumnDefinition:
    """Take a column; `key` None: there can be no PRIMARY KEY."""
    position = reader.position
    name = reader.name("a column")
    kind = _stored_type(reader)
    not_null, comment, default = False, None, None
    while True:
        at = reader.position
        _refuse_constraint(reader)
        if key is None:
            _refuse_added_default(reader)
        if reader.take("NOT", "NULL"):
            not_null = True
        elif reader.take("COMMENT"):
            comment = read_comment(reader)
        elif reader.take("DEFAULT"):
            if default is not None:
                raise reader.error("a column has one DEFAULT", position=at)
            default = _default(reader)
        elif key is not None and reader.take("PRIMARY", "KEY"):
            key.take(reader, (name,), at)
        elif not reader.take("NULL"):
            break
    return ColumnDefinition(position, name, kind, not_null, comment, default)


def _refuse_added_default(reader: StatementReader) -> None:
    """Raise `SqlSyntaxError` for the default of a further column, unless it is NULL."""
    if reader.follows("DEFAULT") and not reader.follows("DEFAULT", "NULL"):
        raise reader.error(
            "a column is added without a DEFAULT: the rows that are there have NULL in it, since "
            "none is written anew",
            hint="add the column, then ALTER COLUMN … SET DEFAULT …; UPDATE sets it in those rows",
        )


_BEHIND_DEFAULT: Final = frozenset({"COMMENT", "PRIMARY", *_REFUSED_CONSTRAINTS, "DEFAULT"})
"""Words with which the expression of a DEFAULT ends."""


def _default(reader: StatementReader) -> TextSpan:
    """Take the expression of a DEFAULT: up to the column's end, or to its next constraint."""
    tokens, first = reader.tokens, reader.place
    while not reader.ends() and not reader.follows(","):
        token, before = tokens[reader.place], tokens[reader.place - 1]
        # An operand stands first, whatever its word is.
        begun = reader.place > first
        if begun and token.word in _BEHIND_DEFAULT:
            break
        # IS NOT NULL is an operator, and NOT NULL behind an operand the column's.
        if begun and reader.follows("NOT", "NULL") and before.word != "IS":
            break
        if token.word == "NULL" and (before.kind in ("number", "text") or before.text == ")"):
            break
        reader.place = reader.partners.get(reader.place, reader.place) + 1
    return constant_expression(reader, first)


def constant_expression(reader: StatementReader, first: int) -> TextSpan:
    """Return the tokens from `first` on as the expression of a DEFAULT."""
    if reader.place == first:
        raise reader.unexpected("an expression")
    refuse_queries(
        reader, first, problem="a DEFAULT has no queries", hint="write a constant expression"
    )
    return reader.span(first, reader.place)


def _stored_type(reader: StatementReader) -> str:
    """Take a type that a table can store."""
    position = reader.position
    written = read_written_type(reader)
    kind = written.spark
    postgres = reader.dialect is SqlDialect.POSTGRES
    if postgres and written.checked and written.name != "bytea":
        raise reader.error(
            f"a column of type {written.name} is not supported: its values would not be checked",
            position=position,
            hint="write text",
        )
    # Here and not when the table is created, as here the type has a position.
    try:
        arrow_type(kind)
    except (InvalidUsage, ValueError) as error:
        raise reader.error(str(error), position=position) from None
    return kind


def read_comment(reader: StatementReader) -> str:
    """Take the text of a COMMENT."""
    return reader.string("a comment in single quotes")
