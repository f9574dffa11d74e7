"""Finding and replacing table names in SQL texts. Pure.

Spark parses the texts. This module only splits them into words, so it may find too much (a column
with the name of a table) but not too little. The exception is names that a text computes
(``IDENTIFIER('a' || 'b')``), which Spark then reports as missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeAlias

from actors.engine.sql.grammar import parse_span, parse_statement
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import SqlStatement, TextSpan
from actors.engine.sql.tokens import LexedText, SqlDialect, SqlToken, lex_sql, name_value
from actors.runtime.errors import SqlSyntaxError

NameParts: TypeAlias = tuple[str, ...]
"""A name as written: (table,), (database, table) or (catalog, database, table)."""
ResolveName: TypeAlias = Callable[[NameParts], str | None]
"""Returns the key of the object with this name; None if there is none."""

_PLAIN: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_QUERY_HEADS: Final = frozenset({"SELECT", "VALUES", "TABLE", "MAP", "REDUCE"})
_MAYBE_HEADS: Final = frozenset({"WITH", "FROM"})
_CHANGE_WORDS: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE"})
_SHOWN_HEADS: Final = frozenset({"EXPLAIN", "DESCRIBE", "DESC", "SHOW"})
_TEXT_NAMES: Final = frozenset({"IDENTIFIER", "EXECUTE"})
"""Words after which a string may be a name or a statement."""


class NameChain(NamedTuple):
    """A dotted name in a text."""

    parts: NameParts
    """The identifiers, without quotes."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of each identifier in the text."""


class TextRead(NamedTuple):
    """A table that a text may read."""

    key: str
    """The key of the object."""
    parts: NameParts
    """Its name as written."""
    in_string: bool = False
    """True if the name is in a string, where it cannot be replaced."""


class TemporaryViewText(NamedTuple):
    """The parts of a CREATE TEMPORARY VIEW."""

    name: str
    query: str
    replace: bool
    if_absent: bool
    is_global: bool
    columns: bool
    """True if there is anything between the name and AS, such as columns or a comment."""


def split_words(sql: str) -> list[SqlToken]:
    """Split a text into words. Comments are omitted, but the words in hints are included. A text
    with an unterminated comment or string, which Spark rejects, has no words.

    >>> [word.text for word in split_words("SELECT a /* b */ FROM `c d`.e -- f")]
    ['SELECT', 'a', 'FROM', '`c d`', '.', 'e']
    """
    return list(_words_in(_tokens_of(sql)))


def _tokens_of(sql: str) -> list[SqlToken]:
    try:
        return lex_sql(sql)
    except SqlSyntaxError:
        return []


def _words_in(tokens: Iterable[SqlToken]) -> Iterator[SqlToken]:
    for token in tokens:
        if token.kind != "hint":
            yield token
            continue
        start = token.start + len("/*+")
        # A hint may name tables, as in BROADCAST(t).
        for each in split_words(token.text[len("/*+") : -len("*/")]):
            yield SqlToken(each.kind, each.text, each.start + start)


class TextNames(NamedTuple):
    """The analysis of a text, which a request needs several times."""

    head: str
    """The first word after any parentheses, in upper case; "" if the text has no words."""
    tokens: Sequence[SqlToken]
    """The tokens of the text, with each hint as one token."""
    words: Sequence[SqlToken]
    """The tokens of the text, with hints split into their tokens."""
    changes: bool
    """True if it contains INSERT, UPDATE, DELETE or MERGE as a word."""
    chains: tuple[NameChain, ...]
    """All dotted names in the text."""
    strings: tuple[SqlToken, ...]
    """Strings that may be names or statements."""


_KEPT: ContextVar[dict[str, TextNames] | None] = ContextVar("texts of a request", default=None)


def keep_names() -> dict[str, TextNames]:
    """Start caching the analysis of texts in this task and the tasks that it starts. Return the
    cache."""
    kept = _KEPT.get()
    if kept is None:
        _KEPT.set(kept := {})
    return kept


def names_of(sql: str) -> TextNames:
    """Return the analysis of a text, from the cache if there is one."""
    kept = _KEPT.get()
    if kept is None:
        return read_names(sql)
    if sql not in kept:
        kept[sql] = read_names(sql)
    return kept[sql]


def read_names(sql: str) -> TextNames:
    """Analyze a text.

    >>> read_names("(SELECT a.b FROM t)").head
    'SELECT'
    """
    tokens = _tokens_of(sql)
    words = list(_words_in(tokens))
    named = {word.text.upper() for word in words if word.kind == "word"}
    return TextNames(
        # Queries may be in parentheses, commands may not.
        next((word.text.upper() for word in words if word.text != "("), ""),
        tokens,
        words,
        not named.isdisjoint(_CHANGE_WORDS),
        tuple(find_chains(words)),
        () if named.isdisjoint(_TEXT_NAMES) else tuple(w for w in words if w.kind == "text"),
    )


