"""The names that PostgreSQL gives to the columns of a SELECT without aliases.

Spark names such a column by its text, ``count(1)``; clients of PostgreSQL expect ``count``. An
expression of a form that is not listed here keeps Spark's name. Pure.

>>> from actors.engine.sql.tokens import SqlDialect, lex_text
>>> lexed = lex_text("SELECT count(*), a, 1 + b, c::int, d e", SqlDialect.POSTGRES)
>>> sorted(missing_names(lexed).values())
['?column?', 'c', 'count']
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from actors.engine.sql.cast_finding import NOT_CALLED
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.tokens import LexedText
from actors.engine.sql.type_names import WrittenType, read_written_type
from actors.runtime.errors import SqlSyntaxError

NO_NAME: Final = "?column?"
_END_WORDS: Final = (
    "FROM WHERE GROUP HAVING ORDER LIMIT OFFSET FETCH UNION INTERSECT EXCEPT FOR INTO"
)
_ENDS: Final = frozenset({*_END_WORDS.split(), ")", ";"})
_SPARK_ENDS: Final = {
    "LATERAL": "VIEW",
    "CLUSTER": "BY",
    "DISTRIBUTE": "BY",
    "SORT": "BY",
    "MINUS": "SELECT",
}
"""Words of Spark's that end a select list if the paired word follows, and are names otherwise."""
_OPERATOR_WORDS: Final = frozenset(
    ["AND", "OR", "NOT", "IS", "LIKE", "ILIKE", "IN", "BETWEEN", "DIV", "SIMILAR"]
)
_NO_OPERATORS: Final = frozenset(["(", ")", "[", "]", "{", "}", ".", ",", "::", ":"])
_CONSTANTS: Final = frozenset(["NULL", "TRUE", "FALSE"])
_BARE_CALLS: Final = frozenset(
    ["CURRENT_DATE", "CURRENT_TIMESTAMP", "LOCALTIMESTAMP", "CURRENT_USER", "SESSION_USER"]
)
_GENERATOR_NAMES: Final = (
    "explode explode_outer posexplode posexplode_outer inline inline_outer stack json_tuple "
    "transform variant_explode variant_explode_outer"
)
_GENERATORS: Final = frozenset(_GENERATOR_NAMES.split())
"""Functions that may return several columns, which a single name does not fit."""
_TYPES: Final = {
    "binary": "bytea",
    "boolean": "bool",
    "int": "int4",
    "bigint": "int8",
    "smallint": "int2",
    "float": "float4",
    "double": "float8",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "char": "bpchar",
    "decimal": "numeric",
}
"""PostgreSQL's type names, by Spark's."""


def missing_names(lexed: LexedText) -> dict[int, str]:
    """Return the names of the columns without an alias, in all select lists of a text. Each is
    keyed by the place after the column's last token."""
    if not any(token.word == "SELECT" for token in lexed.tokens):
        return {}
    return dict(_SelectLists(lexed).missing())


