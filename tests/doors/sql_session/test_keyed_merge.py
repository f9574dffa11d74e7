"""MERGE by keys: which statements are read so, and what comes of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.default_values import TableScope
from actors.doors.sql_session.keyed_merge import KeyedMerge, compute_keyed_merge, read_keyed_merge
from actors.doors.sql_session.row_values import SqlParameter
from actors.doors.sql_session.session_variables import SessionVariables
from actors.doors.sql_session.transaction import OpenTransaction, PendingChange
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import MergeStatement
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings

SCHEMA = TableSchema(
    (
        TableColumn("id", "bigint", nullable=False),
        TableColumn("name", "string"),
        TableColumn("x", "double"),
    ),
    ("id",),
)
ROWS = [{"id": 1, "name": "a", "x": 0.5}, {"id": 2, "name": "b", "x": None}]
UPSERT = (
    "WHEN MATCHED THEN UPDATE SET name = s.name "
    "WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.id, s.name)"
)


class KeyReader:
    """The part of a client that reads by keys."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def peek(self, name: str, as_of: int | None, key: Any, *, deadline_ms: Any) -> pa.Table:
        assert name == "t"
        self.asked += key
        wanted = [each["id"] for each in key]
        found = [row for row in ROWS if row["id"] in wanted]
        return pa.Table.from_pylist(found, schema=SCHEMA.arrow())


def context() -> tuple[SessionContext, KeyReader]:
    client: Any = KeyReader()
    variables = SessionVariables("me")
    return SessionContext(client, Settings(), SqlDialect.POSTGRES, variables), client


def text(rows: str, clauses: str = UPSERT, on: str = "t.id = s.id", names: str = "id, name") -> str:
    source = f"(SELECT * FROM (VALUES {rows}) AS v({names})) AS s"
    return f"MERGE INTO t USING {source} ON {on} {clauses}"


def read(statement: str, parameters: list[SqlParameter] | None = None) -> KeyedMerge | None:
    parsed = parse_statement(statement, SqlDialect.POSTGRES)
    assert isinstance(parsed, MergeStatement)
    return read_keyed_merge(TableScope(context()[0], "t", SCHEMA, parameters or []), parsed)


async def changed(statement: str) -> tuple[list[Any], list[Any], int]:
    """The rows that go, those that come, and the count."""
    found, client = context()
    merge = read(statement)
    assert merge is not None
    change, count = await compute_keyed_merge(TableScope(found, "t", SCHEMA), merge)
    assert len(client.asked) == len({each["id"] for each in client.asked})
    gone, come = change.delete, change.insert
    assert gone is not None
    return gone.to_pylist(), [] if come is None else come.to_pylist(), count


async def test_rows_are_changed_or_come() -> None:
    gone, come, count = await changed(text("(1, 'z'), (9, 'new'), (NULL, 'none')"))
    assert gone == [ROWS[0]]
    assert come == [
        {"id": 1, "name": "z", "x": 0.5},
        {"id": 9, "name": "new", "x": None},
        {"id": None, "name": "none", "x": None},
    ]
    assert count == 3


async def test_each_clause_alone() -> None:
    assert await changed(text("(2, 'x'), (3, 'y')", "WHEN MATCHED THEN DELETE")) == (
        [ROWS[1]],
        [],
        1,
    )
    literal = "WHEN MATCHED THEN UPDATE SET x = 7, name = NULL"
    assert await changed(text("(2, 'x'), (3, 'y')", literal)) == (
        [ROWS[1]],
        [{"id": 2, "name": None, "x": 7.0}],
        1,
    )
    ignoring = "WHEN MATCHED THEN DO NOTHING WHEN NOT MATCHED THEN INSERT (id) VALUES (s.id)"
    assert await changed(text("(2, 'x'), (3, 'y')", ignoring)) == (
        [],
        [{"id": 3, "name": None, "x": None}],
        1,
    )
    whole = text("(2, 'x', 1.5)", "WHEN MATCHED THEN UPDATE SET *", names="id, name, x")
    assert await changed(whole) == ([ROWS[1]], [{"id": 2, "name": "x", "x": 1.5}], 1)


async def test_the_first_clause_counts() -> None:
    clauses = "WHEN MATCHED THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'never'"
    assert await changed(text("(1, 'x')", clauses)) == ([ROWS[0]], [], 1)


async def test_a_row_is_changed_once() -> None:
    with pytest.raises(InvalidUsage, match="two source rows match the same table row"):
        await changed(text("(1, 'x'), (1, 'y')"))


def test_parameters_are_literals() -> None:
    one = SqlParameter(5, "CAST(5 AS bigint)")
    merge = read(text("($1, $2)"), [one, SqlParameter("x", "'x'", untyped=True)])
    assert merge is not None
    assert merge.keys.to_pylist() == [{"id": 5}]
    computed = SqlParameter(None, "(1 + 1)", computed=True)
    assert read(text("($1, 'x')"), [computed]) is None


@pytest.mark.parametrize(
    "statement",
    [
        text("(1, 'a')").replace("VALUES (1, 'a')", "SELECT 1, 'a'"),
        text("(1 + 1, 'a')"),
        text("(1.5, 'a')"),
        text("('1', 'a')"),
        text("(1, 'a'), ('2', 'b')"),
        text("(1, 'a'), (2, 3)"),
        text("(1, 'a'), (2)"),
        text("(1, 'a')", on="t.id = s.id AND t.name = s.name"),
        text("(1, 'a')", on="t.id > s.id"),
        text("(1, 'a')", on="t.id = s.id OR true"),
        text("(1, 'a')", on="t.name = s.name"),
        text("(1, 'a')", on="id = s.id"),
        text("(1, 'a')", on="t.id = t.id"),
        text("(1, 'a')", "WHEN MATCHED AND s.name = 'a' THEN DELETE"),
        text("(1, 'a')", "WHEN NOT MATCHED BY SOURCE THEN DELETE"),
        text("(1, 'a')", "WHEN MATCHED THEN UPDATE SET name = upper(s.name)"),
        text("(1, 'a')", "WHEN MATCHED THEN UPDATE SET name = t.name"),
        text("(1, 'a')", "WHEN MATCHED THEN UPDATE SET nothing = s.name"),
        text("(1, 'a')", "WHEN MATCHED THEN UPDATE SET *"),
        text("(1, 'a')", names="id, id"),
        text("(99999999999999999999, 'a')"),
        "MERGE INTO t USING other AS s ON t.id = s.id WHEN MATCHED THEN DELETE",
    ],
)
def test_everything_else_is_a_query(statement: str) -> None:
    assert read(statement) is None


def test_what_the_transaction_has_changed_is_read_by_spark() -> None:
    found, _ = context()
    found.transaction = transaction = OpenTransaction(found.variables.state())
    parsed = parse_statement(text("(1, 'a')"), SqlDialect.POSTGRES)
    assert isinstance(parsed, MergeStatement)
    assert read_keyed_merge(TableScope(found, "t", SCHEMA), parsed) is not None
    rows = pa.Table.from_pylist(ROWS, schema=SCHEMA.arrow())
    transaction.add("t", SCHEMA, PendingChange(rows, None), 1 << 20)
    assert read_keyed_merge(TableScope(found, "t", SCHEMA), parsed) is None
