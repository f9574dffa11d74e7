"""Parses catalog queries with sqlglot's PostgreSQL dialect, but interprets less.

sqlglot normalizes calls, types and subscripts across its dialects. Here a call keeps its name and
arguments (`exp.Anonymous`), a type keeps its name (`exp.DataType`, whose `kind` is the catalog's
name, such as ``int4`` or ``oid[]``), and a subscript its number. Functions of the SQL standard that
are written without parentheses, or with keywords between the arguments, become calls:

    SELECT current_user, trim(leading 'x' from relname)
    SELECT current_user(), ltrim(relname, 'x')
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, ClassVar, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.parsers.postgres import PostgresParser
from sqlglot.tokens import TokenType

from actors.doors.postgres.pg_catalog.catalog_errors import (
    NOT_SUPPORTED,
    SYNTAX_ERROR,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.pg_types import TYPE_SYNONYMS

_TWO_WORDS = {
    "double": "precision",
    "character": "varying",
    "char": "varying",
    "bit": "varying",
    "national": "character",
}


class CatalogQueryParser(PostgresParser):  # type: ignore[misc]
    """Parses a query without interpreting functions and types."""

    # Without entries, every call becomes `exp.Anonymous`, except ARRAY[…] and special syntax.
    FUNCTIONS: ClassVar[dict[str, Any]] = {}
    FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
        name: PostgresParser.FUNCTION_PARSERS[name]
        for name in ("CAST", "EXTRACT", "POSITION", "SUBSTRING", "TRIM")
    }
    NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
        name: PostgresParser.NO_PAREN_FUNCTION_PARSERS[name] for name in ("ANY", "CASE", "VARIADIC")
    }
    NO_PAREN_FUNCTIONS: ClassVar[dict[TokenType, Any]] = {
        token: partial(exp.Anonymous, this=token.name.lower())
        for token in PostgresParser.NO_PAREN_FUNCTIONS
    }

    # Allow `select` as the name of a result column after AS.
    RESERVED_TOKENS: ClassVar[set[TokenType]] = PostgresParser.RESERVED_TOKENS - {TokenType.SELECT}

    def _parse_position(self, haystack_first: bool = False) -> Any:
        found = super()._parse_position(haystack_first)
        return _plain_call("position", found.this, found.args["substr"])

    def _parse_substring(self) -> Any:
        found = super()._parse_substring()
        return _plain_call(
            "substring", found.this, found.args.get("start"), found.args.get("length")
        )

    def _parse_trim(self) -> Any:
        found = super()._parse_trim()
        names = {"LEADING": "ltrim", "TRAILING": "rtrim"}
        name = names.get(found.args.get("position"), "btrim")
        return _plain_call(name, found.this, found.expression)

    def _parse_unnest(self, with_alias: bool = True) -> None:
        """Parse ``unnest(…)`` in FROM like any other function."""

    def _parse_types(
        self,
        check_func: bool = False,
        schema: bool = False,
        allow_identifiers: bool = True,
        with_collation: bool = False,
    ) -> Any:
        """Parse a type. With `check_func`, a string literal must follow."""
        start = self._index
        name = self._parse_type_name(allow_identifiers)
        if name is None or (check_func and self._curr.token_type != TokenType.STRING):
            self._retreat(start)
            return None
        if with_collation and self._match(TokenType.COLLATE):
            self._parse_column()
        return exp.DataType(this=exp.DataType.Type.USERDEFINED, kind=name)

    def _parse_type_name(self, allow_identifiers: bool) -> str | None:
        """Parse a type's name. Return its catalog name, or None if there is no type here."""
        token = self._curr
        known = token.token_type in self.TYPE_TOKENS
        identifier = token.token_type in (TokenType.VAR, TokenType.IDENTIFIER)
        if not known and not (allow_identifiers and identifier):
            return None
        quoted = token.token_type == TokenType.IDENTIFIER
        name: str = token.text if quoted else token.text.lower()
        self._advance()
        while self._match(TokenType.DOT):
            # Drop the schema, because type names are unique here.
            quoted = self._curr.token_type == TokenType.IDENTIFIER
            name = self._curr.text if quoted else self._curr.text.lower()
            self._advance()
        if not quoted and _TWO_WORDS.get(name) == self._curr.text.lower():
            name = f"{name} {self._curr.text.lower()}"
            self._advance()
        # Unquoted, it is CHARACTER.
        if quoted and name == "char":
            name = '"char"'
        modifier = self._parse_type_modifier()
        if name in ("timestamp", "time"):
            name += self._parse_zone()
        name = TYPE_SYNONYMS.get(name, name)
        return name + modifier + self._parse_dimensions()

    def _parse_type_modifier(self) -> str:
        start = self._index
        if not self._match(TokenType.L_PAREN):
            return ""
        numbers = []
        while self._curr.token_type == TokenType.NUMBER:
            numbers.append(self._curr.text)
            self._advance()
            self._match(TokenType.COMMA)
        if not numbers or not self._match(TokenType.R_PAREN):
            self._retreat(start)
            return ""
        return f"({','.join(numbers)})"

    def _parse_zone(self) -> str:
        for words in (("with", "time", "zone"), ("without", "time", "zone")):
            if self._match_text_seq(*(word.upper() for word in words)):
                return " " + " ".join(words)
        return ""

    def _parse_dimensions(self) -> str:
        dimensions = ""
        if self._match(TokenType.ARRAY):
            dimensions = "[]"
        while True:
            start = self._index
            if not self._match(TokenType.L_BRACKET):
                return dimensions
            # PostgreSQL accepts a length here and ignores it.
            self._match(TokenType.NUMBER)
            if not self._match(TokenType.R_BRACKET):
                # This is a subscript of the cast value.
                self._retreat(start)
                return dimensions
            dimensions += "[]"


