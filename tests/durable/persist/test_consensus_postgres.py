"""Documents in PostgreSQL when it fails: what is said of a set's outcome is what has happened."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import psycopg
import pytest
from msgspec.structs import replace
from store_houses import SETTINGS  # type: ignore[import-not-found]

from actors.durable.persist import consensus_postgres
from actors.durable.persist.consensus_postgres import PostgresConsensus
from actors.durable.persist.location import CompareAndSet, VersionedData, WatchedConsensus
from actors.durable.persist.postgres_link import PostgresAddress, postgres_address
from actors.runtime.errors import InvalidUsage, StorageError, StoreFull
from actors.testing.postgres_server import PostgresServer
from tests.kit.proxy import TcpProxy

pytestmark = pytest.mark.usefixtures("patient_loop")

_NUMBERS = itertools.count()
IMPATIENT_MS = 3_000  # expires: on a patient loop, and the server does little
"""Where the server is not to answer in time. The requests that it answers there have it, too; half
of it for a lock."""


class House:
    """A schema of its own, and a session of the superuser's beside its clients."""

    def __init__(self, server: PostgresServer, sql: psycopg.AsyncConnection[Any]) -> None:
        self.server = server
        self.sql = sql
        self.schema = f"h{next(_NUMBERS)}"

    def url(self, port: int | None = None, user: str = "bench") -> str:
        port = self.server.port if port is None else port
        return f"postgresql://{user}@127.0.0.1:{port}/postgres?schema={self.schema}"

    @asynccontextmanager
    async def client(
        self, port: int | None = None, number: int = 0, **changes: Any
    ) -> AsyncIterator[PostgresConsensus]:
        limits = replace(SETTINGS, **changes)
        made = PostgresConsensus(postgres_address(self.url(port)), limits, Random(number))
        await made.open()
        try:
            yield made
        finally:
            await made.close()

    async def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = await self.sql.execute(statement.encode(), values or None)
        return await cursor.fetchall() if cursor.description else []

    async def at_commit(self, what: str) -> None:
        """What happens when a set is committed."""
        await self.run(
            f"CREATE FUNCTION {self.schema}.at_commit() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$BEGIN {what}; RETURN NULL; END$$"
        )
        await self.run(
            f"CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON {self.schema}.documents"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            f" EXECUTE FUNCTION {self.schema}.at_commit()"
        )

    async def at_insert(self, what: str) -> None:
        """What happens when a set inserts, before it is committed."""
        await self.run(
            f"CREATE FUNCTION {self.schema}.at_insert() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$BEGIN {what}; RETURN NEW; END$$"
        )
        await self.run(
            f"CREATE TRIGGER at_insert BEFORE INSERT ON {self.schema}.documents"
            f" FOR EACH ROW EXECUTE FUNCTION {self.schema}.at_insert()"
        )

    async def waiting(self) -> int:
        """The process of a session that waits for a lock."""
        while True:
            found = await self.run(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND application_name = 'penstock'"
            )
            if found:
                pid: int = found[0][0]
                return pid

    async def end_sessions(self) -> None:
        """Ends those of all clients."""
        await self.run(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE application_name = 'penstock'"
        )


@pytest.fixture
async def house(postgres: PostgresServer) -> AsyncIterator[House]:
    async with await psycopg.AsyncConnection.connect(postgres.conninfo(), autocommit=True) as sql:
        yield House(postgres, sql)


async def test_documents_are_compressed_by_lz4_where_the_server_can(house: House) -> None:
    """Its own compression takes as long as a commit, and documents are written whole."""
    (can,) = await house.run(
        "SELECT coalesce(bool_or('lz4' = ANY (enumvals)), false) FROM pg_settings"
        " WHERE name = 'default_toast_compression'"
    )
    async with house.client() as client:
        document = b"abc" * 30_000
        assert await client.compare_and_set([CompareAndSet("a", None, document)])
        found = await client.head("a")
        assert found is not None
        assert found.data == document
    (how,) = await house.run(
        f"SELECT pg_column_compression(data) FROM {house.schema}.documents WHERE key = 'a'"
    )
    assert how == ("lz4" if can[0] else "pglz",)


