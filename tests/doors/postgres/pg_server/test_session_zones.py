"""The session's time zone beside a real PostgreSQL: what is read and written in it is the same."""

from __future__ import annotations

import datetime as dt
import random
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import psycopg
import pytest

from suite_lanes import examples  # type: ignore[import-not-found]

ZONES = ["Asia/Kathmandu", "'-5'", "'+03:30'", "INTERVAL '-09:30' HOUR TO MINUTE", "5.75"]
EXPRESSIONS = [
    "timestamptz '{0}'",
    "'{0}'::timestamptz",
    "CAST('{0}' AS timestamptz)",
    "timestamp '{2}'",
    "('{0}'::timestamptz)::date",
    "('{0}'::timestamptz)::timestamp",
    "extract(hour FROM '{0}'::timestamptz)::int",
    "date_trunc('day', '{2}'::timestamptz)",
    "('{0}'::timestamptz) = '{1}'::timestamptz",
    "('{0}'::timestamptz)::date + 1",
]


@pytest.fixture(scope="module")
def both(
    compared: tuple[psycopg.Connection, psycopg.Connection],
) -> tuple[psycopg.Connection, psycopg.Connection]:
    """A session of each, with the same empty table."""
    for each in compared:
        each.execute("CREATE TABLE z (id INT PRIMARY KEY, t TIMESTAMPTZ, n TIMESTAMP, d DATE)")
    return compared


def told(connection: psycopg.Connection, text: str, *values: object) -> Any:
    """What a statement answers, with texts of times as they come."""
    cursor = psycopg.RawCursor(connection)
    try:
        cursor.execute(text, values)
    except psycopg.Error as error:
        return error.sqlstate
    if cursor.pgresult is None or cursor.description is None:
        return cursor.statusmessage
    result = cursor.pgresult
    rows = range(result.ntuples)
    return [[result.get_value(row, at) for at in range(result.nfields)] for row in rows]


def same(both: tuple[psycopg.Connection, psycopg.Connection], text: str, *values: object) -> Any:
    """The answer of both, which is the same."""
    theirs, ours = (told(each, text, *values) for each in both)
    differ = (
        [
            f"{one!r}, PostgreSQL {other!r}"
            for rows in zip(ours, theirs, strict=False)
            for one, other in zip(*rows, strict=True)
            if one != other
        ]
        if isinstance(ours, list) and isinstance(theirs, list)
        else []
    )
    assert ours == theirs, (text, values, differ)
    return ours


def changes_of(name: str) -> list[dt.datetime]:
    """The times at which a zone's clocks are put, as they show them before."""
    zone, found = ZoneInfo(name), []
    days = [
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=number)
        for number in range(366 * 24)
    ]
    for before, after in pairwise(days):
        if before.astimezone(zone).utcoffset() != after.astimezone(zone).utcoffset():
            found.append(after.astimezone(zone).replace(tzinfo=None))
    return found


def drawn_moments(rng: random.Random, name: str) -> list[str]:
    """Texts of times: any, those around a change of the clocks, with an offset, without seconds."""
    start = dt.datetime.fromisoformat("1950-01-01")
    found = [start + dt.timedelta(minutes=rng.randrange(80 * 365 * 1440)) for _ in range(2)]
    for change in changes_of(name):
        found += [change + dt.timedelta(minutes=rng.randint(-90, 90)) for _ in range(3)]
    texts = [each.isoformat(" ", rng.choice(("minutes", "seconds"))) for each in found]
    offset = f"{rng.choice('+-')}{rng.randrange(15):02}:{rng.choice(('00', '15', '30', '45'))}"
    return [*texts, found[0].date().isoformat(), f"{texts[0]}{offset}", f"{texts[1]}Z"]


@pytest.mark.sampled
def test_times_are_read_and_written_as_postgresql_does(
    both: tuple[psycopg.Connection, psycopg.Connection],
) -> None:
    """Literals of all forms, texts of other types, and what is made of them."""
    rng = random.Random(58)
    names = sorted(set(available_timezones()) - {"Factory", "localtime", "ROC"})
    names = [each for each in names if not each.startswith("Etc/")]
    for name in ["Europe/Rome", "Australia/Lord_Howe", *rng.sample(names, examples(12))]:
        same(both, f"SET TIME ZONE '{name.lower()}'")
        assert same(both, "SHOW timezone") == [[name.encode()]]
        moments = drawn_moments(rng, name)
        asked = [
            rng.choice(EXPRESSIONS).format(rng.choice(moments), rng.choice(moments), moments[0])
            for _ in range(2 * len(EXPRESSIONS))
        ]
        same(both, f"SELECT {', '.join(asked)}")


