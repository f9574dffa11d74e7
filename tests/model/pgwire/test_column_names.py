"""Names of columns without an alias, beside a real PostgreSQL's."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actors.engine.sql.column_naming import NO_NAME, missing_names
from actors.engine.sql.tokens import SqlDialect, lex_text
from actors.testing.postgres_server import PostgresServer

TABLE = 'CREATE TEMP TABLE t (a int, "B" int, offset_ int, sort int)'
ATOMS = ("a", "t.a", '"B"', '"t"."B"', "t.sort", "5", "'7'", "NULL", "offset_")
TYPES = ("int", "bigint", "int2", "pg_catalog.int4", "numeric(9,2)", "double precision", "real")


SINGLE = (
    *("DATE '2024-01-01'", "true", "now()", "CURRENT_DATE", "'x'::text", "'{}'::int[]"),
    *("timestamp with time zone '2024-01-01'", "count(*) FILTER (WHERE true) OVER ()"),
    *("EXTRACT(YEAR FROM now())", "substring('abc' FROM 2)", "trim(LEADING ' ' FROM 'x')"),
    *("now()::date", "'1 day'::interval", "interval '1 day'", "'a' || 'b'", "NOT true"),
    *("a BETWEEN 1 AND 2", "'a' LIKE 'b'", "nullif(1, 2)", "localtimestamp", "'x'::char(3)"),
    "(SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY a) FROM t)",
)


def wrapped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions around others, all of numbers."""
    types = st.sampled_from(TYPES)
    return st.one_of(
        st.tuples(st.sampled_from(("abs", "COALESCE", '"abs"', "pg_catalog.abs")), inner).map(
            lambda d: f"{d[0]}({d[1]})"
        ),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"count({e}) OVER (PARTITION BY a)"),
        st.tuples(inner, types).map(lambda d: f"({d[0]})::{d[1]}"),
        st.tuples(inner, types).map(lambda d: f"CAST({d[0]} AS {d[1]})"),
        st.tuples(inner, inner).map(lambda d: f"CASE WHEN {d[0]} IS NULL THEN 1 ELSE {d[1]} END"),
        inner.map(lambda e: f"CASE WHEN {e} > 1 THEN 1 END"),
        st.tuples(inner, inner, st.sampled_from("+-*")).map(lambda d: f"{d[0]} {d[2]} {d[1]}"),
        inner.map(lambda e: f"- {e}"),
        st.tuples(inner, st.sampled_from(("", " AS x", " x"))).map(
            lambda d: f"(SELECT {d[0]}{d[1]} LIMIT 1)"
        ),
        inner.map(lambda e: f"greatest({e}, 1)"),
    )


numbers = st.recursive(st.sampled_from(ATOMS), wrapped, max_leaves=4)
others = st.one_of(
    numbers.map(lambda e: f"{e} IS DISTINCT FROM 1"),
    numbers.map(lambda e: f"{e} IN (1, 2)"),
    numbers.map(lambda e: f"{e} IS NOT NULL AND true"),
    numbers.map(lambda e: f"({e})::text"),
    numbers.map(lambda e: f"ARRAY[{e}]"),
    numbers.map(lambda e: f"(ARRAY[{e}])[1]"),
    numbers.map(lambda e: f"EXISTS (SELECT {e})"),
    numbers.map(lambda e: f"({e})::int::varchar(3)"),
    st.sampled_from(SINGLE),
)
aliases = st.sampled_from(("", "", "", " AS total", ' AS "Total"', " total", ' "Total"'))
columns = st.tuples(st.one_of(numbers, others), aliases).map("".join)
lists = st.lists(columns, min_size=1, max_size=3)
ends = st.sampled_from(
    (" FROM t", " FROM t ORDER BY 1", " FROM t UNION ALL TABLE none", " FROM t t")
)


@pytest.fixture(scope="module")
def wire(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.conninfo(), autocommit=True) as made:
        made.execute(TABLE)
        yield made


@given(drawn=lists, end=ends)
def test_columns_are_named_as_postgresql_names_them(
    wire: psycopg.Connection, drawn: list[str], end: str
) -> None:
    text = f"SELECT {', '.join(drawn)}"
    try:
        described = wire.execute(f"{text} FROM t".encode()).description
    except psycopg.errors.ProgrammingError:
        assume(False)  # one window function within another, and their like
    assert described is not None
    lexed = lex_text(text + end, SqlDialect.POSTGRES)
    names = missing_names(lexed)
    place = 1
    for written, wanted in zip(drawn, described, strict=True):
        place += len(lex_text(written, SqlDialect.POSTGRES).tokens)
        last = lexed.tokens[place - 1]
        # A column, or an alias, that Spark itself names so.
        own = last.text.strip('"')
        assert names.get(place, own) == wanted.name, written
        place += 1


@pytest.mark.parametrize(
    "column",
    [
        *("*", "t.*", "count(*) n", "1 AS x", "explode(a)", "a", "t.a", '"A"', "a b", "a + b c"),
        *("CASE WHEN a THEN 1 END z", "a[1] b", "interval '1' day", "a::double precision x"),
    ],
)
def test_a_name_that_is_there_or_not_known_is_left_alone(column: str) -> None:
    assert missing_names(lex_text(f"SELECT {column} FROM t", SqlDialect.POSTGRES)) == {}


def test_the_columns_of_inner_queries_are_named_too() -> None:
    text = "WITH c AS (SELECT DISTINCT ON (a) max(a) FROM t) SELECT q.max FROM (SELECT min(a)) q"
    lexed = lex_text(text, SqlDialect.POSTGRES)
    assert list(missing_names(lexed).values()) == ["max", "min"]


def test_the_order_within_a_group_ends_no_list() -> None:
    text = "SELECT mode() WITHIN GROUP (ORDER BY a) FILTER (WHERE x), 1 FROM t GROUP BY max(b)"
    assert list(missing_names(lex_text(text, SqlDialect.POSTGRES)).values()) == ["mode", NO_NAME]
    text = "SELECT 1, within GROUP BY a"
    assert list(missing_names(lex_text(text, SqlDialect.POSTGRES)).values()) == [NO_NAME]
