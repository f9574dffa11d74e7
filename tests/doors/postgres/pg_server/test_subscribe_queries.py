"""SUBSCRIBE of queries through the door for PostgreSQL's clients, to each kind of end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from pg_house import connected, pg_service  # type: ignore[import-not-found]

from actors import Client
from actors.model.protocol.api import CreateView
from actors.model.protocol.relations import is_subscribed_view
from actors.service import Service

TABLE = "CREATE TABLE orders (id BIGINT, customer STRING, amount BIGINT, PRIMARY KEY (id))"
COUNTS = "SELECT customer, count(*) AS n FROM orders GROUP BY customer"
SECONDS = 60


async def rows(db: psycopg.AsyncConnection[Any], text: str) -> list[tuple[Any, ...]]:
    return await (await db.execute(text)).fetchall()


@contextlib.asynccontextmanager
async def with_orders(
    folder: Path, *, on_spark: bool = False
) -> AsyncIterator[tuple[Service, psycopg.AsyncConnection[Any]]]:
    """A service with two orders, and a connection."""
    async with pg_service(folder, on_spark=on_spark) as service, await connected(service) as db:
        await db.execute(TABLE)
        await db.execute("INSERT INTO orders VALUES (1, 'ann', 5), (2, 'bob', 7)")
        yield service, db


async def views_of_subscribes(service: Service) -> list[str]:
    async with await Client.in_process(service) as client:
        return [e.name for e in (await client.status()).objects if is_subscribed_view(e.name)]


async def until_none_is_left(service: Service) -> None:
    with anyio.fail_after(SECONDS):
        while await views_of_subscribes(service):
            await anyio.sleep(0.02)


async def fetched(
    db: psycopg.AsyncConnection[Any], count: int, cursor: str = "c"
) -> list[tuple[Any, ...]]:
    """The next `count` rows of a cursor."""
    found: list[tuple[Any, ...]] = []
    with anyio.fail_after(SECONDS):
        while len(found) < count:
            found += await rows(db, f"FETCH {count - len(found)} {cursor}")
    return found


# -- plain queries ---------------------------------------------------------------------------------


async def test_a_plain_query_needs_no_view(tmp_path: Path) -> None:
    async with (
        with_orders(tmp_path) as (service, db),
        await connected(service) as other,
        db.transaction(),
    ):
        await db.execute(
            "DECLARE c CURSOR FOR SUBSCRIBE (SELECT customer AS who FROM orders WHERE amount > 5)"
        )
        assert await views_of_subscribes(service) == []
        assert [row[1:] for row in await fetched(db, 1)] == [(1, "bob")]
        # Nothing that is shown changes, then a row comes into sight and one goes out of it.
        await other.execute("UPDATE orders SET amount = 8 WHERE id = 2")
        await other.execute("UPDATE orders SET amount = 6 WHERE id = 1")
        await other.execute("UPDATE orders SET amount = 1 WHERE id = 2")
        found = await fetched(db, 2)
        assert [row[1:] for row in found] == [(1, "ann"), (-1, "bob")]


async def test_its_columns_are_described_without_a_view(tmp_path: Path) -> None:
    async with with_orders(tmp_path) as (service, db):
        for query, names in {
            "SELECT id AS number FROM orders": ["number"],
            COUNTS: ["customer", "n"],
        }.items():
            text = f"SUBSCRIBE ({query}) WITH (PROGRESS)".encode()
            await db.execute("SELECT 1")
            connection = db.pgconn
            connection.send_prepare(b"s", text)
            await answered(db)
            connection.send_describe_prepared(b"s")
            described = await answered(db)
            found = [described.fname(place) for place in range(described.nfields)]
            assert found[:3] == [b"__time", b"__progressed", b"__diff"]
            assert [(name or b"").decode() for name in found[3:]] == names
            await db.execute("DEALLOCATE ALL")
            connection.send_close_prepared(b"s")
            await answered(db)
        assert await views_of_subscribes(service) == []


async def answered(db: psycopg.AsyncConnection[Any]) -> Any:
    """The one result of what was sent."""
    connection = db.pgconn
    while connection.flush():
        await anyio.wait_writable(connection.socket)
    found = None
    while True:
        connection.consume_input()
        while not connection.is_busy():
            result = connection.get_result()
            if result is None:
                assert found is not None
                return found
            found = result
        await anyio.wait_readable(connection.socket)


# -- queries with a view of their own --------------------------------------------------------------


FOLLOWED = [(1, "ann", 1), (1, "bob", 1), (-1, "ann", 1), (1, "ann", 2)]
"""The changes of `COUNTS`: those of the contents sorted, then those of a write."""


async def followed_to_the_end(folder: Path, *, on_spark: bool) -> list[tuple[Any, ...]]:
    """Returns the changes that came, those of one time sorted."""
    async with (
        with_orders(folder, on_spark=on_spark) as (service, db),
        await connected(service) as other,
    ):
        async with db.transaction():
            await db.execute(f"DECLARE c CURSOR FOR SUBSCRIBE ({COUNTS})")
            first = await fetched(db, 2)
            (name,) = await views_of_subscribes(service)
            await other.execute("INSERT INTO orders VALUES (3, 'ann', 1)")
            then = await fetched(db, 2)
            assert len({row[0] for row in then}) == 1
            await nowhere_shown(other, name)
            await db.execute("CLOSE c")
            assert await views_of_subscribes(service) == []
        assert await rows(other, "SELECT count(*) AS n FROM orders") == [(3,)]
        return [*sorted(row[1:] for row in first), *sorted(row[1:] for row in then)]


async def nowhere_shown(db: psycopg.AsyncConnection[Any], name: str) -> None:
    for text in ("SHOW TABLES", "SHOW MATERIALIZED VIEWS"):
        assert name not in {row[1] for row in await rows(db, text)}
    assert await rows(db, f"SELECT relname FROM pg_class WHERE relname = '{name}'") == []
    with pytest.raises(psycopg.errors.UndefinedTable):
        await db.execute(f"DESCRIBE {name}")


async def test_any_query_is_followed(tmp_path: Path) -> None:
    assert await followed_to_the_end(tmp_path, on_spark=False) == FOLLOWED


@pytest.mark.spark
@pytest.mark.long
async def test_any_query_is_followed_on_spark(tmp_path: Path) -> None:
    assert await followed_to_the_end(tmp_path, on_spark=True) == FOLLOWED


@pytest.mark.spark
@pytest.mark.long
async def test_faults_of_a_query_have_their_place(tmp_path: Path) -> None:
    async with with_orders(tmp_path, on_spark=True) as (service, db):
        text = 'COPY (SUBSCRIBE (\n  SELECT "customer",\n    nothing FROM orders)) TO STDOUT'
        with pytest.raises(psycopg.errors.UndefinedColumn) as caught:
            async with db.cursor() as cursor, cursor.copy(text.encode()):
                pass
        assert caught.value.diag.statement_position == str(text.index("nothing") + 1)
        assert await views_of_subscribes(service) == []


async def test_a_copy_ends_with_the_statement_that_is_canceled(tmp_path: Path) -> None:
    async with with_orders(tmp_path) as (service, db):
        began, caught = anyio.Event(), list[BaseException]()

        async def follow() -> None:
            try:
                async with (
                    db.cursor() as cursor,
                    cursor.copy(f"COPY (SUBSCRIBE ({COUNTS})) TO STDOUT".encode()) as copy,
                ):
                    async for _ in copy:
                        began.set()
            except psycopg.errors.QueryCanceled as error:
                caught.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await began.wait()
            assert len(await views_of_subscribes(service)) == 1
            await db.cancel_safe()
        assert caught
        assert await views_of_subscribes(service) == [], "before the client was told"


async def test_a_connection_that_is_lost_leaves_no_view(tmp_path: Path) -> None:
    async with with_orders(tmp_path) as (service, _):
        lost = await connected(service)
        await lost.execute("BEGIN")
        await lost.execute(f"DECLARE c CURSOR FOR SUBSCRIBE ({COUNTS})")
        assert len(await views_of_subscribes(service)) == 1
        # Nothing is sent that says so: the socket is closed.
        lost.pgconn.finish()
        await until_none_is_left(service)


async def test_the_end_of_a_transaction_ends_its_cursors(tmp_path: Path) -> None:
    async with with_orders(tmp_path) as (service, db):
        for last in ("COMMIT", "ROLLBACK"):
            await db.execute("BEGIN")
            await db.execute(f"DECLARE c CURSOR FOR SUBSCRIBE ({COUNTS})")
            assert len(await views_of_subscribes(service)) == 1
            await db.execute(last)
            assert await views_of_subscribes(service) == []


async def test_an_object_that_is_dropped_ends_what_reads_it(tmp_path: Path) -> None:
    async with with_orders(tmp_path) as (service, db), await connected(service) as other:
        with pytest.raises(psycopg.errors.UndefinedTable, match="the query was dropped"):
            async with db.transaction():
                await db.execute(f"DECLARE c CURSOR FOR SUBSCRIBE ({COUNTS})")
                await fetched(db, 2)
                await other.execute("DROP TABLE orders")
                await fetched(db, 1)
        assert await views_of_subscribes(service) == []
        assert await rows(other, "SHOW TABLES") == []


async def test_a_client_of_the_service_that_is_gone_leaves_no_view(tmp_path: Path) -> None:
    async with with_orders(tmp_path) as (service, _):
        client = await Client.in_process(service)
        await client.submit(CreateView(0, "__subscribe_ab", COUNTS, for_subscribe=True))
        assert await views_of_subscribes(service) == ["__subscribe_ab"]
        await client.aclose()
        await until_none_is_left(service)


# -- times and progress ----------------------------------------------------------------------------


async def copied(db: psycopg.AsyncConnection[Any], text: str) -> list[list[str | None]]:
    """All rows of a COPY, as texts."""
    async with db.cursor() as cursor, cursor.copy(text.encode()) as copy:
        with anyio.fail_after(SECONDS):
            return [list(row) async for row in copy.rows()]


@pytest.mark.parametrize("query", ["SELECT customer, amount FROM orders WHERE amount > 5", COUNTS])
async def test_between_two_times(tmp_path: Path, query: str) -> None:
    async with (
        with_orders(tmp_path) as (service, db),
        await Client.in_process(service) as client,
    ):
        row = {"id": 3, "customer": "ann", "amount": 9}
        before = (await client.status()).tables_upper - 1
        first = await client.insert("orders", [row])
        second = await client.insert("orders", [row | {"id": 4}])
        third = await client.insert("orders", [row | {"id": 5}])
        times = f"AS OF {before} UP TO {third}"
        found = await copied(db, f"COPY (SUBSCRIBE ({query}) {times}) TO STDOUT")
        at = [int(each[0] or 0) for each in found]
        assert set(at) == {before, first, second}
        assert sum(int(each[1] or 0) for each in found if int(each[0] or 0) == before) >= 1
        # Without the contents, only what has changed since.
        flags = "WITH (SNAPSHOT = false)"
        found = await copied(db, f"COPY (SUBSCRIBE ({query}) {flags} {times}) TO STDOUT")
        assert {int(each[0] or 0) for each in found} == {first, second}
        assert await views_of_subscribes(service) == []


@pytest.mark.parametrize("query", ["SELECT customer FROM orders", COUNTS])
async def test_progress_says_up_to_where_all_was_told(tmp_path: Path, query: str) -> None:
    async with with_orders(tmp_path) as (service, db):
        async with await Client.in_process(service) as client:
            time = await client.insert("orders", [{"id": 3, "customer": "ann", "amount": 9}])
            await client.insert("orders", [{"id": 4, "customer": "eve", "amount": 9}])
        times = f"WITH (PROGRESS) AS OF {time} UP TO {time + 1}"
        found = await copied(db, f"COPY (SUBSCRIBE ({query}) {times}) TO STDOUT")
        changes = [each for each in found if each[1] == "f"]
        assert {each[0] for each in changes} == {str(time)}
        assert {each[3] for each in changes} == {"ann", "bob"}
        last = found[-1]
        assert last[1:] == ["t", *[None] * (len(last) - 2)]
        assert int(last[0] or 0) > time


@pytest.mark.parametrize("query", ["SELECT customer FROM orders", COUNTS])
async def test_times_that_cannot_be_are_refused(tmp_path: Path, query: str) -> None:
    async with with_orders(tmp_path) as (service, db):
        with pytest.raises(psycopg.Error) as caught:
            await copied(db, f"COPY (SUBSCRIBE ({query}) AS OF 5 UP TO 5) TO STDOUT")
        assert "__subscribe" not in str(caught.value)
        assert await views_of_subscribes(service) == []


ENDLESS = f"SUBSCRIBE ({COUNTS})"


@pytest.mark.parametrize("text", [f"COPY ({ENDLESS}) TO STDOUT", ENDLESS])
async def test_a_client_that_leaves_while_nothing_changes_is_noticed(
    tmp_path: Path, text: str
) -> None:
    async with with_orders(tmp_path) as (service, _):
        gone = await connected(service)
        gone.pgconn.send_query(text.encode())
        while gone.pgconn.flush():
            await anyio.wait_writable(gone.pgconn.socket)
        with anyio.fail_after(SECONDS):
            while not (views := await views_of_subscribes(service)):
                await anyio.sleep(0.02)
        assert len(views) == 1
        gone.pgconn.finish()
        await until_none_is_left(service)
        assert await views_of_subscribes(service) == []
