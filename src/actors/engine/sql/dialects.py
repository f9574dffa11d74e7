r"""Queries of PostgreSQL's dialect, rewritten for Spark token by token.

Only what differs in the lexers and in the names of types is rewritten: quotes, escapes, comments,
parameters and casts. Functions and operators keep Spark's meaning. Positions in the new text map
back to the original, so an error from Spark points at what the user wrote. Pure.

>>> from actors.engine.sql.tokens import lex_text
>>> def written(text, *parameters):
...     print(to_spark(lex_text(text, SqlDialect.POSTGRES), parameters).text)
>>> written('SELECT "a b", $$it\'s$$ FROM "T"')
SELECT `a b`, 'it\'s' FROM `T`
>>> written(r"SELECT 'a\d', E'a\\d'")
SELECT 'a\\d', 'a\\d'
>>> written("SELECT x::int8, CAST(y AS text), $1 + 1, $2", "-5", "'q'")
SELECT x::bigint, CAST(y AS string), (-5) + 1, 'q'
>>> written("SELECT pg_catalog.lower(a) /* why */FROM t")
SELECT lower(a) FROM t
>>> written('SELECT a FROM public.t, "public"."T"')
SELECT a FROM t, `T`
>>> written("SELECT timestamptz '2024-01-01', timestamp '2024-01-01'")
SELECT timestamp '2024-01-01', timestamp_ntz '2024-01-01'
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from actors.engine.sql.cast_finding import NOT_CALLED, CastFinder
from actors.engine.sql.column_naming import missing_names
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.series_calls import SeriesFinder
from actors.engine.sql.tokens import (
    LexedText,
    SqlDialect,
    SqlToken,
    lex_sql,
    quote_name,
    quote_text,
    syntax_error,
    text_value,
)
from actors.engine.sql.type_names import WrittenType, read_written_type
from actors.model.plan.schema import text_limit
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

_TYPED_LITERALS: Final = frozenset(
    {"DATE", "TIMESTAMP", "TIMESTAMPTZ", "BYTEA", "UUID", "JSON", "JSONB", "NUMERIC"}
)
_BYTES: Final = re.compile(r"\\x(?:[0-9a-fA-F]{2})*")
TypedReader: TypeAlias = Callable[[str, WrittenType], str]
"""Returns a text that is cast to a type as a literal of that type; "" if Spark already reads the
text correctly."""
_BYTEA: Final = WrittenType("binary", "bytea", limited=False)
_DATABASE: Final = "penstock"
_SCHEMA: Final = "public"
_LITERAL_TYPES: Final = frozenset({"DATE", "TIME", "TIMESTAMP", "INTERVAL"})
_JOINING: Final = re.compile(r"\w")
_ONE_TOKEN: Final = frozenset({"number", "text", "word"})


class TextEdit(msgspec.Struct, frozen=True, gc=False):
    """A replaced part: `[start, end)` of the new text replaces `[old_start, old_end)` of the
    original."""

    start: int
    end: int
    old_start: int
    old_end: int


class SparkText(msgspec.Struct, frozen=True, gc=False):
    """A text for Spark, and its differences from the original text."""

    text: str
    edits: tuple[TextEdit, ...] = ()

    def original_position(self, position: int) -> int:
        """Return the offset in the original text of an offset in `text`. Within a replaced part
        this is the start of the part.

        >>> from actors.engine.sql.tokens import lex_text
        >>> rewritten = to_spark(lex_text('SELECT E\\'a\\', x', SqlDialect.POSTGRES))
        >>> rewritten.text, rewritten.original_position(rewritten.text.index("x"))
        ("SELECT 'a', x", 13)
        """
        place = bisect_right(self.edits, position, key=lambda edit: edit.start) - 1
        if place < 0:
            return position
        edit = self.edits[place]
        if position < edit.end:
            return edit.old_start
        return position - edit.end + edit.old_end


class TimeReader(Protocol):
    """Interprets time literals that may lack a time zone."""

    def absolute(self, text: str) -> str | None:
        """Return a timestamptz text with its offset; None if it is not a time."""

    def check_untyped(self, text: str) -> None:
        """Raise an error for an untyped text that Spark would read as a different time."""


def to_spark(
    lexed: LexedText,
    parameters: Sequence[str] = (),
    times: TimeReader | None = None,
    read_typed: TypedReader = lambda *_: "",
    *,
    name_columns: bool = False,
    role_of: Callable[[int], str] = lambda _: "",
) -> SparkText:
    """Return a query of PostgreSQL's dialect as Spark reads it.

    Args:
        lexed: The query.
        parameters: Spark literals for ``$1``, ``$2``, …
        times: Reads time literals; None leaves them to Spark.
        read_typed: Reads texts that are cast.
        name_columns: True to give columns without an alias the names that PostgreSQL gives them.
        role_of: Returns the role of the place at an offset (`type_dependent_places`); "" if it has
            none.

    Raises:
        SqlSyntaxError: A parameter is missing, or PostgreSQL checks the result of a cast and Spark
            does not. Also what `TimeReader.check_untyped` raises.
    """
    names = missing_names(lexed) if name_columns else {}
    return _SparkWriter(lexed, parameters, times, read_typed, names, role_of).written()


class _SparkWriter:
    """Writes the tokens of a text for Spark, one after the other."""

    def __init__(
        self,
        lexed: LexedText,
        parameters: Sequence[str],
        times: TimeReader | None,
        read_typed: TypedReader,
        names: Mapping[int, str],
        role_of: Callable[[int], str],
    ) -> None:
        self._times = times
        self._role_of = role_of
        self._moments: set[int] = set()
        """Places of texts of type timestamptz."""
        self._counts: dict[int, str] = {}
        """LIMIT or OFFSET, by the places of the tokens of its row count."""
        self._lexed = lexed
        self._text = lexed.text
        self._tokens = lexed.tokens
        self._parameters = parameters
        # The text written so far, in parts, and its length.
        self._parts: list[str] = []
        self._length = 0
        # The replacements made so far, in order.
        self._edits: list[TextEdit] = []
        self._read_typed = read_typed
        self._casts = CastFinder(lexed, role_of)
        self._series = SeriesFinder(lexed, is_utc=times is None)
        self._replaced = self._casts.replaced | self._series.replaced
        self._names = names
        self._closed: dict[int, str] = {}
        """Texts to write in place of closing brackets, by the brackets' places."""
        self._types: set[int] = set()
        """Places where the type of a CAST starts."""
        self._at = 0
        """Offset in the original text up to which everything is written."""

    def written(self) -> SparkText:
        """Write all tokens and return the text."""
        place = 0
        while place < len(self._tokens):
            self._gap(self._tokens[place].start)
            self._insert(self._series.opening.get(place, ""))
            self._insert(self._casts.opening.get(place, ""))
            place = self._token(place)
            self._insert(self._casts.closing.get(place, ""))
            self._insert(self._series.closing.get(place, ""))
            if name := self._names.get(place):
                self._insert(f" AS {quote_name(name)}")
        self._gap(len(self._text))
        return SparkText("".join(self._parts), tuple(self._edits))

    # -- output -------------------------------------------------------------------------------

    def _gap(self, end: int) -> None:
        """Write what separates the next token from the last one. A comment becomes a blank, since
        the dialects end comments differently."""
        gap = self._text[self._at : end]
        if not gap or gap.isspace():
            self._append(gap)
        else:
            self._edit(end, "\n" if "\n" in gap else " ")
        self._at = end

    def _copy(self, end: int) -> None:
        self._separate(self._text[self._at])
        self._append(self._text[self._at : end])
        self._at = end

    def _edit(self, end: int, new: str) -> None:
        """Write `new` in place of the original text up to `end`."""
        # An empty text drops the part, and cannot join two tokens.
        if new:
            self._separate(new[0])
        start = self._length
        self._append(new)
        self._edits.append(TextEdit(start, self._length, self._at, end))
        self._at = end

    def _insert(self, new: str) -> None:
        if new:
            self._edit(self._at, new)

    def _separate(self, following: str) -> None:
        """Write a blank if the next character would otherwise extend the token before it."""
        if not self._parts or not self._parts[-1]:
            return
        before = self._parts[-1][-1]
        both_words = _JOINING.match(before) and _JOINING.match(following)
        if both_words or (before == following and before in "'`"):
            start = self._length
            self._append(" ")
            self._edits.append(TextEdit(start, self._length, self._at, self._at))

    def _append(self, part: str) -> None:
        if part:
            self._parts.append(part)
            self._length += len(part)

    # -- tokens -------------------------------------------------------------------------------

    def _token(self, place: int) -> int:
        """Write the token at a place, and any that belong to it; return the place after them."""
        token = self._tokens[place]
        if place in self._replaced:
            end, new = self._replaced[place]
            self._edit(self._tokens[end - 1].end, new)
            return end
        if place in self._types:
            return self._type(place)
        if token.kind in ("word", "name") and (end := self._behind_schema(place)):
            self._edit(self._tokens[end].start, "")
            return end
        match token.kind:
            case "name" if token.text[0] == '"':
                self._edit(token.end, quote_name(token.name))
            case "text":
                return self._string(place)
            case "parameter":
                return self._bound(place)
            case "word":
                return self._word(place)
            case "sign" if place in self._casts.subscripts:
                return self._subscript(place)
            case "sign" if place in self._closed:
                self._edit(token.end, self._closed[place])
            case "sign" if token.text == "(" and (end := self._bracketed(place)):
                return end
            case "sign" if opened := self._of_array(place):
                return self._any_of(place, opened)
            case "sign" if token.text == "::":
                # Spark has this operator too: only the type after it is rewritten.
                self._copy(token.end)
                self._types.add(place + 1)
            case _:
                self._copy(token.end)
        return place + 1

    def _subscript(self, place: int) -> int:
        """Write the number of an element, which PostgreSQL counts from 1, counted from 0."""
        closed, first = self._lexed.partners[place], self._tokens[place + 1]
        if closed == place + 2 and first.text.isdecimal() and len(first.text) < _DIGITS_MAX:
            self._edit(self._tokens[closed].end, f", {int(first.text) - 1})")
            return closed + 1
        self._closed[closed] = ") - 1 AS INT))"
        self._edit(self._tokens[place].end, ", CAST((")
        return place + 1

    def _string(self, place: int) -> int:
        token, kind = self._tokens[place], None
        reader = StatementReader(self._lexed, place + 1)
        if reader.take("::"):
            kind = read_written_type(reader)
            if self._typed(place, reader.place, kind):
                return reader.place
        role = self._role_of(token.start)
        if role == "bytea" and self._typed(place, place + 1, _BYTEA):
            return place + 1
        if role == "char":
            self._edit(token.end, quote_text(self._text_at(place).rstrip(" ")))
            return place + 1
        inner = token.text[1:-1]
        if self._times is not None and self._time(place, self._times):
            return place + 1
        # Both dialects write it the same way.
        if token.text[0] == "'" and "\\" not in inner and "'" not in inner:
            self._copy(token.end)
            return place + 1
        value = self._text_at(place)
        if kind is None and place not in self._casts.read and _BYTES.fullmatch(value):
            # Compared with a column of bytes, Spark would take the letters of the text as its
            # bytes.
            raise syntax_error(
                self._text,
                token.start,
                f"cannot tell the type of {token.text} here",
                hint="add ::bytea for bytes, or ::text",
            )
        self._edit(token.end, quote_text(value))
        return place + 1

    def _bracketed(self, place: int) -> int:
        """Write ``('…')::type`` as a literal and return the place after it. Return 0, with nothing
        written, if something else starts at this place or the cast is left to Spark."""
        tokens = self._tokens[place : place + 4]
        if [each.text for each in tokens[2:]] != [")", "::"] or tokens[1].kind != "text":
            return 0
        before = self._tokens[place - 1] if place else None
        if before is not None and before.kind in ("word", "name") and before.word not in NOT_CALLED:
            return 0
        reader = StatementReader(self._lexed, place + 4)
        kind = read_written_type(reader)
        return reader.place if self._typed(place + 1, reader.place, kind) else 0

    def _text_at(self, place: int) -> str:
        token = self._tokens[place]
        try:
            return text_value(token.text, SqlDialect.POSTGRES)
        except ValueError:
            problem = "invalid escape in a string: it does not denote a character"
            raise syntax_error(self._text, token.start, problem) from None

    def _typed(self, place: int, end: int, kind: WrittenType) -> bool:
        """Write the text at a place, up to the token at `end`, as a literal of the type that the
        statement gives it. Return False, with nothing written, if Spark already reads it
        correctly."""
        text = self._text_at(place)
        literal = self._read_typed(text, kind)
        if literal and kind.spark == "timestamp" and self._times is not None:
            # Use the time zone that the session had when it sent the text.
            absolute = self._times.absolute(text)
            literal = "" if absolute is None else f"TIMESTAMP '{absolute}'"
        if literal:
            self._edit(self._tokens[end - 1].end, literal)
        return bool(literal)

    def _time(self, place: int, times: TimeReader) -> bool:
        """Write a timestamptz text with its offset; return False, with nothing written, if it is
        not a time."""
        token = self._tokens[place]
        try:
            value = text_value(token.text, SqlDialect.POSTGRES)
        except ValueError:
            return False
        kind = self._cast_of(place)
        if place in self._moments or kind == "timestamp":
            absolute = times.absolute(value)
            if absolute is not None:
                self._edit(token.end, quote_text(absolute))
            return absolute is not None
        if not kind:
            times.check_untyped(value)
        return False

    def _cast_of(self, place: int) -> str:
        """Return Spark's name of the type that a text is cast to; "" if it is not cast."""
        before = self._tokens[place - 1] if place else None
        if before is not None and before.kind in ("word", "name"):
            try:
                # ``date '2024-01-01'``; any other word before a text is not a type.
                written = read_written_type(StatementReader(self._lexed, place - 1)).spark
            except SqlSyntaxError:
                written = ""
            if before.word in _LITERAL_TYPES and written:
                return written
        reader = StatementReader(self._lexed, place + 1)
        in_cast = place > 1 and self._tokens[place - 2].word == "CAST"
        if reader.take("::") or (in_cast and reader.take("AS")):
            return read_written_type(reader).spark
        return ""

    def _bound(self, place: int) -> int:
        """Write a parameter's literal. Drop a cast after it that only repeats its type, as drivers
        write for each parameter: a comparison with a plain literal does not need Spark."""
        token = self._tokens[place]
        literal = self._parameter(token)
        if self._role_of(token.start) == "char":
            literal = f"rtrim({literal})"
        reader = StatementReader(self._lexed, place + 1)
        clause = self._counts.get(place)
        if clause is not None:
            cast = reader.take("::")
            if cast:
                read_written_type(reader)
            is_alone = reader.place not in self._counts and place - 1 not in self._counts
            problem, written = count_literal(literal, clause if is_alone else "")
            if problem:
                raise _InvalidCount(problem, clause)
            self._edit(self._tokens[reader.place - 1].end, written)
            return reader.place
        if reader.take("::") and (kept := self._cast_literal(literal, read_written_type(reader))):
            self._edit(self._tokens[reader.place - 1].end, kept)
            return reader.place
        self._edit(token.end, literal)
        return place + 1

    def _cast_literal(self, literal: str, kind: WrittenType) -> str:
        """Return a parameter's literal as one of the type `kind`; "" if only Spark's cast can
        convert it."""
        if literal.startswith("'") and (typed := self._read_typed(text_value(literal), kind)):
            return typed
        return literal_cast_to(literal, kind.spark)

    def _parameter(self, token: SqlToken) -> str:
        # Python refuses to parse longer numbers.
        number = int(token.text[1:]) if len(token.text) < _DIGITS_MAX else 0
        if not 1 <= number <= len(self._parameters):
            hint = f"parameters given: {len(self._parameters)}"
            problem = f"no value for parameter {token.text[:_DIGITS_MAX]}"
            raise syntax_error(self._text, token.start, problem, hint=hint)
        literal = self._parameters[number - 1]
        found = lex_sql(literal)
        # Brackets keep a minus sign after another one from starting a comment.
        return literal if len(found) == 1 and found[0].kind in _ONE_TOKEN else f"({literal})"

    def _word(self, place: int) -> int:
        token = self._tokens[place]
        word = token.word
        following = [each.word for each in self._tokens[place + 1 : place + 4]]
        if word == "PG_CATALOG" and following[:1] == ["."] and following[2:3] == ["("]:
            self._edit(self._tokens[place + 2].start, "")
            return place + 2
        if word == "CAST" and following[:1] == ["("]:
            if end := self._cast_call(place):
                return end
            self._note_type(place + 1)
        if word == "ARRAY" and following[:1] == ["["]:
            # In Spark it is a function.
            self._closed[self._lexed.partners[place + 1]] = ")"
            self._edit(self._tokens[place + 1].end, "array(")
            return place + 2
        if word == "FOR" and " ".join(following[:2]).startswith(_LOCKS):
            raise syntax_error(
                self._text,
                token.start,
                f"FOR {following[0]} is not supported: rows cannot be locked",
                hint="remove it: COMMIT fails with 40001 if another session has changed the same"
                " rows, and the client then repeats the transaction",
            )
        # After a dot it is a column.
        if word in ("LIMIT", "OFFSET") and self._tokens[place - 1].text != ".":
            self._note_count(place)
        if word in _TYPED_LITERALS and (end := self._literal_type(place)):
            return end
        self._copy(token.end)
        return place + 1

    def _of_array(self, place: int) -> int:
        """Return the place of the bracket of ``= ANY (array)`` or ``<> ALL (array)`` whose sign is
        at a place; 0 for anything else."""
        following = [each.text.upper() for each in self._tokens[place : place + 4]]
        if len(following) < 4:
            return 0
        sign, word, opened, first = following
        wanted = ("ANY", "SOME") if sign == "=" else ("ALL",) if sign in ("<>", "!=") else ()
        may_be = first in ("ARRAY", "CAST", "(")
        is_array = may_be or self._tokens[place + 3].kind in ("text", "parameter")
        return place + 2 if word in wanted and opened == "(" and is_array else 0

    def _any_of(self, place: int, opened: int) -> int:
        """Write ``= ANY ('{1,2}'::int[])`` as ``IN (1, 2)``, which is NULL in the same cases, and
        return the place after it. An array that is not a literal is left to Spark, which rejects
        it."""
        closed, first = self._lexed.partners[opened], opened + 1
        word = "IN (" if self._tokens[place].text == "=" else "NOT IN ("
        if self._tokens[first].word == "ARRAY":
            if self._tokens[first + 1].text != "[" or self._lexed.partners[first + 1] != closed - 1:
                self._copy(self._tokens[place].end)
                return place + 1
            if first + 2 < closed - 1:
                self._closed[closed - 1] = ""
                self._edit(self._tokens[first + 1].end, word)
                return first + 2
            literal = "array()"
        else:
            literal = self._array_literal(first, closed)
        if not literal:
            self._copy(self._tokens[place].end)
            return place + 1
        # Nothing is in an empty array, not even NULL.
        values = elements_of(literal) or "SELECT NULL WHERE false"
        self._edit(self._tokens[closed].end, f"{word}{values})")
        return closed + 1

    def _array_literal(self, place: int, end: int) -> str:
        """Return Spark's literal of an array that is written as a cast text or a parameter and ends
        at `end`; "" for any other expression."""
        while self._tokens[place].text == "(" and self._lexed.partners[place] == end - 1:
            place, end = place + 1, end - 1
        sign, closing = "::", 0
        if self._tokens[place].word == "CAST" and self._tokens[place + 1].text == "(":
            place, sign, closing = place + 2, "AS", 1
        token, reader = self._tokens[place], StatementReader(self._lexed, place + 1)
        kind = read_written_type(reader) if reader.take(sign) else None
        if reader.place + closing != end or token.kind not in ("text", "parameter"):
            return ""
        if token.kind == "text":
            return "" if kind is None else self._read_typed(self._text_at(place), kind)
        literal = self._parameter(token)
        if literal.startswith("'"):
            return "" if kind is None else self._read_typed(text_value(literal), kind)
        return literal

    def _behind_schema(self, place: int) -> int:
        """Return the place after the schema, or the database and the schema, of an object's name; 0
        if there is none. They can be dropped, since all objects are in one schema."""
        if place and self._tokens[place - 1].text == ".":
            return 0
        names = [each.name.lower() for each in _chain(self._tokens, place)]
        if len(names) > 2 and names[0] == _DATABASE and names[1] == _SCHEMA:
            return place + 4
        return place + 2 if len(names) > 1 and names[0] == _SCHEMA else 0

    def _cast_call(self, place: int) -> int:
        """Write ``CAST ('…' AS type)`` as a literal and return the place after it; 0 if the cast is
        left to Spark."""
        if self._tokens[place + 2].kind not in ("text", "parameter"):
            return 0
        reader = StatementReader(self._lexed, place + 3)
        if not reader.take("AS"):
            return 0
        kind = read_written_type(reader)
        token, end = self._tokens[place + 2], reader.place + 1
        if token.kind == "text":
            return end if self._typed(place + 2, end, kind) else 0
        literal = self._parameter(token)
        typed = self._read_typed(text_value(literal), kind) if literal[0] == "'" else ""
        if typed:
            self._edit(self._tokens[end - 1].end, typed)
        return end if typed else 0

    def _note_count(self, place: int) -> None:
        """Record the places of the row count of a LIMIT or OFFSET."""
        at = place + 1
        while at < len(self._tokens):
            token = self._tokens[at]
            if token.text in (")", ";") or token.word in _AFTER_COUNT:
                return
            closed = self._lexed.partners.get(at, at)
            self._counts |= dict.fromkeys(range(at, closed + 1), self._tokens[place].word)
            at = closed + 1

    def _note_type(self, opened: int) -> None:
        """Record where the type of ``CAST (… AS type)`` starts."""
        closed = self._lexed.partners[opened]
        # A nested CAST is in its own brackets, which this skips.
        for place in self._lexed.outer(opened + 1, closed):
            if self._tokens[place].word == "AS" and place + 1 < closed:
                self._types.add(place + 1)

    def _literal_type(self, place: int) -> int:
        """Write the type of ``timestamp '…'`` and return the place after it; 0 if no such literal
        starts there."""
        reader = StatementReader(self._lexed, place)
        try:
            kind = read_written_type(reader)
        # A column or function with that name.
        except SqlSyntaxError:
            return 0
        if reader.peek().kind != "text":
            return 0
        if self._typed(reader.place, reader.place + 1, kind):
            return reader.place + 1
        if kind.spark == "timestamp":
            self._moments.add(reader.place)
        end = self._tokens[reader.place - 1].end
        # Unchanged, so that positions within it stay exact.
        if self._text[self._at : end].lower() == kind.spark:
            self._copy(end)
        else:
            self._edit(end, kind.spark)
        return reader.place

    def _type(self, place: int) -> int:
        reader = StatementReader(self._lexed, place)
        kind = read_written_type(reader)
        written = "string" if text_limit(kind.spark) is not None else kind.spark
        end = self._tokens[reader.place - 1].end
        # Unchanged, so that positions within it stay exact.
        if self._text[self._at : end].lower() == written:
            self._copy(end)
        else:
            self._edit(end, written)
        return reader.place


