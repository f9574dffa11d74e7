"""What a text, a cast or a subscript means by the types around it, beside a real PostgreSQL."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import psycopg
import pytest

from suite_lanes import examples  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

Session = psycopg.Connection
BYTES = [b"", b"a", b"\\", b"a\\", b"\x00\xff", b"a\x01b", b"'", "é".encode()]
TEXTS = ["", "a", "\\", "a\\b", "\\xff", "é'"]


@pytest.fixture(scope="module")
def both(compared: tuple[Session, Session]) -> tuple[Session, Session]:
    """A session of each, with the same tables."""
    draw = random.Random(1)
    rows = [
        (number, data, TEXTS[number % len(TEXTS)], drawn_time(draw), [number, None, -number])
        for number, data in enumerate(BYTES)
    ]
    for each in compared:
        each.execute(
            "CREATE TABLE k (id INT PRIMARY KEY, b BYTEA, x TEXT, at TIMESTAMPTZ, a INT[])"
        )
        with each.cursor() as cursor:
            cursor.executemany("INSERT INTO k VALUES (%s, %s, %s, %s, %s)", rows)
    return compared


def drawn_time(draw: random.Random) -> dt.datetime:
    micros = draw.choice([0, 500_000, 120_000, 1, 100, 999_999])
    start = dt.datetime(1850, 1, 1, tzinfo=dt.UTC)
    return start + dt.timedelta(seconds=draw.randrange(8_000_000_000), microseconds=micros)


def answer(db: Session, text: str, given: tuple[Any, ...] = ()) -> Any:
    """Rows, or the class of the error."""
    try:
        cursor = db.execute(text.encode(), given or None)
    except psycopg.Error as error:
        return (error.sqlstate or "")[:2]
    return cursor.fetchall() if cursor.description else cursor.statusmessage


def escape(draw: random.Random, data: bytes) -> str:
    """A literal of bytes in one of the forms that PostgreSQL reads."""
    if draw.random() < 0.3:
        return f"'\\x{data.hex()}'"
    parts = []
    for byte in data:
        if byte == 92:
            parts.append(draw.choice(["\\\\", "\\134"]))
        elif 32 <= byte < 127 and byte != 39 and draw.random() < 0.6:
            parts.append(chr(byte))
        else:
            parts.append(f"\\{byte:03o}")
    text = "".join(parts)
    if draw.random() < 0.2:
        return "E'" + text.replace("\\", "\\\\") + "'"
    return f"'{text}'"


CONDITIONS = [
    "b = {0}",
    "{0} < b",
    "b IN ({0}, {1})",
    "k.b BETWEEN {0} AND {1}",
    "coalesce(b, {1}) <> {0}",
    "CASE WHEN b = {0} THEN x = {2} ELSE x <> {2} END",
    "NOT (b = {0}) AND x = {2}",
    "(SELECT q.b FROM k AS q WHERE q.id = 4) >= {0}",
    "EXISTS (SELECT 1 FROM k AS q WHERE q.b = {0} AND q.id = k.id)",
    "id IN (WITH w AS (SELECT id AS n, b AS c FROM k) SELECT n FROM w WHERE c = {0})",
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_text_beside_bytes_is_bytes(both: tuple[Session, Session], condition: str) -> None:
    draw = random.Random(condition)
    for _ in range(examples(8)):
        literals = [escape(draw, draw.choice(BYTES)) for _ in range(2)]
        quoted = "'" + draw.choice([*TEXTS[:4], "a\\134"]).replace("'", "''") + "'"
        text = f"SELECT id FROM k WHERE {condition.format(*literals, quoted)} ORDER BY id"
        found = [answer(db, text) for db in both]
        assert found[0] == found[1], text
        assert isinstance(found[0], list), text


def test_texts_beside_bytes_in_statements_that_write(both: tuple[Session, Session]) -> None:
    """A text column beside them keeps its letters."""
    statements = [
        r"UPDATE k SET x = 'a\134', b = coalesce(NULL, b) WHERE b = 'a\134'",
        r"UPDATE k AS q SET b = CASE WHEN q.b = '\000\377' THEN 'z\001' ELSE b END",
        r"DELETE FROM k WHERE b = '\134'",
        r"MERGE INTO k USING (SELECT id FROM k WHERE b = 'a\001b') AS s ON k.id = s.id"
        r" WHEN MATCHED AND k.b <> '\000' THEN UPDATE SET x = '\000'",
        r"INSERT INTO k (id, b) VALUES (0, 'a') ON CONFLICT (id) DO UPDATE SET x = '\b'"
        r" WHERE k.b <> '\134'",
    ]
    for text in statements:
        found = [answer(db, text) for db in both]
        if not text.startswith("MERGE"):  # the count alone stands in its tag there
            assert found[0] == found[1], text
        rows = [answer(db, "SELECT id, b, x FROM k ORDER BY id") for db in both]
        assert rows[0] == rows[1], text
    for db in both:
        db.execute(r"PREPARE p AS SELECT id, $1::int FROM k WHERE b = 'z\001' OR b = '\000\377'")
    prepared = [answer(db, "EXECUTE p (1)") for db in both]
    assert prepared[0] == prepared[1] == [(4, 1)]
    text = r"COPY (SELECT id, a[1] FROM k WHERE b = 'z\001' OR b = '\000\377') TO STDOUT"
    copied = []
    for db in both:
        with db.cursor() as cursor, cursor.copy(text.encode()) as rows_out:
            copied.append(b"".join(rows_out))
    assert copied[0] == copied[1] != b""
    bad = [answer(db, r"SELECT 1 FROM k WHERE b = 'a\9'") for db in both]
    assert bad == ["22", "22"]


ZONES = ["UTC", "Europe/Rome", "Asia/Kathmandu", "America/St_Johns", "-9:30"]
CLOCKS = [
    "at::text",
    "CAST(at AS text)",
    "k.at::varchar(22)",
    "CAST(max(at) OVER () AS varchar)",
    "(at)::text || '!'",
    "length(at::text)",
    "coalesce(at, now())::text",
    "(SELECT min(q.at) FROM k AS q)::text",
    "at::timestamp::text",
    "(CASE WHEN id > 3 THEN at END)::text",
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("zone", ZONES)
def test_a_timestamptz_as_text_has_its_offset(both: tuple[Session, Session], zone: str) -> None:
    for db in both:
        db.execute(f"SET TIME ZONE '{zone}'")
    try:
        text = f"SELECT {', '.join(CLOCKS)} FROM k ORDER BY id"
        found = [answer(db, text) for db in both]
        assert found[0] == found[1]
    finally:
        for db in both:
            db.execute("RESET TIME ZONE")


SUBSCRIPTS = [
    "a[1]",
    "k.a[3]::text",
    "a[id]",
    "a[id + 1 - 1]",
    "(ARRAY[id, 7])[2]",
    "(a || ARRAY[5])[4]",
    "a[0]",
    "a[-1]",
    "a[9]",
    "a[NULL::int]",
    "a[a[1]]",
    "sum(a[1]) OVER ()",
    "CASE WHEN a[1] = 2 THEN a[3] END",
]


def test_a_subscript_counts_from_one(both: tuple[Session, Session]) -> None:
    text = f"SELECT {', '.join(SUBSCRIPTS)} FROM k ORDER BY id"
    found = [answer(db, text) for db in both]
    assert found[0] == found[1]
    text = "SELECT id FROM k WHERE a[1] > %s AND a[%s] < 0 ORDER BY id"
    found = [answer(db, text, (1, 3)) for db in both]
    assert found[0] == found[1]
    assert answer(both[1], "SELECT a[1:2] FROM k") == "42", "refused, and not another slice"


SERIES = [
    "SELECT i FROM generate_series({0}, {1}) AS g(i)",
    "SELECT g FROM generate_series({0}, {1}, {2}) g",
    "SELECT generate_series FROM pg_catalog.generate_series({0}, {1})",
    "SELECT generate_series({0}, {1}, {2})",
    "SELECT id, generate_series(id, {1}) AS n FROM k",
    "SELECT id, n FROM k, generate_series({0}, k.id) AS n WHERE n <> {2}",
    'SELECT id, "N x" FROM k LEFT JOIN generate_series(1, id, {2}) AS "N x" ON "N x" > {0}',
    "SELECT id, n FROM k RIGHT JOIN generate_series({0}, {1}) AS q(n) ON n = id",
    "SELECT x, sum(n) FROM k CROSS JOIN LATERAL generate_series(id, {1}) AS n GROUP BY x",
    "SELECT (SELECT count(*) FROM generate_series({0}, NULL, {2})) AS n",
    "SELECT n::text FROM generate_series({0}, {1} + 1) AS n WHERE n IN (SELECT id FROM k)",
]
TIMES = [
    "SELECT d FROM generate_series('2024-02-27'::date, '2024-03-02'::date, '{0}') AS d",
    "SELECT generate_series(timestamp '2024-02-27 01:30', '2024-02-28'::timestamp, interval '{0}')",
    "SELECT d FROM generate_series(timestamptz '2024-03-01', timestamptz '2024-02-01', '{0}') d",
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("query", SERIES)
def test_a_series_has_the_rows_that_postgresql_gives(
    both: tuple[Session, Session], query: str
) -> None:
    draw = random.Random(query)
    for _ in range(examples(8)):
        low, high = draw.randint(-2, 4), draw.randint(-2, 6)
        text = query.format(low, high, draw.choice([1, 2, 3, -1, -2]))
        found = [answer(db, text) for db in both]
        assert isinstance(found[0], list), text
        assert sorted(map(repr, found[0])) == sorted(map(repr, found[1])), text


def test_a_series_of_times_is_the_same_or_refused(both: tuple[Session, Session]) -> None:
    draw = random.Random(3)
    for query in TIMES:
        span = f"{draw.randint(1, 40)} {draw.choice(['day', 'hours', 'minutes', 'week'])}"
        found = [answer(db, query.format(span)) for db in both]
        assert found[0] == found[1], (query, span)
        assert answer(both[1], query.format("1 month")) == "42", "its steps differ"
    both[1].execute("SET TIME ZONE 'Europe/Rome'")
    assert answer(both[1], TIMES[0].format("1 day")) == "42", "a day may have 23 hours"
    both[1].execute("RESET TIME ZONE")
    refused = "SELECT * FROM generate_series(1, 2) WITH ORDINALITY"
    assert answer(both[1], refused) == "42"
    for step in (0, "id - id"):
        found = [answer(db, f"SELECT generate_series(1, 2, {step}) FROM k") for db in both]
        assert found == ["22", "22"], step


TYPED_TIMES = ["{1} '{0}'", "'{0}'::{1}", "CAST('{0}' AS {1})", "('{0}')::{1}"]
DAYS = ["2024-06-01", "0044-3-15", "1899-12-31", "2024-02-30", "2024", "2024-13-01", "June 1 2024"]
CLOCKS = [
    "",
    " 12:00",
    " 23:59:59.9999996",
    "T00:00:60",
    " 24:00",
    " 7:5",
    " 25:00",
    " junk",
    " BC",
]
ZONES = ["", "+02", "Z", "-0330", "+05:45", " CET", " eet", " Europe/Rome", " Mars/Base", " PST"]


@pytest.mark.sampled
def test_texts_of_times_mean_the_same_or_are_refused(both: tuple[Session, Session]) -> None:
    draw = random.Random(8)
    outcomes = set()
    for zone in ("UTC", "Europe/Rome", "America/St_Johns"):
        for db in both:
            db.execute(f"SET TIME ZONE '{zone}'")
        for _ in range(examples(60)):
            day, clock, offset = map(draw.choice, (DAYS, CLOCKS, ZONES))
            # Here a day may have an offset: PostgreSQL wants a time before it.
            moment = f"{day}{clock}{offset if clock else ''}"
            kind = draw.choice(["date", "timestamp", "timestamptz"])
            typed = draw.choice(TYPED_TIMES).format(moment, kind)
            # As text, in which every day and zone can be read.
            found = [answer(db, f"SELECT ({typed})::text") for db in both]
            same = found[0] == found[1]
            assert same or found[1] in ("22", "42"), (zone, typed, found)
            outcomes.add((same, isinstance(found[0], list)))
    for db in both:
        db.execute("RESET TIME ZONE")
    assert {(True, True), (True, False)} <= outcomes


UNNESTED = [
    "SELECT * FROM unnest({0})",
    "SELECT x + 1, x FROM unnest({0}) AS x",
    "SELECT * FROM unnest({0}, {1}, ({2})::text[]) AS v (p, q, r)",
    "SELECT id, n, m FROM k, unnest(a, {1}) AS u (n, m)",
    "SELECT id, unnest(a) FROM k WHERE id = {3}",
    "SELECT id FROM k WHERE id IN (SELECT unnest(({1})::bigint[]))",
]


@pytest.mark.sampled
@pytest.mark.parametrize("query", UNNESTED)
def test_arrays_are_unnested_as_postgresql_does(both: tuple[Session, Session], query: str) -> None:
    draw = random.Random(query)
    for _ in range(examples(6)):
        numbers = [
            draw.choice(["NULL::int[]", f"'{{{','.join(some)}}}'::int[]"])
            for some in (draw.choices(["NULL", "0", "1", "-7"], k=draw.randint(0, 3)) for _ in "ab")
        ]
        texts = draw.choice(["'{}'", "'{a,NULL}'", 'E\'{"x\\\\\\\\",é,""}\''])
        text = query.format(*numbers, texts, draw.randint(0, 3))
        found = [answer(db, text) for db in both]
        assert isinstance(found[0], list), text
        assert sorted(map(repr, found[0])) == sorted(map(repr, found[1])), text


CHARS = [
    "{0}::char(3) = {1}",
    "{0} <> CAST({1} AS char(2))",
    "({0}::char(3)) < ({1}::char(2))",
    "{0}::char(2) = {1}::text",
    "{0}::char(3) IN ({1}, 'b ', {0})",
    "{0} BETWEEN {1}::char(1) AND 'b '",
    "CASE {0}::char(3) WHEN {1} THEN 'same ' ELSE 'other' END",
    "{0}::char(3) IS NOT DISTINCT FROM {1}",
    "length({0}::char(3)) + length(({1}::char(2))::text)",
    "{0}::char(3) || {1}::char(2) || '.'",
    "upper({0}::char(3)) = upper({1})",
    "octet_length({0}::char(3))",
    "{0}::char(3) LIKE {1}",
    "{0}::char(3)",
    "coalesce(NULL, {0}::char(2))",
    "count(*) FILTER (WHERE x::char(1) = {0}) OVER ()",
    "(SELECT max(q.x::char(2)) FROM k AS q WHERE q.x::char(2) > {0})",
    "x = {0}::char(3)",
]


def test_blanks_at_the_end_of_a_char_do_not_count(both: tuple[Session, Session]) -> None:
    draw = random.Random(5)
    for _ in range(examples(12)):
        texts = [f"'{draw.choice(['', 'a', 'ab', ' a'])}{' ' * draw.randint(0, 3)}'" for _ in "ab"]
        text = f"SELECT {', '.join(CHARS).format(*texts)} FROM k ORDER BY id"
        found = [answer(db, text) for db in both]
        assert isinstance(found[0], list), text
        assert found[0] == found[1], text
        given = draw.choice(["a", "a ", "b"])
        asked = f"SELECT id FROM k WHERE {texts[0]}::char(3) = %s ORDER BY id"
        bound = [answer(db, asked, (given,)) for db in both]
        assert bound[0] == bound[1], (texts[0], given)
    for db in both:
        db.execute("CREATE TABLE c (c CHAR(3))")
        db.execute("INSERT INTO c VALUES ('a')")
    assert answer(both[0], "SELECT * FROM c WHERE c = 'a'::char(5)") == [("a  ",)]
    assert answer(both[1], "SELECT * FROM c WHERE c = 'a'::char(5)") == "42", "refused by name"
