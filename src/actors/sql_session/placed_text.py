"""Texts for Spark that are put together, with the places of their parts in the statement.

Most statements become a query of another shape, in which Spark's positions mean nothing to the
user. So whoever puts such a query together keeps where each part of it was written. A position in
what stands around one expression alone, as its cast does, is that expression's. Any other position
in what nobody wrote has no place. Pure.

>>> from actors.sql.dialects import to_spark
>>> condition = TextSpan(22, 29, "nope::int4 > 0")
>>> made = placed("SELECT * FROM `t` WHERE ", PlacedText.of(condition, to_spark(condition.text)))
>>> made.text, made.place_of(made.text.index(">")), made.place_of(7)
('SELECT * FROM `t` WHERE nope::int > 0', 33, None)
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.sql.dialects import SparkText
from actors.sql.statements import TextSpan


class PlacedPart(msgspec.Struct, frozen=True):
    """A part `[start, end)` of a text: what was made of a span of the statement. `spark` None: what
    stands around it, whose place is where the span begins."""

    start: int
    end: int
    span: TextSpan
    spark: SparkText | None = None

    def place_of(self, offset: int) -> int | None:
        """Return the place in the statement of an offset in the whole text; None: it has none."""
        if self.spark is None:
            return self.span.place_of(0)
        return self.span.place_of(self.spark.original_position(offset - self.start))


class PlacedText(msgspec.Struct, frozen=True):
    """A text in Spark's dialect, and the places of its parts in the statement."""

    text: str
    parts: tuple[PlacedPart, ...] = ()

    @classmethod
    def of(cls, span: TextSpan, spark: SparkText) -> PlacedText:
        """Return a text that was made of one span."""
        return cls(spark.text, (PlacedPart(0, len(spark.text), span, spark),))

    def around(self, span: TextSpan) -> PlacedText:
        """Return the same text, with the place of `span` for what has no other."""
        return PlacedText(self.text, (*self.parts, PlacedPart(0, len(self.text), span)))

    def before(self, text: str) -> PlacedText:
        """Return this text of one span with another one behind it, whose place is the span's end:
        there Spark tells of an expression that ends too early."""
        span = self.parts[0].span
        # A text that was put together has no end of its own.
        end = TextSpan(span.end, span.end, "", None if span.pieces is None else ())
        return placed(self, PlacedText(text, (PlacedPart(0, len(text), end),)))

    def within(self, whole: str) -> PlacedText:
        """Return a text that has this one in it, with nothing but brackets behind it. Its parts
        have no places if it is not there as it was."""
        if whole == self.text:
            return self
        start = whole.rfind(self.text)
        if start < 0:
            return PlacedText(whole)
        return placed(whole[:start], self, whole[start + len(self.text) :])

    def place_of(self, offset: int) -> int | None:
        """Return the place in the statement of an offset in the text; None: it has none."""
        last = len(self.text)
        covering = [
            each
            for each in self.parts
            # Behind the last word, where a text ends too early.
            if each.start <= offset < each.end or offset == each.end == last
        ]
        if not covering:
            return None
        # Parts are within each other: the innermost one is exact.
        inner = min(covering, key=lambda each: (each.end - each.start, each.spark is None))
        return inner.place_of(offset)


def placed(*pieces: str | PlacedText) -> PlacedText:
    """Return these texts one behind the other; a plain one was written by nobody."""
    return joined("", pieces)


def joined(separator: str, pieces: Iterable[str | PlacedText]) -> PlacedText:
    """Return these texts with a separator between them."""
    texts: list[str] = []
    parts: list[PlacedPart] = []
    at = 0
    for piece in pieces:
        if texts:
            at += len(separator)
        text = piece if isinstance(piece, str) else piece.text
        if not isinstance(piece, str):
            parts += [
                PlacedPart(each.start + at, each.end + at, each.span, each.spark)
                for each in piece.parts
            ]
        texts.append(text)
        at += len(text)
    return PlacedText(separator.join(texts), tuple(parts))
