"""Finds casts and subscripts of PostgreSQL's dialect that mean something else in Spark, and their
operands. Pure.

A *place* is the index of a token in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from actors.engine.sql.reader import NO_NAMES, StatementReader
from actors.engine.sql.tokens import LexedText, syntax_error
from actors.engine.sql.type_names import WrittenType, read_written_type
from actors.model.plan.schema import text_limit
from actors.runtime.errors import SqlSyntaxError

_WORDS: Final = (
    "ALL ANY BETWEEN DISTINCT ELSE END EXISTS FILTER HAVING ILIKE INTERVAL LIKE LIMIT OFFSET OVER "
    "RETURNING SOME UNION VALUES WITHIN"
)
_CLOCK: Final = "yyyy-MM-dd HH:mm:ss.SSSSSSxxxxx"
_CLOCK_ZEROS: Final = "[.]0{6}(?=[+-])|(?<=[.][0-9]{0,5}[1-9])0+(?=[+-])|:00$"
"""The parts of such a text that PostgreSQL leaves out: trailing zeros of the seconds, and zero
minutes of an offset."""
NOT_CALLED: Final = NO_NAMES | frozenset(_WORDS.split())
"""Words that may come before a bracket without naming a function."""


class CastFinder:
    """Finds subscripts, and casts that do less in Spark than in PostgreSQL.

    A cast to ``varchar(n)`` truncates its operand, and one to ``char(n)`` pads it. `opening` and
    `closing` hold the text to write before and after the tokens at these places. `read`: places of
    texts whose type the statement gives. `subscripts`: places of the brackets around an element's
    number.
    """

    def __init__(self, lexed: LexedText, role_of: Callable[[int], str] = lambda _: "") -> None:
        """Find the casts and subscripts of a text. `role_of`: returns the role of the place at an
        offset (`type_dependent_places`)."""
        self._lexed = lexed
        self._role_of = role_of
        self._tokens = lexed.tokens
        # Place of each opening bracket, by the place of its closing one.
        self._openers: dict[int, int] = {}
        self._starts: dict[int, int | None] = {}
        """Place where the operand of a cast starts, by the place after the cast."""
        self._kinds: dict[int, str] = {}
        """Name of a cast's type, by the place after the cast."""
        self.opening: dict[int, str] = {}
        self.closing: dict[int, str] = {}
        self.replaced: dict[int, tuple[int, str]] = {}
        """Replacements of tokens, by the place of the first: the place after the last one, and the
        new text."""
        self.read: set[int] = set()
        self.subscripts: set[int] = set()
        signs = ("::", "CAST", "[")
        places = [place for place, token in enumerate(self._tokens) if token.word in signs]
        if places:
            self._openers = {closed: opened for opened, closed in lexed.partners.items()}
        for place in places:
            if self._tokens[place].text == "::":
                self._note(place - 1, self._operand(place), place + 1)
            elif self._tokens[place].text == "[":
                self._note_subscript(place)
            elif self._tokens[place + 1 : place + 2] and self._tokens[place + 1].text == "(":
                self._note_call(place)

    def _note_subscript(self, place: int) -> None:
        """Record the bracket at a place if it holds the number of an element."""
        closed = self._lexed.partners[place]
        inside = self._tokens[place + 1 : closed]
        before = self._tokens[place - 1] if place else None
        if before is None or not inside or (len(inside) == 1 and inside[0].kind == "text"):
            return  # of a type; or the key of a map
        is_operand = before.kind in ("word", "name", "parameter") or before.text in (")", "]")
        of_type = place > 1 and self._tokens[place - 2].text == "::"
        if not is_operand or before.word == "ARRAY" or of_type:
            return
        if any(each.text.startswith(":") and each.text != "::" for each in inside):
            raise self._refused(place, "array slices are not supported", "write slice(…)")
        start = self._operand(place)
        if start is None:
            raise self._refused(
                place, "cannot tell which array this subscript applies to", "write get(…)"
            )
        # `get` counts from 0 and returns NULL outside the array. Of two subscripts in a row, the
        # second is written around the first.
        self.opening[start] = "get(" + self.opening.get(start, "")
        self.subscripts.add(place)

    def _note_call(self, place: int) -> None:
        """Record the cast of ``CAST (… AS type)``."""
        closed = self._lexed.partners[place + 1]
        found = (at for at in self._lexed.outer(place + 2, closed) if self._tokens[at].word == "AS")
        at = next(found, closed)
        if at < closed:
            self._note(place + 2 if at == place + 3 else -1, place, at + 1, closed + 1)

    def _note(self, operand: int, start: int | None, kind_at: int, end: int = 0) -> None:
        """Record a cast to the type at `kind_at`. `operand`: the place of its operand if that is a
        single token, else negative. `start`: the place where the operand starts; None if it is not
        known. `end`: the place after a ``CAST (…)``; 0 for a ``::``."""
        reader = StatementReader(self._lexed, kind_at)
        try:
            kind = read_written_type(reader)
        except SqlSyntaxError:
            return  # The writer reports the error.
        # A `CAST` ends with its bracket, a `::` with its type.
        end = end or reader.place
        self._starts[end] = start
        again = end == reader.place and self._kinds.get(kind_at - 1) == kind.name
        self._kinds[end] = kind.name
        bracketed = start is not None and self._bracketed(operand) == start
        operand = operand - 1 if bracketed else operand
        alone = operand >= 0 and (bracketed or end != reader.place or start == operand)
        given = alone and self._tokens[operand].kind in ("text", "parameter")
        if given:
            self.read.add(operand)
        if self._role_of(self._tokens[kind_at].start) == "timestamptz":
            self._note_clock(start, kind_at, reader.place, end)
        limit = text_limit(kind.spark)
        # Spark does not truncate or pad in expressions, so the cast is written as the function that
        # does.
        if limit is not None and start is not None:
            before, behind = self._limiting(*limit, kind_at)
            self.opening[start] = before + self.opening.get(start, "")
            self.closing[end] = self.closing.get(end, "") + behind
        elif limit is not None:
            raise self._refused(
                kind_at, "cannot tell what this cast applies to", "write CAST(… AS …)"
            )
        # A value that was just cast to the same type needs no second check.
        elif not (given or again or (alone and self._tokens[operand].word == "NULL")):
            self._check(kind, kind_at)

    def _bracketed(self, closed: int) -> int:
        """Return the place of the bracket before a text whose closing bracket is at `closed`; -1 if
        the operand is something else."""
        opened = self._openers.get(closed, -1)
        is_text = opened == closed - 2 and self._tokens[closed - 1].kind == "text"
        return opened if is_text and self._tokens[closed].text == ")" else -1

    def _limiting(self, length: int, padded: bool, kind_at: int) -> tuple[str, str]:
        """Return the text to write before and after an operand to limit its length."""
        role = self._role_of(self._tokens[kind_at].start)
        if role == "char column":
            raise self._refused(
                kind_at, "cannot compare a cast to char(n) with a CHAR column", "cast to text"
            )
        if role == "char":
            # PostgreSQL ignores trailing blanks of a char(n) when it is compared or converted to
            # text.
            return "rtrim(left(", f", {length}))"
        return ("rpad(", f", {length}, ' ')") if padded else ("left(", f", {length})")

    def _note_clock(self, start: int | None, kind_at: int, behind: int, end: int) -> None:
        """Record the cast of a timestamptz to text, which must show its offset. The type ends
        before the token at `behind`."""
        if start is None:
            raise self._refused(
                kind_at, "cannot tell what this cast applies to", "write CAST(… AS …)"
            )
        self.opening[start] = "regexp_replace(date_format(" + self.opening.get(start, "")
        self.closing[end] = self.closing.get(end, "") + f", '{_CLOCK}'), '{_CLOCK_ZEROS}', '')"
        self.replaced[kind_at - 1] = (behind, "")
        # The word ``CAST`` goes too; its brackets stay.
        if end != behind:
            self.replaced[start] = (start + 1, "")

    def _check(self, kind: WrittenType, place: int) -> None:
        """Raise `SqlSyntaxError` for a cast of an expression to a type whose texts PostgreSQL
        checks."""
        if kind.checked:
            hint = (
                "cast a string literal or a parameter instead"
                if kind.name != "bytea"
                else (
                    "write unhex(…) for hex digits, or CAST(… AS binary) for the bytes of the text"
                    " itself"
                )
            )
            raise self._refused(place, f"cannot cast an expression to {kind.name}", hint)
        if kind.spark.startswith(("array<varchar", "array<char")):
            raise self._refused(place, f"cannot cast an expression to {kind.spark}", "cast to text")

    def _refused(self, place: int, problem: str, hint: str) -> SqlSyntaxError:
        start = self._tokens[place].start
        return syntax_error(self._lexed.text, start, problem, hint=hint)

    def _operand(self, place: int) -> int | None:
        """Return where the operand of the ``::`` at a place starts; None if that cannot be told."""
        if place in self._starts:
            return self._starts[place]
        at = place - 1
        while at in self._openers:
            opened = self._openers[at]
            before = self._tokens[opened - 1] if opened else None
            if self._tokens[opened].text == "(":
                if before is None or before.kind not in ("word", "name"):
                    return opened
                if before.word in ("OVER", "FILTER", "END", "GROUP", "INTERVAL"):
                    return None
                if before.word in NOT_CALLED:
                    return opened
            at = opened - 1
        if at < 0 or self._tokens[at].kind == "sign" or self._tokens[at].word == "END":
            return None
        # A qualified name is one operand.
        while at > 1 and self._tokens[at - 1].text == ".":
            at -= 2
        # In `DATE '…'` the type comes first.
        typed = at > 0 and self._tokens[at].kind == "text" and self._tokens[at - 1].kind == "word"
        if typed and self._tokens[at - 1].word in ("DATE", "TIME", "TIMESTAMP", "INTERVAL"):
            return at - 1
        return at