@pytest.mark.parametrize("zone", ZONES)
def test_a_table_holds_the_same_times(
    both: tuple[psycopg.Connection, psycopg.Connection], zone: str
) -> None:
    """INSERT, UPDATE, COPY and parameters in text and binary read in the zone of the session."""
    same(both, "SET TIME ZONE 'UTC'")
    same(both, "DELETE FROM z")
    same(both, f"SET TIME ZONE {zone if zone[0] in chr(39) + 'I5' else repr(zone)}")
    noon = dt.datetime.fromisoformat("2024-07-01 12:00:30")
    same(both, "INSERT INTO z (id, t, n) VALUES (1, '2024-07-01 12:00', '2024-07-01 12:00')")
    same(both, "INSERT INTO z (id, t) VALUES (2, timestamptz '2024-07-01 23:59'), (3, NULL)")
    same(both, "INSERT INTO z (id, t) VALUES (4, $1)", "2024-07-01 00:10")
    same(both, "INSERT INTO z (id, t, n) VALUES (5, $1, $2)", noon, noon.replace(tzinfo=dt.UTC))
    same(both, "UPDATE z SET t = '2024-07-01 12:00', d = '2024-07-01 12:00Z' WHERE id = 3")
    for each in both:
        with each.cursor() as cursor, cursor.copy("COPY z (id, t) FROM STDIN") as copy:
            copy.write(b"6\t2024-07-01 12:00\n")
    merge = (
        "MERGE INTO z USING (SELECT 7 AS i, '2024-07-01 12:00'::timestamptz AS t) s ON z.id = s.i "
        "WHEN NOT MATCHED THEN INSERT (id, t) VALUES (s.i, s.t)"
    )
    assert told(both[0], merge) == told(both[1], merge) == "MERGE 1"
    same(both, "SELECT * FROM z ORDER BY id")
    same(both, "SELECT t::date, extract(hour FROM t)::int FROM z ORDER BY id")
    same(both, "SELECT id FROM z WHERE t = '2024-07-01 12:00' ORDER BY id")
    same(both, "SELECT id FROM z WHERE t = $1 ORDER BY id", "2024-07-01 12:00")
    same(both, "SET TIME ZONE 'UTC'")
    same(both, "SELECT * FROM z ORDER BY id")


def test_a_zone_changed_after_parse(
    both: tuple[psycopg.Connection, psycopg.Connection],
) -> None:
    """Literals keep the zone of Parse, parameters that of Bind; columns are read in the latest."""
    for each in both:
        wire = each.pgconn
        for statement in (b"SET TIME ZONE 'Asia/Tokyo'", b"DELETE FROM z"):
            wire.exec_(statement)
        text = b"INSERT INTO z (id, t) VALUES ($1, '2024-07-01 12:00'), ($2, $3)"
        wire.prepare(b"kept", text)
        wire.prepare(b"hour", b"SELECT extract(hour FROM timestamptz '2024-07-01 12:00')::int")
        wire.exec_(b"SET TIME ZONE 'America/New_York'")
        wire.exec_prepared(b"kept", [b"1", b"2", b"2024-07-01 12:00"])
    same(both, "SELECT id, t FROM z ORDER BY id")
    hours = [each.pgconn.exec_prepared(b"hour", []).get_value(0, 0) for each in both]
    assert hours == [b"23", b"23"]


@pytest.mark.parametrize("zone", ["Mars/Base", "", "Z", "Europe/Rome ", "PST", "169", "right/UTC"])
def test_what_is_no_zone_is_refused(
    both: tuple[psycopg.Connection, psycopg.Connection], zone: str
) -> None:
    assert same(both, f"SET TIME ZONE '{zone}'") == "22023"


def test_a_time_that_spark_would_read_otherwise_is_refused(
    both: tuple[psycopg.Connection, psycopg.Connection],
) -> None:
    """Spark takes the earlier of two times that clocks show; it reads when a query runs."""
    ours = both[1]
    told(ours, "SET TIME ZONE 'Europe/Rome'")
    assert told(ours, "SELECT id FROM z WHERE t = '2024-10-27 02:30'") == "0A000"
    assert told(ours, "SELECT id FROM z WHERE t = '2024-10-27 03:30'") == []
    assert told(ours, "CREATE VIEW zv AS SELECT id FROM z WHERE t = '2024-07-01'") == "0A000"
    told(ours, "PREPARE old AS SELECT id FROM z WHERE t = '2024-07-01'")
    told(ours, "SET TIME ZONE 'UTC'")
    assert told(ours, "EXECUTE old") == "0A000"


def test_a_view_keeps_the_zone(
    both: tuple[psycopg.Connection, psycopg.Connection],
) -> None:
    """A maintained view is computed in the zone of the session that made it."""
    ours = both[1]
    told(ours, "SET TIME ZONE 'Asia/Tokyo'")
    told(ours, "DELETE FROM z")
    told(ours, "INSERT INTO z (id, t) VALUES (1, '2024-07-01 01:00')")
    told(ours, "CREATE MATERIALIZED VIEW days AS SELECT id, t::date AS day FROM z")
    told(ours, "SET TIME ZONE 'UTC'")
    assert told(ours, "SELECT id, day FROM days") == [[b"1", b"2024-07-01"]]
    assert told(ours, "SELECT id, t::date FROM z") == [[b"1", b"2024-06-30"]]
