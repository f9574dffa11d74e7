"""A service with the gateway, the in-memory engine, and a server that stands for Spark."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import grpc
import grpc.aio
import pyarrow as pa
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from pyspark.sql.connect.proto import base_pb2, relations_pb2
from pyspark.sql.connect.session import SparkSession
from pyspark.sql.connect.types import pyspark_types_to_proto_types
from pyspark.sql.types import StructType

from actors.doors.client.client import Client
from actors.doors.connect_gateway.plan_rewriting import walk_messages
from actors.doors.connect_gateway.row_messages import (
    command_answer,
    complete_answer,
    spark_struct_of,
    table_answers,
)
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import EngineControls, in_memory_engine

T = TypeVar("T")
SERVER = "server-side"


class SparkStandIn:
    """Answers as a Spark Connect server does, without Spark: a relation's rows are those of the
    first local relation in it. Notes the requests that it was sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.settings: dict[str, str] = {}
        self.released: list[str] = []
        self.interrupted: list[str] = []
        self.hanging: set[str] = set()
        """Operations that have sent their columns, and then nothing."""
        self.sessions: dict[str, str] = {}
        self.port = 0

    def of_kind(self, kind: str) -> list[Any]:
        """The requests of one kind, in order."""
        return [each for each in self.requests if each.DESCRIPTOR.name == kind]

    def handlers(self) -> Any:
        made = {}
        for method in base_pb2.DESCRIPTOR.services_by_name["SparkConnectService"].methods:
            kind = getattr(base_pb2, method.input_type.name)
            handler = getattr(self, method.name, None)
            if handler is None:
                continue
            if method.server_streaming:
                made[method.name] = grpc.unary_stream_rpc_method_handler(
                    handler, kind.FromString, lambda message: message.SerializeToString()
                )
            else:
                made[method.name] = grpc.unary_unary_rpc_method_handler(
                    handler, kind.FromString, lambda message: message.SerializeToString()
                )
        return grpc.method_handlers_generic_handler("spark.connect.SparkConnectService", made)

    def _note(self, request: Any) -> None:
        self.requests.append(request)
        self.sessions.setdefault(request.session_id, f"{SERVER}-{request.session_id}")

    def _named(self, request: Any, answer: Any) -> Any:
        answer.session_id = request.session_id
        answer.server_side_session_id = self.sessions[request.session_id]
        return answer

    async def Config(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        answer = base_pb2.ConfigResponse()
        for pair in request.operation.set.pairs:
            self.settings[pair.key] = pair.value
        for key in request.operation.get.keys:
            # Sizes of local relations, and others that a client takes for a number.
            usual = "1048576" if "localRelation" in key else "-1"
            answer.pairs.add(key=key, value=self.settings.get(key, usual))
        for key in request.operation.get_option.keys:
            answer.pairs.add(key=key, value=self.settings.get(key))
        if request.operation.HasField("get_all"):
            for key, value in self.settings.items():
                answer.pairs.add(key=key, value=value)
        for pair in request.operation.get_with_default.pairs:
            answer.pairs.add(key=pair.key, value=self.settings.get(pair.key, pair.value))
        return self._named(request, answer)

    async def AnalyzePlan(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        await self._fail_if_wanted(request, context)
        answer = base_pb2.AnalyzePlanResponse()
        if request.HasField("spark_version"):
            answer.spark_version.version = "4.3.0"
        else:
            answer.schema.schema.CopyFrom(columns_in(request))
        return self._named(request, answer)

    async def ExecutePlan(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._note(request)
        await self._fail_if_wanted(request, context)
        for answer in self._answers(request.plan):
            answer.operation_id, answer.response_id = request.operation_id, str(uuid.uuid4())
            yield self._named(request, answer)
            if "hang" in str(request.plan):
                self.hanging.add(request.operation_id)
                await anyio.sleep_forever()

    def _answers(self, plan: Any) -> Any:
        command = plan.command.WhichOneof("command_type")
        if command == "sql_command":
            text = plan.command.sql_command.input
            return [command_answer(text), complete_answer()]
        if command is not None:
            return [complete_answer()]
        return table_answers(rows_in(plan))

    async def ReattachExecute(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Any]:
        self._note(request)
        answer = complete_answer()
        answer.operation_id, answer.response_id = request.operation_id, str(uuid.uuid4())
        yield self._named(request, answer)

    async def ReleaseExecute(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        answer = base_pb2.ReleaseExecuteResponse(operation_id=request.operation_id)
        return self._named(request, answer)

    async def Interrupt(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        self.interrupted.append(request.operation_id)
        found = sorted(self.hanging)
        return self._named(request, base_pb2.InterruptResponse(interrupted_ids=found))

    async def ReleaseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        self.released.append(request.session_id)
        return self._named(request, base_pb2.ReleaseSessionResponse())

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return self._named(request, base_pb2.GetStatusResponse())

    async def CloneSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        new = request.new_session_id or str(uuid.uuid4())
        self.sessions[new] = f"{SERVER}-{new}"
        answer = base_pb2.CloneSessionResponse(
            new_session_id=new, new_server_side_session_id=self.sessions[new]
        )
        return self._named(request, answer)

    async def _fail_if_wanted(self, request: Any, context: Any) -> None:
        if "boom" not in str(request):
            return
        info = error_details_pb2.ErrorInfo(reason="x", domain="org.apache.spark")
        info.metadata["classes"] = json.dumps(["org.apache.spark.sql.AnalysisException"])
        info.metadata["errorClass"] = "BOOM"
        packed = any_pb2.Any()
        packed.Pack(info)
        status = status_pb2.Status(code=13, message="[BOOM] it is. SQLSTATE: 42000")
        status.details.append(packed)
        await context.abort_with_status(rpc_status.to_status(status))


def local_relations(message: Any) -> list[Any]:
    """The local relations in a plan."""
    kind = relations_pb2.LocalRelation.DESCRIPTOR.full_name
    return [each for each in walk_messages(message) if each.DESCRIPTOR.full_name == kind]


def rows_in(plan: Any) -> pa.Table:
    """The rows of the first local relation with rows; one row without one."""
    for found in local_relations(plan):
        if found.data:
            with pa.ipc.open_stream(found.data) as reader:
                rows = reader.read_all()
            if found.schema:
                fields = json.loads(found.schema)["fields"]
                rows = rows.rename_columns([field["name"] for field in fields])
            return rows
    return pa.table({"a": pa.array([1], pa.int64())})


def columns_in(plan: Any) -> Any:
    """The columns of the rows that `rows_in` gives."""
    found = local_relations(plan)
    if found and not any(each.data for each in found):
        return pyspark_types_to_proto_types(StructType.fromJson(json.loads(found[0].schema)))
    return spark_struct_of(rows_in(plan).schema)


class GatewayWorld:
    """What a test of the gateway has."""

    def __init__(
        self, service: Service, client: Client, spark: SparkStandIn, controls: EngineControls
    ) -> None:
        self.service = service
        self.client = client
        self.spark = spark
        self.controls = controls
        self._numbers = itertools.count(1)
        self._sessions: list[Any] = []

    async def session(self, parameters: str = "", user: str = "") -> Any:
        """A session of an unmodified PySpark."""
        name = user or f"user{next(self._numbers)}"
        address = f"sc://{self.service.connect_address}/;user_id={name}{parameters}"
        made = await self.run(lambda: SparkSession(address))
        self._sessions.append(made)
        return made

    async def stop_sessions(self) -> None:
        """Stop all sessions: one that is left to itself waits for a server that is gone."""
        for made in self._sessions:
            await self.run(made.stop)

    async def run(self, call: Callable[[], T]) -> T:
        """Run blocking code of PySpark beside the service."""
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


@asynccontextmanager
async def standing_in() -> AsyncIterator[SparkStandIn]:
    """A server that stands for Spark."""
    spark = SparkStandIn()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((spark.handlers(),))
    spark.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield spark
    finally:
        await server.stop(0)


@asynccontextmanager
async def gateway_world(
    tmp_path: Path, *, execute_statement: Any = None, **changes: Any
) -> AsyncIterator[GatewayWorld]:
    """A service with the gateway."""
    controls = EngineControls()

    with anyio.fail_after(120):
        async with standing_in() as spark:
            given: dict[str, Any] = {
                "state_dir": str(tmp_path / "state"),
                "listen": "127.0.0.1:0",
                "connect_listen": "127.0.0.1:0",
                "spark_master": f"sc://127.0.0.1:{spark.port}",
            }
            service = Service(Settings(**(given | changes)), engine=in_memory_engine(controls))
            service.execute_statement = execute_statement
            async with service, await Client.in_process(service) as client:
                world = GatewayWorld(service, client, spark, controls)
                yield world
                await world.stop_sessions()


async def fill(client: Client) -> None:
    """Two tables and a view."""
    await client.create_table("orders", {"id": "bigint", "name": "string", "n": "int"}, ["id"])
    await client.create_table("other", {"id": "bigint", "x": "double"})
    rows = [{"id": number, "name": "abc"[number % 3], "n": number} for number in range(6)]
    await client.insert("orders", rows)
    await client.insert("other", [{"id": number, "x": number / 2} for number in range(4)])
    await client.create_materialized_view(
        "sums", "SELECT name, count(*) AS c FROM orders GROUP BY name"
    )


@asynccontextmanager
async def filled_world(
    tmp_path: Path, **changes: Any
) -> AsyncIterator[tuple[GatewayWorld, SparkSession]]:
    """A service with the gateway and the objects of `fill`, and a session of PySpark."""
    async with gateway_world(tmp_path, **changes) as world:
        await fill(world.client)
        yield world, await world.session()
