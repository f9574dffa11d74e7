"""Types of parameters that a client leaves open."""

from __future__ import annotations

import pytest

from actors.pg_server.statements import infer_parameters
from actors.pgwire.type_map import ARRAY_OF, DATE, INT8, TEXT, TIMESTAMP
from actors.plan.schema import TableColumn, TableSchema
from actors.sql.grammar import parse_statement
from actors.sql.tokens import SqlDialect

TABLE = TableSchema((TableColumn("id", "bigint"), TableColumn("day", "date")))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("SELECT * FROM t WHERE id = $1 AND $2 < day", (INT8, DATE)),
        ("SELECT $1", (TEXT,)),
        ("SELECT $1::date, $2::text[], $3::bigint", (DATE, ARRAY_OF[TEXT], INT8)),
        ("SELECT * FROM t WHERE day = $1::timestamp(3) without time zone", (TIMESTAMP,)),
        ("INSERT INTO t VALUES ($1, $2)", (INT8, DATE)),
        ("INSERT INTO t VALUES ($1::int8, $2::text)", (INT8, TEXT)),
        ("SELECT * FROM t LIMIT $1", (INT8,)),
    ],
)
def test_parameters_have_the_type_of_their_place(text: str, wanted: tuple[int, ...]) -> None:
    statement = parse_statement(text, SqlDialect.POSTGRES)
    assert infer_parameters(text, statement, (), {"t": TABLE}) == wanted
