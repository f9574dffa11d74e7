"""Where an error of Spark's is in the statement that the user wrote.

The sign ``¦`` in a statement is where the error is to point; a client plays Spark's part, and finds
``nope`` (or what a test names) at fault in the text that it is sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql, join_sql
from actors.doors.sql_session.row_values import SqlParameter
from actors.doors.sql_session.session import SqlSession
from actors.doors.sql_session.transaction import PendingChange
from actors.engine.sql.dialects import to_spark
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import TextSpan
from actors.engine.sql.tokens import SqlDialect, lex_text
from actors.engine.views.plain_views import inline_views
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.api import CreateView, ObjectStatus
from actors.runtime.errors import DefiniteError, QueryRejected, SqlSyntaxError
from actors.runtime.settings import Settings

COLUMNS = (TableColumn("id", "bigint", nullable=False), TableColumn("name", "string"))
SCHEMA = TableSchema((*COLUMNS, TableColumn("n", "int")), ("id",))
VIEW = "SELECT id,\n name FROM t"
MERGE = "MERGE INTO t USING (SELECT id + 0 AS id FROM t) AS s ON t.id = s.id"


class FaultyClient:
    """A client whose queries fail where `fault` stands in the text that Spark would get."""

    session = None

    def __init__(self, fault: str, *, running: bool, late: bool = False) -> None:
        self._fault = fault
        self._running = running
        self._late = late
        self.sent = ""

    async def status(self) -> Any:
        table = ObjectStatus("t", "table", 0, 1, 0, schema=SCHEMA)
        view = ObjectStatus("v", "plain view", 0, 1, 0, schema=SCHEMA, sql=VIEW)
        return SimpleNamespace(objects=[table, view], tables_upper=1)

    async def check_right(self, right: str, name: str) -> None:
        """Everybody may do everything."""

    async def query(self, sql: str, **_: Any) -> AsyncGenerator[pa.RecordBatch, None]:
        if not self._late:
            self._fail(sql)
        yield pa.RecordBatch.from_pylist([], schema=SCHEMA.arrow())
        self._fail(sql)

    async def describe_query(self, sql: str, **_: Any) -> TableSchema:
        self._fail(sql)
        return SCHEMA

    async def submit(self, statement: CreateView) -> None:
        self._fail(statement.sql)

    async def explain_query(self, sql: str, **_: Any) -> str:
        self._fail(sql)
        return ""

    async def drop(self, name: str) -> None:
        """There is nothing to drop."""

    def _fail(self, sql: str) -> None:
        # As the service does before Spark gets it.
        self.sent = inline_views(sql, {"v": VIEW})
        # Without a fault the text ends too early.
        at = self.sent.index(self._fault) if self._fault else len(self.sent)
        first = self.sent.rfind("\n", 0, at) + 1
        line = self.sent.count("\n", 0, at) + 1
        if self._running:
            shown = self.sent.split("\n")[line - 1]
            place = f"== SQL (line {line}, position {at - first + 1}) =="
            text = f"[DIVIDE_BY_ZERO] {place}\n{shown}\n{' ' * (at - first)}^^^"
            raise DefiniteError(text)
        raise QueryRejected(f"[UNRESOLVED_COLUMN] SQLSTATE: 42703; line {line} pos {at - first}")


async def position(
    statement: str, fault: str = "nope", *given: str, running: bool = False, changed: bool = False
) -> int | None:
    """Where the error of a statement points."""
    client: Any = FaultyClient(fault, running=running)
    session = SqlSession(client, Settings(), SqlDialect.POSTGRES)
    if changed:
        # Its own rows are laid over the table's, before the query.
        session.begin_implicit()
        assert session.context.transaction is not None
        row = pa.Table.from_pylist([{"id": 1, "name": "a\nb", "n": 1}], schema=SCHEMA.arrow())
        session.context.transaction.add("t", SCHEMA, PendingChange(None, row), 1 << 20)
    parameters = [SqlParameter(None, text, computed=True) for text in given]
    with pytest.raises((QueryRejected, DefiniteError)) as caught:
        result = await session.execute(parse_statement(statement, SqlDialect.POSTGRES), parameters)
        assert result.batches is not None
        [each async for each in result.batches]
    assert isinstance(caught.value, QueryRejected | DefiniteError)
    return caught.value.position


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "marked",
    [
        "UPDATE t SET n = id + ¦nope",
        "UPDATE t -- why\n SET name = E'ü😀\\n', n = /* ü */ ¦nope",
        "UPDATE t SET n = 1 WHERE \"name\" = 'é'\n AND ¦nope > 1",
        "DELETE FROM t WHERE id::int8 = 1 OR\n ¦nope",
        "INSERT INTO t VALUES (5, 'é', 1 + 1), (6, DEFAULT, 1 +\n¦nope)",
        "INSERT INTO t SELECT id, $$é$$, ¦nope FROM t",
        "INSERT INTO t (id) SELECT ¦nope FROM v",
        "INSERT INTO t VALUES (1, DEFAULT, ¦nope) ON CONFLICT (id) DO NOTHING",
        "INSERT INTO t (id, name) VALUES (1, E'é\\n'), (2,  ¦nope) ON CONFLICT (id) DO NOTHING",
        "INSERT INTO t (id) SELECT id FROM t WHERE E'' = '' OR ¦nope ON CONFLICT (id) DO NOTHING",
        "INSERT INTO t (id) VALUES (1) ON CONFLICT (id)\n DO UPDATE SET name = 'é', n = ¦nope",
        "INSERT INTO t (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET n = 1 WHERE t.n > ¦nope",
        "MERGE INTO t USING t AS s ON t.id = ¦nope WHEN MATCHED THEN DELETE",
        "MERGE INTO t USING (SELECT ¦nope AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE",
        f"{MERGE} WHEN MATCHED AND 'é' = $$$$ AND ¦nope THEN DELETE",
        f"{MERGE} WHEN MATCHED THEN UPDATE SET name = 'é',\n n = 1 + ¦nope",
        f"{MERGE} WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.id, ¦nope)",
        "SELECT E'\\t', ¦nope FROM v",
        "DESCRIBE SELECT $$é$$, ¦nope FROM t",
        "EXPLAIN INCREMENTAL SELECT $$é$$, ¦nope FROM t",
        "CREATE VIEW w AS SELECT $$é$$, ¦nope FROM t",
        "CREATE MATERIALIZED VIEW w AS SELECT $$é$$, ¦nope FROM v",
        "CREATE TABLE w AS SELECT $$é$$, ¦nope FROM v",
        "SUBSCRIBE (SELECT $$é$$, ¦nope FROM t)",
        "SELECT 1 AS OF ¦nope",
    ],
)
async def test_an_error_points_at_what_was_written(
    marked: str, running: bool, changed: bool
) -> None:
    wanted = marked.index("¦")
    statement = marked.replace("¦", "")
    assert await position(statement, running=running, changed=changed) == wanted


async def test_parameters_before_the_error_count_as_they_were_written() -> None:
    for marked in (
        "UPDATE t SET name = $1, n = ¦nope",
        "UPDATE t SET n = 1 WHERE name IN ($2, $1::text) AND ¦nope",
        "INSERT INTO t VALUES ($1, $2, ¦nope) ON CONFLICT (id) DO NOTHING",
        f"{MERGE} WHEN MATCHED AND $1 = $2 THEN UPDATE SET name = $1, n = ¦nope",
        # One at fault itself.
        "UPDATE t SET name = 'a', n = ¦$3",
    ):
        statement = marked.replace("¦", "")
        found = await position(statement, "nope", "'a long text\n'", "(-1)", "nope")
        assert found == marked.index("¦"), marked


async def test_what_stands_around_one_expression_alone_is_at_the_expression() -> None:
    for marked, fault in (
        ("UPDATE t SET n = ¦name", "CAST(name"),
        ("INSERT INTO t VALUES (1, 'a', ¦1 + id)", "CAST(1 + id"),
        (f"{MERGE} WHEN MATCHED THEN UPDATE SET n = ¦t.name", "CAST(t.name"),
        (f"{MERGE} WHEN MATCHED AND ¦s.id THEN DELETE", "AND (s.id"),
        ("DELETE FROM t WHERE ¦id + 1", "WHERE id"),
        ("INSERT INTO t VALUES (1, 'a', 1) RETURNING ¦count(*), id + 1", "SELECT"),
    ):
        assert await position(marked.replace("¦", ""), fault) == marked.index("¦"), marked


async def test_an_expression_that_ends_too_early_is_told_of_at_its_end() -> None:
    for marked, fault in (
        ("UPDATE t SET n = 1 +¦ WHERE id = 1", " AS int"),
        ("INSERT INTO t VALUES (1, 'é' ||¦ , 1)", "string)"),
        ("UPDATE t SET n = id WHERE 1 +¦ ", ""),
        ("MERGE INTO t USING t AS s ON t.id =¦ WHEN MATCHED THEN DELETE", ") WHERE"),
        (f"{MERGE} WHEN MATCHED AND 1 +¦ THEN DELETE", ") THEN"),
        ("MERGE INTO t USING (SELECT 1 +¦ ) AS s ON t.id = s.n WHEN MATCHED THEN DELETE", ")) AS"),
        ("INSERT INTO t VALUES (1, 'a', 1) RETURNING n + 1, n +¦ ", ", `t`.penstock_row"),
    ):
        assert await position(marked.replace("¦", ""), fault) == marked.index("¦"), marked


async def test_what_nobody_wrote_has_no_place() -> None:
    assert await position("UPDATE t SET n = id", "SELECT") is None
    assert await position(f"{MERGE} WHEN MATCHED THEN DELETE", "FULL OUTER") is None
    merged = "INSERT INTO t VALUES (1, 'a', id) ON CONFLICT (id) DO NOTHING"
    assert await position(merged, "CAST(`excluded`.`id`") is None
    # In the query of a view, or in rows of the transaction.
    assert await position("SELECT * FROM v WHERE name > ''", "name FROM t") is None
    assert await position("UPDATE t SET n = id", "VALUES", changed=True) is None


async def test_errors_of_another_text_have_no_place() -> None:
    client: Any = FaultyClient("nope", running=False)
    session = SqlSession(client, Settings(), SqlDialect.POSTGRES)
    await session.execute(parse_statement("PREPARE p AS SELECT nope FROM t", SqlDialect.POSTGRES))
    statement = parse_statement("EXECUTE p", SqlDialect.POSTGRES)
    for run in (session.execute, session.describe):
        with pytest.raises(QueryRejected) as caught:
            await run(statement, ())
        assert caught.value.position is None
    client = FaultyClient("nope", running=True, late=True)
    session = SqlSession(client, Settings(), SqlDialect.POSTGRES)
    await session.execute(parse_statement("PREPARE p AS SELECT nope FROM t", SqlDialect.POSTGRES))
    result = await session.execute(parse_statement("EXECUTE p", SqlDialect.POSTGRES))
    assert result.batches is not None
    with pytest.raises(DefiniteError) as late:
        [each async for each in result.batches]
    assert late.value.position is None
    await session.execute(
        parse_statement("DECLARE c CURSOR WITH HOLD FOR SELECT nope FROM t", SqlDialect.POSTGRES)
    )
    with pytest.raises(DefiniteError) as late:
        await session.execute(parse_statement("FETCH ALL FROM c", SqlDialect.POSTGRES))
    assert late.value.position is None
    text = "PREPARE q AS UPDATE t SET"
    with pytest.raises(SqlSyntaxError) as refused:
        await session.execute(parse_statement(text, SqlDialect.POSTGRES))
    assert refused.value.position == len(text)


async def test_an_error_behind_the_first_rows_has_its_place() -> None:
    client: Any = FaultyClient("nope", running=True, late=True)
    session = SqlSession(client, Settings(), SqlDialect.POSTGRES)
    text = "SELECT $$é$$, nope FROM v"
    result = await session.execute(parse_statement(text, SqlDialect.POSTGRES))
    assert result.batches is not None
    with pytest.raises(DefiniteError) as caught:
        [each async for each in result.batches]
    assert caught.value.position == text.index("nope")


async def test_a_parameter_that_is_not_given_is_where_it_was_written() -> None:
    session = SqlSession(FaultyClient("", running=False), Settings(), SqlDialect.POSTGRES)  # type: ignore[arg-type]
    text = "UPDATE t SET n = 1 WHERE id = $2"
    with pytest.raises(SqlSyntaxError) as caught:
        await session.execute(parse_statement(text, SqlDialect.POSTGRES), [SqlParameter(1, "1")])
    assert caught.value.position == text.index("$2")


def test_a_text_that_was_changed_has_no_places() -> None:
    lexed = lex_text("SELECT a", SqlDialect.POSTGRES)
    part = MappedSql.of(TextSpan(lexed, 1, 2), to_spark(lexed.part(1, 2)))
    assert join_sql(", ", ["x", part, part]).place_of(6) == 7
    whole = concat_sql("SELECT ", part)
    assert whole.within("WITH b AS (SELECT a) (SELECT a)").place_of(29) == 7
    assert whole.within("WITH b AS (SELECT a) (SELECT a)").place_of(18) is None
    assert whole.within("SELECT b").parts == ()
    # Behind the last word.
    assert whole.place_of(8) == 8
    assert whole.place_of(9) is None
