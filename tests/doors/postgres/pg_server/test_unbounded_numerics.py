"""Columns of ``numeric`` without a precision beside a real PostgreSQL: what is written is what
PostgreSQL has, or an error that names the number."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from decimal import Context, Decimal

import psycopg
import pytest

from suite_lanes import examples  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

Session = psycopg.Connection
WIDE = Context(prec=200)
WAYS: dict[str, Callable[[Session, Decimal], object]] = {
    "literal": lambda db, n: db.execute(f"INSERT INTO n (id, n) VALUES (1, {n:f})"),
    "text": lambda db, n: db.execute(f"INSERT INTO n (id, n) VALUES (1, ' {n} ')"),
    "typed": lambda db, n: db.execute(f"INSERT INTO n (id, n) VALUES (1, '{n}'::numeric)"),
    "parameter": lambda db, n: db.execute("INSERT INTO n (id, n) VALUES (1, %t)", (n,)),
    "binary": lambda db, n: db.execute("INSERT INTO n (id, n) VALUES (1, %b)", (n,)),
    "array": lambda db, n: db.execute(f"INSERT INTO n (id, a) VALUES (1, '{{{n}}}')"),
    "computed": lambda db, n: db.execute(
        f"INSERT INTO n (id, n) VALUES (abs(-1), coalesce({n:f}, 0))"
    ),
    "computed array": lambda db, n: db.execute(
        f"INSERT INTO n (id, a) VALUES (abs(-1), ARRAY[coalesce({n:f}, 0)])"
    ),
    "query": lambda db, n: db.execute(f"INSERT INTO n (id, n) SELECT 1, {n:f}"),
    "double": lambda db, n: db.execute(f"INSERT INTO n (id, n) SELECT 1, '{n}'::float8"),
    "computed double": lambda db, n: db.execute(
        f"INSERT INTO n (id, n) VALUES (1, abs('{n}'::double precision))"
    ),
    "update": lambda db, n: db.execute(f"UPDATE n SET n = {n:f} WHERE id = 0"),
    "computed update": lambda db, n: db.execute(
        f"UPDATE n SET n = coalesce({n:f}, 0) WHERE id = 0"
    ),
    "selected update": lambda db, n: db.execute(
        f"UPDATE n SET n = (SELECT max({n:f}) FROM n) WHERE id = 0"
    ),
    "upsert": lambda db, n: db.execute(
        f"INSERT INTO n (id, n) VALUES (0, {n:f}) ON CONFLICT (id) DO UPDATE SET n = excluded.n"
    ),
    "merge": lambda db, n: db.execute(
        f"MERGE INTO n USING (SELECT * FROM (VALUES (0, {n:f})) AS v (id, v)) AS s ON n.id = s.id"
        " WHEN MATCHED THEN UPDATE SET n = s.v"
    ),
    "computed merge": lambda db, n: db.execute(
        f"MERGE INTO n USING (SELECT * FROM (VALUES (0, {n:f})) AS v (id, v)) AS s ON n.id = s.id"
        " WHEN MATCHED THEN UPDATE SET n = coalesce(s.v, 0)"
    ),
    "copy": lambda db, n: copy(db, n, "text"),
    "copy of csv": lambda db, n: copy(db, n, "csv"),
    "copy of binary": lambda db, n: copy(db, n, "binary"),
}


def copy(db: Session, number: Decimal, form: str) -> None:
    with db.cursor() as cursor, cursor.copy(f"COPY n (id, n) FROM STDIN (FORMAT {form})") as rows:
        if form == "binary":
            rows.set_types(["int4", "numeric"])
            rows.write_row((1, number))
        else:
            rows.write(f"1{',' if form == 'csv' else chr(9)}{number}\n")


@pytest.fixture(scope="module")
def both(compared: tuple[Session, Session]) -> tuple[Session, Session]:
    """A session of each, with the same table."""
    for each in compared:
        each.execute("CREATE TABLE n (id INT PRIMARY KEY, n NUMERIC, a NUMERIC[])")
    return compared


def drawn(draw: random.Random) -> Decimal:
    """A number about the edges of what fits: 20 digits before the point, 18 after it."""
    whole, places = draw.choice([(0, 18), (1, 19), (3, 25), (20, 18), (21, 0), (22, 17), (0, 40)])
    digits = "".join(draw.choices("0123456789", k=whole + places))
    number = Decimal(f"{draw.choice(['', '-'])}{digits or '0'}E-{places}")
    # Zeros at the end are no digits that are lost; an exponent is another form of the same. More
    # than 38 written digits are an error, whatever they are (docs/reference/sql.md).
    zeros = "0" * min(3, max(0, 38 - whole - places))
    return draw.choice([number, number.normalize(WIDE), number * 10, Decimal(f"{number:f}{zeros}")])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("way", list(WAYS))
def test_a_number_is_kept_or_an_error(both: tuple[Session, Session], way: str) -> None:
    theirs, ours = both
    draw = random.Random(way)
    outcomes = set()
    for number in [
        Decimal("1E-19"),
        Decimal("-12.50"),
        *(drawn(draw) for _ in range(examples(16))),
    ]:
        found = [outcome(db, way, number) for db in (theirs, ours)]
        assert isinstance(found[0], Decimal), "PostgreSQL takes all of them"
        kept = found[0]
        fits = abs(kept) < 10**20 and kept == kept.quantize(Decimal("1E-18"), context=WIDE)
        assert found[1] == (kept if fits else "22003"), (number, found)
        outcomes.add(fits)
    assert outcomes == {True, False}


def outcome(db: Session, way: str, number: Decimal) -> Decimal | str | None:
    """What stands in the table then, or the error's SQLSTATE."""
    db.execute("DELETE FROM n")
    db.execute("INSERT INTO n (id, n) VALUES (0, 0.5)")
    try:
        WAYS[way](db, number)
    except psycopg.Error as error:
        assert db.execute("SELECT id, n FROM n").fetchall() == [(0, Decimal("0.5"))]
        return error.sqlstate
    rows = db.execute("SELECT n, a FROM n ORDER BY id DESC LIMIT 1").fetchall()
    found: Decimal | None = rows[0][1][0] if rows[0][0] is None else rows[0][0]
    return found