async def test_a_server_without_lz4_serves_too(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsupported, unknown = "seqno SET COMPRESSION lz4", "data SETS COMPRESSION lz4"
    for refused in (unsupported, unknown):
        monkeypatch.setattr(
            consensus_postgres, "_PACK", f"ALTER TABLE {{table}} ALTER COLUMN {refused}"
        )
        house.schema = f"{house.schema}_x"
        async with house.client() as client:
            assert await client.compare_and_set(
                [CompareAndSet("a", None, b"1"), CompareAndSet("b", None, b"2")]
            )
            assert await client.list_keys() == ["a", "b"]


async def test_an_error_of_commit_leaves_the_outcome_open(house: House) -> None:
    async with house.client() as client:
        await house.at_commit("RAISE EXCEPTION 'not today'")
        with pytest.raises(StorageError, match="not today") as caught:
            await client.compare_and_set([CompareAndSet("a", None, b"")])
        assert not caught.value.determinate
        assert await client.head("a") is None
        await house.run(f"DROP TRIGGER at_commit ON {house.schema}.documents")
        assert await client.compare_and_set([CompareAndSet("a", None, b"")])


@pytest.mark.parametrize(
    ("errcode", "kind"), [("P0001", StorageError), ("53100", StoreFull), ("XX001", StorageError)]
)
async def test_an_error_before_commit_means_that_nothing_happened(
    house: House, errcode: str, kind: type[StorageError]
) -> None:
    async with house.client() as client:
        await house.at_insert(
            "IF NEW.key = 'bad' THEN"
            f" RAISE EXCEPTION 'not this' USING ERRCODE = '{errcode}'; END IF"
        )
        with pytest.raises(StorageError, match="not this") as caught:
            await client.compare_and_set(
                [CompareAndSet("fine", None, b""), CompareAndSet("bad", None, b"")]
            )
        assert type(caught.value) is kind
        assert caught.value.determinate
        assert await client.list_keys() == []
        assert await client.compare_and_set([CompareAndSet("fine", None, b"")])


async def test_a_session_that_is_ended_within_commit_leaves_the_outcome_open(house: House) -> None:
    async with house.client() as client:
        await house.at_commit("PERFORM pg_advisory_xact_lock(1, 1)")
        failures: list[StorageError] = []

        async def write() -> None:
            with pytest.raises(StorageError) as caught:
                await client.compare_and_set([CompareAndSet("a", None, b"")])
            failures.append(caught.value)

        await house.run("SELECT pg_advisory_lock(1, 1)")
        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await house.run("SELECT pg_terminate_backend(%s, 10000)", await house.waiting())
        await house.run("SELECT pg_advisory_unlock(1, 1)")
        assert [failure.determinate for failure in failures] == [False]
        assert await client.head("a") is None
        assert await client.compare_and_set([CompareAndSet("a", None, b"")])


async def test_sessions_that_ended_while_idle_are_not_noticed(house: House) -> None:
    async with house.client() as client:
        assert await client.compare_and_set([CompareAndSet("a", None, b"0")])
        await house.end_sessions()
        assert await client.compare_and_set([CompareAndSet("a", 0, b"1")])
        await house.end_sessions()
        assert await client.head("a") == VersionedData(1, b"1")


async def test_who_waits_too_long_for_a_lock_has_changed_nothing(house: House) -> None:
    limits = {"store_request_timeout_ms": IMPATIENT_MS, "store_request_retries_max": 1}
    async with house.client(**limits) as client:
        await house.run("SELECT pg_advisory_lock(%s)", client._lock_of("a"))
        with pytest.raises(StorageError, match="lock") as caught:
            await client.compare_and_set(
                [CompareAndSet("b", None, b""), CompareAndSet("a", None, b"")]
            )
        assert caught.value.determinate
        assert await client.compare_and_set([CompareAndSet("c", None, b"")])
        await house.run("SELECT pg_advisory_unlock(%s)", client._lock_of("a"))
        assert await client.compare_and_set(
            [CompareAndSet("b", None, b""), CompareAndSet("a", None, b"")]
        )


async def test_who_comes_after_a_cancelled_task_gets_answers_of_its_own(house: House) -> None:
    """A task's own cancel is not held off by a shield: it left its transaction on the session."""
    async with house.client() as client:
        await house.run("SELECT pg_advisory_lock(%s)", client._lock_of("a"))
        first = asyncio.create_task(client.compare_and_set([CompareAndSet("a", None, b"1")]))
        await house.waiting()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not await client.compare_and_set([CompareAndSet("b", 7, b"")])
        assert await client.compare_and_set([CompareAndSet("c", None, b"3")])
        await house.run("SELECT pg_advisory_unlock(%s)", client._lock_of("a"))
        assert await client.compare_and_set([CompareAndSet("a", None, b"2")])
        held = [await client.head(key) for key in "abc"]
        assert held == [VersionedData(0, b"2"), None, VersionedData(0, b"3")]


async def test_an_answer_that_is_lost_leaves_the_outcome_open(house: House) -> None:
    """The server commits, and nobody hears of it."""
    async with TcpProxy("127.0.0.1:0", f"127.0.0.1:{house.server.port}") as proxy:
        port = int(proxy.address.rpartition(":")[2])
        limits = {"store_request_timeout_ms": IMPATIENT_MS}
        async with house.client(port, **limits) as client, house.client(number=1) as other:
            assert await client.compare_and_set([CompareAndSet("a", None, b"0")])
            proxy.stop_reading("target")
            with pytest.raises(StorageError, match="did not respond") as caught:
                await client.compare_and_set([CompareAndSet("a", 0, b"1")])
            assert not caught.value.determinate
            assert await other.head("a") == VersionedData(1, b"1")
            proxy.heal()
            assert not await client.compare_and_set([CompareAndSet("a", 0, b"1")])


async def test_a_server_that_hangs_holds_nobody(house: House) -> None:
    turns = 0
    async with TcpProxy("127.0.0.1:0", f"127.0.0.1:{house.server.port}") as proxy:
        port = int(proxy.address.rpartition(":")[2])
        limits = {"store_request_timeout_ms": IMPATIENT_MS, "store_request_retries_max": 0}
        async with house.client(port, **limits) as client:
            assert await client.compare_and_set([CompareAndSet("a", None, b"0")])
            assert await client.head("a") == VersionedData(0, b"0")
            proxy.vanish()

            async def tick() -> None:
                nonlocal turns
                while True:
                    await anyio.sleep(0.001)
                    turns += 1

            async def fails(call: Any, determinate: bool) -> None:
                with pytest.raises(StorageError, match="did not respond") as caught:
                    await call
                assert caught.value.determinate is determinate

            with anyio.fail_after(200):
                async with anyio.create_task_group() as group:
                    group.start_soon(tick)
                    async with anyio.create_task_group() as calls:
                        calls.start_soon(fails, client.head("a"), True)
                        calls.start_soon(fails, client.list_keys(), True)
                        calls.start_soon(
                            fails, client.compare_and_set([CompareAndSet("a", 0, b"")]), False
                        )
                    group.cancel_scope.cancel()
            assert turns > 20
            proxy.heal()
            # What hung may arrive at last, before we look or after.
            held = await client.head("a")
            assert held in (VersionedData(0, b"0"), VersionedData(1, b""))
            if not await client.compare_and_set([CompareAndSet("a", held.seqno, b"then")]):
                assert held.seqno == 0
                assert await client.head("a") == VersionedData(1, b"")
                assert await client.compare_and_set([CompareAndSet("a", 1, b"then")])


async def test_two_clients_that_take_keys_in_other_orders_never_block_each_other(
    house: House,
) -> None:
    wins = 0
    async with house.client() as one, house.client(number=1) as other:

        async def write(client: PostgresConsensus, keys: list[str]) -> None:
            nonlocal wins
            for _ in range(15):
                seqnos = []
                for key in keys:
                    held = await client.head(key)
                    seqnos.append(None if held is None else held.seqno)
                ops = [
                    CompareAndSet(key, seqno, b"") for key, seqno in zip(keys, seqnos, strict=True)
                ]
                if await client.compare_and_set(ops):
                    wins += 1

        async with anyio.create_task_group() as group:
            for client, keys in ((one, "abc"), (other, "cba"), (one, "bca"), (other, "acb")):
                group.start_soon(write, client, list(keys))
        held = [await one.head(key) for key in "abc"]
        assert held == [VersionedData(wins - 1, b"")] * 3


async def test_who_waits_for_a_lock_holds_no_later_one(house: House) -> None:
    """So nobody waits in a circle, whatever order a set names its keys in."""
    async with house.client() as client:
        first, last = sorted("ab", key=client._lock_of)
        await house.run("SELECT pg_advisory_lock(%s)", client._lock_of(first))
        async with anyio.create_task_group() as group:
            ops = [CompareAndSet(last, None, b""), CompareAndSet(first, None, b"")]
            group.start_soon(client.compare_and_set, ops)
            await house.waiting()
            found = await house.run("SELECT pg_try_advisory_lock(%s)", client._lock_of(last))
            assert found == [(True,)]
            await house.run("SELECT pg_advisory_unlock_all()")
        assert await client.list_keys() == ["a", "b"]


async def next_of(changes: AsyncGenerator[str | None, None]) -> str | None:
    with anyio.fail_after(200):
        return await anext(changes)


async def test_changes_of_others_are_heard(house: House) -> None:
    async with house.client() as one, house.client(number=1) as other:
        assert isinstance(one, WatchedConsensus)
        async with aclosing(one.changes()) as changes:
            assert await next_of(changes) is None
            assert await one.compare_and_set([CompareAndSet("mine", None, b"")])
            assert not await other.compare_and_set(
                [CompareAndSet("mine", None, b""), CompareAndSet("no", None, b"")]
            )
            assert await other.compare_and_set(
                [CompareAndSet("ü b", None, b"1"), CompareAndSet("c", None, b"")]
            )
            assert {await next_of(changes), await next_of(changes)} == {"ü b", "c"}
            assert await one.head("ü b") == VersionedData(0, b"1")
            assert await other.compare_and_set([CompareAndSet("c", 0, None)])
            assert await next_of(changes) == "c"
            await house.end_sessions()
            assert await next_of(changes) is None
            assert await other.compare_and_set([CompareAndSet("d", None, b"")])
            assert await next_of(changes) == "d"
            async with anyio.create_task_group() as group:
                group.start_soon(one.close)
                with pytest.raises(StopAsyncIteration):
                    await next_of(changes)


async def test_a_server_that_is_killed_loses_nothing_acknowledged(postgres: PostgresServer) -> None:
    """And goes on when it is started again: nobody has to be told."""
    acknowledged: list[int] = []
    open_: list[int] = []
    async with await psycopg.AsyncConnection.connect(postgres.conninfo()) as sql:
        house = House(postgres, sql)
    async with house.client() as client:
        written = anyio.Event()
        back = anyio.Event()

        async def write() -> None:
            for number in itertools.count():
                try:
                    assert await client.compare_and_set([CompareAndSet(f"k{number}", None, b"x")])
                    acknowledged.append(number)
                    after = back.is_set()
                except StorageError as error:
                    open_.extend([] if error.determinate else [number])
                    continue
                if number >= 20:
                    written.set()
                if after and number > 20:
                    return

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await written.wait()
            await anyio.to_thread.run_sync(postgres.kill)
            await anyio.to_thread.run_sync(postgres.start)
            back.set()
        found = set(await client.list_keys())
        assert {f"k{number}" for number in acknowledged} <= found
        assert found <= {f"k{number}" for number in acknowledged + open_}
        assert len(acknowledged) > 20


async def test_secrets_never_show(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "postgresql://bench:hush@127.0.0.1:1/postgres",
        "postgresql://bench@127.0.0.1:1/postgres?password=hush",
        "postgresql://ben:hush@ch@127.0.0.1:1/postgres",
        "postgresql://bench:hush@[::1/postgres",
        "postgresql://bench:hush@127.0.0.1:no/postgres",
    ):
        with pytest.raises(InvalidUsage) as refused:
            postgres_address(url)
        assert "hush" not in str(refused.value)
    monkeypatch.setenv("THE_PASSWORD", "hush")
    for name in ("THE_PASSWORD", "NOT_THERE"):
        place = postgres_address(f"{house.url(1)}&password_env={name}")
        limits = replace(SETTINGS, store_request_retries_max=1)
        with pytest.raises(StorageError) as caught:
            await PostgresConsensus(place, limits, Random(0)).open()
        assert caught.value.determinate
        assert "hush" not in str(caught.value)
        assert (name in str(caught.value)) is (name == "NOT_THERE")


HBA = b"host all guest all scram-sha-256\nlocal all all trust\nhost all all all trust\n"


async def test_a_password_comes_from_where_the_url_says(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await house.run("CREATE ROLE guest LOGIN PASSWORD 'hush'")
    await house.run("GRANT CREATE ON DATABASE postgres TO guest")
    house.server.put("data/pg_hba.conf", HBA)
    await house.run("SELECT pg_reload_conf()")
    (tmp_path / "word").write_text("hush\n")
    (tmp_path / "passfile").write_text("*:*:*:guest:hush\n")
    (tmp_path / "passfile").chmod(0o600)
    monkeypatch.setenv("RIGHT", "hush")
    monkeypatch.setenv("WRONG", "oops")

    def place(option: str, value: object) -> PostgresAddress:
        return postgres_address(f"{house.url(user='guest')}&{option}={value}")

    async def is_let_in(option: str, value: object) -> bool:
        made = PostgresConsensus(place(option, value), SETTINGS, Random(0))
        try:
            await made.open()
            assert await made.head("a") is None
        except StorageError as error:
            assert "password authentication failed" in str(error)  # noqa: PT017
            assert "oops" not in str(error)  # noqa: PT017
            return False
        finally:
            await made.close()
        return True

    while await is_let_in("password_env", "WRONG"):  # until the server has read its file
        pass
    for option, value in (
        ("password_env", "RIGHT"),
        ("password_file", tmp_path / "word"),
        ("passfile", tmp_path / "passfile"),
    ):
        assert await is_let_in(option, value)
