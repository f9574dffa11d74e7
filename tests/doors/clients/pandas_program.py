"""Print what pandas can do over SQLAlchemy, and over ADBC: ``pandas_program.py HOST:PORT``."""

from __future__ import annotations

import sys

import adbc_driver_postgresql.dbapi
import pandas as pd
import sqlalchemy as sa
from client_probe import ClientProbe, check
from sample_rows import KINDS, KINDS_ROWS, MANY_ROWS, is_null_row, kinds_row, spent_rows

LEFT_TO_OTHERS = {
    "prepared": "it does not prepare statements; the underlying driver does",
    "savepoint": "it has none; the underlying SQLAlchemy does",
    "copy_in": "it has no COPY; the underlying ADBC does",
    "copy_out": "it has no COPY; the underlying ADBC does",
    "cancel": "it has no cancel; the underlying psycopg does",
}


def main(address: str) -> None:
    probe = ClientProbe("pandas", pd.__version__)
    for capability, reason in LEFT_TO_OTHERS.items():
        probe.lacks(capability, reason)
    engine = sa.create_engine(f"postgresql+psycopg://tester@{address}/penstock")
    with probe.tries("connect"):
        check(pd.read_sql("SELECT 1 AS one", engine)["one"].tolist(), [1])
    with probe.tries("binary"):
        binary(address)
    for tried in TRIED:
        with probe.tries(tried.__name__):
            tried(engine)
    engine.dispose()


def binary(address: str) -> None:
    """Run the checks over ADBC."""
    plain = "id, flag, tiny, small, whole, large, single, twice, word, short, fixed, raw, day"
    with adbc_driver_postgresql.dbapi.connect(f"postgresql://tester@{address}/penstock") as db:
        found = pd.read_sql(f"SELECT {plain} FROM kinds WHERE id < 9 ORDER BY id", db)
    wanted = [
        tuple(value for name, value in kinds_row(number).items() if name in plain.split(", "))
        for number in range(9)
    ]
    check([tuple(row) for row in found.itertuples(index=False)], wanted)


def reflection(engine: sa.Engine) -> None:
    found = pd.read_sql_table("orders", engine, index_col="id")
    check((list(found.columns), len(found)), (["customer", "amount"], 1000))
    check(pd.io.sql.has_table("spent", engine), True)


def text(engine: sa.Engine) -> None:
    found = pd.read_sql_table("kinds", engine).sort_values("id")
    check(list(found.columns), list(KINDS))
    first = found[found["id"] == 17].iloc[0].to_dict()
    wanted = kinds_row(17)
    for name in ("flag", "amount", "word", "short", "fixed", "raw", "list", "words", "pairs"):
        check(first[name], wanted[name])
    for name in ("tiny", "small", "whole", "large", "single", "twice"):
        check(float(first[name]), float(wanted[name]))
    check(first["moment"].to_pydatetime(), wanted["moment"])
    check(first["clock"].to_pydatetime(), wanted["clock"])


def nulls(engine: sa.Engine) -> None:
    found = pd.read_sql("SELECT * FROM kinds WHERE flag IS NULL", engine)
    check(len(found), sum(map(is_null_row, range(KINDS_ROWS))))
    check(bool(found.drop(columns="id").isna().all(axis=None)), True)


def parameters(engine: sa.Engine) -> None:
    text = sa.text("SELECT id FROM orders WHERE customer = :customer AND id < :id ORDER BY id")
    found = pd.read_sql(text, engine, params={"customer": "customer 3", "id": 20})
    check(found["id"].tolist(), [3, 13])


def batch(engine: sa.Engine) -> None:
    frame = pd.DataFrame(
        {
            "id": range(500),
            "word": [f"w{n}" for n in range(500)],
            "x": [n / 4 for n in range(500)],
            "at": pd.date_range("2026-01-01", periods=500, freq="h"),
        }
    )
    frame.to_sql("frames", engine, index=False)
    frame.to_sql("frames", engine, index=False, if_exists="append", method="multi")
    found = pd.read_sql("SELECT count(*) AS c, sum(x) AS x, max(at) AS at FROM frames", engine)
    check(tuple(found.iloc[0])[:2], (1000, 2 * frame["x"].sum()))
    check(found["at"][0], frame["at"].max())


def transaction(engine: sa.Engine) -> None:
    frame = pd.DataFrame({"id": [1, 2]})
    frame.to_sql("kept", engine, index=False)
    with engine.connect() as db:
        begun = db.begin()
        frame.to_sql("kept", db, index=False, if_exists="append")
        begun.rollback()
    check(len(pd.read_sql("SELECT * FROM kept", engine)), 2)


def fetching(engine: sa.Engine) -> None:
    with engine.connect().execution_options(stream_results=True) as db:
        pieces = pd.read_sql("SELECT id FROM many ORDER BY id", db, chunksize=500)
        check([len(next(pieces)) for _ in range(10)], [500] * 10)


def error(engine: sa.Engine) -> None:
    try:
        pd.read_sql("SELECT * FROM nowhere", engine)
    except sa.exc.ProgrammingError as caught:
        check(getattr(caught.orig, "sqlstate", None), "42P01")
        return
    raise AssertionError("an absent table was read")


def view(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.execute(sa.text("CREATE TABLE words (word text)"))
        db.execute(
            sa.text(
                "CREATE MATERIALIZED VIEW lengths AS "
                "SELECT word, count(*) AS n FROM words GROUP BY word"
            )
        )
    found = pd.read_sql_table("spent", engine).sort_values("customer")
    wanted = spent_rows()
    check(found["customer"].tolist(), [row[0] for row in wanted])
    check(found["total"].tolist(), [row[2] for row in wanted])


def fresh(engine: sa.Engine) -> None:
    for number in range(1, 6):
        pd.DataFrame({"word": ["one"]}).to_sql("words", engine, index=False, if_exists="append")
        found = pd.read_sql("SELECT n FROM lengths WHERE word = 'one'", engine)
        check(found["n"].tolist(), [number])


def subscribe(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.execute(sa.text("DECLARE changes CURSOR FOR SUBSCRIBE lengths"))
        found = pd.read_sql(sa.text("FETCH 10 changes"), db)
    check(found[["__diff", "word", "n"]].values.tolist(), [[1, "one", 5]])


def large(engine: sa.Engine) -> None:
    found = pd.read_sql("SELECT * FROM many", engine)
    check(int(found["id"].sum()), MANY_ROWS * (MANY_ROWS - 1) // 2)


TRIED = (
    *(reflection, text, nulls, parameters, batch, transaction, fetching, error, view, fresh),
    *(subscribe, large),
)

if __name__ == "__main__":
    main(sys.argv[1])
