"""The lexer of SQL, for Spark's dialect and PostgreSQL's.

All code of the service that reads SQL text uses `lex_sql`: the grammar of statements, the rewriting
of PostgreSQL's dialect, and the parser of plain reads. The dialects differ in their quotes: ``"a"``
is a string in Spark and an identifier in PostgreSQL, a backslash escapes only in Spark's strings,
and PostgreSQL has ``E'…'`` and ``$$…$$``. Pure.

>>> [(each.kind, each.text) for each in lex_sql("SELECT `a``b` || r'\\\\n' -- a comment")]
[('word', 'SELECT'), ('name', '`a``b`'), ('sign', '||'), ('text', "r'\\\\n'")]
>>> [(each.kind, each.text) for each in lex_sql('"a"::int4 = $1', SqlDialect.POSTGRES)]
[('name', '"a"'), ('sign', '::'), ('word', 'int4'), ('sign', '='), ('parameter', '$1')]
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from actors.runtime.errors import SqlSyntaxError

_FOUND_MAX: Final = 40
"""Maximum number of characters of a token that an error quotes."""


class SqlDialect(enum.Enum):
    """The dialect whose rules split a text into tokens."""

    SPARK = "spark"
    POSTGRES = "postgres"


# gc=False: a long statement has a million tokens, and a collection over them would stop all
# threads.
class SqlToken(msgspec.Struct, frozen=True, gc=False):
    """A token: its `text` as written, at the offset `start`.

    `kind` is ``word``, ``name`` (a quoted identifier), ``text`` (a string), ``number``,
    ``parameter`` (``$1``, ``:name``, ``?``), ``sign`` or ``hint`` (``/*+ … */``).
    """

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Return the offset after the token."""
        return self.start + len(self.text)

    @property
    def word(self) -> str:
        """Return a word in upper case, or a sign; "" for any other kind of token, which is never a
        keyword."""
        return self.text.upper() if self.kind in ("word", "sign") else ""

    @property
    def name(self) -> str:
        """Return the name that a word or a quoted identifier denotes."""
        return name_value(self.text) if self.kind == "name" else self.text


# All repetitions are possessive, so that even a text of millions of characters is scanned once.
_SPARK: Final = re.compile(
    r"""(?P<blank>\s++|
        # A backslash before the line's end continues the comment there.
        --(?:\\\n|[^\n\r])*+)
    |(?P<comment>/\*)
    # The quotes of a raw string have no escape.
    |(?P<text>[rR](?:'[^']*+'|"[^"]*+")
        |'(?:[^'\\]++|\\.|'')*+'|"(?:[^"\\]++|\\.|"")*+")
    |(?P<name>`(?:[^`]++|``)*+`)
    # No letter may follow the digits: 1a is a name.
    |(?P<number>(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?(?i:BD|[LSYDF])?(?!\w))
    |(?P<word>\w++)
    # The colon of struct<a:int> follows a name, and does not start a parameter.
    |(?P<parameter>\?|(?<![\w`:\])]):[^\W0-9]\w*+)
    # A quote that none of the above matched is not closed.
    |(?P<open>['"`])
    # `>>` is two signs, since it may close two types; for an operator this makes no difference.
    |(?P<sign><=>|<=|>=|<>|!=|==|\|\||->|=>|::|:=|.)""",
    re.VERBOSE | re.DOTALL,
)
_POSTGRES: Final = re.compile(
    r"""(?P<blank>\s++|--[^\n\r]*+)
    |(?P<comment>/\*)
    # Matched here, since reading it as a word and a string would silently change the value.
    |(?P<unicode>[uU]&['"])
    |(?P<text>[eE]'(?:[^'\\]++|\\.|'')*+'|'(?:[^']++|'')*+'
        # The closing tag must be the same as the opening one.
        |\$(?P<tag>(?:[^\W0-9]\w*+)?)\$.*?\$(?P=tag)\$)
    # PostgreSQL has no backticks, but its users may copy from Spark's documentation.
    |(?P<name>"(?:[^"]++|"")*+"|`(?:[^`]++|``)*+`)
    |(?P<number>(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?(?!\w))
    |(?P<parameter>\$[0-9]++)
    # Before words, as E' begins with a letter.
    |(?P<open>[eE]?'|["`]|\$(?:[^\W0-9]\w*+)?\$)
    |(?P<word>[^\W0-9][\w$]*+|\w++)
    |(?P<sign><=|>=|<>|!=|\|\||->>|->|=>|::|:=|.)""",
    re.VERBOSE | re.DOTALL,
)
_PATTERNS: Final[Mapping[SqlDialect, re.Pattern[str]]] = {
    SqlDialect.SPARK: _SPARK,
    SqlDialect.POSTGRES: _POSTGRES,
}
# Within a comment, Spark does not take the start of a hint as a nested comment. PostgreSQL has no
# hints.
_COMMENT_MARKS: Final[Mapping[SqlDialect, re.Pattern[str]]] = {
    SqlDialect.SPARK: re.compile(r"/\*(?!\+)|\*/"),
    SqlDialect.POSTGRES: re.compile(r"/\*|\*/"),
}


