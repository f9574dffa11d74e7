"""Operations that are sent again are carried out once: in a session, and by the next service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pyarrow as pa
import pytest
from test_reattaching import (  # type: ignore[import-not-found]
    SESSION,
    raw_client,
    until_left,
    until_there_are,
)

from actors.doors.connect_gateway.gateway_sessions import SessionKey
from actors.doors.connect_gateway.session_ledger import LEDGER_KEY, SessionLedger
from actors.doors.connect_gateway.statement_execution import StatementAnswer
from actors.durable.persist import PersistClient
from actors.runtime.errors import EngineLost, StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings


class CountedStatements:
    """Carries statements out by counting them; the first ones fail with the errors given."""

    def __init__(self, *errors: Exception) -> None:
        self.count = 0
        self._errors = list(errors)

    async def __call__(self, text: str, who: Any, _: Any) -> StatementAnswer:
        self.count += 1
        if self._errors:
            raise self._errors.pop(0)
        return StatementAnswer(pa.schema([]))


async def refused(call: Callable[[], Awaitable[Any]]) -> str:
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call()
    return str(failed.value.details())


def insert(client: Any, operation: str = "op", **named: Any) -> Any:
    return client.execute("INSERT INTO orders VALUES (9)", operation, statement=True, **named)


@pytest.mark.parametrize("reattachable", [True, False])
async def test_an_operation_that_was_carried_out_is_not_repeated(
    tmp_path: Path, reattachable: bool
) -> None:
    execute = CountedStatements()
    async with raw_client(tmp_path, execute_statement=execute) as (_, client):
        answers = [each async for each in insert(client, reattachable=reattachable)]
        assert answers[-1].HasField("result_complete")
        if reattachable:
            assert "ALREADY_EXISTS" in await refused(lambda: insert(client).read())
            await client.release("op")
        # A proxy may send the message again, and a client its release.
        assert "OPERATION_ABANDONED" in await refused(lambda: insert(client).read())
        assert "OPERATION_ABANDONED" in await refused(lambda: client.reattach("op").read())
        assert (await client.release("op")).operation_id == "op"
        assert execute.count == 1
        assert [each async for each in insert(client, "other")] != []
        assert execute.count == 2


async def test_an_operation_that_was_given_up_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.doors.connect_gateway.server.SWEEP_MS", 20)
    execute = CountedStatements()
    changes = {"connect_detached_ms": 50, "execute_statement": execute}
    async with raw_client(tmp_path, **changes) as (world, client):
        call = insert(client)
        await call.read()
        call.cancel()
        await until_there_are(world, 0)
        assert "OPERATION_ABANDONED" in await refused(lambda: client.reattach("op").read())
        assert "OPERATION_ABANDONED" in await refused(lambda: insert(client).read())
        assert execute.count == 1


async def test_what_surely_failed_is_begun_again_and_what_may_have_happened_is_not(
    tmp_path: Path,
) -> None:
    unknown = StorageError("the answer was lost", determinate=False)
    execute = CountedStatements(EngineLost("gone"), unknown)
    async with raw_client(tmp_path, execute_statement=execute) as (_, client):
        assert "gone" in await refused(lambda: insert(client).read())
        assert "answer was lost" in await refused(lambda: insert(client).read())
        assert "OPERATION_ABANDONED" in await refused(lambda: insert(client).read())
        assert execute.count == 2


async def test_only_so_many_operations_are_remembered(tmp_path: Path) -> None:
    execute = CountedStatements()
    changes = {"connect_kept_max": 2, "execute_statement": execute}
    async with raw_client(tmp_path, **changes) as (_, client):
        for name in "abc":
            await insert(client, name, reattachable=False).read()
        assert "OPERATION_ABANDONED" in await refused(lambda: insert(client, "b").read())
        await insert(client, "a", reattachable=False).read()
        assert execute.count == 4


async def test_the_next_service_does_not_repeat_an_operation(tmp_path: Path) -> None:
    execute = CountedStatements()
    async with raw_client(tmp_path, execute_statement=execute) as (world, client):
        call = insert(client)
        seen = (await call.read()).server_side_session_id
        call.cancel()
        await until_left(world)
    # Its client may have seen an answer of the former service, or none at all.
    changes = {"is_filled": True, "execute_statement": execute}
    async with raw_client(tmp_path, **changes) as (world, client):
        for observed in ("", seen):
            again = await refused(lambda: insert(client, observed=observed).read())  # noqa: B023
            assert "INVALID_HANDLE.SESSION_CHANGED" in again
            taken_up = client.reattach("op", observed=observed)
            assert "INVALID_HANDLE.SESSION_CHANGED" in await refused(taken_up.read)
        assert world.spark.of_kind("ReattachExecuteRequest") == []
        # Spark has opened a session of that name, and is to forget it.
        assert world.spark.released == [SESSION, SESSION]
        assert execute.count == 1


async def test_a_session_that_only_read_is_opened_again(tmp_path: Path) -> None:
    async with raw_client(tmp_path) as (_, client):
        assert [each async for each in client.execute("SELECT id FROM orders", "op")] != []
    async with raw_client(tmp_path, is_filled=True) as (world, client):
        # What the client reads of it is Spark's own word for a session that is not there.
        assert "SESSION_NOT_FOUND" in await refused(client.reattach("op").read)
        assert [each async for each in client.execute("SELECT id FROM orders", "op")] != []
        former = client.execute("SELECT id FROM orders", "other", observed="another one")
        assert "SESSION_CHANGED" in await refused(former.read)
        assert "SESSION_CHANGED" in await refused(client.reattach("op", observed="x").read)
        assert world.spark.released == []


async def test_a_session_of_another_server_is_refused_at_its_first_call(tmp_path: Path) -> None:
    async with raw_client(tmp_path) as (world, client):
        former = client.execute("SELECT id FROM orders", "op", observed="another one")
        assert "SESSION_CHANGED" in await refused(former.read)
        assert world.spark.released == [SESSION]


# -- the record ------------------------------------------------------------------------------------


def key(number: int) -> SessionKey:
    return SessionKey("ann", f"session {number}")


async def test_noted_sessions_are_durable_and_bounded() -> None:
    persist = await PersistClient.in_memory(Settings(), SystemClock())
    ledger = SessionLedger(persist, 3)
    for number in range(4):
        await ledger.note(key(number))
        await ledger.note(key(number))
    for reader in (ledger, SessionLedger(persist, 3)):
        assert [await reader.is_noted(key(number)) for number in range(5)] == [
            False, True, True, True, False]  # fmt: skip
    assert not await ledger.is_noted(SessionKey("anns", "ession 1"))
    await persist.close()


async def test_a_record_that_another_service_changed_is_read_again() -> None:
    persist = await PersistClient.in_memory(Settings(), SystemClock())
    first, second = SessionLedger(persist, 9), SessionLedger(persist, 9)
    assert not await first.is_noted(key(2))
    await second.note(key(2))
    await first.note(key(1))
    assert await first.is_noted(key(2))
    assert await SessionLedger(persist, 9).is_noted(key(1))
    await persist.close()


async def test_a_note_whose_answer_was_lost_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    persist = await PersistClient.in_memory(Settings(), SystemClock())
    ledger, change = SessionLedger(persist, 9), persist.compare_and_set

    async def lose_answer(ops: Any) -> bool:
        await change(ops)
        raise StorageError("lost", determinate=False)

    monkeypatch.setattr(persist, "compare_and_set", lose_answer)
    with pytest.raises(StorageError, match="lost"):
        await ledger.note(key(1))
    monkeypatch.undo()
    head = await persist.head(LEDGER_KEY)
    await ledger.note(key(1))
    assert head is not None
    assert await persist.head(LEDGER_KEY) == head
    await persist.close()


async def test_a_ledger_that_cannot_be_written_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    persist = await PersistClient.in_memory(Settings(), SystemClock())

    async def refuse(ops: Any) -> bool:
        return False

    monkeypatch.setattr(persist, "compare_and_set", refuse)
    with pytest.raises(StorageError, match="another service"):
        await SessionLedger(persist, 9).note(key(1))
    await persist.close()
