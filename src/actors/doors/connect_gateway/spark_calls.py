"""Calls to Spark that the gateway makes for itself in a client's session."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Final

import anyio
import grpc.aio
from pyspark.sql.connect.proto import base_pb2, relations_pb2

from actors.doors.connect_gateway.change_streams import registration
from actors.doors.connect_gateway.gateway_sessions import GatewaySession, SessionKey
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, plan_of
from actors.doors.connect_gateway.session_settings import FILE_SETTINGS, FIRST_SETTINGS
from actors.doors.connect_gateway.spark_upstream import SparkUpstream
from actors.runtime.errors import PenstockError

CLIENT_TYPE: Final = "penstock"


class SparkCalls:
    """Makes the gateway's own calls to Spark."""

    def __init__(self, upstream: SparkUpstream) -> None:
        self._upstream = upstream

    async def open_session(self, request: ProtoMessage, settings: Mapping[str, str]) -> str:
        """Open the session that a request names, if needed, and add these settings to its initial
        ones. Return the server-side session id. Raises the same as `SparkUpstream.call`."""
        key = SessionKey(request.user_context.user_id, request.session_id)
        answer = await self._configure(key, {**FIRST_SETTINGS, **settings})
        return str(answer.server_side_session_id)

    async def settings_of(self, session: GatewaySession, names: Iterable[str]) -> dict[str, str]:
        """Return the current values of settings in a session, except those without a value."""
        key = session.key
        asked = base_pb2.ConfigRequest(session_id=key.session_id, client_type=CLIENT_TYPE)
        asked.user_context.user_id = key.user_id
        asked.operation.get_option.keys.extend(sorted(names))
        answer = await self._upstream.call("Config", asked.SerializeToString())
        pairs = base_pb2.ConfigResponse.FromString(answer).pairs
        return {pair.key: pair.value for pair in pairs if pair.HasField("value")}

    async def note_settings(self, session: GatewaySession, names: Iterable[str]) -> None:
        """Record the settings that a client is about to change, with their values before the first
        change."""
        new = [name for name in names if session.note_setting(name)]
        if new:
            present = await self.settings_of(session, new)
            for name in new:
                session.first_settings.setdefault(name, present.get(name))

    async def changed_settings(self, session: GatewaySession) -> dict[str, str]:
        """Return the current values of the settings that affect the service's statements and that
        have changed since the session began."""
        first = session.first_settings
        if not first:
            return {}
        # Ask Spark, because SQL texts or other settings may have changed them as well.
        present = await self.settings_of(session, first)
        return {name: value for name, value in present.items() if value != first[name]}

    async def prepare_files(self, session: GatewaySession) -> None:
        """Prepare a session for reading parts of shards."""
        # Needed only once, because clients cannot change these settings.
        if not session.reads_files:
            await self._configure(session.key, FILE_SETTINGS)
            session.reads_files = True

    async def prepare_streams(self, session: GatewaySession) -> None:
        """Register the data source that a session needs for streaming changes."""
        if not session.reads_streams:
            await self.execute(session, registration())
            session.reads_streams = True

    async def _configure(self, key: SessionKey, settings: Mapping[str, str]) -> ProtoMessage:
        asked = base_pb2.ConfigRequest(session_id=key.session_id, client_type=CLIENT_TYPE)
        asked.user_context.user_id = key.user_id
        for name, value in settings.items():
            asked.operation.set.pairs.add(key=name, value=value)
        answer = await self._upstream.call("Config", asked.SerializeToString())
        return base_pb2.ConfigResponse.FromString(answer)

    async def analyze(self, session: GatewaySession, relation: ProtoMessage) -> None:
        """Have Spark analyze a relation. Raises Spark's error."""
        asked = base_pb2.AnalyzePlanRequest(
            session_id=session.key.session_id, client_type=CLIENT_TYPE
        )
        asked.user_context.user_id = session.key.user_id
        asked.schema.plan.CopyFrom(plan_of(relation))
        async with session.naming:
            await self._upstream.call("AnalyzePlan", asked.SerializeToString())

    async def answers(
        self, session: GatewaySession, plan: ProtoMessage
    ) -> AsyncGenerator[ProtoMessage, None]:
        """Execute a plan and yield its responses. Leaving the loop early interrupts it."""
        asked = base_pb2.ExecutePlanRequest(
            session_id=session.key.session_id,
            client_type=CLIENT_TYPE,
            operation_id=str(uuid.uuid4()),
        )
        asked.user_context.user_id = session.key.user_id
        asked.plan.CopyFrom(plan)
        ended = False
        try:
            stream = self._upstream.stream("ExecutePlan", asked.SerializeToString())
            async with aclosing(stream) as answers:
                async for answer in answers:
                    yield base_pb2.ExecutePlanResponse.FromString(answer)
            ended = True
        finally:
            # Canceling the call only ends the stream, and Spark would continue the operation.
            if not ended:
                await self.interrupt(session, asked.operation_id)

    async def interrupt(self, session: GatewaySession, operation_id: str) -> None:
        """End an operation at Spark, if it is running. Raises nothing."""
        asked = base_pb2.InterruptRequest(
            session_id=session.key.session_id,
            client_type=CLIENT_TYPE,
            interrupt_type=base_pb2.InterruptRequest.INTERRUPT_TYPE_OPERATION_ID,
            operation_id=operation_id,
        )
        asked.user_context.user_id = session.key.user_id
        # Shielded and with a timeout: the caller may be canceled, and Spark may be gone.
        with anyio.move_on_after(INTERRUPT_SECONDS, shield=True):
            # If Spark does not know the operation, or is gone, the operation has ended.
            with contextlib.suppress(grpc.aio.AioRpcError, PenstockError):
                await self._upstream.call("Interrupt", asked.SerializeToString())

    async def execute(self, session: GatewaySession, plan: ProtoMessage) -> None:
        """Execute a plan, and ignore its responses."""
        async with aclosing(self.answers(session, plan)) as answers:
            async for _ in answers:
                pass

    async def count_streams(self, session: GatewaySession) -> int:
        """Return the number of running streams of a session. Raises the same as
        `SparkUpstream.call`."""
        if not session.starts_streams:
            return 0
        plan = base_pb2.Plan()
        plan.command.streaming_query_manager_command.active = True
        count = 0
        async with aclosing(self.answers(session, plan)) as answers:
            async for answer in answers:
                found = answer.streaming_query_manager_command_result.active
                count += len(found.active_queries)
        return count

    async def release(self, key: SessionKey) -> None:
        """Release a session at Spark. Raises the same as `SparkUpstream.call`."""
        asked = base_pb2.ReleaseSessionRequest(session_id=key.session_id, client_type=CLIENT_TYPE)
        asked.user_context.user_id = key.user_id
        await self._upstream.call("ReleaseSession", asked.SerializeToString())

    @asynccontextmanager
    async def naming(
        self, session: GatewaySession, views: Mapping[str, ProtoMessage]
    ) -> AsyncIterator[None]:
        """Make relations temporary views of a session while the block runs. Only one such block
        runs per session, because two plans may use the same name for rows of different times."""
        async with session.naming:
            made: list[str] = []
            try:
                for name, relation in views.items():
                    made.append(name)
                    await self.execute(session, _view_made(name, relation))
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    for name in made:
                        await self._drop_view(session, name)

    async def _drop_view(self, session: GatewaySession, name: str) -> None:
        relation = relations_pb2.Relation()
        relation.catalog.drop_temp_view.view_name = name
        with anyio.move_on_after(INTERRUPT_SECONDS, shield=True):
            try:
                await self.execute(session, plan_of(relation))
            except grpc.aio.AioRpcError:
                return


INTERRUPT_SECONDS: Final = 10.0
"""Timeout of a call that cleans up."""


def _view_made(name: str, relation: ProtoMessage) -> ProtoMessage:
    plan = base_pb2.Plan()
    made = plan.command.create_dataframe_view
    made.name, made.replace = name, True
    made.input.CopyFrom(relation)
    return plan
