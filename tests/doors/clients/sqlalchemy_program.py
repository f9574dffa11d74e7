"""Print what SQLAlchemy can do over psycopg: ``sqlalchemy_program.py HOST:PORT``."""

from __future__ import annotations

import sys
from decimal import Decimal

import sqlalchemy as sa
from client_probe import ClientProbe, check
from sample_rows import KINDS, KINDS_ROWS, MANY_ROWS, PREPARED, is_null_row, kinds_row, spent_rows
from sqlalchemy import orm


class DeclaredBase(orm.DeclarativeBase):  # type: ignore[misc]
    """Base of the tables that the program creates."""


class WordEntry(DeclaredBase):
    """A word, as mapped by SQLAlchemy."""

    __tablename__ = "entries"
    id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    word: orm.Mapped[str | None] = orm.mapped_column(sa.String(40))
    amount: orm.Mapped[Decimal | None] = orm.mapped_column(sa.Numeric(12, 2))


def main(address: str) -> None:
    probe = ClientProbe("SQLAlchemy", sa.__version__)
    engine = sa.create_engine(f"postgresql+psycopg://tester@{address}/penstock")
    probe.lacks("binary", "psycopg decodes values for it, and requests text")
    probe.lacks("copy_in", "it has no COPY; the underlying psycopg does")
    probe.lacks("copy_out", "it has no COPY; the underlying psycopg does")
    probe.lacks("cancel", "it has no cancel; the underlying psycopg does")
    for tried in TRIED:
        with probe.tries(tried.__name__):
            tried(engine)
    engine.dispose()


def connect(engine: sa.Engine) -> None:
    with engine.connect() as db:
        check(db.dialect.server_version_info[:1], (15,))
        check(db.dialect.default_schema_name, "public")


def reflection(engine: sa.Engine) -> None:
    inspector = sa.inspect(engine)
    check({"kinds", "many", "orders"} <= set(inspector.get_table_names()), True)
    check(inspector.get_materialized_view_names(), ["spent"])
    check(inspector.get_pk_constraint("orders")["constrained_columns"], ["id"])
    indexes = {each["name"]: each["column_names"] for each in inspector.get_indexes("orders")}
    check(indexes.get("by_customer"), ["customer"])
    found = sa.MetaData()
    found.reflect(engine, views=True, only=["kinds", "orders", "spent"])
    check(sorted(found.tables), ["kinds", "orders", "spent"])
    kinds = found.tables["kinds"]
    check([column.name for column in kinds.columns], list(KINDS))
    check(str(kinds.c.amount.type), "NUMERIC(20, 3)")
    check(str(found.tables["orders"].c.id.primary_key), "True")
    check([column.name for column in found.tables["spent"].columns], ["customer", "n", "total"])


def text(engine: sa.Engine) -> None:
    kinds = sa.Table("kinds", sa.MetaData(), autoload_with=engine)
    with engine.connect() as db:
        found = db.execute(sa.select(kinds).order_by(kinds.c.id)).fetchall()
    check(
        [tuple(row) for row in found],
        [tuple(kinds_row(number).values()) for number in range(KINDS_ROWS)],
    )


def nulls(engine: sa.Engine) -> None:
    kinds = sa.Table("kinds", sa.MetaData(), autoload_with=engine)
    with engine.connect() as db:
        found = db.execute(sa.select(kinds).where(kinds.c.flag.is_(None))).fetchall()
    check(len(found), sum(map(is_null_row, range(KINDS_ROWS))))
    check({value for row in found for value in row[1:]}, {None})


def parameters(engine: sa.Engine) -> None:
    kinds = sa.Table("kinds", sa.MetaData(), autoload_with=engine)
    row = kinds_row(17)
    with engine.connect() as db:
        for name in ("flag", "small", "large", "twice", "amount", "word", "day"):
            wanted = sa.select(kinds.c.id).where(kinds.c[name] == row[name], kinds.c.id == 17)
            check(db.execute(wanted).scalar_one(), 17)
        some = sa.select(kinds.c.id).where(kinds.c.id.in_([3, 5])).order_by(kinds.c.id)
        check(list(db.scalars(some)), [3, 5])


def prepared(engine: sa.Engine) -> None:
    # psycopg prepares what it has seen five times.
    wanted = sa.text("SELECT id FROM orders WHERE id = :id")
    with engine.connect() as db:
        for number in range(PREPARED):
            check(db.execute(wanted, {"id": number}).scalar_one(), number)


def batch(engine: sa.Engine) -> None:
    DeclaredBase.metadata.create_all(engine)
    rows = [{"id": n, "word": f"w{n}", "amount": Decimal(n) / 2} for n in range(500)]
    with engine.begin() as db:
        db.execute(sa.insert(WordEntry), rows)
    with orm.Session(engine) as session:
        session.add_all(WordEntry(id=n, word="mapped") for n in range(1000, 1100))
        session.commit()
        session.get_one(WordEntry, 7).word = "changed"
        session.commit()
        session.delete(session.get_one(WordEntry, 8))
        session.commit()
        check(session.scalar(sa.select(sa.func.count()).select_from(WordEntry)), 599)
        check(session.get_one(WordEntry, 7).word, "changed")
    returning(engine)


