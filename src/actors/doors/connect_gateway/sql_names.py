"""Names in SQL texts: which tables a text may read, and the same text with other names. Pure.

Spark reads the texts. Here they are only split into words, so what is found may be too much (a
column called like a table) and never too little, except for names that a text computes
(``IDENTIFIER('a' || 'b')``), which Spark then misses.
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
"""A name as it is written: (table,), (database, table) or (catalog, database, table)."""
ResolveName: TypeAlias = Callable[[NameParts], str | None]
"""Returns the key of the object that a name means; None for any other name."""

_PLAIN: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_QUERY_HEADS: Final = frozenset({"SELECT", "VALUES", "TABLE", "MAP", "REDUCE"})
_MAYBE_HEADS: Final = frozenset({"WITH", "FROM"})
_CHANGE_WORDS: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE"})
_SHOWN_HEADS: Final = frozenset({"EXPLAIN", "DESCRIBE", "DESC", "SHOW"})
_TEXT_NAMES: Final = frozenset({"IDENTIFIER", "EXECUTE"})
"""Words behind which a string may be a name, or a statement."""


class NameChain(NamedTuple):
    """Identifiers with dots between them, without quotes, and where each of them stands."""

    parts: NameParts
    spans: tuple[tuple[int, int], ...]


class TextRead(NamedTuple):
    """A table that a text may read: the object's key, and its name as it is written."""

    key: str
    parts: NameParts
    in_string: bool = False
    """True if the name stands in a string, where it cannot be replaced."""


class TemporaryViewText(NamedTuple):
    """The parts of a CREATE TEMPORARY VIEW."""

    name: str
    query: str
    replace: bool
    if_absent: bool
    is_global: bool
    columns: bool
    """True if it names its columns, or has options."""


def split_words(sql: str) -> list[SqlToken]:
    """Return the words of a text. Comments are left out; what stands in a hint is not. A text that
    has no end, which Spark refuses, has no words.

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
        # A hint names tables, as in BROADCAST(t).
        for each in split_words(token.text[len("/*+") : -len("*/")]):
            yield SqlToken(each.kind, each.text, each.start + start)


class TextNames(NamedTuple):
    """Words of a text that are asked for again and again while its request is looked at."""

    head: str
    """The first word after any brackets, in upper case; "" in a text without words."""
    tokens: Sequence[SqlToken]
    words: Sequence[SqlToken]
    """The tokens, with those that stand in hints."""
    changes: bool
    """True if one of its words begins a change."""
    chains: tuple[NameChain, ...]
    strings: tuple[SqlToken, ...]
    """Strings that may be names, or statements."""


_KEPT: ContextVar[dict[str, TextNames] | None] = ContextVar("texts of a request", default=None)


def keep_names() -> dict[str, TextNames]:
    """Return the names of texts that are kept from now on, in this task and those that it starts:
    each text is split into words once."""
    kept = _KEPT.get()
    if kept is None:
        _KEPT.set(kept := {})
    return kept


def names_of(sql: str) -> TextNames:
    """Return what is kept of a text, or what it says."""
    kept = _KEPT.get()
    if kept is None:
        return read_names(sql)
    if sql not in kept:
        kept[sql] = read_names(sql)
    return kept[sql]


def read_names(sql: str) -> TextNames:
    """Split a text into words; return what is asked of them.

    >>> read_names("(SELECT a.b FROM t)").head
    'SELECT'
    """
    tokens = _tokens_of(sql)
    words = list(_words_in(tokens))
    named = {word.text.upper() for word in words if word.kind == "word"}
    return TextNames(
        # Brackets may stand around a query, never around a command.
        next((word.text.upper() for word in words if word.text != "("), ""),
        tokens,
        words,
        not named.isdisjoint(_CHANGE_WORDS),
        tuple(find_chains(words)),
        () if named.isdisjoint(_TEXT_NAMES) else tuple(w for w in words if w.kind == "text"),
    )


def _identifier(word: SqlToken) -> str | None:
    """Return the identifier that a word may be; None if it cannot be one."""
    if word.kind == "word":
        return word.text
    if word.kind == "name":
        return name_value(word.text)
    # With `spark.sql.ansi.doubleQuotedIdentifiers` it is a name.
    return word.text[1:-1] if word.kind == "text" and word.text[0] == '"' else None


def find_chains(words: Iterable[SqlToken]) -> Iterator[NameChain]:
    """Yield all identifiers of a text, those with dots between them together.

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
    """Return the parts of a name that stands by itself; None if it is none.

    >>> parse_identifier("a.`b.c`"), parse_identifier("a b")
    (('a', 'b.c'), None)
    """
    chains = list(find_chains(words := split_words(text)))
    if len(chains) != 1 or len(words) != 2 * len(chains[0].parts) - 1:
        return None
    return chains[0].parts


def is_plain_name(name: str) -> bool:
    """Return whether a name needs no quotes."""
    return _PLAIN.fullmatch(name) is not None


