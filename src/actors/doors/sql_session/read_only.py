"""Statements that a read-only transaction may carry out. Pure."""

from __future__ import annotations

import re

from actors.engine.sql import statements as sql
from actors.runtime.errors import InvalidUsage


class ReadOnlyTransaction(InvalidUsage):
    """A statement would change something in a transaction that only reads."""

    sqlstate = "25006"


def only_reads(statement: sql.SqlStatement) -> bool:
    """Return whether a statement changes nothing."""
    if isinstance(statement, sql.CopyStatement):
        return statement.direction == "to"
    return isinstance(statement, sql.ReadingStatement)


def command_of(statement: sql.SqlStatement) -> str:
    """Return the command of a statement, for an error.

    >>> from actors.engine.sql.grammar import parse_statement
    >>> command_of(parse_statement("DROP TABLE t")), command_of(parse_statement("DELETE FROM t"))
    ('DROP TABLE', 'DELETE')
    """
    match statement:
        case sql.ChangeStatement(command=command):
            return command
        case sql.CopyStatement():
            return "COPY FROM"
    # The classes are named after their commands.
    words = re.findall("[A-Z][a-z]*", type(statement).__name__.removesuffix("Statement"))
    return " ".join(words).upper()