def returning(engine: sa.Engine) -> None:
    # One transaction each: one that reads its own rows needs Spark.
    made = sa.insert(WordEntry).returning(WordEntry.id, WordEntry.word)
    with engine.begin() as db:
        check(db.execute(made, {"id": 5000, "word": "new"}).one(), (5000, "new"))
    changed = sa.update(WordEntry).where(WordEntry.id == 7).values(word="again")
    with engine.begin() as db:
        check(db.scalar(changed.returning(WordEntry.word)), "again")
    gone = sa.delete(WordEntry).where(WordEntry.id == 6).returning(WordEntry)
    with engine.begin() as db:
        check(db.execute(gone).one().id, 6)
    with orm.Session(engine) as session:
        found = session.scalars(sa.insert(WordEntry).values(id=5001).returning(WordEntry)).one()
        check((found.id, found.word), (5001, None))
        session.rollback()


def transaction(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.execute(sa.text("CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint)"))
        db.execute(sa.text("INSERT INTO accounts VALUES (1, 1)"))
    with engine.connect() as db:
        db.execute(sa.text("UPDATE accounts SET n = 10 WHERE id = 1"))
        db.rollback()
        check(db.scalar(sa.text("SELECT n FROM accounts")), 1)


def savepoint(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.execute(sa.text("CREATE TABLE saved (id bigint PRIMARY KEY)"))
        db.execute(sa.text("INSERT INTO saved VALUES (1)"))
        try:
            with db.begin_nested():
                db.execute(sa.text("INSERT INTO saved VALUES (2)"))
                db.execute(sa.text("INSERT INTO saved VALUES (1)"))
        except sa.exc.IntegrityError:
            db.execute(sa.text("INSERT INTO saved VALUES (3)"))
    with engine.connect() as db:
        check(list(db.scalars(sa.text("SELECT id FROM saved ORDER BY id"))), [1, 3])


def fetching(engine: sa.Engine) -> None:
    with engine.connect() as db:
        some = db.execution_options(yield_per=500)
        found = []
        with some.execute(sa.text("SELECT id FROM many ORDER BY id")) as result:
            for row in result:
                found.append(row[0])
                if len(found) == 5_000:
                    break
        check(found, list(range(5_000)))


def error(engine: sa.Engine) -> None:
    with engine.connect() as db:
        try:
            db.execute(sa.text("CREATE TABLE x (a int,)"))
        except sa.exc.ProgrammingError as caught:
            diag = getattr(caught.orig, "diag", None)
            check((diag and diag.sqlstate, diag and diag.statement_position), ("42601", "23"))
            db.rollback()
        try:
            db.execute(sa.text("INSERT INTO orders VALUES (1, 'again', 0)"))
            db.commit()
        except sa.exc.IntegrityError as caught:
            check(getattr(caught.orig, "sqlstate", None), "23505")
            return
    raise AssertionError("a present key was inserted")


def view(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.execute(sa.text("CREATE TABLE words (word text)"))
        db.execute(
            sa.text(
                "CREATE MATERIALIZED VIEW lengths AS "
                "SELECT word, count(*) AS n FROM words GROUP BY word"
            )
        )
    spent = sa.Table("spent", sa.MetaData(), autoload_with=engine)
    with engine.connect() as db:
        found = db.execute(sa.select(spent).order_by(spent.c.customer)).fetchall()
    check([tuple(row) for row in found], spent_rows())


def fresh(engine: sa.Engine) -> None:
    for number in range(1, 6):
        with engine.begin() as db:
            db.execute(sa.text("INSERT INTO words VALUES (:word)"), {"word": "one"})
        with engine.connect() as db:
            check(db.scalar(sa.text("SELECT n FROM lengths WHERE word = 'one'")), number)


def subscribe(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.execute(sa.text("DECLARE changes CURSOR FOR SUBSCRIBE lengths"))
        first = db.execute(sa.text("FETCH 10 changes")).fetchall()
    check([tuple(row)[1:] for row in first], [(1, "one", 5)])


def large(engine: sa.Engine) -> None:
    with engine.connect() as db:
        found = db.execute(sa.text("SELECT * FROM many")).fetchall()
    check(sum(row.id for row in found), MANY_ROWS * (MANY_ROWS - 1) // 2)


TRIED = (
    *(connect, reflection, text, nulls, parameters, prepared, batch, transaction, savepoint),
    *(fetching, error, view, fresh, subscribe, large),
)

if __name__ == "__main__":
    main(sys.argv[1])