_LOCKS: Final = ("UPDATE", "SHARE", "NO KEY", "KEY SHARE")
"""Words after FOR in a clause that locks rows."""
_AFTER_COUNT: Final = frozenset(
    ("LIMIT", "OFFSET", "FETCH", "FOR", "UNION", "EXCEPT", "INTERSECT", "ROW", "ROWS", "AS")
)
"""Words that end the row count of a LIMIT or OFFSET."""
_TEXT_COUNT: Final = re.compile(r"'(-?[0-9]{1,19})'")
_COUNT_MAX: Final = 2**31 - 1
"""Spark counts rows in 32 bits."""


class _InvalidCount(InvalidUsage):
    """A LIMIT or OFFSET with an invalid row count, such as a negative one."""

    def __init__(self, problem: str, clause: str) -> None:
        super().__init__(problem)
        self.sqlstate = "2201W" if clause == "LIMIT" else "2201X"


def count_literal(literal: str, clause: str) -> tuple[str, str]:
    """Check a parameter in a row count, and convert its literal to int, as Spark requires there.

    Return (error, literal); the error is "" if the parameter is valid. `clause`: LIMIT or OFFSET if
    the parameter is the entire count, "" if it is part of an expression.

    >>> count_literal("5L", "LIMIT"), count_literal("CAST(NULL AS bigint)", "OFFSET")
    (('', '5'), ('', '0'))
    >>> count_literal("(-1L)", "LIMIT"), count_literal("9223372036854775807L", "LIMIT")
    (('LIMIT must not be negative', ''), ('', 'ALL'))
    """
    if literal.strip("(").startswith(("NULL", "CAST(NULL")):
        return "", {"LIMIT": "ALL", "OFFSET": "0"}.get(clause, "CAST(NULL AS int)")
    whole = _WHOLE_LITERAL.fullmatch(literal) or _TEXT_COUNT.fullmatch(literal)
    if whole is None:
        return "", literal  # Spark reports the error.
    number = int(whole[1])
    if clause and number < 0:
        return f"{clause} must not be negative", ""
    # No result has more rows than that.
    if clause == "LIMIT" and number > _COUNT_MAX:
        return "", "ALL"
    return "", f"({number})" if number < 0 else str(number)


