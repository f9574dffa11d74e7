"""Texts for Spark that are put together, with the places of their parts in the statement.

Most statements become a query of another shape, in which Spark's positions mean nothing to the
user. So whoever puts such a query together keeps where each part of it was written. A position in
what stands around one expression alone, as its cast does, is that expression's. Any other position
in what nobody wrote has no place. Pure.

>>> from actors.engine.sql.dialects import to_spark
>>> from actors.engine.sql.grammar import parse_statement
>>> from actors.engine.sql.tokens import SqlDialect
>>> text = "DELETE FROM t WHERE nope::int4 > 0"
>>> condition = parse_statement(text, SqlDialect.POSTGRES).where
>>> spark = to_spark(condition.as_text())
>>> made = concat_sql("SELECT * FROM `t` WHERE ", MappedSql.of(condition, spark))
>>> made.text, made.place_of(made.text.index(">")), made.place_of(7)
('SELECT * FROM `t` WHERE nope::int > 0', 31, None)
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.engine.sql.dialects import SparkText
from actors.engine.sql.statements import TextSpan


class MappedSql(msgspec.Struct, frozen=True, gc=False):
    """A text in Spark's dialect, and the places of its parts in the statement.

    `parts`: texts with places of their own, each with its offset in `text`. `span`: the part of the
    statement that everything else stands for, None if nobody wrote it; by `spark` where each
    character of it was written, or all at the begin of the span.
    """

    text: str
    parts: tuple[tuple[int, MappedSql], ...] = ()
    span: TextSpan | None = None
    spark: SparkText | None = None

    @classmethod
    def of(cls, span: TextSpan, spark: SparkText) -> MappedSql:
        """Return a text that was made of one span."""
        return cls(spark.text, (), span, spark)

    def around(self, span: TextSpan) -> MappedSql:
        """Return the same text, with the begin of `span` as the place of what has no other."""
        return MappedSql(self.text, ((0, self),), span)

    def before(self, text: str) -> MappedSql:
        """Return this text of one span with another one behind it, whose place is the span's end:
        there Spark tells of an expression that ends too early."""
        assert self.span is not None
        return concat_sql(self, MappedSql(text, (), self.span.end_span()))

    def within(self, whole: str) -> MappedSql:
        """Return a text that has this one in it, with nothing but brackets behind it. Its parts
        have no places if it is not there as it was."""
        if whole == self.text:
            return self
        start = whole.rfind(self.text)
        return MappedSql(whole) if start < 0 else MappedSql(whole, ((start, self),))

    def place_of(self, offset: int) -> int | None:
        """Return the place in the statement of an offset in the text; None: it has none."""
        last = len(self.text)
        for start, part in self.parts:
            end = start + len(part.text)
            # Behind the last word, where a text ends too early.
            if start <= offset < end or offset == end == last:
                found = part.place_of(offset - start)
                if found is not None:
                    return found
        if self.span is None or offset > last:
            return None
        return self.span.place_of(0 if self.spark is None else self.spark.original_position(offset))


def concat_sql(*pieces: str | MappedSql) -> MappedSql:
    """Return these texts one behind the other; a plain one was written by nobody."""
    return join_sql("", pieces)


def join_sql(separator: str, pieces: Iterable[str | MappedSql]) -> MappedSql:
    """Return these texts with a separator between them."""
    texts: list[str] = []
    parts: list[tuple[int, MappedSql]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
        else:
            parts.append((at, piece))
            texts.append(piece.text)
        at += len(texts[-1]) + len(separator)
    return MappedSql(separator.join(texts), tuple(parts))
