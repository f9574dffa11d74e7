"""Print what ADBC's PostgreSQL driver can do: ``adbc_program.py HOST:PORT``."""

from __future__ import annotations

import sys
import threading
from typing import Any

import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from client_probe import ClientProbe, check
from sample_rows import KINDS_ROWS, LENGTHS, MANY_ROWS, PREPARED, is_null_row, kinds_row, spent_rows

PLAIN = (
    *("id", "flag", "tiny", "small", "whole", "large", "single", "twice", "word", "short"),
    *("fixed", "raw", "day", "moment", "clock", "list", "words"),
)
"""Columns whose values Arrow represents directly; this driver returns the others as strings."""


def main(address: str) -> None:
    probe = ClientProbe("ADBC", adbc_driver_postgresql.__version__)
    uri = f"postgresql://tester@{address}/penstock"
    probe.lacks("text", "it requests only binary")
    probe.lacks("savepoint", "its API has none; the statement SAVEPOINT works")
    with probe.tries("connect"), dbapi.connect(uri) as db:
        check(str(db.adbc_get_info()["vendor_version"])[:2], "15")
    for tried in TRIED:
        with probe.tries(tried.__name__), dbapi.connect(uri, autocommit=True) as db:
            tried(db)
    with probe.tries("transaction"), dbapi.connect(uri) as db:
        transaction(db)


def read(db: Any, text: str, given: Any = None) -> pa.Table:
    with db.cursor() as cursor:
        cursor.execute(text, given)
        return cursor.fetch_arrow_table()


def run(db: Any, text: str, given: Any = None) -> None:
    with db.cursor() as cursor:
        cursor.execute(text, given)


def reflection(db: Any) -> None:
    check({"TABLE", "table", "materialized_view"} & set(db.adbc_get_table_types()) != set(), True)
    found = db.adbc_get_objects(depth="all", db_schema_filter="public").read_all().to_pylist()
    tables = {
        table["table_name"]: table
        for catalog in found
        for schema in catalog["catalog_db_schemas"] or ()
        for table in schema["db_schema_tables"] or ()
    }
    columns = [column["column_name"] for column in tables["orders"]["table_columns"]]
    check(columns, ["id", "customer", "amount"])
    constraints = tables["orders"]["table_constraints"]
    check([each["constraint_column_names"] for each in constraints], [["id"]])
    check("spent" in tables, True)
    check(db.adbc_get_table_schema("orders").names, ["id", "customer", "amount"])


def binary(db: Any) -> None:
    found = read(db, "SELECT * FROM kinds ORDER BY id")
    check(found.num_rows, KINDS_ROWS)
    wanted = [kinds_row(number) for number in range(KINDS_ROWS)]
    for name in PLAIN:
        check(found[name].to_pylist(), [row[name] for row in wanted])
    check(str(found["amount"].to_pylist()[17]), "17.125")
    check(str(found["pairs"].to_pylist()[17]).replace(" ", ""), '{"k":17}')


def nulls(db: Any) -> None:
    found = read(db, "SELECT * FROM kinds WHERE flag IS NULL")
    check(found.num_rows, sum(map(is_null_row, range(KINDS_ROWS))))
    check({found[name].null_count for name in found.column_names[1:]}, {found.num_rows})
    run(db, "CREATE TABLE blanks (a int, b text, c timestamptz)")
    run(db, "INSERT INTO blanks VALUES ($1, $2, $3)", (None, None, None))
    check(read(db, "SELECT * FROM blanks").to_pylist(), [dict.fromkeys("abc")])


def parameters(db: Any) -> None:
    row = kinds_row(17)
    for name in ("flag", "small", "large", "twice", "word", "day"):
        found = read(db, f"SELECT id FROM kinds WHERE {name} = $1 AND id = $2", (row[name], 17))
        check(found["id"].to_pylist(), [17])
    run(db, "CREATE TABLE given (raw bytea, moment timestamptz, clock timestamp)")
    wanted = (row["raw"], row["moment"], row["clock"])
    run(db, "INSERT INTO given VALUES ($1, $2, $3)", wanted)
    check([tuple(each.values()) for each in read(db, "SELECT * FROM given").to_pylist()], [wanted])


def prepared(db: Any) -> None:
    with db.cursor() as cursor:
        for number in range(PREPARED):
            cursor.execute("SELECT id FROM orders WHERE id = $1", (number,))
            check(cursor.fetchone(), (number,))