def find_text_reads(sql: str, resolve: ResolveName) -> list[TextRead]:
    """Return the tables that a text may read, each spelling once.

    >>> known = {("t",): "t", ("default", "t"): "t"}
    >>> find_text_reads("SELECT t.a FROM default.t", known.get)
    [TextRead(key='t', parts=('default', 't'), in_string=False)]
    """
    names = names_of(sql)
    found: dict[TextRead, None] = {}
    for chain in names.chains:
        # A chain that goes on behind the name is a column of a table that is named elsewhere.
        key = resolve(chain.parts)
        if key is not None:
            found[TextRead(key, chain.parts)] = None
    for word in names.strings:
        for read in find_string_reads(string_value(word), resolve):
            found[read] = None
    return list(found)


def find_string_reads(text: str, resolve: ResolveName) -> list[TextRead]:
    """Return the tables that a string's value may name, alone or as a statement."""
    reads = (resolve(chain.parts) and chain.parts for chain in find_chains(split_words(text)))
    found = dict.fromkeys(parts for parts in reads if parts)
    return [TextRead(str(resolve(parts)), parts, in_string=True) for parts in found]


def string_value(word: SqlToken) -> str:
    """Return about the value of a string literal: names have no escapes."""
    return word.text.lstrip("rR")[1:-1].replace("\\", "")


def rename_chains(sql: str, renames: Mapping[NameParts, str]) -> str:
    """Return the text with names replaced, also where they qualify a column. Names are compared in
    lower case.

    >>> rename_chains("SELECT Default.t.a FROM default.t -- t", {("default", "t"): "t1"})
    'SELECT t1.a FROM t1 -- t'
    """
    edits: list[tuple[int, int, str]] = []
    for chain in names_of(sql).chains:
        # By default it is a string, which is not to be changed.
        if any(sql[start] == '"' for start, _ in chain.spans):
            continue
        folded = tuple(part.lower() for part in chain.parts)
        # The longest name first: (a, b) may be renamed as well as (a,).
        for count in range(len(folded), 0, -1):
            alias = renames.get(folded[:count])
            if alias is not None:
                edits.append((chain.spans[0][0], chain.spans[count - 1][1], alias))
                break
    # From the end, so that the places before stay what they were.
    for start, end, alias in reversed(edits):
        sql = sql[:start] + alias + sql[end:]
    return sql


def is_query(sql: str) -> bool:
    """Return whether a text is surely a query; False for a command, and for what may be one.

    >>> is_query("(SELECT 1)"), is_query("WITH a AS (SELECT 1) INSERT INTO t SELECT 1")
    (True, False)
    """
    names = names_of(sql)
    return names.head in _QUERY_HEADS or (names.head in _MAYBE_HEADS and not names.changes)


def needs_no_rows(sql: str) -> bool:
    """Return whether Spark answers a text by its analysis alone, without any table's rows."""
    words = names_of(sql).words
    head = words[0].text.upper() if words else ""
    return head in _SHOWN_HEADS or is_query(sql)


class SettingText(NamedTuple):
    """A SET or RESET statement: the setting that it names ("": all), and what it does with it."""

    name: str
    assigns: bool
    resets: bool


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
    # SET TIME ZONE has a word of its own.
    if found.upper() == "TIME":
        return SettingText("spark.sql.session.timeZone", True, resets)
    return SettingText(found, any(word.text == "=" for word in words), resets)


def parse_text(sql: str) -> SqlStatement:
    """Return the one statement of a text, whose words are split already. Raises
    `SqlSyntaxError`."""
    tokens = names_of(sql).tokens
    if not tokens:
        return parse_statement(sql)
    lexed = LexedText(sql, SqlDialect.SPARK, tokens, {})
    return parse_span(TextSpan(lexed, 0, len(tokens)).matched())


def _words_of(sql: str) -> StatementReader:
    """Return a reader of a text's words."""
    return StatementReader(LexedText(sql, SqlDialect.SPARK, names_of(sql).words, {}))


def _take_name(reader: StatementReader) -> NameParts | None:
    """Take a name; None if none comes next."""
    chain = next(find_chains(reader.tokens[reader.place :]), None)
    if chain is None or chain.spans[0][0] != reader.position:
        return None
    reader.place += 2 * len(chain.parts) - 1
    return chain.parts


def temporary_view_of(sql: str) -> TemporaryViewText | None:
    """Return the parts of a CREATE TEMPORARY VIEW; None for every other text.

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
    # Over a list of columns, a comment, properties: which of them it is does not matter.
    while not bare and not reader.ends() and not reader.take("AS"):
        reader.place += 1
    query = "" if reader.ends() else sql[reader.position :]
    return TemporaryViewText(name[0], query, replace, if_absent, is_global, not bare)


def created_name_of(sql: str) -> tuple[str, NameParts] | None:
    """Return what a text makes in Spark's catalog (TABLE, VIEW, FUNCTION), and its name; None for
    other texts, and for what is temporary.

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
    """Return the name of one part that a DROP VIEW drops; None for every other text."""
    reader = _words_of(sql)
    if not reader.take("DROP", "VIEW"):
        return None
    reader.take("IF", "EXISTS")
    name = _take_name(reader)
    alone = all(token.text == ";" for token in reader.tokens[reader.place :])
    return name[0] if name is not None and len(name) == 1 and alone else None
