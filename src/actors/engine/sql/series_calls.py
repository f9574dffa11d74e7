"""Rewrites PostgreSQL's ``generate_series`` as Spark's ``explode(sequence(…))``, and ``unnest`` as
``explode``.

Spark's `sequence` counts down where PostgreSQL's series is empty, so the operands are named and
compared. A series of times is supported if all its steps have the same length, that is steps of
days or less, in UTC. Everything else is refused with an error. Pure.
"""

from __future__ import annotations

import re
from typing import Final

from actors.engine.sql.reader import StatementReader
from actors.engine.sql.tokens import (
    LexedText,
    SqlDialect,
    name_value,
    quote_name,
    syntax_error,
    text_value,
)
from actors.engine.sql.type_names import read_written_type
from actors.runtime.errors import NO_STEP, SqlSyntaxError

_SERIES: Final = "GENERATE_SERIES"
_UNNEST: Final = "UNNEST"
_CLAUSE_WORDS: Final = "SELECT FROM WHERE BY HAVING LIMIT OFFSET VALUES RETURNING"
_CLAUSES: Final = frozenset(_CLAUSE_WORDS.split())
_OTHER_WORDS: Final = (
    "WHERE GROUP HAVING ORDER LIMIT OFFSET FETCH UNION INTERSECT EXCEPT FOR WINDOW ON USING"
    " JOIN LEFT RIGHT FULL INNER CROSS NATURAL TABLESAMPLE LATERAL"
)
_NO_ALIASES: Final = frozenset(_OTHER_WORDS.split())
_SPAN: Final = re.compile(r"\s*(\d{1,6})\s+(week|day|hour|minute|second)s?\s*", re.IGNORECASE)
_HEAD: Final = "explode(flatten(transform(array(named_struct('a', "
_TWO: Final = "IF(p.a <= p.b, sequence(p.a, p.b), NULL)"
_THREE: Final = (
    "CASE WHEN p.c > 0 AND p.a <= p.b OR p.c < 0 AND p.a >= p.b THEN sequence(p.a, p.b, p.c)"
    f" WHEN p.c = 0 THEN raise_error('{NO_STEP}') END"
)


