"""Generated SQL for Spark that remembers which part of the user's statement each part came from.

Most statements become a query of another shape, in which the positions of Spark's errors mean
nothing to the user. A `MappedSql` maps them back to the statement. A position in generated text
around a single expression, such as its cast, maps to that expression. Positions in other generated
text map to nothing. Pure.

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
    """A text in Spark's dialect with a mapping to the user's statement.

    `parts` are nested texts with their own mapping, each with its offset in `text`. Everything else
    maps to `span`, a part of the statement (None: it was generated and maps to nothing): with
    `spark` character by character, without it to the start of the span.
    """

    text: str
    parts: tuple[tuple[int, MappedSql], ...] = ()
    span: TextSpan | None = None
    spark: SparkText | None = None

    @classmethod
    def of(cls, span: TextSpan, spark: SparkText) -> MappedSql:
        """Return the translation `spark` of one span of the statement."""
        return cls(spark.text, (), span, spark)

    def around(self, span: TextSpan) -> MappedSql:
        """Return the same text; what maps to nothing now maps to the start of `span`."""
        return MappedSql(self.text, ((0, self),), span)

    def before(self, text: str) -> MappedSql:
        """Append generated text to the translation of one span. It maps to the end of the span,
        because Spark reports an incomplete expression there."""
        assert self.span is not None
        return concat_sql(self, MappedSql(text, (), self.span.end_span()))

    def within(self, whole: str) -> MappedSql:
        """Return the mapping of `whole`, a text that contains this one followed only by closing
        parentheses. If it does not contain this one unchanged, nothing in it maps."""
        if whole == self.text:
            return self
        start = whole.rfind(self.text)
        return MappedSql(whole) if start < 0 else MappedSql(whole, ((start, self),))

    def place_of(self, offset: int) -> int | None:
        """Return the position in the statement of an offset in the text; None if it has none."""
        last = len(self.text)
        for start, part in self.parts:
            end = start + len(part.text)
            # The second case is the end of the text, where Spark reports an incomplete text.
            if start <= offset < end or offset == end == last:
                found = part.place_of(offset - start)
                if found is not None:
                    return found
        if self.span is None or offset > last:
            return None
        return self.span.place_of(0 if self.spark is None else self.spark.original_position(offset))


def concat_sql(*pieces: str | MappedSql) -> MappedSql:
    """Concatenate texts. Plain strings are generated text and map to nothing."""
    return join_sql("", pieces)


def join_sql(separator: str, pieces: Iterable[str | MappedSql]) -> MappedSql:
    """Concatenate texts with a separator between them."""
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
