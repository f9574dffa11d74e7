"""Operations that a client leaves and takes up again, or leaves for good: by raw calls of gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from gateway_world import (  # type: ignore[import-not-found]
    GatewayWorld,
    fill,
    gateway_world,
)
from pyspark.sql.connect.proto import base_pb2

SESSION = "00112233-4455-6677-8899-aabbccddeeff"
DROP = "DROP MATERIALIZED VIEW absent"
SERVICE = "/spark.connect.SparkConnectService/"


class RawClient:
    """Calls of one session."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def execute(
        self,
        text: str,
        operation: str,
        *,
        reattachable: bool = True,
        statement: bool = False,
        observed: str = "",
    ) -> Any:
        request = base_pb2.ExecutePlanRequest(session_id=SESSION, operation_id=operation)
        request.client_observed_server_side_session_id = observed
        if statement:
            request.plan.command.sql_command.sql = text
        else:
            request.plan.root.sql.query = text
        if reattachable:
            request.request_options.add().reattach_options.reattachable = True
        return self._stream("ExecutePlan", request)

    def reattach(self, operation: str, after: str = "", observed: str = "") -> Any:
        request = base_pb2.ReattachExecuteRequest(session_id=SESSION, operation_id=operation)
        request.client_observed_server_side_session_id = observed
        if after:
            request.last_response_id = after
        return self._stream("ReattachExecute", request)

    async def release(self, operation: str, until: str = "") -> Any:
        request = base_pb2.ReleaseExecuteRequest(session_id=SESSION, operation_id=operation)
        if until:
            request.release_until.response_id = until
        else:
            request.release_all.SetInParent()
        call = self._channel.unary_unary(
            f"{SERVICE}ReleaseExecute",
            lambda message: message.SerializeToString(),
            base_pb2.ReleaseExecuteResponse.FromString,
        )
        return await call(request)

    def _stream(self, method: str, request: Any) -> Any:
        return self._channel.unary_stream(
            f"{SERVICE}{method}",
            lambda message: message.SerializeToString(),
            base_pb2.ExecutePlanResponse.FromString,
        )(request)


@asynccontextmanager
async def raw_client(
    tmp_path: Path, *, is_filled: bool = False, **changes: Any
) -> AsyncIterator[tuple[GatewayWorld, Any]]:
    async with gateway_world(tmp_path, **changes) as world:
        if not is_filled:
            await fill(world.client)
        async with grpc.aio.insecure_channel(world.service.connect_address) as channel:
            yield world, RawClient(channel)


def described(world: GatewayWorld) -> str:
    found = [each for each in world.service.actors() if each.path == "/connect"]
    return str(found[0].doing)


async def until_left(world: GatewayWorld) -> None:
    while " 1 operations (1 without a client)" not in described(world):
        await anyio.sleep(0.01)


async def until_there_are(world: GatewayWorld, operations: int) -> None:
    while f" {operations} operations" not in described(world):
        await anyio.sleep(0.01)


async def test_an_operation_of_the_gateway_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    async with raw_client(tmp_path) as (world, client):
        call = client.execute("SELECT id FROM orders", "op")
        first = await call.read()
        call.cancel()
        assert first.schema.struct.fields[0].name == "id"
        await until_left(world)  # and kept: its client may come back

        rest = [each async for each in client.reattach("op", first.response_id)]
        assert sum(each.arrow_batch.row_count for each in rest) == 6
        assert rest[-1].HasField("result_complete")
        assert {each.operation_id for each in rest} == {"op"}
        again = [each async for each in client.reattach("op")]
        assert again == [first, *rest]

        released = await client.release("op", rest[0].response_id)
        assert (released.operation_id, released.session_id) == ("op", SESSION)
        assert [each async for each in client.reattach("op", rest[0].response_id)] == rest[1:]
        with pytest.raises(grpc.aio.AioRpcError, match="POSITION_NOT_AVAILABLE"):
            await client.reattach("op", first.response_id).read()
        with pytest.raises(grpc.aio.AioRpcError, match="POSITION_NOT_AVAILABLE"):
            await client.reattach("op").read()
        assert world.spark.of_kind("ReattachExecuteRequest") == []

        await client.release("op")
        assert " 0 operations" in described(world)
        # From here on it is unknown, which is Spark's to say.
        await client.reattach("op").read()
        assert len(world.spark.of_kind("ReattachExecuteRequest")) == 1


async def test_an_operation_that_failed_is_over(tmp_path: Path) -> None:
    async with raw_client(tmp_path) as (world, client):
        # Its client begins it again, by the same name, when it is told that it is not known.
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError, match="'absent' does not exist"):
                await client.execute(DROP, "op", statement=True).read()
            await until_there_are(world, 0)
        await client.reattach("op").read()
        assert len(world.spark.of_kind("ReattachExecuteRequest")) == 1


async def test_an_operation_of_spark_is_reattached_at_spark(tmp_path: Path) -> None:
    async with raw_client(tmp_path) as (world, client):
        call = client.execute("SELECT 'hang'", "op")
        first = await call.read()
        call.cancel()
        await until_left(world)
        released = await client.release("op", first.response_id)
        assert released.server_side_session_id == first.server_side_session_id
        assert world.spark.of_kind("ReleaseExecuteRequest") == []  # Spark needs only the last one
        with pytest.raises(grpc.aio.AioRpcError, match="ALREADY_EXISTS"):
            await client.execute("SELECT 'hang'", "op").read()
        assert world.spark.interrupted == []
        rest = [each async for each in client.reattach("op", first.response_id)]
        assert rest[-1].HasField("result_complete")
        (asked,) = world.spark.of_kind("ReattachExecuteRequest")
        assert (asked.operation_id, asked.last_response_id) == ("op", first.response_id)
        await until_there_are(world, 0)
        await client.release("op")
        assert len(world.spark.of_kind("ReleaseExecuteRequest")) == 1


@pytest.mark.parametrize("reattachable", [True, False])
async def test_what_a_client_left_for_good_is_ended_at_spark(
    tmp_path: Path, reattachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.doors.connect_gateway.server.SWEEP_MS", 20)
    async with raw_client(tmp_path, connect_detached_ms=50) as (world, client):
        call = client.execute("SELECT 'hang'", "op", reattachable=reattachable)
        await call.read()
        call.cancel()
        await until_there_are(world, 0)
        while not world.spark.interrupted:
            await anyio.sleep(0.01)
        assert world.spark.interrupted == ["op"]


async def test_what_a_client_left_for_good_is_ended_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.doors.connect_gateway.server.SWEEP_MS", 20)
    begun, ended = anyio.Event(), anyio.Event()

    async def execute(text: str, who: Any, _: Any) -> None:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with raw_client(tmp_path, connect_detached_ms=50, execute_statement=execute) as made:
        world, client = made
        call = client.execute("CREATE something", "op", statement=True)
        await begun.wait()
        call.cancel()
        await until_there_are(world, 0)
        await ended.wait()
        assert world.spark.of_kind("ExecutePlanRequest") == []  # nor was it ever Spark's
        assert world.spark.interrupted == []
