"""Casts and subscripts of PostgreSQL's dialect that Spark reads otherwise, and where their operands
begin. Pure."""

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
"""Parts of such a text that PostgreSQL leaves out: zeros behind seconds, and minutes of an
offset."""
NOT_CALLED: Final = NO_NAMES | frozenset(_WORDS.split())
"""Words before a bracket that name no function."""


class CastFinder:
    """Finds the operands of casts of which Spark does less than PostgreSQL does, and of subscripts.

    A cast to ``varchar(n)`` cuts its operand off, one to ``char(n)`` fills it up: `opening` and
    `closing` have what is written before and behind the tokens at these places for that. `read`:
    places of texts whose type the statement gives. `subscripts`: places of brackets that hold the
    number of an element.
    """

    def __init__(self, lexed: LexedText, role_of: Callable[[int], str] = lambda _: "") -> None:
        """Take a text, and the roles of places in it (`typed_places`)."""
        self._lexed = lexed
        self._role_of = role_of
        self._tokens = lexed.tokens
        self._openers: dict[int, int] = {}
        self._starts: dict[int, int | None] = {}
        """By the place behind a cast, where its operand begins."""
        self._kinds: dict[int, str] = {}
        """By the same place, the name of its type."""
        self.opening: dict[int, str] = {}
        self.closing: dict[int, str] = {}
        self.replaced: dict[int, tuple[int, str]] = {}
        """Texts for the tokens from a place on, with the place behind them."""
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
        """Note the bracket at a place, if an element's number stands in it."""
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
            raise self._refused(place, "slices of arrays are not known", "write slice(…)")
        start = self._operand(place)
        if start is None:
            raise self._refused(place, "the array of this subscript is not known", "write get(…)")
        # Counts from 0, and is NULL outside of the array.
        # A subscript behind another one is written around it.
        self.opening[start] = "get(" + self.opening.get(start, "")
        self.subscripts.add(place)

    def _note_call(self, place: int) -> None:
        """Note the cast in ``CAST (… AS type)``."""
        closed = self._lexed.partners[place + 1]
        found = (at for at in self._lexed.outer(place + 2, closed) if self._tokens[at].word == "AS")
        at = next(found, closed)
        if at < closed:
            self._note(place + 2 if at == place + 3 else -1, place, at + 1, closed + 1)

    def _note(self, operand: int, start: int | None, kind_at: int, end: int = 0) -> None:
        """Note a cast to the type at a place. `operand`: the place of its operand's one token, if
        it is one."""
        reader = StatementReader(self._lexed, kind_at)
        try:
            kind = read_written_type(reader)
        except SqlSyntaxError:
            return  # the writer says so
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
        # Spark has no such casts in expressions: they are written as what they do.
        if limit is not None and start is not None:
            before, behind = self._limiting(*limit, kind_at)
            self.opening[start] = before + self.opening.get(start, "")
            self.closing[end] = self.closing.get(end, "") + behind
        elif limit is not None:
            raise self._refused(kind_at, "this cast's operand is not known", "write CAST(… AS …)")
        # What has been checked as the same type is not checked again.
        elif not (given or again or (alone and self._tokens[operand].word == "NULL")):
            self._check(kind, kind_at)

    def _bracketed(self, closed: int) -> int:
        """Return where the brackets around a text begin that end at a place; -1 if it is
        another operand."""
        opened = self._openers.get(closed, -1)
        is_text = opened == closed - 2 and self._tokens[closed - 1].kind == "text"
        return opened if is_text and self._tokens[closed].text == ")" else -1

    def _limiting(self, length: int, padded: bool, kind_at: int) -> tuple[str, str]:
        """Return what is written around an operand to limit its length."""
        role = self._role_of(self._tokens[kind_at].start)
        if role == "char column":
            raise self._refused(
                kind_at, "a cast to char(n) is not compared with a column of CHAR", "cast to text"
            )
        if role == "char":
            # PostgreSQL compares such texts, and makes others of them, without blanks at the end.
            return "rtrim(left(", f", {length}))"
        return ("rpad(", f", {length}, ' ')") if padded else ("left(", f", {length})")

    def _note_clock(self, start: int | None, kind_at: int, behind: int, end: int) -> None:
        """Note the cast of a timestamptz to text, as which it has its offset. Its type ends before
        the token at `behind`."""
        if start is None:
            raise self._refused(kind_at, "this cast's operand is not known", "write CAST(… AS …)")
        self.opening[start] = "regexp_replace(date_format(" + self.opening.get(start, "")
        self.closing[end] = self.closing.get(end, "") + f", '{_CLOCK}'), '{_CLOCK_ZEROS}', '')"
        self.replaced[kind_at - 1] = (behind, "")
        # Of a `CAST` the word goes too; its brackets stay.
        if end != behind:
            self.replaced[start] = (start + 1, "")

    def _check(self, kind: WrittenType, place: int) -> None:
        """Raise `SqlSyntaxError` for an expression that is cast to a type that checks its texts."""
        if kind.checked:
            hint = (
                "cast a text or a parameter"
                if kind.name != "bytea"
                else ("write unhex(…) for hex digits, CAST(… AS binary) for a text's own bytes")
            )
            raise self._refused(place, f"an expression is not cast to {kind.name}", hint)
        if kind.spark.startswith(("array<varchar", "array<char")):
            raise self._refused(place, f"an expression is not cast to {kind.spark}", "cast to text")

    def _refused(self, place: int, problem: str, hint: str) -> SqlSyntaxError:
        start = self._tokens[place].start
        return syntax_error(self._lexed.text, start, problem, hint=hint)

    def _operand(self, place: int) -> int | None:
        """Return where the operand of the ``::`` at a place begins; None if that is not known."""
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
        # `DATE '…'` has its type before it.
        typed = at > 0 and self._tokens[at].kind == "text" and self._tokens[at - 1].kind == "word"
        if typed and self._tokens[at - 1].word in ("DATE", "TIME", "TIMESTAMP", "INTERVAL"):
            return at - 1
        return at
