"""Prepared queries of one key: which are recognised, and what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pg_house import connected, pg_service  # type: ignore[import-not-found]

from actors.control.controller.reads.memory_reads import MemoryReads
from actors.doors.postgres.pg_server.point_statements import find_point
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire.type_oids import BOOL, FLOAT8, INT4, INT8, TEXT
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.measurement import ValueHistogram
from actors.runtime.metric_table import STATEMENT_SECONDS
from actors.service import Service

COLUMNS = {"id": "bigint", "kind": "int", "name": "string", "price": "double"}
SCHEMA = TableSchema(tuple(TableColumn(name, kind) for name, kind in COLUMNS.items()), ("id",))


def found(text: str, *oids: int) -> Any:
    statement: Any = parse_statement(text, SqlDialect.POSTGRES)
    return find_point(text, statement, oids, {"goods": SCHEMA})


def test_queries_of_one_key_are_recognised() -> None:
    point = found("SELECT name AS n, id FROM goods WHERE id = $1", INT8)
    assert (point.selection.key, point.selection.columns) == (("id",), ("name", "id"))
    assert (point.names, point.key([7])) == (("n", "id"), [7])
    point = found("SELECT * FROM public.goods g WHERE g.name = $2 AND kind = $1", INT4, TEXT)
    assert (point.selection.key, point.key([3, "x"])) == (("name", "kind"), ["x", 3])
    point = found("SELECT id FROM goods WHERE kind = 5 AND id = $1", INT8)
    assert point.key([9]) == [5, 9]
    assert found("SELECT id FROM goods WHERE id = 5").key([]) == [5]


@pytest.mark.parametrize(
    ("text", "oids"),
    [
        ("SELECT id FROM goods WHERE id > $1", (INT8,)),
        ("SELECT id FROM goods WHERE id = $1 OR id = $2", (INT8, INT8)),
        ("SELECT id FROM goods WHERE id = $1 AND id = $2", (INT8, INT8)),
        ("SELECT id FROM goods WHERE id = $1 + $2", (INT8, INT8)),
        ("SELECT id, $2 FROM goods WHERE id = $1", (INT8, INT8)),
        ("SELECT id FROM goods WHERE id = $1 ORDER BY name", (INT8,)),
        ("SELECT count(*) FROM goods WHERE id = $1", (INT8,)),
        ("SELECT id FROM goods", ()),
        ("SELECT id FROM goods WHERE price = $1", (FLOAT8,)),
        ("SELECT id FROM goods WHERE id = $1 AS OF 5", (INT8,)),
        ("SELECT id FROM others WHERE id = $1", (INT8,)),
        ("SELECT id FROM goods WHERE id = $1", (BOOL,)),
        # The example that stands for $1 must not be taken for the text's own number.
        ("SELECT id FROM goods WHERE id = 30000 AND kind = $1", (INT4,)),
    ],
)
def test_other_queries_are_not(text: str, oids: tuple[int, ...]) -> None:
    assert found(text, *oids) is None


async def test_rows_of_a_key_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    original = MemoryReads.find

    def watched(self: MemoryReads, *given: Any) -> Any:
        rows = original(self, *given)
        answers.append(rows is not None)
        return rows

    monkeypatch.setattr(MemoryReads, "find", watched)
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE goods (id BIGINT, kind INT, name STRING, PRIMARY KEY (id))")
        await db.execute("CREATE INDEX ON goods (kind)")
        text = "SELECT name, id FROM goods WHERE kind = %s"
        for number in range(300):
            await db.execute(
                "INSERT INTO goods VALUES (%s, %s, %s)", (number, number % 100, f"n{number}")
            )
            # Each read sees the write that was acknowledged before it, whichever way it goes.
            rows = await (await db.execute(text, (number % 100,), prepare=True)).fetchall()
            wanted = [(f"n{n}", n) for n in range(number + 1) if n % 100 == number % 100]
            assert sorted(rows) == sorted(wanted)
        nothing = await (await db.execute(text, (777,), prepare=True)).fetchall()
        assert nothing == []
        assert any(answers)
        cursor = db.cursor(binary=True)
        await cursor.execute(text, (99,), prepare=True)
        assert [column.name for column in cursor.description or ()] == ["name", "id"]
        await db.execute("DELETE FROM goods WHERE id = 99")
        rows = await (await db.execute(text, (99,), prepare=True)).fetchall()
        assert sorted(rows) == [("n199", 199), ("n299", 299)]
        # A transaction reads at its own time: another session's write is not in it.
        async with await connected(service) as other, db.transaction():
            mine = await (await db.execute(text, (98,), prepare=True)).fetchall()
            await other.execute("INSERT INTO goods VALUES (1098, 98, 'late')")
            assert await (await db.execute(text, (98,), prepare=True)).fetchall() == mine
        assert len(await (await db.execute(text, (98,), prepare=True)).fetchall()) == 4
        # Each statement is counted once, whichever way it went.
        before = _statements(service)
        fast = len(answers)
        for _ in range(5):
            await db.execute("SELECT name FROM goods WHERE id = %s", (97,), prepare=True)
        assert any(answers[fast:])
        assert _statements(service) == before + 5


def _statements(service: Service) -> int:
    """How many statements of PostgreSQL's clients were counted."""
    [durations] = [
        each.value
        for each in service.measures()
        if (each.metric, each.labels) == (STATEMENT_SECONDS, ("postgresql",))
    ]
    assert isinstance(durations, ValueHistogram)
    return sum(durations.counts)
