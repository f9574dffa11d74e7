"""Splits SQL texts at their semicolons, and parses each statement.

>>> statement = parse_statement("CREATE MATERIALIZED VIEW v REFRESH POLICY FULL AS SELECT 1 AS a")
>>> statement.names, statement.query.text, statement.query.start
((('v',),), 'SELECT 1 AS a', 50)
>>> parse_statement("DROP TABLE public.b, c CASCADE").requests
(DropObject(request=0, name='b', cascade=True), DropObject(request=0, name='c', cascade=True))
>>> split = split_statements("SELECT ';' -- no; end\\n; ;INSERT INTO t VALUES (1);")
>>> [(each.start, each.text) for each in split]
[(0, "SELECT ';'"), (25, 'INSERT INTO t VALUES (1)')]
>>> parse_statement("CREATE TABLE t (a int,\\n  b)")
Traceback (most recent call last):
actors.runtime.errors.SqlSyntaxError: line 2, column 4: expected a type, found ')'

Queries and expressions are not parsed (see `statements`). The rules are in one file per subject
(`grammar_ddl`, `grammar_dml`, `grammar_query`, `grammar_session`, `grammar_roles`), as functions of
a `StatementReader`. Only nested types recurse, and their depth is limited, so no text exhausts the
stack. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from actors.engine.sql.grammar_ddl import (
    read_alter,
    read_comment_on,
    read_create,
    read_drop,
    read_maintain,
    read_refresh,
)
from actors.engine.sql.grammar_dml import (
    read_copy,
    read_delete,
    read_insert,
    read_merge,
    read_truncate,
    read_update,
)
from actors.engine.sql.grammar_query import QUERY_WORDS, begins_query, read_query, read_subscribe
from actors.engine.sql.grammar_roles import read_grant, read_revoke
from actors.engine.sql.grammar_session import (
    read_begin,
    read_close,
    read_commit,
    read_deallocate,
    read_declare,
    read_describe,
    read_discard,
    read_execute,
    read_fetch,
    read_listen,
    read_prepare,
    read_release,
    read_reset,
    read_rollback,
    read_savepoint,
    read_set,
    read_show,
    read_use,
)
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import (
    ChangeStatement,
    ExplainMode,
    ExplainStatement,
    SqlStatement,
    TextSpan,
)
from actors.engine.sql.tokens import LexedText, SqlDialect, lex_sql, lex_text
from actors.runtime.errors import PenstockError

_Rule: TypeAlias = Callable[[StatementReader], SqlStatement]


def _read_explain(reader: StatementReader) -> SqlStatement:
    position = reader.position
    reader.need("EXPLAIN")
    mode: ExplainMode = "plain"
    if reader.take("INCREMENTAL"):
        mode = "incremental"
    elif reader.take("ANALYZE"):
        mode = "analyze"
    # Tested before CREATE, since a query may start with a bracket.
    if begins_query(reader):
        return ExplainStatement(position=position, mode=mode, statement=read_query(reader))
    if reader.follows("CREATE"):
        at = reader.position
        created = read_create(reader)
        view = "CREATE MATERIALIZED VIEW"
        if isinstance(created, ChangeStatement) and created.command == view:
            return ExplainStatement(position=position, mode=mode, statement=created)
        raise reader.error("EXPLAIN takes a query or CREATE MATERIALIZED VIEW", position=at)
    if reader.follows("MATERIALIZED") or reader.follows("VIEW"):
        reader.take("MATERIALIZED")
        reader.need("VIEW")
        name = reader.object_name("a materialized view's name")
        reader.need_end()
        return ExplainStatement(position=position, mode=mode, view=name)
    modes = "INCREMENTAL, ANALYZE, " if mode == "plain" else ""
    raise reader.unexpected(f"{modes}a query, MATERIALIZED VIEW name or CREATE MATERIALIZED VIEW")


_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(QUERY_WORDS, read_query),
    "ALTER": read_alter,
    "COMMENT": read_comment_on,
    "CREATE": read_create,
    "DELETE": read_delete,
    "DESC": read_describe,
    "DESCRIBE": read_describe,
    "DROP": read_drop,
    "EXPLAIN": _read_explain,
    "GRANT": read_grant,
    "INSERT": read_insert,
    "MERGE": read_merge,
    "REFRESH": read_refresh,
    "RESET": read_reset,
    "REVOKE": read_revoke,
    "SET": read_set,
    "SHOW": read_show,
    "SUBSCRIBE": read_subscribe,
    "TRUNCATE": read_truncate,
    "UPDATE": read_update,
    "USE": read_use,
}
"""The rule for each first word, in both dialects."""
_POSTGRES_RULES: Final[Mapping[str, _Rule]] = {
    "ABORT": read_rollback,
    "ANALYZE": read_maintain,
    "BEGIN": read_begin,
    "CLOSE": read_close,
    "COMMIT": read_commit,
    "COPY": read_copy,
    "DEALLOCATE": read_deallocate,
    "DECLARE": read_declare,
    "DISCARD": read_discard,
    "END": read_commit,
    "EXECUTE": read_execute,
    "FETCH": read_fetch,
    "LISTEN": read_listen,
    "MOVE": read_fetch,
    "PREPARE": read_prepare,
    "RELEASE": read_release,
    "ROLLBACK": read_rollback,
    "SAVEPOINT": read_savepoint,
    "START": read_begin,
    "UNLISTEN": read_listen,
    "VACUUM": read_maintain,
}
"""Rules of statements that only connections of PostgreSQL's protocol accept."""