class _SelectLists:
    """Finds the columns of the select lists of a text, each as tokens ``[first, last)``, and their
    names."""

    def __init__(self, lexed: LexedText) -> None:
        self._lexed = lexed
        self._tokens = lexed.tokens
        self._partners = lexed.partners

    def missing(self) -> Iterator[tuple[int, str]]:
        """Yield the place after each column without an alias, and the column's name."""
        for place, token in enumerate(self._tokens):
            if token.word == "SELECT" and not self._is_part(place):
                for first, last in self._columns(place):
                    name = self._own_name(first, last)
                    if name and not self._is_column(first, last):
                        yield last, name

    def _is_part(self, place: int) -> bool:
        return place > 0 and self._tokens[place - 1].text == "."

    def _word(self, place: int) -> str:
        return self._tokens[place].word if place < len(self._tokens) else ""

    def _columns(self, select: int) -> Iterator[tuple[int, int]]:
        at = select + 1
        while self._word(at) in ("ALL", "DISTINCT") or (
            at < len(self._tokens) and self._tokens[at].kind == "hint"
        ):
            at += 1
            if self._word(at) == "ON" and self._word(at + 1) == "(":
                at = self._partners[at + 1] + 1
        first = at
        while at < len(self._tokens) and not self._ends(at):
            if self._tokens[at].text == ",":
                yield first, at
                first = at + 1
            at = self._partners.get(at, at) + 1
        yield first, at

    def _ends(self, place: int) -> bool:
        word = self._word(place)
        # IS DISTINCT FROM is an operator.
        if word == "FROM" and self._word(place - 1) == "DISTINCT":
            return self._word(place - 2) not in ("IS", "NOT")
        if word == "WINDOW":
            return self._word(place + 2) == "AS"  # Otherwise it is Spark's function.
        if word == "GROUP" and self._word(place - 1) == "WITHIN":
            return self._word(place + 1) != "("  # Otherwise it is a call.
        return word in _ENDS or (word in _SPARK_ENDS and self._word(place + 1) == _SPARK_ENDS[word])

    # -- names -------------------------------------------------------------------------------

    def _own_name(self, first: int, last: int) -> str:
        """Return the name of a column without an alias; "" if it has an alias or its name is not
        known."""
        if first >= last or self._tokens[last - 1].text in ("*", ","):
            return ""
        if any(self._tokens[at].word == "AS" for at in self._lexed.outer(first, last)):
            return ""
        name, _ = self._named(first, last)
        return name

    def _named(self, first: int, last: int) -> tuple[str, bool]:
        """Return the name of an expression, "" if it is not known. Also return whether it is the
        name of a column or a function, which a cast around it keeps."""
        token = self._tokens[first]
        if token.text == "(" and self._partners[first] == last - 1:
            return self._bracketed(first + 1, last - 1)
        if self._is_chain(first, last):
            return self._chain_name(first, last)
        if last == first + 1 and token.kind in ("number", "text", "parameter"):
            return NO_NAME, False
        if token.word == "CASE" and self._closes_case(first) == last - 1:
            return self._case(first, last)
        behind = self._behind_call(first)
        if behind == last:
            return self._call(first, last)
        base = behind or self._behind_chain(first)
        if token.text == "(":
            base = self._partners[first] + 1
        if first < base < last and self._subscripts(base, last):
            return self._named(first, base)
        return self._cast(first, last) or self._typed(first, last) or self._operator(first, last)

    def _bracketed(self, first: int, last: int) -> tuple[str, bool]:
        if self._word(first) != "SELECT":
            return self._named(first, last) if first < last else ("", False)
        begin, end = next(self._columns(first))
        if end - begin > 2 and self._word(end - 2) == "AS":
            return self._value(end - 1), True
        if begin >= end:
            return "", False
        name, _ = self._named(begin, end)
        if not name and self._tokens[end - 1].kind in ("word", "name"):
            name = self._value(end - 1)  # An alias without AS.
        return name, bool(name)

    def _value(self, place: int) -> str:
        token = self._tokens[place]
        return token.name if token.kind == "name" else token.text.lower()

    def _behind_chain(self, first: int) -> int:
        """Return the place after the name ``a.b.c`` that starts at `first`; `first` if no name
        starts there."""
        at = first
        while at < len(self._tokens) and self._tokens[at].kind in ("word", "name"):
            if self._word(at + 1) != ".":
                return at + 1
            at += 2
        return first

    def _is_chain(self, first: int, last: int) -> bool:
        return first < last and self._behind_chain(first) == last

    def _is_column(self, first: int, last: int) -> bool:
        word = self._word(first)
        return self._is_chain(first, last) and word not in _CONSTANTS | _BARE_CALLS

    def _chain_name(self, first: int, last: int) -> tuple[str, bool]:
        word = self._word(last - 1)
        if last == first + 1 and word in _CONSTANTS:
            return NO_NAME, False
        return self._value(last - 1), True

    def _behind_call(self, first: int) -> int:
        """Return the place after a function call, including FILTER and OVER; 0 if there is no
        call."""
        at = self._behind_chain(first)
        if at == first or self._word(at) != "(" or self._word(at - 1) in NOT_CALLED - {"EXISTS"}:
            return 0
        at = self._partners[at] + 1
        while self._word(at) in ("FILTER", "WITHIN", "OVER"):
            at += 2 if self._word(at) == "WITHIN" else 1
            at = self._partners.get(at, at) + 1
        return at

    def _subscripts(self, first: int, last: int) -> bool:
        while first < last and self._word(first) == "[":
            first = self._partners[first] + 1
        return first == last

    def _call(self, first: int, last: int) -> tuple[str, bool]:
        opened = self._behind_chain(first)
        name = self._value(opened - 1)
        # Spark names each of their columns itself.
        if name in _GENERATORS:
            return "", False
        if name == "cast" and opened == first + 1:
            closed = self._partners[opened]
            split = [at for at in self._lexed.outer(opened + 1, closed) if self._word(at) == "AS"]
            return self._cast_name(opened + 1, split[0], split[0] + 1) if split else ("", False)
        if name == "trim":
            ends = {"LEADING": "ltrim", "TRAILING": "rtrim"}
            return ends.get(self._word(opened + 1), "btrim"), True
        return name, True

    def _cast(self, first: int, last: int) -> tuple[str, bool] | None:
        casts = [at for at in self._lexed.outer(first, last) if self._word(at) == "::"]
        if not casts or self._has_operator(first, casts[-1]):
            return None
        if self._type_at(casts[-1] + 1, last) is None:
            return None  # The cast covers only a part of the expression.
        return self._cast_name(first, casts[-1], casts[-1] + 1, last)

    def _cast_name(
        self, first: int, last: int, kind_at: int, end: int | None = None
    ) -> tuple[str, bool]:
        kind = self._type_at(kind_at, end)
        if kind is None or first >= last:
            return "", False
        name, strong = self._named(first, last)
        return (name, True) if strong else (_type_name(kind), False)

    def _type_at(self, place: int, end: int | None = None) -> WrittenType | None:
        reader = StatementReader(self._lexed, place)
        try:
            kind = read_written_type(reader)
        except SqlSyntaxError:
            return None
        return kind if end in (None, reader.place) else None

    def _typed(self, first: int, last: int) -> tuple[str, bool] | None:
        """Return the name of ``DATE '…'``, if the tokens are of this form."""
        if last != first + 2 or self._tokens[last - 1].kind != "text":
            return None
        kind = self._type_at(first, last - 1)
        # PostgreSQL treats it as a cast of a text, which takes the name of the type.
        return None if kind is None else (_type_name(kind), False)

    def _closes_case(self, first: int) -> int:
        depth = 0
        for at in range(first, len(self._tokens)):
            depth += (self._word(at) == "CASE") - (self._word(at) == "END")
            if depth == 0:
                return at
        return -1

    def _case(self, first: int, last: int) -> tuple[str, bool]:
        depth, default = 0, 0
        for at in range(first, last):
            depth += (self._word(at) == "CASE") - (self._word(at) == "END")
            if depth == 1 and self._word(at) == "ELSE":
                default = at + 1
        name, strong = self._named(default, last - 1) if default else ("", False)
        return (name, True) if strong else ("case", False)

    def _has_operator(self, first: int, last: int) -> bool:
        for at in self._lexed.outer(first, last):
            token = self._tokens[at]
            if token.word in _OPERATOR_WORDS or (
                token.kind == "sign" and token.text not in _NO_OPERATORS
            ):
                return True
        return False

    def _operator(self, first: int, last: int) -> tuple[str, bool]:
        """Return "?column?" for an operation, "" if an alias follows it."""
        end = self._tokens[last - 1]
        if not self._has_operator(first, last) or (end.kind == "sign" and end.text not in ")]"):
            return "", False
        if end.kind in ("word", "name") and end.word != "END":
            before = last - 2
            while self._word(before) == ".":
                before -= 2
            token = self._tokens[before]
            if token.word not in _OPERATOR_WORDS and (token.kind != "sign" or token.text in ")]"):
                return "", False
        return NO_NAME, False


def _type_name(kind: WrittenType) -> str:
    """Return PostgreSQL's name of a type; for an array, the name of its element type.

    >>> _type_name(WrittenType("array<int>", "integer", False))
    'int4'
    """
    base = kind.spark.replace("array<", "").rstrip(">").partition("(")[0]
    return kind.name if base == "string" else _TYPES.get(base, base)
