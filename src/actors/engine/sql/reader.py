"""Reads a statement token by token, and reports its errors.

The grammar reads words, names and literals one by one, and queries and expressions as a whole:
their `extent` ends before the first stop word outside brackets and ``CASE … END``. Brackets are
matched once, when the text is split, so nothing here recurses. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from actors.engine.sql.statements import QualifiedName, TextSpan
from actors.engine.sql.tokens import (
    BRACKETS,
    LexedText,
    SqlDialect,
    SqlToken,
    describe_token,
    name_value,
    syntax_error,
    text_value,
)
from actors.runtime.errors import SqlSyntaxError

T = TypeVar("T")
_NO_NAME_WORDS: Final = (
    "AND AS BY CASE CREATE FROM IN INTO IS NOT NULL ON OR SELECT SET THEN TO USING WHEN WHERE WITH"
)
NO_NAMES: Final = frozenset(_NO_NAME_WORDS.split())
"""Words that cannot be an unquoted name of an object or an alias: it is more likely that a name is
missing."""


def list_words(words: Iterable[str]) -> str:
    """Return alternatives in the form used in errors.

    >>> list_words(["TABLE", "VIEW", "SINK"])
    'TABLE, VIEW or SINK'
    """
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


class StatementReader:
    """Reads the tokens `[first, last)` of a text in order."""

    @classmethod
    def of(cls, span: TextSpan) -> StatementReader:
        """Return a reader of a part of a statement."""
        return cls(span.lexed, span.first, span.last)

    def __init__(self, lexed: LexedText, first: int = 0, last: int | None = None) -> None:
        """Start at the token `first`. `last` None: read to the end of the text."""
        self.text: Final = lexed.text
        self.dialect: Final = lexed.dialect
        self.tokens: Final = lexed.tokens
        self.partners: Final = lexed.partners
        self.last: Final = len(lexed.tokens) if last is None else last
        # Index of the next token; it moves as tokens are read.
        self.place = first
        self._lexed = lexed

    # -- lookahead ----------------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> SqlToken:
        """Return the token that is `ahead` tokens after the next one; after the last, a token of
        kind ``end``."""
        place = self.place + ahead
        return self.tokens[place] if place < self.last else self._end()

    def _end(self) -> SqlToken:
        # A part in brackets ends where its closing bracket is.
        if self.last < len(self.tokens) and self.tokens[self.last].text != ";":
            return SqlToken("end", "", self.tokens[self.last].start)
        return SqlToken("end", "", self.tokens[self.last - 1].end if self.last else 0)

    @property
    def position(self) -> int:
        """Return the offset of the next token in the text."""
        return self.peek().start

    def ends(self) -> bool:
        """Return whether no token is left."""
        return self.place >= self.last

    def follows(self, *words: str) -> bool:
        """Return whether these words (in upper case) or signs come next, in this order."""
        place, tokens = self.place, self.tokens
        if place + len(words) > self.last:
            return False
        for word in words:
            if tokens[place].word != word:
                return False
            place += 1
        return True

    def follows_any(self, *words: str) -> bool:
        """Return whether one of these words (in upper case) or signs comes next."""
        return not self.ends() and self.tokens[self.place].word in words

    # -- words --------------------------------------------------------------------------------

    def take(self, *words: str) -> bool:
        """Read these words if they come next; return whether they did."""
        if not self.follows(*words):
            return False
        self.place += len(words)
        return True

    def take_any(self, *words: str) -> str:
        """Read one of these words if it comes next and return it; else return ""."""
        if not self.follows_any(*words):
            return ""
        self.place += 1
        return self.tokens[self.place - 1].word

    def need(self, *words: str, hint: str = "") -> None:
        """Read these words. Raises `SqlSyntaxError` if they do not come next."""
        for word in words:
            if not self.take(word):
                raise self.unexpected(word if word.isalpha() else f"'{word}'", hint=hint)

    def need_any(self, *words: str, hint: str = "") -> str:
        """Read one of these words and return it. Raises `SqlSyntaxError` if none comes next."""
        if not (word := self.take_any(*words)):
            raise self.unexpected(list_words(words), hint=hint)
        return word

    def need_end(self, expected: str = "the end of the statement") -> None:
        """Raise `SqlSyntaxError` if a token is left."""
        if not self.ends():
            raise self.unexpected(expected)

    # -- errors -------------------------------------------------------------------------------

    def error(self, problem: str, *, hint: str = "", position: int | None = None) -> SqlSyntaxError:
        """Return an error for a problem at the next token, or at `position`."""
        at = self.position if position is None else position
        return syntax_error(self.text, at, problem, hint=hint)

    def unexpected(self, expected: str, *, hint: str = "") -> SqlSyntaxError:
        """Return the error for a next token that is not what was `expected`."""
        return self.error(f"expected {expected}, found {self._found()}", hint=hint)

    def _found(self) -> str:
        if not self.ends():
            return describe_token(self.peek())
        # After a part in brackets comes its closing bracket, which the user sees.
        if self.last < len(self.tokens) and self.tokens[self.last].text in BRACKETS:
            return describe_token(self.tokens[self.last])
        return "the end of the statement"

    def refuse(self, *words: str, problem: str, hint: str = "") -> None:
        """Raise `SqlSyntaxError` with a problem and a hint if these words come next."""
        if self.follows(*words):
            raise self.error(problem, hint=hint)

    # -- names and literals -------------------------------------------------------------------

    def name(self, expected: str = "a name", *, refused: frozenset[str] = frozenset()) -> str:
        """Read a name, quoted or not. `refused`: words that are not names unless quoted."""
        token = self.peek()
        if token.kind == "name":
            value = name_value(token.text)
            if not value:
                raise self.error("a quoted name cannot be empty")
            self.place += 1
            return value
        postgres = self.dialect is SqlDialect.POSTGRES
        is_word = token.kind == "word" and not (postgres and token.text[0].isdigit())
        if not is_word or token.word in refused:
            raise self.unexpected(expected, hint=self._name_hint(token))
        self.place += 1
        # PostgreSQL folds unquoted names to lower case. Spark keeps the case and compares without
        # it.
        return token.text.lower() if postgres else token.text

    def _name_hint(self, token: SqlToken) -> str:
        if token.kind == "text" and token.text[0] == '"':
            return "quote a name with backticks: `name`"
        if token.kind == "text":
            return "write the name without quotes"
        if token.kind == "word":
            quote = '"' if self.dialect is SqlDialect.POSTGRES else "`"
            return f"to use this word as a name, quote it: {quote}{token.text}{quote}"
        return ""

    def object_name(self, expected: str = "a name") -> QualifiedName:
        """Read a name of one or more parts."""
        parts = [self.name(expected, refused=NO_NAMES)]
        while self.take("."):
            parts.append(self.name("a name after the dot"))
        return tuple(parts)

    def object_names(self, expected: str = "a name") -> tuple[QualifiedName, ...]:
        """Read names of one or more parts, separated by commas."""
        return self.sequence(lambda: self.object_name(expected))

    def sequence(self, read: Callable[[], T]) -> tuple[T, ...]:
        """Call `read` once, and once more after each comma that follows; return the results."""
        found = [read()]
        while self.take(","):
            found.append(read())
        return tuple(found)

    def alias(self, *stops: str) -> str | None:
        """Read an alias, with or without AS, unless the next word is one of `stops`."""
        # After AS there must be one.
        if self.take("AS"):
            return self.name("an alias", refused=NO_NAMES)
        token = self.peek()
        if token.kind == "name":
            return self.name()
        if token.kind == "word" and token.word not in NO_NAMES and token.word not in stops:
            return self.name()
        return None

    def string(self, expected: str = "a text in single quotes") -> str:
        """Read a string and return its value."""
        token = self.peek()
        if token.kind != "text":
            hint = ""
            if token.kind == "name" and token.text[0] == '"':
                hint = "double quotes are for names; use single quotes for text"
            raise self.unexpected(expected, hint=hint)
        try:
            value = text_value(token.text, self.dialect)
        except ValueError:
            raise self.error("invalid escape in a string: it does not denote a character") from None
        self.place += 1
        return value

    def whole_number(self, expected: str) -> int:
        """Read a number without a sign or a fraction."""
        token = self.peek()
        if token.kind != "number" or not token.text.isdecimal():
            raise self.unexpected(expected)
        # Python refuses to parse longer numbers.
        if len(token.text) > _DIGITS_MAX:
            raise self.error("the number is too large")
        self.place += 1
        return int(token.text)

    # -- queries and expressions --------------------------------------------------------------

    def span(self, first: int, last: int) -> TextSpan:
        """Return the tokens `[first, last)` as a part of the statement."""
        return TextSpan(self._lexed, first, last)

    def extent(self, expected: str, *stops: str) -> TextSpan:
        """Read the tokens before the first of `stops` (upper-case words, or signs) that is outside
        brackets and CASE. Raises `SqlSyntaxError` if there are none."""
        tokens, partners, last = self.tokens, self.partners, self.last
        first = place = self.place
        cases = 0
        while place < last:
            token = tokens[place]
            word = token.word
            if place in partners:
                place = partners[place]
            # The WHEN and THEN of a CASE do not end a clause of MERGE.
            elif word == "CASE" and self._is_keyword(place):
                cases += 1
            elif word == "END" and cases and self._is_keyword(place):
                cases -= 1
            elif not cases and word in stops and self._is_keyword(place):
                break
            place += 1
        if place == first:
            raise self.unexpected(expected)
        self.place = place
        return self.span(first, place)

    def _is_keyword(self, place: int) -> bool:
        """Return whether a word is a keyword, and not part of a qualified name or the second word
        of an operator."""
        # An operand must come here, and a keyword is not one.
        if place == self.place:
            return True
        before, word = self.tokens[place - 1].word, self.tokens[place].word
        return before != "." and (before, word) != ("DISTINCT", "FROM")

    def rest(self, expected: str) -> TextSpan:
        """Read all remaining tokens; there must be at least one."""
        return self.extent(expected)

    def part(self, first: int, last: int) -> StatementReader:
        """Return a reader of the tokens `[first, last)`."""
        return StatementReader(self._lexed, first, last)

    def bracketed(self, expected: str = "'('") -> StatementReader:
        """Read a part in round brackets and return a reader of its content."""
        if not self.follows("("):
            raise self.unexpected(expected)
        inner = StatementReader(self._lexed, self.place + 1, self.partners[self.place])
        self.place = self.partners[self.place] + 1
        return inner

    def expressions(self, expected: str) -> tuple[TextSpan, ...]:
        """Read all remaining tokens as expressions, separated by commas."""
        return self.sequence(lambda: self.extent(expected, ","))

    def column_names(self) -> tuple[str, ...]:
        """Read column names in round brackets."""
        inner = self.bracketed("'(' and column names")
        names = inner.sequence(lambda: inner.name("a column"))
        inner.need_end("',' or ')'")
        return names


_DIGITS_MAX: Final = 1000