def _plain_call(name: str, *arguments: Any) -> Any:
    return exp.Anonymous(this=name, expressions=[each for each in arguments if each is not None])


class CatalogQueryDialect(Postgres):  # type: ignore[misc]
    """PostgreSQL's dialect, parsed by `CatalogQueryParser`."""

    # Keep subscripts as written: those of vectors start at 0, those of arrays at 1.
    INDEX_OFFSET = 0
    Parser = CatalogQueryParser

    class Tokenizer(Postgres.Tokenizer):  # type: ignore[misc]
        """PostgreSQL's tokens, but ``$1,$2`` are two parameters instead of the start of a
        dollar-quoted string."""

        HEREDOC_STRINGS: ClassVar[list[str]] = []
        SINGLE_TOKENS: ClassVar[dict[str, TokenType]] = {
            **Postgres.Tokenizer.SINGLE_TOKENS,
            "$": TokenType.PARAMETER,
        }


class DollarQuoteDialect(CatalogQueryDialect):
    """The same dialect with dollar-quoted strings, in which sqlglot misreads ``$1,$2``."""

    Tokenizer = Postgres.Tokenizer


_DOLLAR_QUOTE: Final = re.compile(r"\$(?:[A-Za-z_]\w*)?\$")


def parse_query(text: str) -> Any:
    """Parse one statement into a syntax tree. Raises `CatalogQueryError`."""
    dialect = DollarQuoteDialect() if _DOLLAR_QUOTE.search(text) else CatalogQueryDialect()
    try:
        trees = [tree for tree in dialect.parse(text) if tree is not None]
    except ParseError as error:
        first = error.errors[0] if error.errors else {}
        where = f" at line {first['line']}, column {first['col']}" if first.get("line") else ""
        reason = first.get("description") or str(error)
        raise CatalogQueryError(f"syntax error{where}: {reason}", SYNTAX_ERROR) from None
    except (SqlglotError, RecursionError, AttributeError, LookupError, TypeError) as error:
        # sqlglot itself raises the last ones for texts that are not SQL.
        raise CatalogQueryError(f"syntax error: {error}", SYNTAX_ERROR) from None
    if len(trees) != 1:
        raise CatalogQueryError("a catalog query must be a single statement", SYNTAX_ERROR)
    return trees[0]


def identifier_name(node: Any) -> str:
    """Return the name of an identifier, in lower case unless it was quoted."""
    if isinstance(node, exp.Identifier):
        return str(node.this) if node.args.get("quoted") else str(node.this).lower()
    if isinstance(node, exp.ColumnDef | exp.Column):
        return identifier_name(node.this)
    return str(node if isinstance(node, str) else node.name).lower()


def called_function(node: Any) -> Any:
    """Return a call without its schema; None if the node is not a plain call."""
    while isinstance(node, exp.Dot):
        node = node.expression
    return node if isinstance(node, exp.Anonymous) else None


def called_name(node: Any) -> str:
    """Return the name of the function that a node calls; "" if it is not a plain call."""
    call = called_function(node)
    return "" if call is None else identifier_name(call.this)


def refuse_unread(node: Any, *read: str) -> None:
    """Raise `CatalogQueryError` if a node has parts other than those in `read`, which the compiler
    would ignore."""
    for part, value in node.args.items():
        if value and part not in read:
            raise CatalogQueryError(
                f"{part.strip('_')} of {type(node).__name__.lower()} is not supported in a catalog"
                f" query: {node.sql('postgres')}",
                NOT_SUPPORTED,
            )