def parse_statement(text: str, dialect: SqlDialect = SqlDialect.SPARK) -> SqlStatement:
    """Return the one statement of a text, with or without trailing semicolons.

    Raises `SqlSyntaxError` with the position of the first token that cannot be parsed.
    """
    lexed = lex_text(text, dialect)
    return parse_span(TextSpan(lexed, 0, len(lexed.tokens)))


def parse_span(span: TextSpan) -> SqlStatement:
    """Return the one statement of a part of a text. Raises as `parse_statement`."""
    lexed, last = span.lexed, span.last
    # Clients send a statement with or without its semicolon.
    while last > span.first and lexed.tokens[last - 1].text == ";":
        last -= 1
    reader = StatementReader(lexed, span.first, last)
    _refuse_several(span, reader)
    rule = _rule_of(reader)
    statement = rule(reader)
    # Most rules check this themselves, with a better error.
    reader.need_end()
    return statement


def _refuse_several(span: TextSpan, reader: StatementReader) -> None:
    for place in span.lexed.outer(reader.place, reader.last):
        if reader.tokens[place].text == ";":
            raise reader.error(
                "expected a single statement, found another one after a semicolon",
                position=reader.tokens[place].start,
            )


def _rule_of(reader: StatementReader) -> _Rule:
    word = reader.peek().word
    if (rule := _RULES.get(word)) is not None:
        return rule
    postgres = reader.dialect is SqlDialect.POSTGRES
    if (rule := _POSTGRES_RULES.get(word)) is not None:
        if postgres:
            return rule
        raise reader.error(
            f"{word} is available only over PostgreSQL's protocol",
            hint="over this protocol each statement is its own transaction",
        )
    known = sorted([*_RULES, *(_POSTGRES_RULES if postgres else ())])
    raise reader.unexpected(
        "a statement", hint=f"expected one of {', '.join(word for word in known if word != '(')}"
    )


def split_statements(text: str, dialect: SqlDialect = SqlDialect.SPARK) -> list[TextSpan]:
    """Return the statements of a text, split at semicolons outside quotes, comments and brackets.
    Parts without a token are left out.

    Raises `SqlSyntaxError` for an unterminated quote or comment. Brackets are not matched here:
    reading a statement with unmatched ones raises the error (`TextSpan.matched`).
    """
    found: list[TextSpan] = []
    lexed = LexedText(text, dialect, lex_sql(text, dialect), {})
    first = depth = 0
    for place, token in enumerate(lexed.tokens):
        if token.text == ";" and depth == 0:
            found.append(TextSpan(lexed, first, place))
            first = place + 1
        elif token.text in ("(", "[", "{"):
            depth += 1
        elif token.text in (")", "]", "}"):
            # An unmatched closing bracket must not swallow the statements after it.
            depth = max(0, depth - 1)
    found.append(TextSpan(lexed, first, len(lexed.tokens)))
    return [each for each in found if each.first < each.last]


class ParsedStatement(msgspec.Struct, frozen=True, eq=False):
    """One statement of a text: its span, and its tree or the error in it. `text` is the statement
    as it was sent, including the comments after it."""

    span: TextSpan
    text: str
    tree: SqlStatement | None = None
    error: PenstockError | None = None

    def statement(self) -> SqlStatement:
        """Return the statement. Raises its parse error, which is reported only when the statement's
        turn to run comes."""
        if self.error is not None:
            raise self.error
        assert self.tree is not None
        return self.tree


def parse_statements(text: str, dialect: SqlDialect = SqlDialect.SPARK) -> list[ParsedStatement]:
    """Return the statements of a text, each parsed. Raises as `split_statements`."""
    found = []
    for span in split_statements(text, dialect):
        following = span.lexed.tokens[span.last : span.last + 1]
        own = text[span.start : following[0].start if following else len(text)]
        try:
            matched = span.matched()
            found.append(ParsedStatement(matched, own, parse_span(matched)))
        # The statements before it run first.
        except PenstockError as error:
            found.append(ParsedStatement(span, own, error=error))
    return found
