"""A statement of thousands of parameters is worked on in a thread, a short one on the loop."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from pg_house import dsn_of, pg_table  # type: ignore[import-not-found]

from actors.doors.postgres.pg_server import connection, statement_preparation
from actors.doors.sql_session import write_statements
from actors.engine.sql.tokens import lex_sql
from actors.runtime.kernel.loop_delays import watch_loop
from tests.kit.loop_turns import bounded_turns

PLACES: list[tuple[Any, str]] = [
    (connection, "parse_statements"),
    (statement_preparation, "relations_of"),
    (statement_preparation, "infer_parameters"),
    (connection, "parse_parameters"),
    (connection, "spark_literal"),
    (write_statements, "_local_values"),
]


async def test_long_statements_leave_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage, and for short statements none."""
    monkeypatch.setattr("actors.doors.sql_session.offloading.LOOP_CHARACTERS_MAX", 8_192)
    seen: dict[str, set[int]] = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **more: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return function(*given, **more)

        return noted

    for module, name in PLACES:
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    async with pg_table(tmp_path, "CREATE TABLE t (x INT)") as (_, db):
        for count, is_long in ((2, False), (3_000, True)):
            seen.clear()
            text = "INSERT INTO t VALUES " + ", ".join(f"(${n})" for n in range(1, count + 1))
            cursor = await psycopg.AsyncRawCursor(db).execute(text, ["1"] * count)
            assert cursor.rowcount == count
            assert seen.keys() == {name for _, name in PLACES}
            here = {name for name, threads in seen.items() if threading.get_ident() in threads}
            assert here == (set() if is_long else set(seen))


async def test_a_loop_that_is_held_up_is_told() -> None:
    delays: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(watch_loop, delays.append)
        while not delays:
            await anyio.lowlevel.checkpoint()
        delays.clear()
        held_until = time.monotonic() + 0.1  # expires: so long the loop is held up
        while time.monotonic() < held_until:
            pass
        while not delays:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert delays[0] >= 0.05


MANY, FEWER = range(1, 30_001), range(1, 3_001)
LONG = {
    "insert": "INSERT INTO t VALUES " + ", ".join(f"(${n})" for n in MANY),
    "literals": "INSERT INTO t VALUES " + ", ".join(f"({n})" for n in MANY),
    # The in-memory engine reads these, much slower than Spark does.
    "select": f"SELECT x FROM t WHERE x IN ({', '.join(f'${n}' for n in FEWER)})",
    "delete": f"DELETE FROM t WHERE x IN ({', '.join(f'${n}' for n in FEWER)})",
    "script": "; ".join(f"INSERT INTO t VALUES ({n})" for n in range(1, 1_501)),
}


@pytest.mark.parametrize("name", LONG)
async def test_no_turn_of_the_loop_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("actors.doors.sql_session.offloading.LOOP_CHARACTERS_MAX", 8_192)
    async with pg_table(tmp_path, "CREATE TABLE t (x INT)") as (service, db):
        with bounded_turns():
            # The client has another loop: its own turns are not the service's.
            done = await anyio.to_thread.run_sync(execute, dsn_of(service), name)
        assert done
        found = await (await db.execute("SELECT count(*) FROM t")).fetchone()
        assert found == ({"literals": 30_000, "insert": 30_000, "script": 1_500}.get(name, 0),)


def execute(dsn: str, name: str) -> bool:
    with psycopg.connect(dsn, autocommit=True) as db:
        parameters = ["1"] * LONG[name].count("$") or None
        psycopg.RawCursor(db).execute(LONG[name].encode(), parameters)
        return True


async def test_a_long_turn_is_told() -> None:
    with pytest.raises(AssertionError, match="a turn of the loop took"), bounded_turns(20):
        await anyio.lowlevel.checkpoint()
        busy_until = time.thread_time() + 0.04  # of the processor, on any machine
        while time.thread_time() < busy_until:
            pass
        await anyio.lowlevel.checkpoint()


def test_tokens_are_nothing_for_the_collector() -> None:
    assert not any(gc.is_tracked(each) for each in lex_sql("SELECT $1, 'a' FROM t"))
