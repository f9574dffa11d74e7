"""Spark SQL as it is read here: sqlglot's, but functions that it would rewrite pass verbatim.

sqlglot knows functions by classes of its own and writes them back under one name each, without
what it takes for a default. That changes some of them: ``array_size`` becomes ``size``, which is
-1 for NULL without ANSI mode; ``to_date`` loses a format of ``yyyy-MM-dd``. The functions below
are therefore none that it knows: their text stays as written, and Spark says (see
`build.probe_texts`) whether they are scalar.
"""

from __future__ import annotations

from typing import Final

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
MAKE_TIMESTAMP MAKE_INTERVAL DATE_FROM_UNIX_DATE UNIX_MICROS UNIX_MILLIS UNIX_SECONDS
"""
VERBATIM: Final = frozenset(_VERBATIM_WORDS.split())


class _Parser(Spark.Parser):  # type: ignore[misc]
    FUNCTIONS: Final = {
        name: builder for name, builder in Spark.Parser.FUNCTIONS.items() if name not in VERBATIM
    }


class _Tokenizer(Spark.Tokenizer):  # type: ignore[misc]
    # A doubled quote is one quote, not the end of a literal and the begin of its neighbour.
    STRING_ESCAPES: Final = ["'", '"', "\\"]


class VerbatimSpark(Spark):  # type: ignore[misc]
    """Reads and writes the text of views."""

    Tokenizer = _Tokenizer
    Parser = _Parser
