"""Types of parameters that a client leaves open: those of their place in the query's own scope."""

from __future__ import annotations

import random

import psycopg
import pytest

from actors.doors.postgres.pg_server.parameter_inference import named_relations
from actors.doors.postgres.pg_server.statements import infer_parameters
from actors.engine.sql.grammar import parse_span
from actors.engine.sql.statements import generated_span
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire.type_oids import ARRAY_OF, BOOL, DATE, INT4, INT8, NUMERIC, TEXT, TIMESTAMP
from actors.model.plan.schema import TableColumn, TableSchema
from actors.testing.postgres_server import postgres_server
from suite_lanes import examples  # type: ignore[import-not-found]

TABLES = {
    "t": TableSchema((TableColumn("id", "bigint"), TableColumn("day", "date"))),
    # An unrelated table, whose columns of the same names have other types.
    "u": TableSchema(
        (
            TableColumn("id", "string"),
            TableColumn("day", "int"),
            TableColumn("ok", "boolean"),
            TableColumn("amount", "decimal(10,2)"),
        )
    ),
}
SHAPES = [
    "SELECT 1 FROM {t} a WHERE a.{c} {op} $1",
    "SELECT 1 FROM {t} WHERE $1 {op} {c}",
    "WITH a AS (SELECT {c} AS id, 1 AS day FROM {t}) SELECT 1 FROM a WHERE id {op} $1 AND day = $2",
    "WITH a(x) AS (SELECT {c} FROM {t}) SELECT 1 FROM a JOIN {s} b ON true WHERE x {op} $1",
    "SELECT 1 FROM (SELECT max({c}) AS day FROM {t}) q WHERE day {op} $1",
    "SELECT 1 FROM {s} b WHERE EXISTS (SELECT 1 FROM {t} a WHERE a.{c} {op} $1)",
    "SELECT 1 FROM {t} a WHERE EXISTS (SELECT 1 FROM (SELECT 1 AS z) b WHERE a.{c} {op} $1)",
    "SELECT 1 FROM {t} WHERE {c} IN ($1, $2) OR {c} BETWEEN $3 AND $4",
    "SELECT $1 {op} {c} FROM {t} LIMIT $2 OFFSET $3",
    "SELECT coalesce($1, {c}), CASE WHEN $2 THEN {c} ELSE $3 END FROM {t}",
    "SELECT count(*) FROM {t} HAVING count(*) {op} $1",
    "SELECT 1 FROM {t} a, {s} b WHERE (a.{c}, 1) = ($1, $2)",
    "UPDATE {t} SET {c} = $1 WHERE {c} {op} $2",
    "DELETE FROM {t} AS a WHERE a.{c} {op} $1",
    "INSERT INTO {t} ({c}) SELECT $1",
    "INSERT INTO {t} ({c}) VALUES ($1), ($2) RETURNING {c} {op} $3",
    "SELECT 1 FROM (VALUES (1, 'a'), (2, 'b')) v (id, day) WHERE id = $1 AND day {op} $2",
    "SELECT 1 FROM {t} WHERE {c} = ANY ($1) OR {c} <> ALL (($2)) OR {c} = SOME (ARRAY[$3])",
    "DELETE FROM {t} AS a WHERE NOT a.{c} = ANY ($1)",
    "SELECT sum(day) {op} $1, avg(day) {op} $2, abs(max(day)) {op} $3 FROM u",
    "SELECT 1 FROM u GROUP BY ok HAVING sum(amount) {op} $1 OR avg(amount) {op} $2",
    "SELECT extract(year FROM day) {op} $1, length($2) {op} $3 FROM t GROUP BY day",
    "SELECT sum(id) {op} $1 FROM t",
    "SELECT 1 FROM {t} UNION ALL SELECT 1 FROM {s} b WHERE b.{d} {op} $1",
]