def test_the_error_names_the_number_and_the_type(both: tuple[Session, Session]) -> None:
    for way in ("literal", "computed", "query", "copy", "merge", "computed array", "double"):
        with pytest.raises(psycopg.errors.NumericValueOutOfRange) as caught:
            WAYS[way](both[1], Decimal("-1E-20"))
        assert re.search(r"-(1(\.0+)?E-20|0\.0{19}1)", str(caught.value)), (way, caught.value)
        assert "does not fit decimal(38,18) exactly" in str(caught.value), way


def test_a_precision_rounds_as_postgresql_does(both: tuple[Session, Session]) -> None:
    """Only what was declared without one is exact."""
    for db in both:
        db.execute("CREATE TABLE p (n NUMERIC(10, 3))")
        db.execute("INSERT INTO p VALUES (0.0005), (-0.0005), (1e-9), (abs(2.0015)), ('1.00049')")
    rows = [db.execute("SELECT n FROM p ORDER BY n").fetchall() for db in both]
    assert rows[0] == rows[1]


FLOATING = {
    "values": "INSERT INTO q (id, n) VALUES (1, {0} + 0)",
    "rows": "INSERT INTO q (id, n) VALUES (1, 2.5), (2, {0})",
    "query": "INSERT INTO q (id, n) SELECT 1, {0}",
    "column": "INSERT INTO q (id, n) SELECT id + 1, f FROM q",
    "array": "INSERT INTO q (id, a) VALUES (1, ARRAY[{0}, 2.5])",
    "selected array": "INSERT INTO q (id, a) SELECT 1, ARRAY[NULL, {0}]",
    "update": "UPDATE q SET n = {0}",
    "update by column": "UPDATE q SET n = f",
    "upsert": "INSERT INTO q (id) VALUES (0) ON CONFLICT (id) DO UPDATE SET n = {0}",
    "merge": "MERGE INTO q USING (SELECT 0 AS id, {0} AS f) AS s ON q.id = s.id"
    " WHEN MATCHED THEN UPDATE SET n = s.f",
}


@pytest.mark.second
def test_no_decimal_loses_what_a_double_holds(both: tuple[Session, Session]) -> None:
    """Spark's cast makes NULL of NaN and of infinities."""
    for db in both:
        db.execute(
            "CREATE TABLE q (id INT PRIMARY KEY, n NUMERIC(9, 3), a NUMERIC(9, 3)[], f FLOAT8)"
        )
    draw = random.Random(6)
    for way, text in FLOATING.items():
        for number in ("NaN", draw.choice(["Infinity", "-inf"]), draw.choice(["-0.0015", "7e5"])):
            typed = f"'{number}'::{draw.choice(['float8', 'real'])}"
            found = [floated(db, text.format(typed), number) for db in both]
            # A decimal of PostgreSQL's can be NaN.
            assert found[1] == ("22003" if number == "NaN" else found[0]), (way, typed, found)
            assert found[0] != [], way
    refused = "ALTER TABLE q ALTER COLUMN n SET DEFAULT 'NaN'::float8"
    with pytest.raises(psycopg.errors.SyntaxErrorOrAccessRuleViolation, match="cannot hold NaN"):
        both[1].execute(refused)


def floated(db: Session, text: str, number: str) -> object:
    """What stands in the table after a statement, or the error's SQLSTATE."""
    db.execute("DELETE FROM q")
    db.execute(f"INSERT INTO q (id, f) VALUES (0, '{number}')")
    try:
        db.execute(text.encode())
    except psycopg.Error as error:
        return error.sqlstate
    return db.execute("SELECT id, n, a FROM q ORDER BY id").fetchall()
