"""Texts of numbers as decimals: exactly, rounded as PostgreSQL rounds, or an error."""

from __future__ import annotations

import contextlib
import random
from decimal import ROUND_HALF_UP, Context, Decimal

import pyarrow as pa

from actors.model.pgwire.column_parsing import ColumnError, parse_text_column
from actors.model.pgwire.decimal_digits import cast_decimals
from actors.model.plan.schema import UNBOUNDED_NUMERIC, arrow_type


def drawn_number(draw: random.Random) -> str:
    """A text of a number: long, large or small, with an exponent, with zeros."""
    count = draw.choice([1, 5, 20, 37, 39, 45, 80])
    digits = "".join(draw.choices("0123456789", k=count))
    point = draw.randint(0, count)
    text = f"{draw.choice(['', '-'])}{digits[:point] or '0'}.{digits[point:] or '0'}"
    return text + draw.choice(["", "", "0" * 30, f"e{draw.choice([-240, -30, -5, 3, 20, 200])}"])


def parsed(text: str, kind: pa.DataType) -> Decimal | str:
    """The number that COPY makes of a text, or the error's SQLSTATE."""
    try:
        found = parse_text_column(pa.array([text.encode()], pa.large_binary()), kind, "UTC")
    except ColumnError as error:
        return error.error.sqlstate
    number: Decimal = found[0].as_py()
    return number


def test_decimals_are_exact_or_rounded_or_errors() -> None:
    """Arrow alone makes other numbers of those that are far too large, or small."""
    draw = random.Random(11)
    wide = Context(prec=400)
    cast = 0
    for _ in range(2_000):
        precision = draw.choice([1, 9, 18, 20, 38, 38])
        scale = draw.choice([draw.randint(0, precision), min(18, precision)])
        kind = pa.decimal128(precision, scale)
        unbounded = kind == arrow_type(UNBOUNDED_NUMERIC)
        text = drawn_number(draw)
        number = Decimal(text)
        with contextlib.suppress(pa.ArrowInvalid):
            assert cast_decimals(pa.array([text, None]), kind).to_pylist() == [number, None]
            cast += 1
        unit = Decimal(1).scaleb(-kind.scale)
        rounded = number.quantize(unit, rounding=ROUND_HALF_UP, context=wide)
        fits = abs(rounded) < 10 ** (precision - kind.scale)
        fits = fits and not (unbounded and rounded != number)
        assert parsed(text, kind) == (rounded if fits else "22003"), (text, kind)
    assert cast > 50
