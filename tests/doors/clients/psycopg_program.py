"""Print what psycopg 3 can do: ``psycopg_program.py HOST:PORT`` (see `client_probe`)."""

from __future__ import annotations

import sys
import threading
from typing import Any

import psycopg
from client_probe import ClientProbe, check
from psycopg import sql
from sample_rows import KINDS_ROWS, LENGTHS, MANY_ROWS, PREPARED, is_null_row, kinds_row, spent_rows


def main(address: str) -> None:
    probe = ClientProbe("psycopg", psycopg.__version__)
    dsn = f"postgresql://tester@{address}/penstock"

    def connected() -> psycopg.Connection[Any]:
        return psycopg.connect(dsn, autocommit=True)

    with probe.tries("connect"), connected() as db:
        check(db.info.server_version, 150000)
    for capability, tried in TRIED:
        with probe.tries(capability), connected() as db:
            tried(db)
    with probe.tries("cancel"), connected() as db:
        cancel(db)
        check(db.execute("SELECT id FROM orders WHERE id = 1").fetchall(), [(1,)])


def reflection(db: psycopg.Connection[Any]) -> None:
    found = db.execute(
        "SELECT column_name, data_type, is_nullable FROM information_schema.columns "
        "WHERE table_schema = 'public' AND table_name = 'orders' ORDER BY ordinal_position"
    ).fetchall()
    check([row[:2] for row in found], [("id", "bigint"), ("customer", "text"),
                                       ("amount", "numeric")])  # fmt: skip
    kinds = db.execute(
        "SELECT c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = 'public' AND c.relname = ANY(%s) ORDER BY 1",
        (["orders", "spent", "by_customer"],),
    ).fetchall()
    check(kinds, [("by_customer", "i"), ("orders", "r"), ("spent", "m")])
    key = db.execute(
        "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
        "AND a.attnum = ANY(i.indkey) WHERE i.indrelid = 'orders'::regclass AND i.indisprimary"
    ).fetchall()
    check(key, [("id",)])


def text(db: psycopg.Connection[Any]) -> None:
    found = db.execute("SELECT * FROM kinds WHERE id < 100 ORDER BY id").fetchall()
    check(found, [tuple(kinds_row(number).values()) for number in range(100)])


def binary(db: psycopg.Connection[Any]) -> None:
    found = db.cursor(binary=True).execute("SELECT * FROM kinds ORDER BY id").fetchall()
    check(found, [tuple(kinds_row(number).values()) for number in range(KINDS_ROWS)])


def nulls(db: psycopg.Connection[Any]) -> None:
    for form in (False, True):
        rows = db.cursor(binary=form).execute("SELECT * FROM kinds WHERE flag IS NULL").fetchall()
        check(len(rows), sum(map(is_null_row, range(KINDS_ROWS))))
        check({value for row in rows for value in row[1:]}, {None})
    db.execute("CREATE TABLE blanks (a int, b text, c timestamptz)")
    db.execute("INSERT INTO blanks VALUES (%s, %s, %s)", (None, None, None))
    check(db.execute("SELECT * FROM blanks").fetchall(), [(None, None, None)])


def parameters(db: psycopg.Connection[Any]) -> None:
    row = kinds_row(17)
    for name in ("flag", "small", "large", "twice", "amount", "word", "day"):
        text = sql.SQL("SELECT id FROM kinds WHERE {} = %s AND id >= %s AND id <= %s")
        found = db.execute(text.format(sql.Identifier(name)), (row[name], 17, 17)).fetchall()
        check(found, [(17,)])
    found = db.execute("SELECT id FROM orders WHERE id IN (%s, %s) ORDER BY id", (3, 5)).fetchall()
    check(found, [(3,), (5,)])
    db.execute("CREATE TABLE given (raw bytea, moment timestamptz, clock timestamp, list int[])")
    wanted = (row["raw"], row["moment"], row["clock"], row["list"])
    db.execute("INSERT INTO given VALUES (%s, %s, %s, %s)", wanted)
    check(db.execute("SELECT * FROM given").fetchall(), [wanted])


def prepared(db: psycopg.Connection[Any]) -> None:
    for number in range(PREPARED):
        row = db.execute("SELECT id FROM orders WHERE id = %s", (number,), prepare=True).fetchone()
        check(row, (number,))


