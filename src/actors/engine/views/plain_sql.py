"""Reader of a small part of SQL: plain conditions, in the words of `sql.tokens`.

Spark reads views and queries. Two things cannot wait for it: a query that is a plain read of one
object is answered without an engine (`simple`), and a condition that the engine wrote tells which
parts of an input need not be fetched (`input_uses`). Text that this reader does not surely read as
Spark does raises `NotPlain`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from actors.engine.sql.tokens import SqlToken, lex_sql
from actors.runtime.errors import QueryRejected, SqlSyntaxError

Op: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">=", "is null", "is not null", "in"]

_PLAIN_TEXT: Final = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"")
_WHOLE: Final = re.compile(r"(\d+)[LSY]?", re.IGNORECASE)
_DECIMAL: Final = re.compile(r"(\d+(?:\.\d+)?)(BD)?", re.IGNORECASE)
_DOUBLE: Final = re.compile(r"(\d+(?:\.\d+)?(?:E[+-]?\d+)?)(D)?", re.IGNORECASE)
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_INTEGER_BITS: Final[Mapping[str, int]] = {
    "tinyint": 8,
    "byte": 8,
    "smallint": 16,
    "short": 16,
    "int": 32,
    "integer": 32,
    "bigint": 64,
    "long": 64,
}
_WHOLE_DOUBLES_MAX: Final = 1 << 53
_EXCHANGED: Final[Mapping[str, Op]] = {
    "=": "=",
    "<>": "<>",
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
}
"""Each comparison with its sides exchanged."""
_SAME: Final = {"==": "=", "!=": "<>"}
_NO_NAME_WORDS: Final = "ALL CASE DISTINCT EXISTS FALSE FROM NOT NULL SELECT TRUE"
_NO_NAMES: Final = frozenset(_NO_NAME_WORDS.split())
"""Words that are keywords to Spark where a name could stand."""


class NotPlain(Exception):
    """The text must be read by Spark."""


class LiteralValue(NamedTuple):
    """A literal as written: `kind` is number, text, boolean or date."""

    kind: str
    text: str


class ColumnTest(NamedTuple):
    """A column (its qualifier, empty for none, and its name) compared with literals."""

    column: tuple[str, str]
    op: Op
    values: tuple[LiteralValue, ...] = ()


def tokens(sql: str) -> list[SqlToken]:
    """Return the words of a text, without comments. Raises `NotPlain` for an unclosed quote or
    comment, and for a hint."""
    try:
        found = lex_sql(sql)
    except SqlSyntaxError as error:
        raise NotPlain(error.problem) from None
    if any(each.kind == "hint" for each in found):
        raise NotPlain("a hint")
    return found


def query_text(sql: str) -> str:
    """Return a query up to its last word, without semicolons and comments behind it.

    Raises `QueryRejected` for several statements.

    >>> query_text("SELECT ';' AS a -- the first\\n; -- and no more")
    "SELECT ';' AS a"
    >>> query_text("SELECT 1; SELECT 2")
    Traceback (most recent call last):
    actors.runtime.errors.QueryRejected: one query is wanted: line 1 has a statement behind a \
