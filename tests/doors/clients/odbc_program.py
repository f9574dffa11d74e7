"""Print what psqlODBC can do, through pyodbc: ``odbc_program.py DRIVER HOST:PORT``."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pyodbc
from client_probe import ClientProbe, check
from sample_rows import KINDS_ROWS, LENGTHS, MANY_ROWS, PREPARED, is_null_row, kinds_row, spent_rows


def main(driver: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    settings = (
        f"DRIVER={driver};SERVER={host};PORT={port};DATABASE=penstock;UID=tester;"
        "BoolsAsChar=0;ByteaAsLongVarBinary=1;MaxVarcharSize=8190;"
    )

    def connected(more: str = "", *, autocommit: bool = True) -> Any:
        return pyodbc.connect(settings + more, autocommit=autocommit)

    db = connected()
    probe = ClientProbe("psqlODBC", db.getinfo(pyodbc.SQL_DRIVER_VER).lstrip("0"))
    with probe.tries("connect"):
        check(db.getinfo(pyodbc.SQL_DBMS_VER).split(".")[0], "15")
        check(db.getinfo(pyodbc.SQL_DBMS_NAME), "PostgreSQL")
    db.close()
    probe.lacks("binary", "it requests only text")
    probe.lacks("copy_in", "ODBC has no COPY")
    probe.lacks("copy_out", "ODBC has no COPY")
    for tried in TRIED:
        with probe.tries(tried.__name__):
            db = connected()
            try:
                tried(db)
            finally:
                db.close()
    with probe.tries("fetching"):
        db = connected("UseDeclareFetch=1;Fetch=500;", autocommit=False)
        rows = db.execute("SELECT id FROM many ORDER BY id").fetchmany(5_000)
        check([row[0] for row in rows], list(range(5_000)))
        db.close()


def reflection(db: Any) -> None:
    cursor = db.cursor()
    tables = {row.table_name for row in cursor.tables(schema="public")}
    check({"kinds", "orders", "many"} <= tables, True)
    columns = [row.column_name for row in cursor.columns(table="orders", schema="public")]
    check(columns, ["id", "customer", "amount"])
    check([row.column_name for row in cursor.primaryKeys("orders", schema="public")], ["id"])
    names = {row.index_name for row in cursor.statistics("orders", schema="public")}
    check("by_customer" in names, True)
    check("spent" in tables, True)


def text(db: Any) -> None:
    rows = db.execute("SELECT * FROM kinds ORDER BY id").fetchall()
    check(len(rows), KINDS_ROWS)
    for number in (0, 17, 9_998):
        names = [column[0] for column in rows[0].cursor_description]
        found = dict(zip(names, rows[number], strict=True))
        wanted = kinds_row(number)
        for name in ("id", "flag", "tiny", "small", "whole", "large", "single", "twice", "amount"):
            check(found[name], wanted[name])
        for name in ("word", "short", "fixed", "raw", "day", "clock"):
            check(found[name], wanted[name])
        check(found["moment"], wanted["moment"].replace(tzinfo=None))
        check(found["list"], f"{{{number},NULL,{number + 1}}}")
        check(found["pairs"], f'{{"k":{number}}}')


def nulls(db: Any) -> None:
    rows = db.execute("SELECT * FROM kinds WHERE flag IS NULL").fetchall()
    check(len(rows), sum(map(is_null_row, range(KINDS_ROWS))))
    check({value for row in rows for value in tuple(row)[1:]}, {None})
    db.execute("CREATE TABLE blanks (a int, b text, c timestamptz)")
    db.execute("INSERT INTO blanks VALUES (?, ?, ?)", (None, None, None))
    check([tuple(row) for row in db.execute("SELECT * FROM blanks").fetchall()], [(None,) * 3])


def parameters(db: Any) -> None:
    row = kinds_row(17)
    for name in ("flag", "small", "large", "twice", "amount", "word", "day"):
        wanted = f"SELECT id FROM kinds WHERE {name} = ? AND id = ?"
        check([found[0] for found in db.execute(wanted, (row[name], 17)).fetchall()], [17])
    db.execute("CREATE TABLE given (raw bytea, clock timestamp)")
    db.execute("INSERT INTO given VALUES (?, ?)", (row["raw"], row["clock"]))
    found = db.execute("SELECT * FROM given").fetchall()
    check([tuple(each) for each in found], [(row["raw"], row["clock"])])


def prepared(db: Any) -> None:
    cursor = db.cursor()
    for number in range(PREPARED):
        cursor.execute("SELECT id FROM orders WHERE id = ?", (number,))
        check(cursor.fetchval(), number)


def batch(db: Any) -> None:
    db.execute("CREATE TABLE batches (id bigint PRIMARY KEY, word text)")
    cursor = db.cursor()
    rows = [(number, f"w{number}") for number in range(50)]
    cursor.executemany("INSERT INTO batches VALUES (?, ?)", rows)
    cursor.fast_executemany = True
    rows = [(number, f"w{number}") for number in range(50, 100)]
    cursor.executemany("INSERT INTO batches VALUES (?, ?)", rows)
    check(db.execute("SELECT count(*) FROM batches").fetchval(), 100)


def transaction(db: Any) -> None:
    db.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint)")
    db.autocommit = False
    db.execute("INSERT INTO accounts VALUES (1, 1)")
    db.commit()
    db.execute("UPDATE accounts SET n = 10 WHERE id = 1")
    db.rollback()
    check(db.execute("SELECT n FROM accounts").fetchval(), 1)
    db.rollback()


def savepoint(db: Any) -> None:
    db.execute("CREATE TABLE saved (id bigint PRIMARY KEY)")
    db.autocommit = False
    db.execute("INSERT INTO saved VALUES (1)")
    db.execute("SAVEPOINT here")
    db.execute("INSERT INTO saved VALUES (2)")
    db.execute("ROLLBACK TO SAVEPOINT here")
    # psqlODBC itself goes back to before a statement that failed.
    try:
        db.execute("INSERT INTO saved VALUES (1)")
    except pyodbc.Error:
        db.execute("INSERT INTO saved VALUES (3)")
    db.commit()
    found = db.execute("SELECT id FROM saved ORDER BY id").fetchall()
    check([row[0] for row in found], [1, 3])
    db.rollback()


def cancel(db: Any) -> None:
    cursor = db.cursor()
    caught: list[BaseException] = []

    def follow() -> None:
        try:
            cursor.execute("SUBSCRIBE orders")
        except pyodbc.Error as error:
            caught.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    while thread.is_alive():
        cursor.cancel()
        thread.join(0.2)
    check(len(caught), 1)
    check(db.execute("SELECT id FROM orders WHERE id = 1").fetchval(), 1)


def error(db: Any) -> None:
    try:
        db.execute("CREATE TABLE x (a int,)")
    except pyodbc.Error as caught:
        check(caught.args[0], "42601")
    try:
        db.execute("INSERT INTO orders VALUES (1, 'again', 0)")
    except pyodbc.IntegrityError as caught:
        check(caught.args[0], "23505")
        return
    raise AssertionError("a present key was inserted")


def view(db: Any) -> None:
    db.execute("CREATE TABLE words (word text)")
    db.execute(f"CREATE MATERIALIZED VIEW lengths AS {LENGTHS}")
    found = db.execute("SELECT * FROM spent ORDER BY customer").fetchall()
    check([tuple(row) for row in found], spent_rows())


def fresh(db: Any) -> None:
    for number in range(1, 6):
        db.execute("INSERT INTO words VALUES (?)", ("one",))
        check(db.execute("SELECT n FROM lengths WHERE word = 'one'").fetchval(), number)


def subscribe(db: Any) -> None:
    db.autocommit = False
    db.execute("DECLARE changes CURSOR FOR SUBSCRIBE lengths")
    found = db.execute("FETCH 10 changes").fetchall()
    check([tuple(row)[1:] for row in found], [(1, "one", 5)])
    db.rollback()


def large(db: Any) -> None:
    found = db.execute("SELECT * FROM many").fetchall()
    check(sum(row[0] for row in found), MANY_ROWS * (MANY_ROWS - 1) // 2)


TRIED = (
    *(reflection, text, nulls, parameters, prepared, batch, transaction, savepoint, cancel),
    *(error, view, fresh, subscribe, large),
)

if __name__ == "__main__":
    main(*sys.argv[1:])
