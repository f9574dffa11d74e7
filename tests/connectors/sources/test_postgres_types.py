"""Types: which of Spark's holds which of PostgreSQL's; copied and streamed values agree."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres_house import Driver, House  # type: ignore[import-not-found]

from actors.connectors.sources.postgres_numerics import SeenNumbers, fitting_decimal
from actors.connectors.sources.postgres_types import (
    ColumnType,
    TypeFacts,
    UnrepresentableValue,
    column_type,
    from_text,
)
from actors.model.pgwire.type_oids import BYTEA, NUMERIC
from actors.model.plan.schema import TableColumn, arrow_type
from actors.runtime.errors import InvalidUsage

UTC = dt.UTC
WIDE = Context(prec=200)


def scaled(text: str, scale: int) -> Decimal:
    """With all digits of its scale."""
    return Decimal(text).quantize(Decimal(1).scaleb(-scale), context=WIDE)


SETUP = """
CREATE TYPE mood AS ENUM ('sad', 'so so', 'happy');
CREATE DOMAIN cents AS numeric(10,2);
CREATE DOMAIN price AS cents CHECK (VALUE >= 0);
CREATE TYPE pair AS (a int, b text);
"""
# type, Spark's type, (literal, value) …
CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("boolean", "boolean", [("true", True), ("false", False)]),
    ("smallint", "smallint", [("-32768", -32768), ("32767", 32767)]),
    ("int", "int", [("-2147483648", -(2**31)), ("7", 7)]),
    ("bigint", "bigint", [("-9223372036854775808", -(2**63)), ("9223372036854775807", 2**63 - 1)]),
    ("oid", "bigint", [("4294967295", 2**32 - 1)]),
    (
        "real",
        "float",
        [("1.5", 1.5), ("'-Infinity'", -math.inf), ("3.4028235e38", 3.4028234663852886e38)],
    ),
    ("double precision", "double", [("0.1", 0.1), ("5e-324", 5e-324), ("'Infinity'", math.inf)]),
    (
        "numeric(12,2)",
        "decimal(12,2)",
        [("-1.5", Decimal("-1.50")), ("9999999999.99", Decimal("9999999999.99"))],
    ),
    ("numeric(38,0)", "decimal(38,0)", [("9" * 38, Decimal("9" * 38))]),
    ("numeric(2,-3)", "decimal(5,0)", [("12345", Decimal("12000"))]),
    ("numeric(3,5)", "decimal(5,5)", [("0.00123", Decimal("0.00123"))]),
    ("numeric(40,2)", "decimal(38,18)", [("1.5", scaled("1.5", 18)), ("1e17", scaled("1e17", 18))]),
    ("numeric", "decimal(38,8)", [("1.50", scaled("1.5", 8)), ("-1e21", scaled("-1e21", 8))]),
    (
        "numeric[]",
        "array<decimal(38,28)>",
        [("'{1,NULL}'", [scaled("1", 28), None]), ("'{1e-20}'", [scaled("1e-20", 28)])],
    ),
    ("price", "decimal(10,2)", [("3", Decimal("3.00"))]),
    ("text", "string", [("''", ""), (r"E'a\nb\t\\N\"é😀'", 'a\nb\t\\N"é😀')]),
    ("varchar(5)", "string", [("'abc'", "abc")]),
    ("char(5)", "string", [("'abc'", "abc  ")]),
    ('"char"', "string", [("'c'", "c")]),
    ("name", "string", [("'n'", "n")]),
    ("bytea", "binary", [("''", b""), (r"'\x00ff10'", b"\x00\xff\x10")]),
    ("date", "date", [("'0001-01-01'", dt.date(1, 1, 1)), ("'9999-12-31'", dt.date(9999, 12, 31))]),
    ("time", "string", [("'23:59:59.25'", "23:59:59.25")]),
    ("timetz", "string", [("'23:59:59+02'", "23:59:59+02")]),
    (
        "timestamp",
        "timestamp_ntz",
        [("'1999-12-31 23:59:59.999999'", dt.datetime.fromisoformat("1999-12-31T23:59:59.999999"))],
    ),
    (
        "timestamptz",
        "timestamp",
        [
            ("'2024-03-31 03:30+02'", dt.datetime(2024, 3, 31, 1, 30, tzinfo=UTC)),
            ("'0001-01-02 00:00+00'", dt.datetime(1, 1, 2, tzinfo=UTC)),
        ],
    ),
    ("interval", "string", [("'1 year 2 days 03:04:05'", "P1Y2DT3H4M5S")]),
    (
        "uuid",
        "string",
        [("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")],
    ),
    ("json", "string", [("'{\"a\" : 1}'", '{"a" : 1}')]),
    ("jsonb", "string", [("'{\"a\" : [1]}'", '{"a": [1]}')]),
    ("inet", "string", [("'10.0.0.1'", "10.0.0.1"), ("'10.0.0.0/8'", "10.0.0.0/8")]),
    ("mood", "string", [("'so so'", "so so")]),
    ("pair", "string", [("'(1,x)'", "(1,x)")]),
    ("int4range", "string", [("'[1,5)'", "[1,5)")]),
    ("box", "string", [("'(1,1),(0,0)'", "(1,1),(0,0)")]),
    (
        "int[]",
        "array<int>",
        [("'{}'", []), ("'{1,NULL,-3}'", [1, None, -3]), ("'[0:1]={5,6}'", [5, 6])],
    ),
    (
        "text[]",
        "array<string>",
        [(r"""'{a,"b c","d\"e\\",NULL,"NULL",""}'""", ["a", "b c", 'd"e\\', None, "NULL", ""])],
    ),
    ("numeric(6,2)[]", "array<decimal(6,2)>", [("'{1.5,2}'", [Decimal("1.50"), Decimal("2.00")])]),
    ("boolean[]", "array<boolean>", [("'{t,f}'", [True, False])]),
    ("bytea[]", "array<binary>", [(r"""'{"\\x01","\\xff"}'""", [b"\x01", b"\xff"])]),
    ("date[]", "array<date>", [("'{2024-02-29}'", [dt.date(2024, 2, 29)])]),
    (
        "timestamptz[]",
        "array<timestamp>",
        [("""'{"2024-01-01 00:00+01"}'""", [dt.datetime(2023, 12, 31, 23, tzinfo=UTC)])],
    ),
    ("mood[]", "array<string>", [("""'{happy,"so so"}'""", ["happy", "so so"])]),
    (
        "uuid[]",
        "array<string>",
        [("'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"])],
    ),
]


async def test_every_type_copied_and_streamed(db: House) -> None:
    """One table with a column of each; each row once by COPY and once by the stream, then all are
    deleted: what a delete tells is what was copied."""
    await db.run(SETUP)
    columns = ", ".join(f"c{at} {kind}" for at, (kind, _, _) in enumerate(CASES))
    await db.run(f"CREATE TABLE v (id int, {columns}); ALTER TABLE v REPLICA IDENTITY FULL")
    rows: list[tuple[Any, ...]] = [(0, *[None] * len(CASES))]
    insert = []
    for number in range(3):
        chosen = [values[number % len(values)] for _, _, values in CASES]
        rows.append((number + 1, *(value for _, value in chosen)))
        insert.append(f"({number + 1}, {', '.join(literal for literal, _ in chosen)})")
    load = f"INSERT INTO v VALUES {', '.join(insert)}; INSERT INTO v VALUES (0)"
    await db.run(load)
    source = db.source()
    driver = Driver(await source.describe({"v": ()}))
    schema = driver.exports["public.v"].schema
    assert [column.type for column in schema.columns[1:]] == [spark for _, spark, _ in CASES]
    driver.contents["public.v"] = contents = Tally()
    await driver.open(source)
    while driver.position is None:
        await driver.step(source)
    assert contents.counts() == {shown(row): 1 for row in rows}
    await db.run(f"{load}; INSERT INTO v (id) VALUES (-1)")
    while not contents[(-1, *[None] * len(CASES))]:
        await driver.step(source)
    last = (-1, *[None] * len(CASES))
    assert contents.counts() == {shown(row): 2 for row in rows} | {shown(last): 1}
    await db.run("DELETE FROM v WHERE id >= 0")
    while len(contents.counts()) > 1:
        await driver.step(source)


def shown(row: Any) -> str:
    """Two names of one time zone are one."""
    return repr(row).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc")


class Tally(dict[Any, int]):
    """Counts of rows whose values may be lists or NaN."""

    def __getitem__(self, row: Any) -> int:
        return self.get(shown(row), 0)

    def __setitem__(self, row: Any, count: int) -> None:
        super().__setitem__(shown(row), count)

    def __pos__(self) -> Tally:
        return self

    def counts(self) -> dict[str, int]:
        """Of rows that are there."""
        return {row: count for row, count in self.items() if count}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("kind", "literal", "words"),
    [
        ("date", "'infinity'", "in years 1 to 9999"),
        ("date", "'0044-03-15 BC'", "in years 1 to 9999"),
        ("timestamp", "'10000-01-01'", "in years 1 to 9999"),
        ("timestamptz", "'-infinity'", "in years 1 to 9999"),
        ("numeric(5,2)", "'NaN'", "does not fit"),
        ("int[]", "'{{1,2},{3,4}}'", "one-dimensional"),
        ("date[]", "'{2024-01-01,infinity}'", "in years 1 to 9999"),
    ],
)
async def test_what_cannot_be_held_ends_its_table_alone(
    db: House, kind: str, literal: str, words: str, streamed: bool
) -> None:
    await db.run(f"CREATE TABLE bad (id int PRIMARY KEY, odd {kind})")
    await db.run("CREATE TABLE good (id int PRIMARY KEY)")
    load = f"INSERT INTO bad VALUES (1, NULL), (2, {literal}); INSERT INTO good VALUES (1)"
    if not streamed:
        await db.run(load)
    source, driver = await db.opened({"bad": (), "good": ()})
    if streamed:
        await driver.step(source)
        await db.run(load)
    failed = await driver.until_failed(source, "public.bad")
    assert "column odd" in failed.error
    assert words in failed.error
    assert "drop this table from the source" in failed.hint
    await driver.until(source, "public.good", (1,))
    await db.run("INSERT INTO good VALUES (2); DELETE FROM bad")
    await driver.until(source, "public.good", (2,))


async def test_numeric_as_its_option_says(db: House) -> None:
    await db.run("CREATE TABLE n (id int PRIMARY KEY, v numeric); INSERT INTO n VALUES (1, 1.5)")
    source, driver = await db.filled({"n": ()}, numeric="decimal(38,4)")
    assert driver.contents["public.n"] == {(1, Decimal("1.5000")): 1}
    await db.run("INSERT INTO n VALUES (2, 1.00001)")
    failed = await driver.until_failed(source, "public.n")
    assert "column v: '1.00001': it does not fit decimal(38,4) exactly" in failed.error
    for numeric in ("decimal(39,4)", "decimal(9,10)", "double", "decimal(9, 2)"):
        with pytest.raises(InvalidUsage, match="numeric '"):
            db.source(numeric=numeric)
    for place, value in enumerate(("'NaN'", "1e40", "1e-40")):
        await db.run(f"UPDATE n SET v = {value} WHERE id = 1; DELETE FROM n WHERE id = 2")
        # The rows are looked at when the table is taken: no decimal has both ends.
        with pytest.raises(InvalidUsage, match="no decimal type holds the values of column v of"):
            await db.source(slot=f"s{place}").describe({"n": ()})
    (found,) = await db.source(numeric="string").describe({"n": ()})
    assert found.schema.columns[1].type == "string"


async def test_a_table_that_was_taken_keeps_the_type_of_its_numbers(db: House) -> None:
    """Whatever its rows and the option would choose now; what does not fit ends it."""
    await db.run("CREATE TABLE n (id int PRIMARY KEY, v numeric, a numeric[], d numeric(9,2))")
    source, driver = await db.filled({"n": ()}, numeric="string")
    kinds = [column.type for column in driver.exports["public.n"].schema.columns[1:]]
    assert kinds == ["string", "array<string>", "decimal(9,2)"]
    await source.close()
    driver.contents["public.n"] = Tally()
    await db.run("INSERT INTO n VALUES (1, 1.50, '{2.0}', 3); ALTER TABLE n ALTER d TYPE numeric")
    again = db.source()
    await driver.open(again)
    await driver.until(again, "public.n", (1, "1.50", ["2.0"], Decimal("3.00")))
    await db.run("INSERT INTO n VALUES (2, NULL, NULL, 0.125)")
    failed = await driver.until_failed(again, "public.n")
    assert "column d: '0.125': it does not fit decimal(9,2) exactly" in failed.error


async def test_a_further_column_of_numbers_has_the_type_that_is_named(db: House) -> None:
    await db.run("CREATE TABLE n (id int PRIMARY KEY, v numeric, a numeric[])")
    source = db.source()
    (export,) = await source.describe({"n": ("v", "a")})
    for name, kind in (("v", "decimal(20,4)"), ("v", "string"), ("a", "array<decimal(9,2)>")):
        (added,) = await source.describe_added(export, (TableColumn(name, kind.upper()),))
        assert (added.name, added.type) == (name, kind)
    for name, kind in (("v", "bigint"), ("a", "array<double>")):
        with pytest.raises(InvalidUsage, match=f"ADD COLUMN {name} .*decimal.38,18"):
            await source.describe_added(export, (TableColumn(name, kind),))


async def test_a_table_with_numbers_that_no_decimal_holds_is_left_out_of_all(db: House) -> None:
    await db.run("CREATE TABLE n (id int PRIMARY KEY, v numeric); INSERT INTO n VALUES (1, 'NaN')")
    await db.run("CREATE TABLE m (id int PRIMARY KEY, v numeric, w int[])")
    exports = {each.name: each for each in await db.source().describe(None)}
    assert "column v of public.n" in exports["public.n"].refused
    assert exports["public.m"].schema.columns[1].type == "decimal(38,18)", "of no rows"


@given(st.lists(st.decimals(allow_nan=True, allow_infinity=True), max_size=6), st.data())
def test_the_decimal_holds_what_was_seen(numbers: list[Decimal], data: st.DataObject) -> None:
    """Against Python's own arithmetic: what is chosen holds each number, or none would."""
    finite = [each for each in numbers if each.is_finite()]
    whole = max((max(each.adjusted() + 1, 0) for each in finite if each), default=0)
    after = max((max(-int(each.normalize().as_tuple().exponent), 0) for each in finite), default=0)
    ordered = sorted(str(each) for each in numbers if not each.is_finite())
    odd = ordered[0].replace("sNaN", "NaN") if ordered else "0"
    least, greatest = (odd, "0") if odd == "-Infinity" else ("0", odd.lstrip("-"))
    found = fitting_decimal(SeenNumbers(least, greatest, whole, after))
    if found is None:
        assert whole + after > 38 or odd != "0"
        return
    assert odd == "0"
    kind = arrow_type(found)
    texts = pa.array([f"{each:f}" for each in finite], pa.string())
    made = from_text(texts.cast(pa.large_binary()), ColumnType(NUMERIC, found))
    assert made.to_pylist() == finite
    assert made.type == kind
    # And where there is room, two digits more on both sides.
    assert min(kind.scale - after, 38 - kind.scale - whole) >= min(2, (38 - whole - after) // 2)


@given(st.integers(1, 38), st.data())
def test_decimals_are_exact_or_named(precision: int, data: st.DataObject) -> None:
    """Arrow alone would give another number for one that is far too large."""
    scale = data.draw(st.integers(0, precision))
    digits = st.text("0123456789", min_size=1, max_size=60)
    text = data.draw(st.builds("{}{}.{}".format, st.sampled_from(["", "-"]), digits, digits))
    number = Decimal(text)
    units = number.scaleb(scale, WIDE)
    fits = units.copy_abs() < 10**precision and not WIDE.remainder(units, Decimal(1))
    kind = ColumnType(NUMERIC, f"decimal({precision},{scale})")
    texts = pa.array([b"0", text.encode(), None], pa.large_binary())
    if fits:
        assert from_text(texts, kind).to_pylist() == [0, number, None]
        return
    with pytest.raises(UnrepresentableValue, match="exactly") as caught:
        from_text(texts, kind)
    assert text.startswith(caught.value.value)


def test_unknown_types_are_their_text() -> None:
    assert column_type(99_999, -1, {}, "string") == ColumnType(99_999, "string")
    facts = {5: TypeFacts(5, "d", "x", base=NUMERIC, base_modifier=-1)}
    assert column_type(5, -1, facts, "decimal(9,1)").spark == "decimal(9,1)"


@given(st.lists(st.none() | st.binary(max_size=10)))
def test_bytea_of_any_bytes(values: list[bytes | None]) -> None:
    texts = [None if each is None else b"\\x" + each.hex().encode() for each in values]
    made = from_text(pa.array(texts, pa.large_binary()), ColumnType(BYTEA, "binary"))
    made.validate(full=True)
    assert made.to_pylist() == values


@given(st.lists(st.none() | st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=4)))
def test_integer_arrays_at_once(values: list[list[int | None] | None]) -> None:
    texts = [
        None
        if each is None
        else "{" + ",".join("NULL" if part is None else str(part) for part in each) + "}"
        for each in values
    ]
    kind = ColumnType(1007, "array<int>")
    made = from_text(pa.array(texts, pa.string()).cast(pa.large_binary()), kind)
    made.validate(full=True)
    assert made.to_pylist() == values


def test_the_first_value_that_does_not_fit_is_named() -> None:
    texts = pa.array([b"1", None, b"x1", b"y"], pa.large_binary())
    with pytest.raises(UnrepresentableValue) as caught:
        from_text(texts, ColumnType(23, "int"))
    assert caught.value.value == "x1"
