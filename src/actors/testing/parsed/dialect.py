"""Spark SQL as the parser reads it: sqlglot's dialect, except that functions which it would rewrite
stay verbatim.

sqlglot has classes of its own for functions, and writes each back under one name, without arguments
that it believes to be defaults. That changes some functions: ``array_size`` becomes ``size``, which
is -1 for NULL without ANSI mode; ``to_date`` loses the format ``yyyy-MM-dd``. The functions below
are therefore hidden from it: their text stays as written, and Spark says whether they are scalar
(see `build.probe_texts`).
"""

from __future__ import annotations

from typing import Any, Final

from sqlglot import exp
from sqlglot.dialects.spark import Spark

_VERBATIM_WORDS: Final = """
ARRAY_SIZE TO_DATE TO_TIMESTAMP DATE_SUB DATE_FORMAT FROM_UNIXTIME UNIX_DATE MONTHS_BETWEEN NEXT_DAY
FROM_UTC_TIMESTAMP TO_UTC_TIMESTAMP CONVERT_TIMEZONE DAYNAME MONTHNAME
SPLIT_PART SPACE SOUNDEX LEVENSHTEIN FORMAT_STRING TO_CHAR TO_NUMBER BIT_LENGTH
HEX UNHEX BASE64 UNBASE64 ENCODE SHA SHA1 PARSE_URL GET_JSON_OBJECT TO_JSON FROM_JSON
LN LOG LOG2 LOG10 CBRT SIN COS TAN ASIN ACOS ATAN ATAN2 SINH COSH TANH DEGREES RADIANS RINT
FACTORIAL WIDTH_BUCKET ISNAN NANVL BIT_COUNT GETBIT SHIFTLEFT SHIFTRIGHT NEGATIVE TYPEOF EQUAL_NULL
ARRAY_DISTINCT ARRAY_JOIN ARRAY_SORT SORT_ARRAY MAP MAP_KEYS MAP_FROM_ENTRIES
MAP_FROM_ARRAYS SEQUENCE NAMED_STRUCT
TRY_ADD TRY_SUBTRACT TRY_MULTIPLY ARRAY_COMPACT ARRAY_EXCEPT ARRAY_INTERSECT ARRAY_MAX ARRAY_MIN
ARRAY_POSITION ARRAY_REMOVE ARRAY_APPEND ARRAY_PREPEND ARRAY_INSERT SLICE MAP_CONTAINS_KEY
SUBSTRING_INDEX REGEXP_COUNT REGEXP_EXTRACT_ALL REGEXP_INSTR REGEXP_SUBSTR STR_TO_MAP ELT
DATE_TRUNC TRUNC INSTR
MAKE_TIMESTAMP MAKE_INTERVAL DATE_FROM_UNIX_DATE UNIX_MICROS UNIX_MILLIS UNIX_SECONDS
"""
VERBATIM: Final = frozenset(_VERBATIM_WORDS.split())


_BITWISE: Final = (exp.BitwiseAnd, exp.BitwiseXor, exp.BitwiseOr)
"""Operators in the order in which they bind."""


def _join(operator: Any, operands: list[Any]) -> None:
    """Replace the last two operands by the operator over them."""
    right, left = operands.pop(), operands.pop()
    operator.set("this", left)
    operator.set("expression", right)
    operands.append(operator)


class _Parser(Spark.Parser):  # type: ignore[misc]
    FUNCTIONS: Final = {
        name: builder for name, builder in Spark.Parser.FUNCTIONS.items() if name not in VERBATIM
    }

    def _parse_bitwise(self) -> Any:
        """Parse with Spark's precedence: ``&`` before ``^``, then ``|``; in sqlglot all bind alike.

        >>> VerbatimSpark().parse("SELECT a | b & c")[0].expressions[0].expression.key
        'bitwiseand'
        """
        made = super()._parse_bitwise()
        operators: list[Any] = []
        while isinstance(made, _BITWISE):
            operators.append(made)
            made = made.this
        operands = [made]
        waiting: list[Any] = []
        for operator in reversed(operators):
            while waiting and _BITWISE.index(type(waiting[-1])) <= _BITWISE.index(type(operator)):
                _join(waiting.pop(), operands)
            operands.append(operator.expression)
            waiting.append(operator)
        while waiting:
            _join(waiting.pop(), operands)
        return operands[0]


class _Tokenizer(Spark.Tokenizer):  # type: ignore[misc]
    # A doubled quote is one quote, not the end of a literal and the start of the next.
    STRING_ESCAPES: Final = ["'", '"', "\\"]


class _Generator(Spark.Generator):  # type: ignore[misc]
    # A table expression stays nested: further out it could hide a table of the same name.
    EXPRESSIONS_WITHOUT_NESTED_CTES: Final[frozenset[Any]] = frozenset()


class VerbatimSpark(Spark):  # type: ignore[misc]
    """Reads and writes the text of views."""

    Tokenizer = _Tokenizer
    Parser = _Parser
    Generator = _Generator