def types_of(text: str) -> tuple[int, ...]:
    span = generated_span(SqlDialect.POSTGRES, text)
    return infer_parameters(span, parse_span(span), (), TABLES)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("SELECT * FROM t WHERE id = $1 AND $2 < day", (INT8, DATE)),
        ("SELECT $1", (TEXT,)),
        ("SELECT $1::date, $2::text[], $3::bigint", (DATE, ARRAY_OF[TEXT], INT8)),
        ("SELECT * FROM t WHERE day = $1::timestamp(6) without time zone", (TIMESTAMP,)),
        ("INSERT INTO t VALUES ($1, $2)", (INT8, DATE)),
        ("INSERT INTO t VALUES ($1::int8, $2::text)", (INT8, TEXT)),
        ("SELECT * FROM t LIMIT $1", (INT8,)),
        ("WITH t AS (SELECT 'a' AS id) SELECT * FROM t WHERE id = $1", (TEXT,)),
        ("SELECT * FROM u WHERE id = $1 AND day IN ($2,$3)", (TEXT, INT4, INT4)),
        ("SELECT * FROM t JOIN u ON t.day = $1 AND u.day = $2 WHERE ok = $3", (DATE, INT4, BOOL)),
        (
            "INSERT INTO u VALUES ($1, 1, true, $2) ON CONFLICT (id) DO UPDATE SET amount = $3",
            (TEXT, NUMERIC, NUMERIC),
        ),
        (
            "MERGE INTO u USING t ON u.day = $1 WHEN MATCHED AND t.day > $2 THEN UPDATE SET "
            "amount = $3 WHEN NOT MATCHED THEN INSERT (day, ok) VALUES ($4, $5)",
            (INT4, DATE, NUMERIC, INT4, BOOL),
        ),
        ("SELECT * FROM t AS OF 5 WHERE nowhere = $1", (TEXT,)),
        ("SELECT * FROM t WHERE id = ANY ($1)", (ARRAY_OF[INT8],)),
        ("SELECT * FROM u WHERE NOT id <> ALL ($1)", (ARRAY_OF[TEXT],)),
        ("SELECT * FROM t WHERE day = ANY (ARRAY[$1])", (DATE,)),
        ("SELECT * FROM t WHERE nowhere = ANY ($1)", (TEXT,)),
    ],
)
def test_parameters_have_the_type_of_their_place(text: str, wanted: tuple[int, ...]) -> None:
    assert types_of(text) == wanted


def test_the_relations_of_a_text() -> None:
    """Those of other schemas, functions and table expressions are none that must be there."""
    assert named_relations("SELECT * FROM a JOIN public.b USING (x), generate_series(1, 2)") == [
        "a",
        "b",
    ]
    assert named_relations("WITH a AS (SELECT 1) SELECT * FROM a, penstock.objects") == []
    assert named_relations("this is no SQL") == []


@pytest.mark.second
def test_types_are_those_of_postgresql() -> None:
    """Drawn statements over tables whose columns have the same names and other types."""
    rng = random.Random(1)
    with (
        postgres_server() as server,
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE t (id BIGINT, day DATE)")
        connection.execute("CREATE TABLE u (id TEXT, day INT, ok BOOLEAN, amount NUMERIC(10, 2))")
        compared = 0
        for number in range(examples(600)):
            table = rng.choice(("t", "u"))
            other = "u" if table == "t" else "t"
            text = rng.choice(SHAPES).format(
                t=table,
                s=other,
                c=rng.choice(TABLES[table].names),
                d=rng.choice(TABLES[other].names),
                op=rng.choice(("=", "<>", "<", ">=")),
            )
            name = f"s{number}".encode()
            made = connection.pgconn.prepare(name, text.encode())
            if made.error_message:
                continue
            told = connection.pgconn.describe_prepared(name)
            wanted = tuple(told.param_type(at) for at in range(told.nparams))
            assert types_of(text) == wanted, text
            compared += 1
        # Others are of types that PostgreSQL does not compare.
        assert compared > examples(600) // 2