def lex_sql(text: str, dialect: SqlDialect = SqlDialect.SPARK) -> list[SqlToken]:
    """Return the tokens of a text, without comments.

    Raises `SqlSyntaxError` for a quote or comment that is not closed.
    """
    match_at = _PATTERNS[dialect].match
    found: list[SqlToken] = []
    at = 0
    while (match := match_at(text, at)) is not None:
        kind, start, at = str(match.lastgroup), at, match.end()
        if kind == "blank":
            continue
        if kind == "comment":
            at = _comment_end(text, start, dialect)
            # A hint is for Spark's planner, so unlike a comment it is part of the query.
            if not text.startswith("+", start + 2):
                continue
            kind = "hint"
        elif kind == "open":
            raise syntax_error(text, start, f"{_QUOTES.get(match[0], match[0])} is not closed")
        elif kind == "unicode":
            raise syntax_error(text, start, f"{match[0]} is not supported", hint=r"write E'\u00e9'")
        found.append(SqlToken(kind, text[start:at], start))
    return found


_QUOTES: Final = {
    "'": "a string",
    "E'": "a string",
    "e'": "a string",
    '"': "a text in double quotes",
    "`": "a name in backticks",
    "$$": "a string in $$",
}


def _comment_end(text: str, start: int, dialect: SqlDialect) -> int:
    """Return the end of the comment, or hint, at `start`; comments nest."""
    marks = _COMMENT_MARKS[dialect]
    at, depth = start + 2, 1
    while depth:
        mark = marks.search(text, at)
        if mark is None:
            raise syntax_error(text, start, "a comment is not closed")
        depth += 1 if mark[0] == "/*" else -1
        at = mark.end()
    return at


# -- brackets --------------------------------------------------------------------------------------

_CLOSERS: Final[Mapping[str, str]] = {"(": ")", "[": "]", "{": "}"}
_OPENERS: Final = frozenset(_CLOSERS)
BRACKETS: Final = _OPENERS | frozenset(_CLOSERS.values())


