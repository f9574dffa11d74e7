"""Grammar of queries and of SUBSCRIBE: where they end, and the times that they name.

Of a query, only the ``AS OF`` clauses are parsed. A clause at the very end is the time of the whole
query and not part of its text. ``name TIMESTAMP AS OF …`` is Spark's: it stays in the text and is
returned as a `QueryPin`. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from actors.engine.sql.reader import NO_NAMES, StatementReader, list_words
from actors.engine.sql.statements import (
    QueryPin,
    QueryStatement,
    SubscribeStatement,
    TextSpan,
)
from actors.engine.sql.tokens import SqlDialect, SqlToken

QUERY_WORDS: Final = ("SELECT", "WITH", "VALUES", "FROM", "TABLE", "(")
"""Words and signs that start a query."""
_ROW_VERBS: Final = ("INSERT", "UPDATE", "DELETE", "MERGE")
_PIN_WORDS: Final = ("TIMESTAMP", "SYSTEM_TIME", "VERSION", "SYSTEM_VERSION")
_NO_RELATIONS: Final = NO_NAMES | {"JOIN", "LATERAL", "TABLE"}
_TIME_WORDS: Final = frozenset({"CURRENT_DATE", "CURRENT_TIMESTAMP", "LOCALTIMESTAMP"})
_LITERAL_WORDS: Final = frozenset(
    {"DATE", "TIMESTAMP", "TIMESTAMPTZ", "TIMESTAMP_LTZ", "TIMESTAMP_NTZ"}
)
"""Types before a string: ``TIMESTAMP '…'``."""
_TIME_CALLS: Final = _LITERAL_WORDS | frozenset(
    {"CAST", "NOW", "CURRENT_TIMESTAMP", "CURRENT_DATE", "TO_TIMESTAMP", "TIMESTAMP_MILLIS"}
)
"""Functions that an ``AS OF`` at the end may call. Any other word there may be part of the
query."""
AS_OF_HINT: Final = "AS OF takes milliseconds since 1970-01-01, or a timestamp in quotes"


_IN_BRACKETS: Final = frozenset({"FROM", "TABLE", "VALUES", "WITH", "MAP", "REDUCE"})
"""Words with which a query in brackets may start, apart from SELECT, which every other query
has."""


def refuse_queries(reader: StatementReader, first: int, *, problem: str, hint: str) -> None:
    """Raise `SqlSyntaxError` if the tokens from `first` up to the next one contain a query."""
    for place in range(first, reader.place):
        token, before = reader.tokens[place], reader.tokens[place - 1]
        if token.word == "SELECT" or (before.text == "(" and token.word in _IN_BRACKETS):
            raise reader.error(problem, hint=hint, position=token.start)


def begins_query(reader: StatementReader) -> bool:
    """Return whether a query comes next."""
    return reader.follows_any(*QUERY_WORDS)


def read_query(reader: StatementReader) -> QueryStatement:
    """Read all remaining tokens as a query."""
    if not begins_query(reader):
        raise reader.unexpected("a query", hint=f"a query begins with {list_words(QUERY_WORDS)}")
    _refuse_rows_with(reader)
    clauses = _as_of_clauses(reader)
    first, last = reader.place, reader.last
    as_of = None
    # Only the last clause can be at the end.
    if clauses and (trailing := _trailing(reader, clauses[-1])) is not None:
        last, as_of = clauses.pop(), trailing
    pins = (_pin(reader, place) for place in clauses)
    statement = QueryStatement(
        position=reader.position,
        query=reader.span(first, last),
        as_of=as_of,
        pins=tuple(pin for pin in pins if pin is not None),
    )
    reader.place = reader.last
    return statement


def read_query_text(reader: StatementReader, expected: str = "a query") -> TextSpan:
    """Read all remaining tokens as a query whose changes are followed: it cannot name times."""
    if not begins_query(reader):
        raise reader.unexpected(expected)
    query = read_query(reader)
    hint = "the query is kept up to date as its inputs change"
    if query.as_of is not None:
        raise reader.error("AS OF is not allowed here", hint=hint, position=query.as_of.start)
    for pin in query.pins:
        raise reader.error("AS OF is not allowed here", hint=hint, position=pin.clause.start)
    return query.query


def _refuse_rows_with(reader: StatementReader) -> None:
    """Refuse ``WITH … INSERT`` and the like, where a query does not follow WITH."""
    if not reader.follows("WITH"):
        return
    place = reader.place
    while place < reader.last:
        after = reader.tokens[place + 1] if place + 1 < reader.last else None
        # After a table expression of WITH, or after its list of columns.
        closed = reader.tokens[place].text == ")" and after is not None
        if closed and after is not None and after.word in _ROW_VERBS:
            raise reader.error(
                f"{after.word} cannot follow WITH",
                hint=f"put WITH into the query: {after.word} … WITH …",
                position=after.start,
            )
        # Skip to the closing bracket itself, which this loop tests for.
        place = reader.partners.get(place, place + 1)


# -- AS OF ---------------------------------------------------------------------------------------


def _as_of_clauses(reader: StatementReader) -> list[int]:
    """Return the places of AS in all remaining ``AS OF``, including those in brackets."""
    tokens = reader.tokens
    return [
        place - 1
        for place in range(reader.place + 1, reader.last)
        if len(tokens[place].text) == 2
        and tokens[place].word == "OF"
        and tokens[place - 1].word == "AS"
    ]


def _trailing(reader: StatementReader, place: int) -> TextSpan | None:
    """Return the expression of an ``AS OF`` that ends the query. Return None if this one does not,
    or if it belongs to a relation."""
    if place <= reader.place or _pin(reader, place) is not None:
        return None
    end = _expression_end(reader, place + 2, _TIME_CALLS)
    return reader.span(place + 2, end) if end == reader.last else None


class _PinnedName(NamedTuple):
    first: int
    is_version: bool


def _pinned_name(reader: StatementReader, place: int) -> _PinnedName | None:
    """Return the place where the name in ``name [FOR] TIMESTAMP AS OF`` starts, given the place of
    AS."""
    tokens, least = reader.tokens, reader.place
    # Read backwards from AS, since nothing before it marks the start of a relation.
    word = tokens[place - 1].word
    if word not in _PIN_WORDS:
        return None
    at = place - 2
    if at > least and tokens[at].word == "FOR":
        at -= 1
    # In `FROM timestamp AS OF 5` it is the name of a table, and the time is that of the query.
    if at <= least or not _is_relation(tokens[at]):
        return None
    while at - 2 > least and tokens[at - 1].word == "." and tokens[at - 2].kind in ("word", "name"):
        at -= 2
    return _PinnedName(at, word.endswith("VERSION"))


def _is_relation(token: SqlToken) -> bool:
    return token.kind == "name" or (token.kind == "word" and token.word not in _NO_RELATIONS)


def _pin(reader: StatementReader, place: int) -> QueryPin | None:
    """Return the pinned relation of an ``AS OF``; None if it does not belong to one."""
    found = _pinned_name(reader, place)
    end = _expression_end(reader, place + 2, None) if found is not None else 0
    if found is None or not end:
        return None
    name_end = place - (2 if reader.tokens[place - 2].word == "FOR" else 1)
    return QueryPin(
        position=reader.tokens[found.first].start,
        name=tuple(
            _part(token, reader.dialect) for token in reader.tokens[found.first : name_end : 2]
        ),
        is_version=found.is_version,
        expression=reader.span(place + 2, end),
        clause=reader.span(name_end, end),
    )


def _part(token: SqlToken, dialect: SqlDialect) -> str:
    unquoted = token.kind == "word" and dialect is SqlDialect.POSTGRES
    return token.text.lower() if unquoted else token.name


def _expression_end(reader: StatementReader, place: int, calls: frozenset[str] | None) -> int:
    """Return the place after operands joined by ``+`` and ``-``; 0 if there are none.

    `calls`: the words that may be functions or denote a time; None: all that are not keywords.
    """
    end = _operand_end(reader, place, calls)
    while end and end < reader.last and reader.tokens[end].word in ("+", "-"):
        further = _operand_end(reader, end + 1, calls)
        # A sign without an operand: Spark reports the error.
        if not further:
            break
        end = further
    return end


def _operand_end(reader: StatementReader, place: int, calls: frozenset[str] | None) -> int:
    if place < reader.last and reader.tokens[place].word in ("+", "-"):
        place += 1
    if place >= reader.last:
        return 0
    token = reader.tokens[place]
    if token.kind in ("number", "text", "parameter"):
        end = place + 1
    elif token.word == "(":
        end = reader.partners[place] + 1
    elif token.word == "INTERVAL":
        end = _interval_end(reader, place + 1)
    else:
        end = _word_end(reader, place, calls)
    # A cast of PostgreSQL's: '…'::timestamptz.
    while end and end + 1 < reader.last and reader.tokens[end].word == "::":
        end += 2
    return end


def _word_end(reader: StatementReader, place: int, calls: frozenset[str] | None) -> int:
    token = reader.tokens[place]
    following = reader.tokens[place + 1] if place + 1 < reader.last else None
    # A keyword continues the query: `SELECT a AS of FROM t`.
    if token.kind not in ("word", "name") or token.word in _NO_RELATIONS:
        return 0
    if following is not None and following.kind == "text" and token.word in _LITERAL_WORDS:
        return place + 2
    if following is not None and following.word == "(" and (calls is None or token.word in calls):
        return reader.partners[place + 1] + 1
    return place + 1 if calls is None or token.word in _TIME_WORDS else 0


def _interval_end(reader: StatementReader, place: int) -> int:
    """Return the place after ``'…' unit TO unit`` or ``number unit number unit``."""
    first = place
    while place < reader.last and reader.tokens[place].kind in ("number", "text"):
        place += 1
        if place >= reader.last or reader.tokens[place].word not in _UNITS:
            break
        place += 1
        if place + 1 < reader.last and reader.tokens[place].word == "TO":
            place += 2
    return place if place > first else 0


_UNIT_WORDS: Final = "YEAR MONTH WEEK DAY HOUR MINUTE SECOND MILLISECOND MICROSECOND"
_UNITS: Final = frozenset(word + ending for word in _UNIT_WORDS.split() for ending in ("", "S"))


# -- SUBSCRIBE -----------------------------------------------------------------------------------


def read_subscribe(reader: StatementReader) -> SubscribeStatement:
    """Read ``SUBSCRIBE [TO] (query)|name [WITH (…)] [AS OF t] [UP TO t]``."""
    position = reader.position
    reader.need("SUBSCRIBE")
    reader.take("TO")
    query = name = None
    if reader.follows("("):
        query = read_query_text(reader.bracketed())
    elif begins_query(reader):
        raise reader.unexpected(
            "a name or a query in brackets", hint="put the query of a SUBSCRIBE in brackets"
        )
    else:
        name = reader.object_name("a name or a query in brackets")
    flags = _subscribe_flags(reader) if reader.take("WITH") else {}
    as_of = read_time(reader) if reader.take("AS", "OF") else None
    up_to = read_time(reader) if reader.take("UP", "TO") else None
    reader.need_end("WITH (…), AS OF, UP TO or the end of the statement")
    return SubscribeStatement(
        position=position,
        query=query,
        name=name,
        snapshot=flags.get("SNAPSHOT", True),
        progress=flags.get("PROGRESS", False),
        as_of=as_of,
        up_to=up_to,
    )


def read_time(reader: StatementReader) -> TextSpan:
    """Read the expression of an ``AS OF`` or ``UP TO``."""
    end = _expression_end(reader, reader.place, _TIME_CALLS)
    if not end:
        raise reader.unexpected("a time", hint=AS_OF_HINT)
    span = reader.span(reader.place, end)
    reader.place = end
    return span


def _subscribe_flags(reader: StatementReader) -> dict[str, bool]:
    inner = reader.bracketed("'(' and options of SUBSCRIBE")
    found: dict[str, bool] = {}
    while True:
        flag = inner.need_any("SNAPSHOT", "PROGRESS")
        if flag in found:
            raise inner.error(f"option {flag} is given twice")
        found[flag] = read_flag(inner)
        if not inner.take(","):
            break
    inner.need_end("',' or ')'")
    return found


def read_flag(reader: StatementReader) -> bool:
    """Read ``[=] true|false`` after the name of an option; the name alone means true."""
    given = reader.take("=")
    token = reader.peek()
    word = token.text.strip("'").upper()
    if token.kind in ("word", "text", "number") and word in _FLAGS:
        reader.place += 1
        return _FLAGS[word]
    if given:
        raise reader.unexpected("true or false")
    return True


_FLAGS: Final = {
    "TRUE": True,
    "ON": True,
    "YES": True,
    "1": True,
    "FALSE": False,
    "OFF": False,
    "NO": False,
    "0": False,
}


def read_query_or_subscribe(reader: StatementReader) -> QueryStatement | SubscribeStatement:
    """Read all remaining tokens as a query or a SUBSCRIBE, for COPY and cursors."""
    if reader.follows("SUBSCRIBE"):
        return read_subscribe(reader)
    return read_query(reader)


def read_as_query(reader: StatementReader, expected: str) -> TextSpan:
    """Read ``AS query`` at the end of a definition."""
    if not reader.take("AS"):
        raise reader.unexpected(expected)
    return read_query_text(reader)
