"""Parses plain expressions into small trees: literals, columns, comparisons, tests, sums and
products.

Spark evaluates all expressions. This module parses those that the service evaluates or inspects
without Spark, in either dialect. Each node covers the tokens `[first, last)` of the text.

>>> lexed = lex_text("(a + 1) * 2 >= t.b AND c IS NOT NULL", SqlDialect.SPARK)
>>> both = read_expression(StatementReader(lexed))
>>> both.kind, [each.kind for each in both.operands]
('AND', ['>=', 'IS NOT NULL'])
>>> product, column = both.operands[0].operands
>>> product.kind, column.kind, column.names, lexed.part(product.first, product.last).text
('*', 'column', ('t', 'b'), '(a + 1) * 2')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from actors.engine.sql.reader import StatementReader
from actors.engine.sql.tokens import SqlDialect, lex_text
from actors.runtime.errors import SqlSyntaxError

NESTED_MAX: Final = 50
"""Maximum nesting of operators and brackets; a deeper expression is left to Spark."""
COMPARISONS: Final[Mapping[str, str]] = {
    **{"=": "=", "==": "=", "<>": "<>", "!=": "<>"},
    **{"<": "<", "<=": "<=", ">": ">", ">=": ">="},
}
"""Signs of comparisons, and the form that a node uses for each."""
_BINDING: Final = {"+": 1, "-": 1, "*": 2}
_NO_NAME_WORDS: Final = "ALL CASE DISTINCT EXISTS FALSE FROM NOT NULL SELECT TRUE"
_NO_NAMES: Final = frozenset(_NO_NAME_WORDS.split())
"""Words that are keywords in Spark where a name could come."""


class UnknownExpression(Exception):
    """The expression is not a plain one: only Spark can evaluate it."""


class ExpressionNode(msgspec.Struct, frozen=True):
    """One part of an expression.

    Its `kind` is ``number``, ``text`` or ``boolean`` (a literal, as written in `text`); ``column``
    (`names`: the unquoted name, after its qualifier if it has one); ``cast`` (of one operand, to
    the type `text`); or an operator over its operands: ``AND``, ``NOT``, one of `COMPARISONS`, ``IS
    NULL``, ``IS NOT NULL``, ``IN`` (the first operand is one of the others), ``BETWEEN``, ``+``,
    ``-``, ``*``. A minus may have a single operand.
    """

    first: int
    last: int
    kind: str
    operands: tuple[ExpressionNode, ...] = ()
    text: str = ""
    names: tuple[str, ...] = ()


def read_expression(reader: StatementReader, parameters: Sequence[str] = ()) -> ExpressionNode:
    """Parse an expression as far as it is a plain one. `parameters`: Spark literals for ``$1``,
    ``$2``, … Raises `UnknownExpression`."""
    try:
        return _ExpressionReader(reader, parameters).conjunction()
    except SqlSyntaxError as error:
        raise UnknownExpression(error.problem) from None


def read_whole_expression(
    reader: StatementReader, parameters: Sequence[str] = ()
) -> ExpressionNode:
    """Parse all remaining tokens as a plain expression. Raises as `read_expression`."""
    node = read_expression(reader, parameters)
    if not reader.ends():
        raise UnknownExpression("not a plain expression")
    return node


class _ExpressionReader:
    """A recursive-descent parser: each method reads operators that bind tighter than those of the
    one before it."""

    def __init__(self, reader: StatementReader, parameters: Sequence[str]) -> None:
        self._reader = reader
        self._parameters = parameters
        # Number of operators and brackets open at the current token.
        self._nested = 0

    def conjunction(self) -> ExpressionNode:
        """Parse tests that are joined by AND."""
        reader, first = self._reader, self._reader.place
        before = self._nested
        operands = [self._negation()]
        while reader.take("AND"):
            # Tests joined by AND add no depth.
            self._nested = before
            operands.append(self._negation())
        return self._operation(first, "AND", *operands) if len(operands) > 1 else operands[0]

    def _operation(self, first: int, kind: str, *operands: ExpressionNode) -> ExpressionNode:
        return ExpressionNode(first, self._reader.place, kind, operands)

    def _note_nesting(self) -> None:
        """Raise `UnknownExpression` for a tree that may be too deep for the code that walks it."""
        self._nested += 1
        if self._nested > NESTED_MAX:
            raise UnknownExpression("operators and brackets are nested too deeply")

    def _negation(self) -> ExpressionNode:
        first = self._reader.place
        if not self._reader.take("NOT"):
            return self._test()
        self._note_nesting()
        return self._operation(first, "NOT", self._negation())

    def _test(self) -> ExpressionNode:
        reader, first = self._reader, self._reader.place
        left = self._sum()
        word = reader.peek().word
        if word in COMPARISONS:
            reader.place += 1
            return self._operation(first, COMPARISONS[word], left, self._sum())
        if word not in ("IS", "BETWEEN", "IN"):
            return left
        reader.place += 1
        if word == "IS":
            sign = "IS NOT NULL" if reader.take("NOT") else "IS NULL"
            reader.need("NULL")
            return self._operation(first, sign, left)
        if word == "BETWEEN":
            low = self._sum()
            reader.need("AND")
            return self._operation(first, word, left, low, self._sum())
        reader.need("(")
        values = reader.sequence(self._sum)
        reader.need(")")
        return self._operation(first, word, left, *values)

    def _sum(self, least: int = 1) -> ExpressionNode:
        """Parse operands joined by signs whose precedence in `_BINDING` is at least `least`."""
        reader, first = self._reader, self._reader.place
        node = self._signed()
        while (binding := _BINDING.get(sign := reader.peek().text, 0)) >= least:
            self._note_nesting()
            reader.place += 1
            node = self._operation(first, sign, node, self._sum(binding + 1))
        return node

    def _signed(self) -> ExpressionNode:
        first = self._reader.place
        if not self._reader.take("-"):
            return self._operand()
        self._note_nesting()
        return self._operation(first, "-", self._signed())

    def _operand(self) -> ExpressionNode:
        reader, first, token = self._reader, self._reader.place, self._reader.peek()
        if token.word == "(":
            return self._bracketed()
        if token.kind == "parameter":
            return self._parameter()
        if reader.take("CAST", "("):
            operand = self._sum()
            reader.need("AS")
            kind = plain_name(reader).lower()
            reader.need(")")
            return ExpressionNode(first, reader.place, "cast", (operand,), kind)
        if token.kind in ("number", "text") or token.word in ("TRUE", "FALSE"):
            reader.place += 1
            # Spark concatenates adjacent strings.
            if token.kind == reader.peek().kind == "text":
                raise UnknownExpression("adjacent strings")
            kind = "boolean" if token.kind == "word" else token.kind
            return ExpressionNode(first, reader.place, kind, (), token.text)
        if token.word == "DATE" and reader.peek(1).kind == "text":
            reader.place += 1
            operand = self._operand()
            return ExpressionNode(first, reader.place, "cast", (operand,), "date")
        names = plain_names(reader)
        return ExpressionNode(first, reader.place, "column", names=names)

    def _bracketed(self) -> ExpressionNode:
        reader, first = self._reader, self._reader.place
        self._note_nesting()
        reader.need("(")
        node = self.conjunction()
        reader.need(")")
        # The operand's tokens include the brackets.
        return msgspec.structs.replace(node, first=first, last=reader.place)

    def _parameter(self) -> ExpressionNode:
        reader, first, text = self._reader, self._reader.place, self._reader.peek().text
        # A number with more digits than that is too large anyway.
        number = int(text[1:12]) if text[1:].isdecimal() else 0
        if not 1 <= number <= len(self._parameters):
            raise UnknownExpression("a parameter without a value")
        reader.place += 1
        literal = lex_text(self._parameters[number - 1], SqlDialect.SPARK)
        node = read_whole_expression(StatementReader(literal))
        return msgspec.structs.replace(node, first=first, last=reader.place)


def plain_names(reader: StatementReader) -> tuple[str, ...]:
    """Parse a name, or two names joined by a dot. Raises `SqlSyntaxError`."""
    first = plain_name(reader)
    return (first, plain_name(reader)) if reader.take(".") else (first,)


def plain_name(reader: StatementReader) -> str:
    """Parse a name that Spark also takes as one, and return it without quotes. Raises
    `SqlSyntaxError`."""
    token = reader.peek()
    if token.kind == "word" and token.text[0].isdigit():
        raise reader.unexpected("a name")
    return reader.name(refused=_NO_NAMES)
