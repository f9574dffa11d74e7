"""The client against the far end of a link: answers, streams, and what a lost connection says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
import pyarrow as pa
import pytest

from actors.control.controller.sessions.memory_link import MemoryConnection, pair
from actors.doors.client.client import ChangeBatch, Client, TableWrite, concatenate_pieces
from actors.doors.client.requests import RequestExchange
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.api import (
    ClientHello,
    CopyFromFiles,
    CreateTable,
    DropObject,
    EndRequest,
    ReadContents,
    ReadObject,
    ReadStatus,
    RequestDone,
    RequestFailed,
    ServiceHello,
    SubscribeChanges,
    SubscribeObject,
    WaitFor,
    WriteCommitted,
    WriteTables,
)
from actors.runtime.errors import (
    ConnectionBroken,
    DuplicateKey,
    IncompatibleVersion,
    InvalidUsage,
    ResourceClosed,
    TypeMismatch,
)
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_S


class Service:
    """The far end: what the client sends, and the answers that the test gives."""

    def __init__(self) -> None:
        self.mine, self.far = pair(64)

    async def connect_in_process(self) -> MemoryConnection[Any, Any]:
        return self.mine

    async def connected(self, settings: Settings | None = None) -> Client:
        client: list[Client] = []
        async with anyio.create_task_group() as group:

            async def connect() -> None:
                client.append(await Client.in_process(self, settings=settings))

            group.start_soon(connect)
            assert isinstance(await self.far.receive(), ClientHello)
            await self.far.send(ServiceHello(1, "test"))
        return client[0]


Far: TypeAlias = MemoryConnection[Any, Any]


@asynccontextmanager
async def answered(
    answer: Callable[[Far], Coroutine[Any, Any, None]], settings: Settings | None = None
) -> AsyncIterator[Client]:
    """A client of a service whose end of the link `answer` holds."""
    service = Service()
    client = await service.connected(settings)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(answer, service.far)
            yield client


def _rows(*values: int) -> bytes:
    return to_ipc(
        pa.table({"x": list(values), "__time": [5] * len(values), DIFF: [1] * len(values)})
    )


async def test_a_write_encodes_rows_and_returns_its_time() -> None:

    async def answer(far: Far) -> None:
        write = await far.receive()
        assert isinstance(write, WriteTables)
        (change,) = write.changes
        assert change.table == "t"
        rows = from_ipc(change.insert or b"")
        assert rows.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
        assert from_ipc(change.delete or b"").num_rows == 1
        await far.send(WriteCommitted(write.request, 42, 3))

    async with answered(answer) as client:
        change = TableWrite(insert=[{"a": 1}, {"b": "x"}], delete=pa.table({"a": [1]}))
        assert await client.write({"t": change}) == 42


async def test_create_table_reads_columns() -> None:
    service = Service()
    client = await service.connected()
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(
                client.create_table, "t", {"a": "BIGINT not null", "b": "string"}, ["a"]
            )
            request = await service.far.receive()
            assert isinstance(request, CreateTable)
            columns = (TableColumn("a", "bigint", False), TableColumn("b", "string"))
            assert request.schema == TableSchema(columns, ("a",))
            await service.far.send(RequestDone(request.request))


async def test_tasks_share_the_connection_in_any_order() -> None:
    service = Service()
    client = await service.connected()
    found: dict[str, list[Any]] = {}

    async def peek(name: str) -> None:
        found[name] = (await client.peek(name)).to_pylist()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            for name in ("a", "b", "c"):
                group.start_soon(peek, name)
            reads = [await service.far.receive() for _ in range(3)]
            for read in (reads[2], reads[0], reads[1]):
                arrow = to_ipc(pa.table({"n": [read.name], DIFF: [2]}))
                await service.far.send(ReadContents(read.request, 5, arrow))
    assert found == {name: [{"n": name}, {"n": name}] for name in ("a", "b", "c")}


async def test_errors_are_the_services_own_classes() -> None:

    async def answer(far: Far) -> None:
        write = await far.receive()
        await far.send(RequestFailed(write.request, "DuplicateKey", "id = 1"))

    async with answered(answer) as client:
        with pytest.raises(DuplicateKey, match="id = 1"):
            await client.insert("t", [{"id": 1}])


async def test_a_canceled_read_is_canceled_at_the_service() -> None:
    service = Service()
    client = await service.connected()
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(client.wait_for, "v", 5)
            request = await service.far.receive()
            group.cancel_scope.cancel()
        assert isinstance(request, WaitFor)
        cancel = await service.far.receive()
        assert isinstance(cancel, EndRequest)
        assert cancel.target == request.request


async def test_subscribe_yields_whole_changes_and_ends() -> None:

    async def answer(far: Far) -> None:
        request = await far.receive()
        wanted = SubscribeObject(request.request, "v", 3, up_to=9, snapshot=False, progress=False)
        assert request == wanted
        number = request.request
        await far.send(SubscribeChanges(number, 3, 7, _rows(1, 2)))
        await far.send(SubscribeChanges(number, 7, 9))
        await far.send(SubscribeChanges(number, 9, EMPTY))
        await far.send(RequestDone(number))

    async with answered(answer) as client:
        stream = client.subscribe("v", from_=3, up_to=9, snapshot=False, progress=False)
        changes = [change async for change in stream]
    assert [(c.lower, c.upper) for c in changes] == [(3, 7), (7, 9), (9, EMPTY)]
    assert changes[0].table is not None
    assert changes[0].table["x"].to_pylist() == [1, 2]
    assert changes[1] == ChangeBatch(7, 9)


async def test_leaving_a_subscribe_ends_it_at_the_service() -> None:
    service = Service()
    client = await service.connected()
    with anyio.fail_after(PATIENCE_S):
        stream = client.subscribe("v")
        async with anyio.create_task_group() as group:

            async def answer() -> None:
                request = await service.far.receive()
                await service.far.send(SubscribeChanges(request.request, 0, 7, _rows(1)))

            group.start_soon(answer)
            assert (await anext(stream)).upper == 7
        await stream.aclose()
        cancel = await service.far.receive()
        assert isinstance(cancel, EndRequest)


async def test_what_piles_up_is_taken_and_the_rest_asked_for_again() -> None:
    settings = Settings(subscribe_inflight_bytes_max=1000)

    async def answer(far: Far) -> None:
        first = await far.receive()
        for time in range(1, 9):
            await far.send(SubscribeChanges(first.request, time - 1, time, _rows(time)))
        peek = await far.receive()
        await far.send(ReadContents(peek.request, 5, to_ipc(pa.table({DIFF: [1]}))))
        cancel = await far.receive()
        assert cancel == EndRequest(cancel.request, first.request)
        await far.send(RequestDone(cancel.request))
        await far.send(RequestFailed(first.request, "OperationCanceled", "unsubscribed"))
        again = await far.receive()
        assert again == SubscribeObject(again.request, "v", 8)
        await far.send(SubscribeChanges(again.request, 8, EMPTY, _rows(9)))
        await far.send(RequestDone(again.request))

    async with answered(answer, settings) as client:
        stream = client.subscribe("v")
        changes = [await anext(stream)]
        await client.peek("w")
        changes += [change async for change in stream]
    assert [c.upper for c in changes] == [*range(1, 9), EMPTY]
    assert [c.table["x"].to_pylist() for c in changes if c.table] == [[n] for n in range(1, 10)]


class BreakingLink:
    """Breaks while a message is sent."""

    def try_send(self, messages: Sequence[Any], /) -> int:
        return 0

    async def send(self, message: Any, /) -> None:
        raise ConnectionBroken("the other end is gone")

    async def receive(self) -> Any:
        raise ConnectionBroken("the other end is gone")

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(
    "request_", [DropObject(1, "t"), CopyFromFiles(1, "t", "x", "csv", uuid="u")]
)
async def test_a_request_that_changes_something_may_have_arrived(request_: Any) -> None:
    with pytest.raises(ConnectionBroken) as caught:
        await RequestExchange(BreakingLink(), Settings()).open(request_)
    assert not caught.value.determinate


async def test_a_request_that_only_reads_may_be_sent_again() -> None:
    with pytest.raises(ConnectionBroken) as caught:
        await RequestExchange(BreakingLink(), Settings()).open(ReadStatus(1))
    assert caught.value.determinate


async def test_a_lost_connection_says_whether_a_write_may_have_happened() -> None:

    async def vanish(far: Far) -> None:
        await far.receive()
        await far.aclose()

    async with answered(vanish) as client:
        with pytest.raises(ConnectionBroken) as caught:
            await client.insert("t", [{"id": 1}])
    assert not caught.value.determinate
    with pytest.raises(ConnectionBroken):
        await client.peek("t")
    await client.aclose()
    await client.aclose()
    with pytest.raises(ConnectionBroken):
        await client.status()


async def test_a_closed_client_refuses() -> None:
    service = Service()
    async with await service.connected() as client:
        pass
    with pytest.raises(ResourceClosed):
        await client.peek("t")


async def test_rows_that_make_no_column_are_named() -> None:
    client = await Service().connected()
    with pytest.raises(TypeMismatch, match="table t, column n, row 2: 'x'"):
        await client.insert("t", [{"n": 1}, {"n": 2}, {"n": "x"}])
    with pytest.raises(InvalidUsage, match="dicts with the same columns"):
        await client.peek("t", key=[{"a": 1}, {"b": 1}])
    with pytest.raises(InvalidUsage, match="host:port"):
        await Client.connect("nowhere")


async def test_a_service_of_another_version_is_refused_by_name() -> None:
    service = Service()
    with anyio.fail_after(PATIENCE_S):
        await service.far.send(
            RequestFailed(0, "IncompatibleVersion", "the client speaks version 1")
        )
        with pytest.raises(IncompatibleVersion):
            await Client.in_process(service)


async def test_peek_by_key_names_its_columns() -> None:

    async def answer(far: Far) -> None:
        read = await far.receive()
        assert isinstance(read, ReadObject)
        assert read.key_columns == ("a", "b")
        assert from_ipc(read.key or b"").to_pylist() == [{"a": 1, "b": "x"}]
        empty = pa.table({"n": pa.array([], pa.int64()), DIFF: pa.array([], pa.int64())})
        await far.send(ReadContents(read.request, 5, to_ipc(empty)))

    async with answered(answer) as client:
        assert (await client.peek("t", key={"a": 1, "b": "x"})).num_rows == 0


async def test_what_piles_up_in_the_midst_of_an_interval_is_not_taken_twice() -> None:
    """Pieces of an interval that did not end are forgotten: all of it comes again."""

    async def answer(far: Far) -> None:
        first = await far.receive()

        async def piece(request: int, lower: int, upper: int, *values: int) -> None:
            partial = lower == upper
            rows = _rows(*values)
            await far.send(SubscribeChanges(request, lower, upper, rows, partial=partial))

        await piece(first.request, 5, 5, 1)
        await piece(first.request, 5, 5, 2)
        await piece(first.request, 5, 6, 3)
        await piece(first.request, 6, 6, 4)
        await piece(first.request, 6, 7, 5)
        await piece(first.request, 7, 7, 6)
        await piece(first.request, 7, 7, 7)
        peek = await far.receive()
        await far.send(ReadContents(peek.request, 5, to_ipc(pa.table({DIFF: [1]}))))
        cancel = await far.receive()
        assert cancel == EndRequest(cancel.request, first.request)
        await far.send(RequestDone(cancel.request))
        await far.send(RequestFailed(first.request, "OperationCanceled", "unsubscribed"))
        again = await far.receive()
        assert again == SubscribeObject(again.request, "v", 7)
        await piece(again.request, 7, 7, 6)
        await piece(again.request, 7, EMPTY, 7)
        await far.send(RequestDone(again.request))

    async with answered(answer, Settings(subscribe_inflight_bytes_max=1000)) as client:
        stream = client.subscribe("v")
        changes = [await anext(stream)]
        await client.peek("w")
        changes += [change async for change in stream]
    values = [value for c in changes if c.table for value in c.table["x"].to_pylist()]
    assert values == [1, 2, 3, 4, 5, 6, 7]
    assert [(c.upper, c.partial) for c in changes] == [
        (5, True),
        (5, True),
        (6, False),
        (6, True),
        (7, False),
        (7, True),
        (EMPTY, False),
    ]


async def test_pieces_are_put_together() -> None:
    def table(*values: int) -> pa.Table:
        return pa.table({"x": list(values)})

    closed = False

    async def pieces() -> AsyncGenerator[ChangeBatch, None]:
        nonlocal closed
        try:
            yield ChangeBatch(5, 5, table(1), True)
            yield ChangeBatch(5, 5, table(2), True)
            yield ChangeBatch(5, 6)
            yield ChangeBatch(6, 7)
            yield ChangeBatch(7, 8, table(3))
            yield ChangeBatch(8, 8, table(4), True)
        finally:
            closed = True

    found = [change async for change in concatenate_pieces(pieces())]
    assert [(c.lower, c.upper, c.partial) for c in found] == [
        (5, 6, False),
        (6, 7, False),
        (7, 8, False),
    ]
    assert [c.table and c.table["x"].to_pylist() for c in found] == [[1, 2], None, [3]]
    assert closed
