"""Redacts the secrets in statements that others than their authors can see."""

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
"""Words of statements whose options may contain a secret."""


def redact_statement(text: str, dialect: SqlDialect) -> str:
    """Return a statement with its secrets redacted; "" if its secrets cannot be located.

    >>> redact_statement("CREATE ROLE r PASSWORD 'x'", SqlDialect.POSTGRES)
    'CREATE ROLE r PASSWORD ***'
    """
    try:
        statement = parse_statement(text, dialect)
    except SqlSyntaxError:
        # Several statements, or a query in Spark's own grammar: only its words are examined.
        statement = None
        if _MAY_HAVE_OPTIONS.search(text):
            return ""
    return redact_text(text, dialect, statement)


def redact_text(text: str, dialect: SqlDialect, statement: SqlStatement | None = None) -> str:
    """Return a text with all passwords redacted, and all strings in the options of sources and
    sinks. Return "" for a text that cannot be split into tokens.

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
        # A statement inside another, as in PREPARE, is not parsed: only its words are examined.
        if token.kind == "text" and (options or before == "PASSWORD"):
            hidden.add((token.start, token.end))
        before = token.word
    # Replace from the end backwards, so that earlier offsets stay valid.
    for start, end in sorted(hidden, reverse=True):
        text = text[:start] + SECRET_SHOWN + text[end:]
    return text