def _identifier(word: SqlToken) -> str | None:
    """Return a word as an identifier without quotes; None if it cannot be one."""
    if word.kind == "word":
        return word.text
    if word.kind == "name":
        return name_value(word.text)
    # A double-quoted text is a name with `spark.sql.ansi.doubleQuotedIdentifiers`.
    return word.text[1:-1] if word.kind == "text" and word.text[0] == '"' else None


def find_chains(words: Iterable[SqlToken]) -> Iterator[NameChain]:
    """Yield all identifiers in a text, with dotted ones combined.

    >>> [chain.parts for chain in find_chains(split_words("SELECT a.b, c FROM d . e"))]
    [('SELECT',), ('a', 'b'), ('c',), ('FROM',), ('d', 'e')]
    """
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    dotted = False
    for word in words:
        name = _identifier(word)
        if name is None:
            dotted = word.text == "." and bool(parts) and not dotted
            if not dotted and parts:
                yield NameChain(tuple(parts), tuple(spans))
                parts, spans = [], []
            continue
        if parts and not dotted:
            yield NameChain(tuple(parts), tuple(spans))
            parts, spans = [], []
        parts.append(name)
        spans.append((word.start, word.end))
        dotted = False
    if parts:
        yield NameChain(tuple(parts), tuple(spans))


def parse_identifier(text: str) -> NameParts | None:
    """Parse a text that consists of one name; None if it does not.

    >>> parse_identifier("a.`b.c`"), parse_identifier("a b")
    (('a', 'b.c'), None)
    """
    chains = list(find_chains(words := split_words(text)))
    if len(chains) != 1 or len(words) != 2 * len(chains[0].parts) - 1:
        return None
    return chains[0].parts


def is_plain_name(name: str) -> bool:
    """Return whether a name is valid without quotes."""
    return _PLAIN.fullmatch(name) is not None


def find_text_reads(sql: str, resolve: ResolveName) -> list[TextRead]:
    """Return the tables that a text may read, with each spelling once.

    >>> known = {("t",): "t", ("default", "t"): "t"}
    >>> find_text_reads("SELECT t.a FROM default.t", known.get)
    [TextRead(key='t', parts=('default', 't'), in_string=False)]
    """
    names = names_of(sql)
    found: dict[TextRead, None] = {}
    for chain in names.chains:
        # A longer chain is a column of a table, which the text names elsewhere.
        key = resolve(chain.parts)
        if key is not None:
            found[TextRead(key, chain.parts)] = None
    for word in names.strings:
        for read in find_string_reads(string_value(word), resolve):
            found[read] = None
    return list(found)


def find_string_reads(text: str, resolve: ResolveName) -> list[TextRead]:
    """Return the tables that a string's value may name, as a name or in a statement."""
    reads = (resolve(chain.parts) and chain.parts for chain in find_chains(split_words(text)))
    found = dict.fromkeys(parts for parts in reads if parts)
    return [TextRead(str(resolve(parts)), parts, in_string=True) for parts in found]


def string_value(word: SqlToken) -> str:
    """Return the approximate value of a string literal: backslashes are removed, because names have
    no escapes."""
    return word.text.lstrip("rR")[1:-1].replace("\\", "")


def rename_chains(sql: str, renames: Mapping[NameParts, str]) -> str:
    """Replace names in a text, including those that qualify a column. The keys of `renames` are in
    lower case.

    >>> rename_chains("SELECT Default.t.a FROM default.t -- t", {("default", "t"): "t1"})
    'SELECT t1.a FROM t1 -- t'
    """
    edits: list[tuple[int, int, str]] = []
    for chain in names_of(sql).chains:
        # By default, a double-quoted text is a string, which must not change.
        if any(sql[start] == '"' for start, _ in chain.spans):
            continue
        folded = tuple(part.lower() for part in chain.parts)
        # The longest name first, because both (a, b) and (a,) may be renamed.
        for count in range(len(folded), 0, -1):
            alias = renames.get(folded[:count])
            if alias is not None:
                edits.append((chain.spans[0][0], chain.spans[count - 1][1], alias))
                break
    # From the end, so that earlier positions remain valid.
    for start, end, alias in reversed(edits):
        sql = sql[:start] + alias + sql[end:]
    return sql


def is_query(sql: str) -> bool:
    """Return whether a text is certainly a query; False for commands, and if it may be one.

    >>> is_query("(SELECT 1)"), is_query("WITH a AS (SELECT 1) INSERT INTO t SELECT 1")
    (True, False)
    """
    names = names_of(sql)
    return names.head in _QUERY_HEADS or (names.head in _MAYBE_HEADS and not names.changes)


def needs_no_rows(sql: str) -> bool:
    """Return whether Spark needs only to analyze a text, without reading any rows of tables: for
    queries, which run later, and commands such as EXPLAIN."""
    words = names_of(sql).words
    head = words[0].text.upper() if words else ""
    return head in _SHOWN_HEADS or is_query(sql)


