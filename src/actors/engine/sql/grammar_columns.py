"""Grammar of a table's columns: types, constraints and defaults. Pure."""

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
    "GENERATED": "GENERATED columns are not supported",
    "UNIQUE": "UNIQUE is not supported; use the PRIMARY KEY, of which a table has one",
    "CHECK": "CHECK is not supported",
    "REFERENCES": "foreign keys are not supported",
    "FOREIGN": "foreign keys are not supported",
    "COLLATE": "COLLATE is not supported",
}


class ColumnDefinition(NamedTuple):
    """A column as defined. `type` is Spark's type text, in both dialects."""

    position: int
    name: str
    type: str
    not_null: bool
    comment: str | None
    default: TextSpan | None


def columns_schema(columns: Sequence[ColumnDefinition], key: tuple[str, ...] = ()) -> TableSchema:
    """Return columns as a schema in which those of the PRIMARY KEY are NOT NULL."""
    return TableSchema(
        tuple(
            TableColumn(each.name, each.type, not (each.not_null or each.name in key))
            for each in columns
        ),
        key,
    )


class ColumnList:
    """The columns read so far. No two may have names that differ only in case."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Each column's name as written, by its lower-case form."""
        # The columns in the order of the statement.
        self._columns: list[ColumnDefinition] = []

    def add(self, reader: StatementReader, column: ColumnDefinition) -> None:
        """Add a column. Raises `SqlSyntaxError` if its name is taken."""
        # Spark resolves names case-insensitively: two such columns would be ambiguous.
        if column.name.lower() in self.names:
            problem = f"column {column.name!r} is defined twice"
            raise reader.error(problem, position=column.position)
        self.names[column.name.lower()] = column.name
        self._columns.append(column)

    def found(self) -> tuple[ColumnDefinition, ...]:
        """Return the columns in order."""
        return tuple(self._columns)


class _KeyReader:
    """The PRIMARY KEY of the table that is being read; a table has at most one."""

    def __init__(self) -> None:
        # Columns of the key; empty until one is read.
        self.names: tuple[str, ...] = ()
        # Offset of the key in the statement.
        self.position = 0

    def take(self, reader: StatementReader, names: tuple[str, ...], position: int) -> None:
        """Record the key. Raises `SqlSyntaxError` if there already is one, or if it repeats a
        name."""
        if self.names:
            raise reader.error("a table can have only one PRIMARY KEY", position=position)
        lowered = [name.lower() for name in names]
        if len(set(lowered)) < len(lowered):
            raise reader.error("the PRIMARY KEY names a column twice", position=position)
        self.names, self.position = names, position


def read_table_elements(
    reader: StatementReader,
) -> tuple[tuple[ColumnDefinition, ...], tuple[str, ...]]:
    """Read columns and the PRIMARY KEY up to the end of the tokens."""
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
        # Otherwise the error would say that a column needs a type.
        if reader.ends():
            raise reader.unexpected("a column")
    reader.need_end("NOT NULL, DEFAULT, PRIMARY KEY, COMMENT, ',' or ')'")
    if not columns.names:
        raise reader.error("a table needs at least one column", position=position)
    # Checked after all columns are read, since the key may come before them.
    for name in key.names:
        if name.lower() not in columns.names:
            raise reader.error(
                f"the PRIMARY KEY names {name!r}, which is not a column", position=key.position
            )
    return columns.found(), tuple(columns.names[name.lower()] for name in key.names)


def _begins_constraint(reader: StatementReader) -> bool:
    """Return whether a table constraint comes next; a column may also be named ``primary``."""
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
    """Read a column definition. `key` None: a PRIMARY KEY is not allowed here."""
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
                raise reader.error("a column can have only one DEFAULT", position=at)
            default = _default(reader)
        elif key is not None and reader.take("PRIMARY", "KEY"):
            key.take(reader, (name,), at)
        elif not reader.take("NULL"):
            break
    return ColumnDefinition(position, name, kind, not_null, comment, default)


def _refuse_added_default(reader: StatementReader) -> None:
    """Raise `SqlSyntaxError` for a non-NULL default of a column that is added to a table."""
    if reader.follows("DEFAULT") and not reader.follows("DEFAULT", "NULL"):
        raise reader.error(
            "cannot add a column with a DEFAULT: existing rows are not rewritten and have NULL in"
            " it",
            hint="add the column, then ALTER COLUMN … SET DEFAULT …; use UPDATE for the existing"
            " rows",
        )


_BEHIND_DEFAULT: Final = frozenset({"COMMENT", "PRIMARY", *_REFUSED_CONSTRAINTS, "DEFAULT"})
"""Words that end the expression of a DEFAULT."""


def _default(reader: StatementReader) -> TextSpan:
    """Read the expression of a DEFAULT: up to the end of the column or its next constraint."""
    tokens, first = reader.tokens, reader.place
    while not reader.ends() and not reader.follows(","):
        token, before = tokens[reader.place], tokens[reader.place - 1]
        # The first token is always part of an operand, even if it is such a word.
        begun = reader.place > first
        if begun and token.word in _BEHIND_DEFAULT:
            break
        # IS NOT NULL is an operator; NOT NULL after an operand is a constraint of the column.
        if begun and reader.follows("NOT", "NULL") and before.word != "IS":
            break
        if token.word == "NULL" and (before.kind in ("number", "text") or before.text == ")"):
            break
        reader.place = reader.partners.get(reader.place, reader.place) + 1
    return constant_expression(reader, first)


def constant_expression(reader: StatementReader, first: int) -> TextSpan:
    """Return the tokens from `first` up to the next one as the expression of a DEFAULT. Raises
    `SqlSyntaxError` for a query in it."""
    if reader.place == first:
        raise reader.unexpected("an expression")
    refuse_queries(
        reader,
        first,
        problem="a DEFAULT cannot contain a query",
        hint="write a constant expression",
    )
    return reader.span(first, reader.place)


def _stored_type(reader: StatementReader) -> str:
    """Read a column type. Raises `SqlSyntaxError` for one that a table cannot store."""
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
    # Checked here rather than when the table is created, because the type's position is known here.
    try:
        arrow_type(kind)
    except (InvalidUsage, ValueError) as error:
        raise reader.error(str(error), position=position) from None
    return kind


def read_comment(reader: StatementReader) -> str:
    """Read the string after COMMENT."""
    return reader.string("a comment in single quotes")