_DIGITS_MAX: Final = 12
_WHOLE_LITERAL: Final = re.compile(r"\(*(-?[0-9]{1,19})[SL]?\)*")
_WHOLE_TYPES: Final = {"smallint": ("S", 1 << 15), "int": ("", 1 << 31), "bigint": ("L", 1 << 63)}
"""Suffix of a literal of each type, and the first number that is too large for it."""
_LITERALS_OF: Final = {
    "string": re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL),
    "boolean": re.compile(r"TRUE|FALSE"),
    "double": re.compile(r"-?[0-9.e+-]+D"),
    "binary": re.compile(r"X'[0-9A-F]*'"),
    "date": re.compile(r"DATE '[^']*'"),
    "timestamp": re.compile(r"TIMESTAMP '[^']*'"),
    "timestamp_ntz": re.compile(r"TIMESTAMP_NTZ '[^']*'"),
}
"""Form of each type's literals in parameters; some are in brackets."""


def without_schema(lexed: LexedText, schemas: Container[str], catalogs: Container[str]) -> str:
    """Return a query of Spark's dialect with the schema and catalog before names replaced by
    blanks: all objects are in one schema.

    >>> from actors.engine.sql.tokens import lex_text
    >>> query = lex_text("SELECT Default.t.a FROM `default`.t, c.default.t", SqlDialect.SPARK)
    >>> without_schema(query, {"default"}, ())
    'SELECT         t.a FROM           t, c.default.t'
    >>> without_schema(query, {"default"}, {"c"})
    'SELECT         t.a FROM           t,           t'
    """
    text, tokens, place = lexed.text, lexed.tokens, 0
    while place < len(tokens):
        names = _chain(tokens, place)
        if not names:
            place += 1
            continue
        values = [each.name.lower() for each in names]
        # A catalog comes only before a schema: `spark_catalog.t` may be a column of a table.
        passed = 1 if len(names) > 2 and values[0] in catalogs and values[1] in schemas else 0
        if len(names) > passed + 1 and values[passed] in schemas:
            first, last = names[0].start, names[passed + 1].start
            # Blanks keep every later position the same.
            text = text[:first] + " " * (last - first) + text[last:]
        place += 2 * len(names) - 1
    return text