def batch(db: Any) -> None:
    run(db, "CREATE TABLE batches (id bigint PRIMARY KEY, word text)")
    with db.cursor() as cursor:
        rows = [(number, f"w{number}") for number in range(200)]
        cursor.executemany("INSERT INTO batches VALUES ($1, $2)", rows)
    check(read(db, "SELECT count(*) AS c FROM batches")["c"].to_pylist(), [200])


def transaction(db: Any) -> None:
    """Run a transaction on a connection without autocommit."""
    run(db, "CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint)")
    run(db, "INSERT INTO accounts VALUES (1, 1)")
    db.commit()
    run(db, "UPDATE accounts SET n = 10 WHERE id = 1")
    db.rollback()
    check(read(db, "SELECT n FROM accounts")["n"].to_pylist(), [1])


def fetching(db: Any) -> None:
    with db.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": "16384"})
        cursor.execute("SELECT id, s FROM many ORDER BY id")
        reader = cursor.fetch_record_batch()
        found = [reader.read_next_batch().num_rows for _ in range(5)]
        check(max(found) < MANY_ROWS // 10, True)


def copy_in(db: Any) -> None:
    rows = pa.table(
        {
            "id": pa.array(range(2_000), pa.int64()),
            "word": [f"tab\t{number}" for number in range(2_000)],
            "x": [number / 4 for number in range(2_000)],
            "at": pa.array([kinds_row(5)["moment"]] * 2_000, pa.timestamp("us", "UTC")),
        }
    )
    with db.cursor() as cursor:
        check(cursor.adbc_ingest("copied", rows, mode="create"), 2_000)
        check(cursor.adbc_ingest("copied", rows, mode="append"), 2_000)
    found = read(db, "SELECT count(*) AS c, sum(x) AS x, min(at) AS at FROM copied").to_pylist()
    wanted = {"c": 4_000, "x": 2 * sum(rows["x"].to_pylist()), "at": kinds_row(5)["moment"]}
    check(found, [wanted])


def copy_out(db: Any) -> None:
    # What it reads without parameters comes by COPY.
    check(read(db, "SELECT * FROM orders").num_rows, 1_000)


def cancel(db: Any) -> None:
    cursor = db.cursor()
    caught: list[BaseException] = []

    def follow() -> None:
        try:
            cursor.execute("SUBSCRIBE orders")
            cursor.fetch_arrow_table()
        # Which class it is says the driver, not the test.
        except Exception as error:  # noqa: BLE001
            caught.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    while thread.is_alive():
        cursor.adbc_cancel()
        thread.join(0.2)
    check(len(caught), 1)
    check(read(db, "SELECT id FROM orders WHERE id = 1").num_rows, 1)


def error(db: Any) -> None:
    try:
        run(db, "INSERT INTO orders VALUES (1, 'again', 0)")
    except dbapi.Error as caught:
        check(caught.sqlstate, "23505")
    try:
        run(db, "CREATE TABLE x (a int,)")
    except dbapi.Error as caught:
        check(caught.sqlstate, "42601")
        check("LINE 1: CREATE TABLE x (a int,)" in str(caught) or str(caught), True)
        return
    raise AssertionError("a wrong statement was taken")


def view(db: Any) -> None:
    run(db, "CREATE TABLE words (word text)")
    run(db, f"CREATE MATERIALIZED VIEW lengths AS {LENGTHS}")
    found = read(db, "SELECT customer, n FROM spent ORDER BY customer").to_pylist()
    check([(row["customer"], row["n"]) for row in found], [row[:2] for row in spent_rows()])


def fresh(db: Any) -> None:
    for number in range(1, 6):
        run(db, "INSERT INTO words VALUES ($1)", ("one",))
        check(read(db, "SELECT n FROM lengths WHERE word = 'one'")["n"].to_pylist(), [number])


def subscribe(db: Any) -> None:
    db.adbc_connection.set_autocommit(False)
    run(db, "DECLARE changes CURSOR FOR SUBSCRIBE lengths")
    with db.cursor() as cursor:
        # Else it would copy what FETCH returns, which no PostgreSQL does.
        cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
        cursor.execute("FETCH 10 changes")
        found = cursor.fetch_arrow_table().to_pylist()
    check([(row["__diff"], row["word"], row["n"]) for row in found], [(1, "one", 5)])
    db.rollback()


def large(db: Any) -> None:
    found = read(db, "SELECT * FROM many")
    check(sum(found["id"].to_pylist()), MANY_ROWS * (MANY_ROWS - 1) // 2)


TRIED = (
    *(reflection, binary, nulls, parameters, prepared, batch, fetching, copy_in),
    *(copy_out, cancel, error, view, fresh, subscribe, large),
)

if __name__ == "__main__":
    main(sys.argv[1])