class LexedText(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A text with its tokens; `partners` maps the place of each opening bracket to that of its
    closing one."""

    text: str
    dialect: SqlDialect
    tokens: Sequence[SqlToken]
    partners: Mapping[int, int]

    def outer(self, first: int, last: int) -> Iterator[int]:
        """Yield the places of the tokens `[first, last)` that are not in brackets."""
        while first < last:
            yield first
            first = self.partners.get(first, first) + 1

    def part(self, first: int, last: int) -> LexedText:
        """Return the tokens `[first, last)` as a text of their own, without lexing it again."""
        tokens = self.tokens[first:last]
        start = tokens[0].start if tokens else 0
        text = self.text[start : tokens[-1].end if tokens else 0]
        if first == 0 and last == len(self.tokens) and len(text) == len(self.text):
            return self
        if start:
            tokens = [SqlToken(each.kind, each.text, each.start - start) for each in tokens]
        partners = {
            opened - first: self.partners[opened] - first
            for opened in range(first, last)
            if opened in self.partners
        }
        return LexedText(text, self.dialect, tokens, partners)


def lex_text(text: str, dialect: SqlDialect) -> LexedText:
    """Return the tokens of a text with their brackets matched. Raises `SqlSyntaxError`."""
    tokens = lex_sql(text, dialect)
    return LexedText(text, dialect, tokens, match_brackets(text, tokens, 0, len(tokens)))


def match_brackets(
    text: str, tokens: Sequence[SqlToken], first: int, last: int
) -> Mapping[int, int]:
    """Map the place of each opening bracket among the tokens `[first, last)` to that of its closing
    one. Raises `SqlSyntaxError` if they do not match."""
    partners: dict[int, int] = {}
    opened: list[int] = []
    for place in range(first, last):
        token = tokens[place]
        if token.text not in BRACKETS:
            continue
        if token.text in _OPENERS:
            opened.append(place)
        elif opened and _CLOSERS[tokens[opened[-1]].text] == token.text:
            partners[opened.pop()] = place
        elif opened:
            wanted = _CLOSERS[tokens[opened[-1]].text]
            raise syntax_error(text, token.start, f"expected '{wanted}', found '{token.text}'")
        else:
            raise syntax_error(text, token.start, f"unmatched closing '{token.text}'")
    # Report the innermost bracket: those around it may be unclosed only because of it.
    if opened:
        innermost = tokens[opened[-1]]
        raise syntax_error(text, innermost.start, f"'{innermost.text}' is not closed")
    return partners


# -- positions and errors ------------------------------------------------------------------------


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Return the line and the column of an offset; both count from 1.

    >>> line_and_column("SELECT\\n  1", 9)
    (2, 3)
    """
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def syntax_error(text: str, position: int, problem: str, *, hint: str = "") -> SqlSyntaxError:
    """Return the error for a problem at an offset of a text.

    >>> syntax_error("SELECT\\n  *", 9, "expected a name, found '*'").problem
    "line 2, column 3: expected a name, found '*'"
    """
    line, column = line_and_column(text, position)
    return SqlSyntaxError(f"line {line}, column {column}: {problem}", position=position, hint=hint)


def describe_token(token: SqlToken) -> str:
    """Return a token as an error quotes it, shortened if it is long.

    >>> describe_token(SqlToken("word", "FROM", 7))
    "'FROM'"
    """
    text = token.text if len(token.text) <= _FOUND_MAX else token.text[: _FOUND_MAX - 1] + "…"
    return f"'{text}'" if "'" not in text else text


# -- values of literals and names ----------------------------------------------------------------

_SPARK_ESCAPE: Final = re.compile(
    r"\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<octal>[01][0-7]{2})|\\(?P<char>.)"
    r"""|(?P<quote>''|"")""",
    re.DOTALL,
)
_SPARK_CHARACTERS: Final = {
    "0": "\0",
    "b": "\b",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "Z": "\x1a",
    # The patterns of LIKE need the backslash.
    "%": "\\%",
    "_": "\\_",
}
_POSTGRES_ESCAPE: Final = re.compile(
    r"\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<octal>[0-7]{1,3})"
    r"|\\x(?P<hex>[0-9a-fA-F]{1,2})|\\(?P<char>.)|(?P<quote>'')",
    re.DOTALL,
)
_POSTGRES_CHARACTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def text_value(written: str, dialect: SqlDialect = SqlDialect.SPARK) -> str:
    """Return the value of a string as written, with its quotes.

    Raises `ValueError` for escapes that do not denote text.

    >>> text_value(r"'it\\'s'"), text_value("'it''s'"), text_value(r"r'\\d'")
    ("it's", "it's", '\\\\d')
    >>> text_value(r"'\\d'", SqlDialect.POSTGRES), text_value("$q$it's$q$", SqlDialect.POSTGRES)
    ('\\\\d', "it's")
    """
    if dialect is SqlDialect.POSTGRES:
        return _postgres_value(written)
    if written[0] in "rR":
        return written[2:-1]
    quote, inner = written[0], written[1:-1]
    # This covers nearly all strings.
    if "\\" not in inner and quote not in inner:
        return inner
    return _joined_surrogates(_SPARK_ESCAPE.sub(lambda found: _unescaped(found, quote), inner))


def _unescaped(found: re.Match[str], quote: str) -> str:
    if (doubled := found["quote"]) is not None:
        return quote if doubled[0] == quote else doubled
    if (char := found["char"]) is not None:
        return _SPARK_CHARACTERS.get(char, char)
    if (octal := found["octal"]) is not None:
        return chr(int(octal, 8))
    return _character(found["u"] or found["U"])


def _character(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise ValueError(f"there is no character with code {digits}")
    return chr(code)


def _joined_surrogates(value: str) -> str:
    r"""Return a text with each surrogate pair (``\ud83d\ude00``) replaced by the character it
    denotes. Raises `ValueError` for a surrogate without its other half."""
    # UnicodeDecodeError is a ValueError.
    return value.encode("utf-16", "surrogatepass").decode("utf-16")


def _postgres_value(written: str) -> str:
    if written[0] == "$":
        tag = written.index("$", 1) + 1
        return written[tag:-tag]
    if written[0] == "'":
        return written[1:-1].replace("''", "'")
    inner = written[2:-1]
    value, at = bytearray(), 0
    # Octal and hexadecimal escapes are bytes, and several of them may make up one character.
    for found in _POSTGRES_ESCAPE.finditer(inner):
        value += inner[at : found.start()].encode("utf-8", "surrogatepass")
        value += _postgres_bytes(found)
        at = found.end()
    value += inner[at:].encode("utf-8", "surrogatepass")
    return _joined_surrogates(value.decode("utf-8", "surrogatepass"))


def _postgres_bytes(found: re.Match[str]) -> bytes:
    if found["quote"] is not None:
        return b"'"
    if (char := found["char"]) is not None:
        return _POSTGRES_CHARACTERS.get(char, char).encode("utf-8", "surrogatepass")
    if (octal := found["octal"]) is not None:
        return bytes([int(octal, 8) & 0xFF])
    if (digits := found["hex"]) is not None:
        return bytes([int(digits, 16)])
    return _character(found["u"] or found["U"]).encode("utf-8", "surrogatepass")


def name_value(written: str) -> str:
    """Return the name that a quoted identifier denotes.

    >>> name_value("`a``b`"), name_value('"a""b"')
    ('a`b', 'a"b')
    """
    quote = written[0]
    return written[1:-1].replace(quote * 2, quote)


def quote_name(name: str) -> str:
    """Return a name as a quoted identifier of Spark's.

    >>> quote_name("a`b")
    '`a``b`'
    """
    return f"`{name.replace('`', '``')}`"


def quote_text(value: str) -> str:
    r"""Return a text as a string literal of Spark's.

    >>> print(quote_text("it's \\d"))
    'it\'s \\d'
    """
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
