"""Writes names and texts as PostgreSQL's SQL requires."""

from __future__ import annotations

import re
from typing import Final

_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
_WORDS: Final = """
all analyse analyze and any array as asc asymmetric authorization between bigint binary bit
boolean both case cast char character check coalesce collate collation column concurrently
constraint create cross current_catalog current_date current_role current_schema current_time
current_timestamp current_user dec decimal default deferrable desc distinct do else end except
exists extract false fetch float for foreign freeze from full grant greatest group grouping having
ilike in initially inner inout int integer intersect interval into is isnull join lateral leading
least left like limit localtime localtimestamp national natural nchar none normalize not notnull
null nullif numeric offset on only or order out outer overlaps overlay placing position precision
primary real references returning right row select session_user setof similar smallint some
substring symmetric table tablesample then time timestamp to trailing treat trim true union unique
user using values varchar variadic verbose when where window with xmlattributes xmlconcat
xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable
"""
_RESERVED: Final = frozenset(_WORDS.split())
"""Keywords that must be quoted to be used as names."""


def quote_name(name: str) -> str:
    """Return a name in double quotes.

    >>> print(quote_name('a"b'))
    "a""b"
    """
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def quote_identifier(name: str) -> str:
    """Return a name, quoted if necessary, like ``quote_ident``.

    >>> quote_identifier("orders"), quote_identifier("Orders"), quote_identifier("user")
    ('orders', '"Orders"', '"user"')
    """
    if _PLAIN.fullmatch(name) and name not in _RESERVED:
        return name
    return quote_name(name)


def quote_text(text: str) -> str:
    """Write a text as a standard SQL literal, in which a backslash is an ordinary character.

    >>> print(quote_text("it's"))
    'it''s'
    """
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def quote_literal(text: str) -> str:
    """Write a text as a literal like ``quote_literal``: it has the same meaning whatever the value
    of `standard_conforming_strings`.

    >>> print(quote_literal("a\\\\b"))
     E'a\\\\b'
    """
    quoted = quote_text(text)
    if "\\" not in quoted:
        return quoted
    # The blank separates the E from a word before it.
    return " E" + quoted.replace("\\", "\\\\")