class SettingText(NamedTuple):
    """A SET or RESET statement."""

    name: str
    """The setting; "" for all settings."""
    assigns: bool
    """True if it sets a value."""
    resets: bool
    """True if it resets the setting."""


def setting_of(sql: str) -> SettingText | None:
    """Return the setting that a SET or RESET statement names; None for other texts.

    >>> setting_of("SET spark.sql.ansi.enabled = false")
    SettingText(name='spark.sql.ansi.enabled', assigns=True, resets=False)
    """
    words = names_of(sql).words
    if not words or words[0].text.upper() not in ("SET", "RESET"):
        return None
    chains = list(find_chains(words[1:]))
    found = ".".join(chains[0].parts) if chains else ""
    resets = words[0].text.upper() == "RESET"
    # SET TIME ZONE does not name its setting.
    if found.upper() == "TIME":
        return SettingText("spark.sql.session.timeZone", True, resets)
    return SettingText(found, any(word.text == "=" for word in words), resets)


def parse_text(sql: str) -> SqlStatement:
    """Parse a text that is one statement, using cached tokens. Raises `SqlSyntaxError`."""
    tokens = names_of(sql).tokens
    if not tokens:
        return parse_statement(sql)
    lexed = LexedText(sql, SqlDialect.SPARK, tokens, {})
    return parse_span(TextSpan(lexed, 0, len(tokens)).matched())


def _words_of(sql: str) -> StatementReader:
    """Return a reader of a text's words."""
    return StatementReader(LexedText(sql, SqlDialect.SPARK, names_of(sql).words, {}))


def _take_name(reader: StatementReader) -> NameParts | None:
    """Consume a name; None if the next tokens are not one."""
    chain = next(find_chains(reader.tokens[reader.place :]), None)
    if chain is None or chain.spans[0][0] != reader.position:
        return None
    reader.place += 2 * len(chain.parts) - 1
    return chain.parts


def temporary_view_of(sql: str) -> TemporaryViewText | None:
    """Parse a CREATE TEMPORARY VIEW; None for all other texts.

    >>> temporary_view_of("CREATE OR REPLACE TEMP VIEW v AS SELECT 1")[:3]
    ('v', 'SELECT 1', True)
    """
    reader = _words_of(sql)
    if not reader.take("CREATE"):
        return None
    replace = reader.take("OR", "REPLACE")
    is_global = reader.take("GLOBAL")
    if not (reader.take("TEMPORARY") or reader.take("TEMP")) or not reader.take("VIEW"):
        return None
    if_absent = reader.take("IF", "NOT", "EXISTS")
    name = _take_name(reader)
    if name is None or len(name) > 1:
        return None
    bare = reader.take("AS")
    # Skip columns, a comment and properties.
    while not bare and not reader.ends() and not reader.take("AS"):
        reader.place += 1
    query = "" if reader.ends() else sql[reader.position :]
    return TemporaryViewText(name[0], query, replace, if_absent, is_global, not bare)


def created_name_of(sql: str) -> tuple[str, NameParts] | None:
    """Return the kind (TABLE, VIEW or FUNCTION) and name of the object that a text creates in
    Spark's catalog; None for other texts, and for temporary objects.

    >>> created_name_of("CREATE OR REPLACE TABLE default.t USING parquet AS SELECT 1")
    ('TABLE', ('default', 't'))
    """
    reader = _words_of(sql)
    if not reader.take("CREATE") and not reader.take("REPLACE"):
        return None
    reader.take("OR", "REPLACE")
    reader.take("EXTERNAL")
    for kind in ("TABLE", "VIEW", "FUNCTION"):
        if reader.take(kind):
            reader.take("IF", "NOT", "EXISTS")
            parts = _take_name(reader)
            return None if parts is None else (kind, parts)
    return None


def changed_name_of(sql: str) -> NameParts | None:
    """Return the name of the table that an INSERT, UPDATE, DELETE or MERGE changes; None for other
    texts.

    >>> changed_name_of("MERGE INTO a.t USING {s} ON true"), changed_name_of("SELECT 1")
    (('a', 't'), None)
    """
    reader = _words_of(sql)
    for head in ("INSERT", "UPDATE", "DELETE", "MERGE"):
        if reader.take(head):
            for word in ("INTO", "OVERWRITE", "FROM", "TABLE"):
                reader.take(word)
            return _take_name(reader)
    return None


def dropped_view_of(sql: str) -> str | None:
    """Return the name that a DROP VIEW drops, if it has no database; None for all other texts."""
    reader = _words_of(sql)
    if not reader.take("DROP", "VIEW"):
        return None
    reader.take("IF", "EXISTS")
    name = _take_name(reader)
    alone = all(token.text == ";" for token in reader.tokens[reader.place :])
    return name[0] if name is not None and len(name) == 1 and alone else None