semicolon
    """
    # A long text is not taken apart for what it surely has not.
    if not any(sign in sql for sign in (";", "--", "/*")):
        return sql.strip()
    try:
        found = lex_sql(sql)
    # Not read here: Spark reports what is wrong with it.
    except SqlSyntaxError:
        return sql.strip().rstrip(";").strip()
    end = next((each.end for each in reversed(found) if each.text != ";"), 0)
    inner = [each.end for each in found if each.text == ";" and each.end < end]
    if inner:
        line = sql.count("\n", 0, inner[0]) + 1
        raise QueryRejected(f"one query is wanted: line {line} has a statement behind a semicolon")
    return sql[:end].strip()


class PlainReader:
    """Reads a text word by word."""

    def __init__(self, sql: str) -> None:
        """Split the text into words. Raises `NotPlain`, as all methods do."""
        self._tokens = tokens(sql)
        self._at = 0

    def _next(self) -> SqlToken:
        token = self.peek()
        self._at += 1
        return token

    def peek(self) -> SqlToken:
        """Return the next word; at the end a sign without text."""
        return self._tokens[self._at] if self._at < len(self._tokens) else SqlToken("sign", "", 0)

    def at_end(self) -> bool:
        """Return whether no word is left."""
        return self._at == len(self._tokens)

    def follows(self, *words: str) -> bool:
        """Return whether one of these words (in upper case) or signs comes next; "" stands for the
        end."""
        token = self.peek()
        return token.kind in ("word", "sign") and token.text.upper() in words

    def takes(self, *words: str) -> bool:
        """Take these words (in upper case) or signs if they come next; return whether they do."""
        following = self._tokens[self._at : self._at + len(words)]
        if [each.text.upper() for each in following if each.kind in ("word", "sign")] != [*words]:
            return False
        self._at += len(words)
        return True

    def needs(self, *words: str) -> None:
        """Take these words. Raises `NotPlain` when others come."""
        if not self.takes(*words):
            raise NotPlain(f"no {' '.join(words)}")

    def name(self) -> str:
        """Take a name, quoted or not."""
        token = self._next()
        if token.kind == "name":
            return token.text[1:-1].replace("``", "`")
        if token.kind != "word" or token.text[0].isdigit() or token.text.upper() in _NO_NAMES:
            raise NotPlain("no name")
        return token.text

    def column(self) -> tuple[str, str]:
        """Take a column: its qualifier, empty for none, and its name."""
        first = self.name()
        return (first, self.name()) if self.takes(".") else ("", first)

    def count(self) -> int:
        """Take a number of rows."""
        token = self._next()
        if token.kind != "number" or not token.text.isdigit():
            raise NotPlain("no number of rows")
        return int(token.text)

    # -- conditions ----------------------------------------------------------------------------

    def conjunction(self) -> list[ColumnTest]:
        """Take tests that are connected by AND, with or without parentheses around them."""
        found = self._test()
        while self.takes("AND"):
            found += self._test()
        return found

    def _test(self) -> list[ColumnTest]:
        if self.takes("NOT"):
            (test, *more) = self._test()
            if more or test.op not in ("is null", "is not null"):
                raise NotPlain("NOT before more than a test of NULL")
            return [
                ColumnTest(test.column, "is null" if test.op == "is not null" else "is not null")
            ]
        if self.peek().text == "(":
            back = self._at
            self._at += 1
            try:
                found = self.conjunction()
                self.needs(")")
            except NotPlain:
                self._at = back  # it may be a literal in parentheses
            else:
                return found
        if self._is_value():
            value, op = self._value(), self._comparison()
            return [ColumnTest(self.column(), _EXCHANGED[op], (value,))]
        return self._tested(self.column())

    def _tested(self, column: tuple[str, str]) -> list[ColumnTest]:
        if self.takes("IS"):
            negated = self.takes("NOT")
            self.needs("NULL")
            return [ColumnTest(column, "is not null" if negated else "is null")]
        if self.takes("IN", "("):
            values = [self._value()]
            while self.takes(","):
                values.append(self._value())
            self.needs(")")
            return [ColumnTest(column, "in", tuple(values))]
        if self.takes("BETWEEN"):
            low = self._value()
            self.needs("AND")
            return [ColumnTest(column, ">=", (low,)), ColumnTest(column, "<=", (self._value(),))]
        op = self._comparison()
        return [ColumnTest(column, op, (self._value(),))]

    def _comparison(self) -> Op:
        text = self._next().text
        op = _SAME.get(text, text)
        if op not in _EXCHANGED:
            raise NotPlain("no comparison")
        # Exchanged twice it is the operator itself, typed as `UpsertOp`.
        return _EXCHANGED[_EXCHANGED[op]]

    # -- literals ------------------------------------------------------------------------------

    def _is_value(self) -> bool:
        token = self.peek()
        if token.kind in ("number", "text") or token.text in ("-", "("):
            return True
        following = self._tokens[self._at + 1 : self._at + 2]
        after = following[0] if following else token
        word = token.text.upper()
        return token.kind == "word" and (
            word in ("TRUE", "FALSE")
            or (word == "DATE" and after.kind == "text")
            or (word == "CAST" and after.text == "(")
        )

    def _value(self) -> LiteralValue:
        if self.takes("("):
            value = self._value()
            self.needs(")")
            return value
        if self.takes("-"):
            value = self._value()
            if value.kind != "number" or value.text.startswith("-"):
                raise NotPlain("a minus before no number")
            return LiteralValue("number", "-" + value.text)
        if self.takes("CAST", "("):
            value = self._value()
            self.needs("AS")
            wanted = self.name().lower()
            self.needs(")")
            return _cast(value, wanted)
        token = self._next()
        if token.kind == "number":
            return LiteralValue("number", token.text)
        # Spark joins adjacent strings, and settings decide over backslashes and doubled quotes.
        alone = token.kind == "text" and self.peek().kind != "text"
        if alone and _PLAIN_TEXT.fullmatch(token.text):
            return LiteralValue("text", token.text[1:-1])
        if token.kind == "word" and token.text.upper() in ("TRUE", "FALSE"):
            return LiteralValue("boolean", token.text.lower())
        if token.kind == "word" and token.text.upper() == "DATE" and self.peek().kind == "text":
            return _cast(self._value(), "date")
        raise NotPlain("no literal")


def _cast(value: LiteralValue, wanted: str) -> LiteralValue:
    """Return a literal cast to another kind without loss. Raises `NotPlain` for other casts."""
    if wanted == "date" and value.kind == "text" and _DAY.fullmatch(value.text):
        return LiteralValue("date", value.text)
    whole = value.kind == "number" and _WHOLE.fullmatch(value.text.removeprefix("-"))
    if whole and wanted in ("bigint", "double"):  # `value_of` checks that it fits the column
        return value
    raise NotPlain(f"a cast to {wanted}")


def value_of(value: LiteralValue, kind: str) -> Any:
    """Return a literal's value in a column's type, such that comparisons with it are Spark's.

    Raises `NotPlain`; `ValueError` for a day that is none.
    """
    if value.kind == "number":
        return _number(value.text, kind)
    if value.kind == "text" and kind == "string":
        return value.text
    if value.kind == "boolean" and kind == "boolean":
        return value.text == "true"
    if value.kind == "date" and kind == "date":
        return datetime.date.fromisoformat(value.text)
    raise NotPlain(f"a {value.kind} beside a column of type {kind}")


def _number(text: str, kind: str) -> Any:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if (whole := _WHOLE.fullmatch(digits)) is not None:
        number = sign * int(whole[1])
        bits = _INTEGER_BITS.get(kind)
        # Within the column's range Spark's comparison has no cast that could lose anything.
        if bits is not None and -(1 << (bits - 1)) <= number < 1 << (bits - 1):
            return number
        # Beyond 2^53 doubles round integers.
        if kind == "double" and abs(number) <= _WHOLE_DOUBLES_MAX:
            return float(number)
    if kind.startswith("decimal") and (exact := _DECIMAL.fullmatch(digits)) is not None:
        # A product of Python's would round to 28 digits.
        return Decimal(exact[1]).copy_sign(sign)
    is_double = (found := _DOUBLE.fullmatch(digits)) and (found[2] or "." in digits)
    if kind == "double" and found is not None and is_double:
        return sign * float(found[1])
    raise NotPlain(f"the number {text} beside a column of type {kind}")
