"""A MERGE by keys does what the same MERGE does on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.doors.client.client import Client
from actors.doors.sql_session import SqlSession, merge_statements
from actors.doors.sql_session.keyed_merge import read_keyed_merge
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.tokens import SqlDialect
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives

pytestmark = [pytest.mark.spark, pytest.mark.long]

TABLE = "CREATE TABLE {} (id INT PRIMARY KEY, name TEXT, x FLOAT8, d NUMERIC(8,2), at TIMESTAMPTZ)"
ROWS = (
    "INSERT INTO {} VALUES (1, 'a', 0.5, 1.25, NULL), (2, 'b', NULL, 3, '2020-01-01 00:00:00+00')"
)
SOURCE = "(SELECT * FROM (VALUES {rows}) AS v (id, name, x, d, at)) AS s"
FOUND = (
    "(2, 'it''s', 1.5, 7.0, '2021-02-03 04:05:06.5+00'), (9, NULL, NULL, -2.5, NULL), "
    "(NULL, 'n', 1.0, 1.0, NULL)"
)
MERGES = (
    "WHEN MATCHED THEN UPDATE SET name = s.name, x = s.x, d = s.d, at = s.at",
    "WHEN MATCHED THEN UPDATE SET *",
    "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN DO NOTHING",
    "WHEN NOT MATCHED THEN INSERT (id, d, name) VALUES (s.id, s.d, s.name)",
    "WHEN MATCHED THEN UPDATE SET x = 3, name = NULL WHEN NOT MATCHED THEN INSERT *",
)


async def test_both_ways_make_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = for_short_lives(
        Settings(state_dir=str(tmp_path), listen="127.0.0.1:0", spark_master="local[2]")
    )
    taken: list[bool] = []
    async with Service(settings) as service, await Client.in_process(service) as client:
        session = SqlSession(client, settings, SqlDialect.POSTGRES)
        for number, clauses in enumerate(MERGES):
            made = []
            # A key that is NULL is no row: those are left out where rows are inserted.
            found = FOUND if "INSERT" not in clauses else FOUND.rpartition(", (NULL")[0]
            for way in ("keys", "spark"):
                name = f"{way}{number}"

                def read(*given: Any, way: str = way) -> Any:
                    merge = read_keyed_merge(*given) if way == "keys" else None
                    taken.append(merge is not None)
                    return merge

                monkeypatch.setattr(merge_statements, "read_keyed_merge", read)
                await session.execute(parse_statement(TABLE.format(name), session.context.dialect))
                await session.execute(parse_statement(ROWS.format(name), session.context.dialect))
                source = SOURCE.format(rows=found)
                text = f"MERGE INTO {name} AS t USING {source} ON s.id = t.id {clauses}"
                statement = parse_statement(text, session.context.dialect)
                taken.clear()
                result = await session.execute(statement)
                assert taken == [way == "keys"]
                rows = (await client.peek(name, order_by=["id"])).to_pylist()
                made.append((result.tag, rows))
            assert made[0] == made[1], clauses
        await session.close()
