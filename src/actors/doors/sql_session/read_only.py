"""Statements that a read-only transaction may carry out. Pure."""

from __future__ import annotations

import re
from typing import Final

from actors.engine.sql import statements as sql
from actors.runtime.errors import InvalidUsage

_READING: Final = (
    sql.QueryStatement,
    sql.SubscribeStatement,
    sql.ShowObjectsStatement,
    sql.ShowColumnsStatement,
    sql.ShowCreateStatement,
    sql.ShowSettingStatement,
    sql.ShowRolesStatement,
    sql.ShowGrantsStatement,
    sql.DescribeStatement,
    sql.ExplainStatement,
    sql.BeginStatement,
    sql.SetTransactionStatement,
    sql.CommitStatement,
    sql.RollbackStatement,
    sql.SavepointStatement,
    sql.ReleaseSavepointStatement,
    sql.RollbackToStatement,
    sql.SetVariableStatement,
    sql.ResetVariableStatement,
    sql.UseSchemaStatement,
    sql.DiscardAllStatement,
    sql.DeclareCursorStatement,
    sql.FetchCursorStatement,
    sql.CloseCursorStatement,
    sql.PrepareTextStatement,
    # What it carries out is checked in its turn.
    sql.ExecutePreparedStatement,
    sql.DeallocateStatement,
    sql.NoOperationStatement,
    # As in PostgreSQL: it changes how things are stored, and not what there is.
    sql.MaintainStatement,
)
"""Statements that change nothing. A new one is refused until it is put here."""


class ReadOnlyTransaction(InvalidUsage):
    """A statement would change something in a transaction that only reads."""

    sqlstate = "25006"


def only_reads(statement: sql.SqlStatement) -> bool:
    """Return whether a statement changes nothing."""
    if isinstance(statement, sql.CopyStatement):
        return statement.direction == "to"
    return isinstance(statement, _READING)


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