def _chain(tokens: Sequence[SqlToken], place: int) -> list[SqlToken]:
    """Return the names, separated by dots, that start at a place."""
    found: list[SqlToken] = []
    while place < len(tokens) and tokens[place].kind in ("word", "name"):
        found.append(tokens[place])
        if place + 1 >= len(tokens) or tokens[place + 1].text != ".":
            break
        place += 2
    return found


def elements_of(literal: str) -> str:
    """Return the elements of an array literal as an SQL list; "" for an empty array.

    >>> elements_of("CAST(array(1, 2) AS array<decimal(5,2)>)"), elements_of("(array('a'))")
    ('1, 2', "'a'")
    >>> elements_of("CAST(NULL AS array<int>)"), elements_of("CAST(array() AS array<int>)")
    ('NULL', '')
    """
    while literal.startswith("("):
        literal = literal[1:-1]
    while literal.startswith("CAST("):
        literal = literal[len("CAST(") : literal.rindex(" AS ")]
    return "NULL" if literal == "NULL" else literal[len("array(") : -1]


def literal_cast_to(literal: str, kind: str) -> str:
    """Return a parameter's literal as one of another type; "" if a cast to that type could change
    the value.

    >>> literal_cast_to("7S", "bigint"), literal_cast_to("(-5L)", "int")
    ('7L', '(-5)')
    >>> literal_cast_to("7", "string"), literal_cast_to("70000", "smallint")
    ('', '')
    """
    known = _LITERALS_OF.get(kind)
    if known is not None:
        return literal if known.fullmatch(literal.strip("()")) else ""
    whole = _WHOLE_LITERAL.fullmatch(literal)
    if whole is None or kind not in _WHOLE_TYPES:
        return ""
    # A comparison with a literal of the column's own type does not need Spark.
    suffix, limit = _WHOLE_TYPES[kind]
    number = int(whole[1])
    if not -limit < number < limit:
        return ""  # Spark reports the error.
    return f"({number}{suffix})" if number < 0 else f"{number}{suffix}"
