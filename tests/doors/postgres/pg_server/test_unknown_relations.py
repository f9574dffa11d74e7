"""Parse refuses a statement over what is not there, as PostgreSQL does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import psycopg
from pg_house import pg_table  # type: ignore[import-not-found]

UNKNOWN = [
    "SELECT * FROM nowhere",
    "SELECT * FROM t WHERE EXISTS (SELECT 1 FROM public.nowhere)",
    "WITH q AS (SELECT * FROM nowhere) SELECT * FROM q",
    "INSERT INTO nowhere VALUES ($1)",
    "UPDATE nowhere SET x = 1",
    "DELETE FROM t WHERE x IN (SELECT x FROM nowhere)",
]
KNOWN = [
    "SELECT * FROM T",
    "WITH q AS (SELECT x FROM t) SELECT * FROM q",
    "INSERT INTO public.t VALUES ($1)",
    "SELECT * FROM penstock.objects",
    "CREATE VIEW v AS SELECT * FROM later",
]
TEXTS = [*UNKNOWN, *KNOWN]


async def test_parse_looks_for_relations(tmp_path: Path) -> None:
    """Parse alone: nothing is described, bound or executed."""
    async with pg_table(tmp_path, "CREATE TABLE t (x INT)") as (_, db):
        answers = {text: await anyio.to_thread.run_sync(prepared, db, text) for text in TEXTS}
    assert answers == {text: None if text in KNOWN else "42P01" for text in TEXTS}


def prepared(db: psycopg.AsyncConnection[Any], text: str) -> str | None:
    """The SQLSTATE of a Parse in a session of its own; None if it is taken."""
    with psycopg.connect(db.info.dsn, autocommit=True) as connection:
        wire = connection.pgconn
        wire.send_prepare(b"", text.encode())
        states = []
        while (result := answer(wire)) is not None:
            states.append(result.error_field(psycopg.pq.DiagnosticField.SQLSTATE))
        (state,) = states
        return None if state is None else state.decode()


def answer(wire: Any) -> Any:
    """The next result, waited for without holding up the service in the same process."""
    while wire.is_busy():
        wire.consume_input()
    return wire.get_result()