class SeriesFinder:
    """Finds the calls of ``generate_series`` and ``unnest`` in a text.

    `opening` and `closing` hold the text to write before and after the tokens at these places.
    `replaced` holds the text that replaces the tokens from a place on, and the place after them.
    """

    def __init__(self, lexed: LexedText, *, is_utc: bool) -> None:
        self._lexed = lexed
        self._tokens = lexed.tokens
        self._is_utc = is_utc
        self.opening: dict[int, str] = {}
        self.closing: dict[int, str] = {}
        self.replaced: dict[int, tuple[int, str]] = {}
        for place, token in enumerate(self._tokens[:-1]):
            if token.word not in (_SERIES, _UNNEST) or self._tokens[place + 1].text != "(":
                continue
            closed = self._lexed.partners[place + 1]
            commas = [
                at for at in self._lexed.outer(place + 2, closed) if self._tokens[at].text == ","
            ]
            if token.word == _UNNEST:
                self._note_arrays(place, commas, closed)
            else:
                self._note(place, commas, closed)
            if self._is_relation(place):
                columns = [token.word.lower()] * (1 if token.word == _SERIES else len(commas) + 1)
                self._note_relation(place, columns, closed)

    def _note_arrays(self, place: int, commas: list[int], closed: int) -> None:
        """Record an ``unnest``. Of several arrays the shorter ones are padded with NULLs, and so is
        a NULL array."""
        if not commas:
            self.replaced[place] = (place + 1, "explode")
            return
        if not self._is_relation(place):
            problem, hint = "unnest of several arrays must be a relation", "write it after FROM"
            raise self._refused(place, problem, hint)
        self.replaced[place] = (place + 2, "inline(arrays_zip(coalesce(")
        for comma in commas:
            self.replaced[comma] = (comma + 1, ", array()), coalesce(")
        self.replaced[closed] = (closed + 1, ", array())))")

    def _note(self, place: int, commas: list[int], closed: int) -> None:
        if len(commas) not in (1, 2):
            raise self._refused(place, "generate_series takes two or three operands")
        clocks = {
            self._clock(place + 2, commas[0]),
            self._clock(commas[0] + 1, [*commas, closed][1]),
        }
        of_times = clocks != {""} or (len(commas) == 2 and self._is_span(commas[1] + 1))
        series, end = _THREE if len(commas) == 2 else _TWO, closed
        opened, shut = "(", ")"
        # Numbers are left to Spark, which rejects operands of any other type.
        if of_times:
            step = self._step(commas[1] + 1, closed) if len(commas) == 2 else ""
            moment = clocks.pop().replace("date", "timestamp")
            same = not clocks or clocks.pop().replace("date", "timestamp") == moment
            if not (step and moment and same and (self._is_utc or moment == "timestamp_ntz")):
                raise self._refused(place, "this generate_series of times is not supported")
            series = _TWO.replace("p.b)", f"p.b, {step})")
            opened, shut, end = "CAST((", f") AS {moment})", commas[1]
        self.replaced[place] = (place + 2, _HEAD + opened)
        self.replaced[commas[0]] = (commas[0] + 1, f"{shut}, 'b', {opened}")
        if len(commas) == 2 and end == closed:
            self.replaced[commas[1]] = (commas[1] + 1, f"{shut}, 'c', {opened}")
        self.replaced[end] = (closed + 1, f"{shut})), p -> {series})))")

    def _refused(
        self, place: int, problem: str, hint: str = "write explode(sequence(…))"
    ) -> SqlSyntaxError:
        return syntax_error(self._lexed.text, self._tokens[place].start, problem, hint=hint)

    # -- times ---------------------------------------------------------------------------------

    def _clock(self, first: int, last: int) -> str:
        """Return the type of an operand that is marked as a time; "" for any other operand."""
        typed = self._tokens[first].word in ("DATE", "TIMESTAMP", "TIMESTAMPTZ")
        signs = [at for at in self._lexed.outer(first, last) if self._tokens[at].text == "::"]
        # In a sum, a cast applies only to the last operand.
        if signs and len(list(self._lexed.outer(first, signs[-1]))) > 1:
            return ""
        reader = StatementReader(self._lexed, first if typed else (signs[-1:] or [last])[0] + 1)
        if not (typed or signs):
            return ""
        try:
            kind = read_written_type(reader).spark
        except SqlSyntaxError:
            return ""
        whole = reader.place == last - 1 if typed else reader.place == last
        return kind if whole and kind in ("date", "timestamp", "timestamp_ntz") else ""

    def _is_span(self, first: int) -> bool:
        return self._tokens[first].word == "INTERVAL" or self._tokens[first].kind == "text"

    def _step(self, first: int, last: int) -> str:
        """Return a step between times in Spark's syntax; "" for a step without a fixed length."""
        at = first + (self._tokens[first].word == "INTERVAL")
        cast = [each.word for each in self._tokens[at + 1 : last]]
        if self._tokens[at].kind != "text" or cast not in ([], ["::", "INTERVAL"]):
            return ""
        found = _SPAN.fullmatch(text_value(self._tokens[at].text, SqlDialect.POSTGRES))
        if found is None or not int(found[1]):
            return ""
        return f"INTERVAL '{int(found[1])}' {found[2].upper()}"

    # -- relations -----------------------------------------------------------------------------

    def _is_relation(self, place: int) -> bool:
        at = self._before(place)
        at -= self._word(at) == "LATERAL"
        if self._word(at) != ",":
            return self._word(at) in ("FROM", "JOIN")
        openers = {closed: opened for opened, closed in self._lexed.partners.items()}
        while at >= 0 and self._word(at) not in _CLAUSES and self._word(at) not in ("(", "["):
            at = openers.get(at, at) - 1
        return self._word(at) == "FROM"

    def _before(self, place: int) -> int:
        """Return the place before a call and its schema."""
        return place - 3 if self._word(place - 1) == "." else place - 1

    def _word(self, place: int) -> str:
        return self._tokens[place].word if 0 <= place < len(self._tokens) else ""

    def _note_relation(self, place: int, columns: list[str], closed: int) -> None:
        """Record the names of a relation and its column. A relation or column without a name takes
        the other's name; several `columns` have their own."""
        if self._word(closed + 1) == "WITH":
            raise self._refused(
                closed + 1, f"{columns[0]} WITH ORDINALITY is not supported", "write posexplode(…)"
            )
        before = self._before(place)
        kinds = {self._word(before - 1), self._word(before - 2)}
        # Operands may refer to columns of the relations before the call.
        if self._word(before) in (",", "JOIN") and not kinds & {"RIGHT", "FULL"}:
            self.opening[place] = "LATERAL "
        at = closed + 1 + (self._word(closed + 1) == "AS")
        token = self._tokens[at] if at < len(self._tokens) else None
        named = token is not None and token.kind in ("word", "name")
        if token is None or not named or token.word in _NO_ALIASES:
            self.closing[closed + 1] = f" AS {columns[0]}({', '.join(columns)})"
        elif self._word(at + 1) != "(":
            quoted = token.kind == "name"
            name = quote_name(name_value(token.text)) if quoted else token.text
            self.closing[at + 1] = f"({', '.join(columns) if len(columns) > 1 else name})"
