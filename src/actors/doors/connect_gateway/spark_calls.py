"""Calls that the gateway makes for itself in a client's session of Spark."""

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
    """The calls."""

    def __init__(self, upstream: SparkUpstream) -> None:
        self._upstream = upstream

    async def open_session(self, request: ProtoMessage, settings: Mapping[str, str]) -> str:
        """Open the session that a request names, if it is not open, with these settings too. Return
        Spark's id of it. Raises as `SparkUpstream.call` does."""
        key = SessionKey(request.user_context.user_id, request.session_id)
        answer = await self._configure(key, {**FIRST_SETTINGS, **settings})
        return str(answer.server_side_session_id)

    async def settings_of(self, session: GatewaySession, names: Iterable[str]) -> dict[str, str]:
        """Return the values that settings have in a session, of those that have one."""
        key = session.key
        asked = base_pb2.ConfigRequest(session_id=key.session_id, client_type=CLIENT_TYPE)
        asked.user_context.user_id = key.user_id
        asked.operation.get_option.keys.extend(sorted(names))
        answer = await self._upstream.call("Config", asked.SerializeToString())
        pairs = base_pb2.ConfigResponse.FromString(answer).pairs
        return {pair.key: pair.value for pair in pairs if pair.HasField("value")}

    async def note_settings(self, session: GatewaySession, names: Iterable[str]) -> None:
        """Note settings that a client is about to change, with the values that they have before
        the first change."""
        new = [name for name in names if session.note_setting(name)]
        if new:
            present = await self.settings_of(session, new)
            for name in new:
                session.first_settings.setdefault(name, present.get(name))

    async def changed_settings(self, session: GatewaySession) -> dict[str, str]:
        """Return the settings that mean something to statements of the service and that have
        another value in a session than at its begin."""
        first = session.first_settings
        if not first:
            return {}
        # Spark is asked, as a text or a setting of another name may have changed it, too.
        present = await self.settings_of(session, first)
        return {name: value for name, value in present.items() if value != first[name]}

    async def prepare_files(self, session: GatewaySession) -> None:
        """Set what a session needs before it reads parts of shards."""
        # Once for a session: no client sets it back.
        if not session.reads_files:
            await self._configure(session.key, FILE_SETTINGS)
            session.reads_files = True

    async def prepare_streams(self, session: GatewaySession) -> None:
        """Make the data source known that a session needs before it streams changes."""
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
        """Let Spark analyse a relation. Raises Spark's error."""
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
        """Yield the answers to a plan that is executed at once. It is interrupted when the loop is
        left."""
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
            # A call that is cancelled ends its stream; what Spark runs for it would go on.
            if not ended:
                await self.interrupt(session, asked.operation_id)

    async def interrupt(self, session: GatewaySession, operation_id: str) -> None:
        """End an operation at Spark, if it runs. Raises nothing."""
        asked = base_pb2.InterruptRequest(
            session_id=session.key.session_id,
            client_type=CLIENT_TYPE,
            interrupt_type=base_pb2.InterruptRequest.INTERRUPT_TYPE_OPERATION_ID,
            operation_id=operation_id,
        )
        asked.user_context.user_id = session.key.user_id
        # Shielded and bounded: the caller may itself be cancelled, and Spark be gone.
        with anyio.move_on_after(INTERRUPT_SECONDS, shield=True):
            # What Spark does not run any more, or cannot answer for, is ended.
            with contextlib.suppress(grpc.aio.AioRpcError, PenstockError):
                await self._upstream.call("Interrupt", asked.SerializeToString())

    async def execute(self, session: GatewaySession, plan: ProtoMessage) -> None:
        """Execute a plan, without a look at its answers."""
        async with aclosing(self.answers(session, plan)) as answers:
            async for _ in answers:
                pass

    async def count_streams(self, session: GatewaySession) -> int:
        """Return how many streams of a session run. Raises as `SparkUpstream.call` does."""
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
        """Release a session. Raises as `SparkUpstream.call` does."""
        asked = base_pb2.ReleaseSessionRequest(session_id=key.session_id, client_type=CLIENT_TYPE)
        asked.user_context.user_id = key.user_id
        await self._upstream.call("ReleaseSession", asked.SerializeToString())

    @asynccontextmanager
    async def naming(
        self, session: GatewaySession, views: Mapping[str, ProtoMessage]
    ) -> AsyncIterator[None]:
        """Let relations be temporary views of a session while the block runs, alone: two plans of a
        session may need the same name for rows at two times."""
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
"""Time for a call that cleans up."""


def _view_made(name: str, relation: ProtoMessage) -> ProtoMessage:
    plan = base_pb2.Plan()
    made = plan.command.create_dataframe_view
    made.name, made.replace = name, True
    made.input.CopyFrom(relation)
    return plan
