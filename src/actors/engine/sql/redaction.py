"""Statements as they are shown to others than their authors: with their secrets blanked."""

from __future__ import annotations

import re
from typing import Final

from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import (
    SECRET_SHOWN,
    ChangeStatement,
    SecretSpan,
    SqlStatement,
    parts_in,
)
from actors.engine.sql.tokens import SqlDialect, lex_sql
from actors.runtime.errors import SqlSyntaxError

_MAY_HAVE_OPTIONS: Final = re.compile(r"\b(?:SOURCE|SINK)\b", re.IGNORECASE)
"""Words of statements whose options may hold a secret."""


def redact_statement(text: str, dialect: SqlDialect) -> str:
    """Return a statement as it is shown to others than its author: with its secrets blanked, "" for
    one whose secrets cannot be found.

    >>> redact_statement("CREATE ROLE r PASSWORD 'x'", SqlDialect.POSTGRES)
    'CREATE ROLE r PASSWORD ***'
    """
    try:
        statement = parse_statement(text, dialect)
    except SqlSyntaxError:
        # Several statements, or a query in Spark's own grammar: its words tell.
        statement = None
        if _MAY_HAVE_OPTIONS.search(text):
            return ""
    return redact_text(text, dialect, statement)


def redact_text(text: str, dialect: SqlDialect, statement: SqlStatement | None = None) -> str:
    """Return a text with its secrets blanked: passwords wherever they stand, and all strings among
    the options of sources and sinks. "" for a text that cannot be split into tokens.

    >>> redact_text("PREPARE p AS ALTER ROLE r PASSWORD 'x'", SqlDialect.POSTGRES)
    'PREPARE p AS ALTER ROLE r PASSWORD ***'
    """
    try:
        tokens = lex_sql(text, dialect)
    except SqlSyntaxError:
        return ""
    command = statement.command if isinstance(statement, ChangeStatement) else ""
    options = command in ("CREATE SOURCE", "CREATE SINK")
    hidden = {(each.start, each.end) for each in parts_in(statement, SecretSpan)}
    before = ""
    for token in tokens:
        # A text within a statement, as of PREPARE, is not parsed: its words tell.
        if token.kind == "text" and (options or before == "PASSWORD"):
            hidden.add((token.start, token.end))
        before = token.word
    # From the end on, so that earlier offsets stay right.
    for start, end in sorted(hidden, reverse=True):
        text = text[:start] + SECRET_SHOWN + text[end:]
    return text