def batch(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE batches (id bigint PRIMARY KEY, word text)")
    with db.cursor() as cursor:
        rows = [(number, f"w{number}") for number in range(500)]
        cursor.executemany("INSERT INTO batches VALUES (%s, %s)", rows)
    check(db.execute("SELECT count(*) FROM batches").fetchone(), (500,))


def transaction(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint)")
    with db.transaction():
        db.execute("INSERT INTO accounts VALUES (1, 1)")
        db.execute("INSERT INTO accounts VALUES (2, 2)")
    with db.transaction(force_rollback=True):
        db.execute("UPDATE accounts SET n = 10 WHERE id = 1")
    found = db.execute("SELECT * FROM accounts ORDER BY id").fetchall()
    check(found, [(1, 1), (2, 2)])


def savepoint(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE saved (id bigint PRIMARY KEY)")
    with db.transaction():
        db.execute("INSERT INTO saved VALUES (1)")
        try:
            with db.transaction():
                db.execute("INSERT INTO saved VALUES (2)")
                db.execute("INSERT INTO saved VALUES (1)")
        except psycopg.errors.UniqueViolation:
            db.execute("INSERT INTO saved VALUES (3)")
    check(db.execute("SELECT id FROM saved ORDER BY id").fetchall(), [(1,), (3,)])


def fetching(db: psycopg.Connection[Any]) -> None:
    with db.transaction(), db.cursor("some") as cursor:
        cursor.itersize = 500
        cursor.execute("SELECT id FROM many ORDER BY id")
        found = []
        for row in cursor:
            found.append(row[0])
            if len(found) == 5_000:
                break
        check(found, list(range(5_000)))


def copy_in(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE copied (id bigint, word text, at timestamptz)")
    moment = kinds_row(5)["moment"]
    with db.cursor() as cursor:
        with cursor.copy("COPY copied FROM STDIN") as copy:
            for number in range(2_000):
                copy.write_row((number, f"tab\t{number}", None))
        with cursor.copy("COPY copied FROM STDIN (FORMAT binary)") as copy:
            copy.set_types(["int8", "text", "timestamptz"])
            for number in range(2_000, 4_000):
                copy.write_row((number, "binary", moment))
        with cursor.copy("COPY copied FROM STDIN (FORMAT csv, HEADER)") as copy:
            copy.write('id,word,at\n4000,"a,b",\n')
    check(db.execute("SELECT count(*), count(at) FROM copied").fetchone(), (4_001, 2_000))
    found = db.execute("SELECT word FROM copied WHERE id = 7 OR id = 4000 ORDER BY id").fetchall()
    check(found, [("tab\t7",), ("a,b",)])


def copy_out(db: psycopg.Connection[Any]) -> None:
    with db.cursor() as cursor:
        with cursor.copy("COPY orders TO STDOUT") as copy:
            copy.set_types(["int8", "text", "numeric"])
            check(len(list(copy.rows())), 1_000)
        wanted = "COPY (SELECT id, word, day FROM kinds WHERE id < 9) TO STDOUT (FORMAT binary)"
        with cursor.copy(wanted) as copy:
            copy.set_types(["int8", "text", "date"])
            found = sorted(copy.rows())
    rows = [kinds_row(number) for number in range(9)]
    check(found, [(row["id"], row["word"], row["day"]) for row in rows])


def error(db: psycopg.Connection[Any]) -> None:
    try:
        db.execute("CREATE TABLE x (a int,)")
    except psycopg.errors.SyntaxError as caught:
        check((caught.sqlstate, caught.diag.statement_position), ("42601", "23"))
    try:
        db.execute("INSERT INTO orders VALUES (1, 'again', 0)")
    except psycopg.errors.UniqueViolation as caught:
        check(caught.sqlstate, "23505")
        return
    raise AssertionError("a present key was inserted")


def view(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE words (word text)")
    db.execute(f"CREATE MATERIALIZED VIEW lengths AS {LENGTHS}")
    check(db.execute("SELECT * FROM lengths").fetchall(), [])
    check(db.execute("SELECT * FROM spent ORDER BY customer").fetchall(), spent_rows())


def fresh(db: psycopg.Connection[Any]) -> None:
    for number in range(1, 6):
        db.execute("INSERT INTO words VALUES (%s)", ("one",))
        check(db.execute("SELECT n FROM lengths WHERE word = 'one'").fetchall(), [(number,)])


def subscribe(db: psycopg.Connection[Any]) -> None:
    with db.transaction():
        db.execute("DECLARE changes CURSOR FOR SUBSCRIBE lengths")
        first = db.execute("FETCH 10 changes").fetchall()
        check([row[1:] for row in first], [(1, "one", 5)])


def large(db: psycopg.Connection[Any]) -> None:
    for form in (False, True):
        rows = db.cursor(binary=form).execute("SELECT * FROM many").fetchall()
        check(sum(row[0] for row in rows), MANY_ROWS * (MANY_ROWS - 1) // 2)


def cancel(db: psycopg.Connection[Any]) -> None:
    begun = threading.Event()
    caught: list[BaseException] = []

    def follow() -> None:
        try:
            with db.cursor() as cursor, cursor.copy("COPY (SUBSCRIBE orders) TO STDOUT") as copy:
                for _ in copy:
                    begun.set()
        except psycopg.errors.QueryCanceled as error:
            caught.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=follow)
    thread.start()
    begun.wait()
    db.cancel_safe()
    thread.join()
    check(len(caught), 1)


TRIED = [
    (each.__name__, each)
    for each in (
        *(reflection, text, binary, nulls, parameters, prepared, batch, transaction, savepoint),
        *(fetching, copy_in, copy_out, error, view, fresh, subscribe, large),
    )
]

if __name__ == "__main__":
    main(sys.argv[1])
