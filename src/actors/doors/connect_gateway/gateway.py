"""The gateway's implementation of the methods of the Spark Connect service.

`ExecutePlan` and `AnalyzePlan` are inspected; of other methods, only what concerns sessions and the
gateway's own operations. Everything for Spark is forwarded as bytes, one message at a time, each
after the previous one was consumed. So a client that does not read delays only Spark's work for it.
Deadlines and cancellation are forwarded.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, nullcontext
from typing import Any, Final, TypeVar

import anyio
import grpc
import grpc.aio
from google.protobuf import message_factory
from grpc_status import rpc_status
from pyspark.sql.connect.proto import base_pb2

from actors.control.access.access_rules import UNPROVEN
from actors.control.access.open_sessions import OpenSessions
from actors.control.access.role_registry import CONNECT, EXECUTE_CODE, token_digest
from actors.doors.connect_gateway.call_messages import (
    is_interrupted,
    observed_session,
    with_original,
)
from actors.doors.connect_gateway.callers import CallerIdentity, FindRoleOfToken, caller, use_caller
from actors.doors.connect_gateway.error_status import (
    engine_ended,
    session_changed,
    session_missing,
    status_of,
)
from actors.doors.connect_gateway.execution_routes import PlanRouter
from actors.doors.connect_gateway.gateway_sessions import (
    AttachedCall,
    GatewaySession,
    OpenOperation,
    SessionKey,
    SessionTable,
    key_of_request,
)
from actors.doors.connect_gateway.local_operations import LocalOperation, OperationTags
from actors.doors.connect_gateway.message_budget import MessageReader, read_messages
from actors.doors.connect_gateway.object_catalog import ObjectDirectory
from actors.doors.connect_gateway.plan_decoding import decode_request
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, shown_plan
from actors.doors.connect_gateway.plan_rights import check_form
from actors.doors.connect_gateway.plan_routes import ForwardRoute, LocalRoute
from actors.doors.connect_gateway.session_ledger import SessionLedger
from actors.doors.connect_gateway.session_settings import (
    check_fixed,
    check_settings,
    seen_settings,
    settings_without_code,
)
from actors.doors.connect_gateway.session_termination import SessionTerminator
from actors.doors.connect_gateway.spark_calls import SparkCalls
from actors.doors.connect_gateway.spark_upstream import SparkUpstream, is_forgotten, passed_on
from actors.doors.connect_gateway.statement_execution import StatementDeclined
from actors.engine.spark.remote_address import is_remote
from actors.runtime.errors import (
    AccessDenied,
    AuthenticationFailed,
    DeadlineExceeded,
    InvalidUsage,
    PenstockError,
    ResourceBusy,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.runtime.transport.security import TransportSecurity

log = logging.getLogger("penstock.connect")

T = TypeVar("T")
SERVICE_NAME: Final = "spark.connect.SparkConnectService"
USER_CHARACTERS_MAX: Final = 1024
_DETAILS: Final = "grpc-status-details-bin"
_BEARER: Final = "bearer "
_STILL_THERE: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""Status codes after which an operation may continue, and its client may reattach."""

_CONTROL: Final = frozenset(
    {
        "Config",
        "FetchErrorDetails",
        "GetStatus",
        "Interrupt",
        "ReattachExecute",
        "ReleaseExecute",
        "ReleaseSession",
    }
)
"""Methods that inspect or end work."""

Handler = Callable[[Any, Any], Awaitable[bytes | None]]


class GatewayCalls:
    """The handlers of all methods."""

    def __init__(
        self,
        settings: Settings,
        clock: ActorClock,
        upstream: SparkUpstream,
        calls: SparkCalls,
        router: PlanRouter,
        directory: ObjectDirectory,
        run: Callable[[Callable[[], Awaitable[None]]], None],
        security: TransportSecurity | None,
        find_token: FindRoleOfToken,
        ledger: SessionLedger,
        prove: Callable[[str], str],
        opened: OpenSessions,
    ) -> None:
        """Set up the handlers. `run` runs an async function as a separate task, `find_token`
        returns the role of a token by its digest, `ledger` has the sessions that changed something,
        `prove` records that a peer of gRPC is authenticated and returns its address, and `opened`
        are the sessions of all protocols."""
        self._settings = settings
        self._clock = clock
        self._upstream = upstream
        self._calls = calls
        self._router = router
        self._directory = directory
        self._run = run
        self._security = security
        self._find_token = find_token
        self._ledger = ledger
        self._prove = prove
        message_max, wait_ms = settings.connect_message_bytes_max, settings.connect_timeout_ms
        # A separate budget, so that running work cannot block the calls that would end it.
        control_max = max(message_max, settings.connect_bodies_bytes_max // 4)
        work_max = settings.connect_bodies_bytes_max - control_max
        self._control = MessageReader(control_max, message_max, wait_ms)
        self._work = MessageReader(work_max, message_max, wait_ms)
        self._sessions = SessionTable(settings, run)
        self._statistics = opened.statistics_of("connect")
        self._terminator = SessionTerminator(
            opened, self._sessions, run, self._release, self._give_up
        )
        self._opening = anyio.Lock()

    def handlers(self) -> Any:
        """Return gRPC handlers for all methods of this release of the protocol."""
        own: dict[str, Handler] = {
            "ExecutePlan": self._execute_plan,
            "ReattachExecute": self._reattach,
            "ReleaseExecute": self._release_execute,
            "AnalyzePlan": self._analyze,
            "Config": self._config,
            "Interrupt": self._interrupt,
            "GetStatus": self._get_status,
            "ReleaseSession": self._release_session,
            "CloneSession": self._clone_session,
        }
        made = {}
        for method in base_pb2.DESCRIPTOR.services_by_name["SparkConnectService"].methods:
            name = method.name
            handler = own.get(name) or self._forwarder(method)
            reader = self._control if name in _CONTROL else self._work
            # On the wire this equals the method's own kind. For a unary handler, however, gRPC
            # would read the message before the handler can check any token.
            made[name] = grpc.stream_stream_rpc_method_handler(
                self._guarded(handler, reader, several=method.client_streaming)
            )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, made)

    def _guarded(self, handler: Handler, reader: MessageReader, *, several: bool) -> Handler:
        """Wrap a handler: read its message only after authenticating the caller, and report errors
        in Spark's form. `several`: the handler takes an iterator over all messages of the call."""

        async def carry_out(context: Any) -> None:
            if several:
                async with aclosing(read_messages(reader, context)) as messages:
                    answer = await handler(messages, context)
            else:
                # Keep the budget until the answer: an operation may need its message until then.
                async with reader.reading(context.read) as message:
                    if message is grpc.aio.EOF:
                        raise InvalidUsage("the call has no message")
                    answer = await handler(message, context)
            if answer is not None:
                await context.write(answer)

        async def call(_: Any, context: Any) -> None:
            try:
                with use_caller(await self._caller(context)):
                    await carry_out(context)
                    return
            except grpc.aio.AioRpcError as error:
                failed = error
                if self._is_lost(error):
                    # Report this directly: on a retry the client would get unknown handles.
                    await context.abort_with_status(rpc_status.to_status(status_of(engine_ended())))
            except PenstockError as error:
                self._statistics.errors[type(error).__name__] += 1
                await context.abort_with_status(rpc_status.to_status(status_of(error)))
                raise
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception as error:
                # An internal error fails only this call.
                log.exception("a call failed with an internal error")
                told = PenstockError(f"{type(error).__name__}: {error}")
                await context.abort_with_status(rpc_status.to_status(status_of(told)))
                raise
            details = [each for each in failed.trailing_metadata() or () if each[0] == _DETAILS]
            await context.abort(failed.code(), failed.details() or "", tuple(details))

        return call

    def _is_lost(self, error: grpc.aio.AioRpcError) -> bool:
        """Return whether a call failed because the service's own Spark has ended."""
        # A remote Spark may still be running, with only the network failing.
        own = not is_remote(self._settings.spark_master)
        return own and error.code() is grpc.StatusCode.UNAVAILABLE

    async def _caller(self, context: Any) -> CallerIdentity:
        """Authenticate a call by its token. Raises `AuthenticationFailed` if a token is required
        and the call has no valid one."""
        # Checked for each call, because a connection may carry calls of several clients.
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        text = shown if isinstance(shown, str) else ""
        token = text[len(_BEARER) :] if text.lower().startswith(_BEARER) else ""
        digest = token_digest(token)
        login = await self._find_token(digest)
        if login.wanted:
            if login.role is None:
                raise AuthenticationFailed(
                    "a role's token is required: create one with CREATE TOKEN FOR ROLE name, and "
                    "add ;token=… to the address"
                )
            peer = self._prove(context.peer())
            return CallerIdentity(login.role, peer, login.runs_code, digest)
        tokens = self._security
        if tokens is not None and tokens.has_tokens and not tokens.knows(token.encode()):
            raise AuthenticationFailed(
                "a token of the service's token_file is required: add ;token=… to the address"
            )
        return CallerIdentity(UNPROVEN, self._prove(context.peer()), login.runs_code)

    # -- sessions ------------------------------------------------------------------------------

    async def _session(self, request: ProtoMessage) -> GatewaySession:
        """Return the session that a request names. Its first request opens it."""
        key = key_of_request(request)
        if len(key.user_id) > USER_CHARACTERS_MAX or len(key.session_id) > USER_CHARACTERS_MAX:
            raise InvalidUsage(f"user_id or session_id exceeds {USER_CHARACTERS_MAX} characters")
        found, who = self._found(key), caller()
        if found is not None and found.server != self._upstream.server:
            # Spark would reopen it, but not in the scheduler pool of clients.
            await self._forget(found)
            found = None
        if found is None:
            # One at a time, so that two concurrent first calls do not open a session twice.
            async with self._opening:
                found = self._found(key)
                if found is None:
                    self._sessions.check_room()
                    first = {} if who.runs_code else settings_without_code(self._settings)
                    opened = await self._calls.open_session(request, first)
                    await self._check_new(request, opened)
                    found = self._terminator.add_session(key, opened, who, self._upstream.server)
        if observed_session(request) not in ("", found.server_side_session_id):
            raise session_changed(key.session_id)
        found.ran_code = found.ran_code or who.runs_code
        found.used_ms = self._clock.monotonic_ms()
        if found.opened is not None:
            found.opened.requests += 1
        return found

    async def _check_new(self, request: ProtoMessage, opened: str) -> None:
        """Raise `SparkCondition` if Spark has just opened a session, with the id `opened`, that is
        not new to its client, which may be repeating an operation that was executed."""
        key = key_of_request(request)
        if observed_session(request) in ("", opened) and not await self._ledger.is_noted(key):
            return
        await self._calls.release(key)
        raise session_changed(key.session_id)

    def _found(self, key: SessionKey) -> GatewaySession | None:
        """Return an open session; None if there is none. Raises `AuthenticationFailed` if it is
        another role's, and `AccessDenied` if its role lost a right that it has used."""
        found = self._sessions.get(key)
        # Clients choose the names of sessions, so a name alone proves nothing.
        if found is not None and found.caller.role != caller().role:
            raise AuthenticationFailed(
                "the session belongs to a different role than the token: open a new one"
            )
        # The session is being released at Spark.
        if found is not None and found.opened is not None and found.opened.ended is not None:
            raise found.opened.ended
        # Its client's functions and views may still exist in the session.
        if found is not None and found.ran_code and not caller().runs_code:
            raise AccessDenied(
                f"role {found.caller.role} has run code in this session, but has lost the right to "
                "do so: open a new session"
            )
        return found

    def _operation(self, session: GatewaySession, operation_id: str) -> OpenOperation | None:
        """Return an operation; None if it is unknown or has ended. Raises its error if stopped."""
        session.used_ms = self._clock.monotonic_ms()
        session.check_operation(operation_id)
        return session.operations.get(operation_id)

    async def _forget(self, session: GatewaySession) -> None:
        """Remove a session, and end its operations here."""
        if self._sessions.get(session.key) is session:
            self._sessions.remove(session.key)
        for operation in list(session.operations.values()):
            await self._sessions.end(operation)

    async def _known(self, session: GatewaySession, work: Awaitable[T]) -> T:
        """Await a call in a session and return its answer. If Spark no longer has the session,
        remove it here as well. Raises the call's error."""
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            if is_forgotten(error):
                await self._forget(session)
            raise

    async def sweep(self) -> None:
        """End operations whose client has left, and release sessions that are idle or whose role
        lost its rights."""
        now, settings = self._clock.monotonic_ms(), self._settings
        await self._directory.names()
        for session in self._sessions:
            if self._has_lost_rights(session):
                await self._release(session)
                continue
            for operation in list(session.operations.values()):
                if not session.ran_code and now - operation.begun_ms > settings.query_deadline_ms:
                    await self._expire(operation)
                left = not operation.attached and operation.left_ms
                if left and now - operation.left_ms > settings.connect_detached_ms:
                    await self._give_up(operation)
            idle = now - session.used_ms > settings.connect_session_idle_ms
            # As with Spark's own server, a stream continues without its client.
            if idle and not session.operations and not await self._streams_of(session):
                await self._release(session)

    def _has_lost_rights(self, session: GatewaySession) -> bool:
        """Return whether a session's role lost the right to connect, or to run code that it ran."""
        may, role = self._directory.may, session.caller.role
        return not may(role, CONNECT) or (session.ran_code and not may(role, EXECUTE_CODE))

    async def _expire(self, operation: OpenOperation) -> None:
        """End an operation of a role without the right to run code after `query_deadline_ms`, which
        also applies to queries of the other protocols."""
        # The gateway's own operations have their own deadlines; only their answers are left.
        if operation.own is None or not operation.own.ended:
            limit = self._settings.query_deadline_ms
            operation.stop(
                DeadlineExceeded(f"the operation exceeded {limit} ms (query_deadline_ms)")
            )
            await self._give_up(operation)

    async def _release(self, session: GatewaySession) -> None:
        """End a session that its client has not ended, here and at Spark."""
        for operation in list(session.operations.values()):
            await self._give_up(operation)
        try:
            await self._calls.release(session.key)
        except grpc.aio.AioRpcError as error:
            if not is_forgotten(error):
                log.info("failed to release a session: %s", error)
                return
        except PenstockError as error:
            log.info("failed to release a session: %s", error)
            return
        # Only now: until it is released, a new session of this name would inherit its state.
        await self._forget(session)

    async def _streams_of(self, session: GatewaySession) -> int:
        """Return the number of running streams of a session; 0 if Spark cannot tell."""
        try:
            return await self._calls.count_streams(session)
        except (grpc.aio.AioRpcError, PenstockError) as error:
            log.info("cannot count the streams of a session: %s", error)
            return 0

    async def _check_streams(self, session: GatewaySession) -> None:
        """Raise `ResourceBusy` if `connect_streams_max` streams are running. Concurrent starts may
        exceed the limit by one for each open operation."""
        # Ask Spark instead of counting: streams may end without any notice.
        limit, running = self._settings.connect_streams_max, 0
        for each in self._sessions:
            running += await self._streams_of(each)
        if running >= limit:
            raise ResourceBusy(
                f"too many streams are running (connect_streams_max = {limit}): stop one, or try "
                "again later"
            )
        session.starts_streams = True

    async def _give_up(self, operation: OpenOperation) -> None:
        """End an operation without its client, here and at Spark."""
        # First at Spark, because the rows that it reads are released next.
        if operation.own is None:
            await self._calls.interrupt(operation.session, operation.operation_id)
        await self._sessions.end(operation)

    def stop(self) -> None:
        """Prepare to stop: from now on operations end in their callers' tasks."""
        self._sessions.stop()

    async def end_all(self) -> None:
        """Remove all sessions, and end their operations."""
        for session in self._sessions:
            await self._forget(session)

    def describe(self) -> str:
        """Return the numbers of sessions and operations as readable text."""
        sessions = list(self._sessions)
        operations = [each for session in sessions for each in session.operations.values()]
        left = sum(bool(each.left_ms) and not each.attached for each in operations)
        alone = f" ({left} without a client)" if left else ""
        return f"{len(sessions)} sessions, {len(operations)} operations{alone}"

    # -- executing -----------------------------------------------------------------------------

    async def _execute_plan(self, data: bytes, context: Any) -> None:
        request = self._decode(base_pb2.ExecutePlanRequest, data)
        session = await self._session(request)
        request.operation_id = request.operation_id or str(uuid.uuid4())
        operation = self._sessions.begin(session, request.operation_id)
        operation.begun_ms = self._clock.monotonic_ms()
        if session.opened is not None:
            session.opened.begin(shown_plan(request.plan))
        with operation.worked_on():
            await self._execute_operation(operation, request, context)

    async def _execute_operation(
        self, operation: OpenOperation, request: ProtoMessage, context: Any
    ) -> None:
        session = operation.session
        reattachable = any(each.reattach_options.reattachable for each in request.request_options)
        over = True
        try:
            if request.plan.command.HasField("write_stream_operation_start"):
                await self._check_streams(session)
            # Reading objects for the plan is part of the operation, with its deadline and end.
            route = await self._router.route(operation, request)
            if isinstance(route, LocalRoute):
                await self._begin_own(operation, route, request, reattachable=reattachable)
                try:
                    over = await self._stream_own(operation, context, "", reattachable)
                    return
                except StatementDeclined:
                    operation.own = None
                route = await self._router.route(operation, request, declined=True)
            if isinstance(route, LocalRoute):
                await self._begin_own(operation, route, request, reattachable=reattachable)
                over = await self._stream_own(operation, context, "", reattachable)
            else:
                over = await self._stream_spark(operation, route, context, reattachable)
        except grpc.aio.AioRpcError as error:
            over = self._is_lost(error) or not (reattachable and error.code() in _STILL_THERE)
            if is_forgotten(error):
                await self._forget(session)
            raise
        except anyio.get_cancelled_exc_class():
            # The client has left. It may reattach to an operation that has started; an operation
            # that has not, it will start again.
            over = not reattachable or not operation.left_ms
            if over:
                with anyio.CancelScope(shield=True):
                    await self._give_up(operation)
            raise
        finally:
            if over:
                await self._sessions.end(operation)

    async def _begin_own(
        self,
        operation: OpenOperation,
        route: LocalRoute,
        request: ProtoMessage,
        *,
        reattachable: bool,
    ) -> None:
        session = operation.session
        operation.changes = route.changes
        if route.changes and not session.noted:
            await self._ledger.note(session.key)
            session.noted = True
        names = OperationTags(
            session.key.session_id, session.server_side_session_id, operation.operation_id
        )
        operation.own = LocalOperation(
            names, route.answers, tags=frozenset(request.tags), reattachable=reattachable
        )
        self._run(operation.own.run)

    async def _stream_own(
        self, operation: OpenOperation, context: Any, after: str, reattachable: bool
    ) -> bool:
        """Stream the responses of a local operation. Return whether to end it: a client that may
        reattach releases it itself."""
        assert operation.own is not None
        with AttachedCall(operation, self._clock):
            async for data in operation.own.stream(after):
                await operation.hand_on(context, data)
        return not reattachable

    async def _stream_spark(
        self, operation: OpenOperation, route: ForwardRoute, context: Any, reattachable: bool
    ) -> bool:
        """Stream the responses of an operation of Spark. Return whether to end it."""
        session = operation.session
        async with AsyncExitStack() as naming:
            if route.names_texts or route.views:
                await naming.enter_async_context(self._calls.naming(session, route.views))
            stream = self._upstream.stream(
                "ExecutePlan",
                route.request.SerializeToString(),
                timeout=context.time_remaining(),
                metadata=passed_on(context.invocation_metadata()),
            )
            complete = False
            with AttachedCall(operation, self._clock):
                async with aclosing(stream) as answers:
                    async for data in answers:
                        # Spark has analyzed the plan, so the names are no longer needed.
                        await naming.aclose()
                        told, complete = with_original(data, route.original)
                        if complete and route.done is not None:
                            route.done()
                        await operation.hand_on(context, told)
        return complete or not reattachable

    async def _reattach(self, data: bytes, context: Any) -> None:
        request = self._decode(base_pb2.ReattachExecuteRequest, data)
        key = key_of_request(request)
        session = self._found(key)
        # Do not open a session for this call: a released session must stay released.
        if session is None:
            known = observed_session(request) or await self._ledger.is_noted(key)
            raise (session_changed if known else session_missing)(key.session_id)
        if observed_session(request) not in ("", session.server_side_session_id):
            raise session_changed(key.session_id)
        operation = self._operation(session, request.operation_id)
        if operation is None:
            self._sessions.check_carried_out(session, request.operation_id)
        with nullcontext() if operation is None else operation.worked_on():
            await self._reattach_operation(operation, request, data, context)

    async def _reattach_operation(
        self, operation: OpenOperation | None, request: ProtoMessage, data: bytes, context: Any
    ) -> None:
        if operation is not None and operation.own is not None:
            await self._stream_own(operation, context, request.last_response_id, True)
            return
        stream = self._upstream.stream(
            "ReattachExecute",
            data,
            timeout=context.time_remaining(),
            metadata=passed_on(context.invocation_metadata()),
        )
        over = False
        try:
            with AttachedCall(operation, self._clock):
                async with aclosing(stream) as answers:
                    async for answer in answers:
                        over = with_original(answer, None)[1]
                        if operation is None:
                            await context.write(answer)
                        else:
                            await operation.hand_on(context, answer)
        except grpc.aio.AioRpcError as error:
            over = self._is_lost(error) or error.code() not in _STILL_THERE
            raise
        finally:
            if over and operation is not None:
                await self._sessions.end(operation)

    async def _release_execute(self, data: bytes, context: Any) -> bytes:
        request = self._decode(base_pb2.ReleaseExecuteRequest, data)
        whole = not request.HasField("release_until")
        session = self._found(key_of_request(request))
        operation = None if session is None else self._operation(session, request.operation_id)
        own = None if operation is None else operation.own
        if session is None or (whole and own is None):
            answer = await self._pass_on("ReleaseExecute", data, context)
        else:
            # PySpark releases each response separately. For an operation of Spark this is not
            # forwarded: Spark retains few sent responses, and drops them at the end.
            if not whole and own is not None:
                own.release_until(request.release_until.response_id)
            told = base_pb2.ReleaseExecuteResponse(
                session_id=request.session_id,
                server_side_session_id=session.server_side_session_id,
                operation_id=request.operation_id,
            )
            answer = told.SerializeToString()
        if whole and operation is not None:
            await self._sessions.end(operation)
        return answer

    # -- analysing -----------------------------------------------------------------------------

    async def _analyze(self, data: bytes, context: Any) -> bytes:
        request = self._decode(base_pb2.AnalyzePlanRequest, data)
        session = await self._session(request)
        schema = await self._router.plain_schema(session, request)
        if schema is not None:
            told = base_pb2.AnalyzePlanResponse(
                session_id=session.key.session_id,
                server_side_session_id=session.server_side_session_id,
            )
            told.schema.schema.CopyFrom(schema)
            return bytes(told.SerializeToString())
        route = await self._router.bind_analysis(session, request)
        async with AsyncExitStack() as naming:
            if route.names_texts or route.views:
                await naming.enter_async_context(self._calls.naming(session, route.views))
            sent = route.request.SerializeToString()
            return await self._known(session, self._pass_on("AnalyzePlan", sent, context))

    # -- other calls ---------------------------------------------------------------------------

    async def _config(self, data: bytes, context: Any) -> bytes:
        request, who = self._decode(base_pb2.ConfigRequest, data), caller()
        if not who.runs_code:
            limit = self._settings.engine_shuffle_partitions_max
            check_settings(request, who.role, limit)
        session = await self._session(request)
        if request.operation.HasField("set"):
            pairs = request.operation.set.pairs
            for pair in pairs:
                check_fixed(pair.key, pair.value)
        for name in request.operation.unset.keys:
            check_fixed(name)
        changed = [*(pair.key for pair in request.operation.set.pairs)]
        changed += request.operation.unset.keys
        await self._known(session, self._calls.note_settings(session, changed))
        # Send what was decoded here, since Spark might decode the client's bytes differently.
        sent = request.SerializeToString()
        told = await self._known(session, self._pass_on("Config", sent, context))
        if who.runs_code or not request.operation.HasField("get_all"):
            return told
        seen = seen_settings(request, base_pb2.ConfigResponse.FromString(told))
        return bytes(seen.SerializeToString())

    async def _interrupt(self, data: bytes, context: Any) -> bytes:
        request = self._decode(base_pb2.InterruptRequest, data)
        session = self._found(key_of_request(request))
        if session is None:
            return await self._pass_on("Interrupt", data, context)
        canceled = [
            operation.operation_id
            for operation in session.operations.values()
            if operation.own is not None
            and is_interrupted(request, operation.operation_id, operation.own.tags)
            and operation.own.cancel()
        ]
        kinds = base_pb2.InterruptRequest
        # Do not forward this: Spark does not know the operation and would fail.
        if canceled and request.interrupt_type == kinds.INTERRUPT_TYPE_OPERATION_ID:
            answer = base_pb2.InterruptResponse(
                session_id=session.key.session_id,
                server_side_session_id=session.server_side_session_id,
            )
        else:
            told = await self._known(session, self._pass_on("Interrupt", data, context))
            answer = base_pb2.InterruptResponse.FromString(told)
        answer.interrupted_ids.extend(canceled)
        return bytes(answer.SerializeToString())

    async def _get_status(self, data: bytes, context: Any) -> bytes:
        request = self._decode(base_pb2.GetStatusRequest, data)
        session = self._found(key_of_request(request))
        if session is None:
            return await self._pass_on("GetStatus", data, context)
        told = await self._known(session, self._pass_on("GetStatus", data, context))
        answer = base_pb2.GetStatusResponse.FromString(told)
        own = {each.operation_id for each in session.operations.values() if each.own is not None}
        states = base_pb2.GetStatusResponse.OperationStatus
        for status in answer.operation_statuses:
            if status.operation_id in own:
                status.state = states.OPERATION_STATE_RUNNING
                own.discard(status.operation_id)
        # A request without ids asks for all operations.
        asked = set(request.operation_status.operation_ids)
        for operation_id in sorted(own & asked if asked else own):
            answer.operation_statuses.add(
                operation_id=operation_id, state=states.OPERATION_STATE_RUNNING
            )
        return bytes(answer.SerializeToString())

    async def _release_session(self, data: bytes, context: Any) -> bytes:
        request = self._decode(base_pb2.ReleaseSessionRequest, data)
        session = self._sessions.get(key_of_request(request))
        if session is not None and session.caller.role != caller().role:
            session = self._found(session.key)
        # Release resources here first: Spark may take long to end what is running.
        if session is not None:
            await self._forget(session)
        return await self._pass_on("ReleaseSession", data, context)

    async def _clone_session(self, data: bytes, context: Any) -> bytes:
        request = self._decode(base_pb2.CloneSessionRequest, data)
        session = await self._session(request)
        self._sessions.check_room()
        told = await self._known(session, self._pass_on("CloneSession", data, context))
        answer = base_pb2.CloneSessionResponse.FromString(told)
        key = session.key._replace(session_id=answer.new_session_id)
        made = self._terminator.add_session(
            key, answer.new_server_side_session_id, session.caller, self._upstream.server
        )
        made.ran_code = session.ran_code
        # Spark has copied its views and settings, so copy those that are stored here as well.
        made.views, made.own_views = dict(session.views), set(session.own_views)
        made.first_settings = dict(session.first_settings)
        made.changed_meaning, made.reads_files = session.changed_meaning, session.reads_files
        made.used_ms = self._clock.monotonic_ms()
        return told

    def _forwarder(self, method: Any) -> Handler:
        """Return a handler that forwards a method to Spark."""
        kind = message_factory.GetMessageClass(method.input_type)

        async def forward(data: bytes, context: Any) -> bytes:
            request = self._decode(kind, data)
            if method.name == "FetchErrorDetails":
                self._found(key_of_request(request))
                return await self._pass_on(method.name, data, context)
            session = await self._session(request)
            return await self._known(session, self._pass_on(method.name, data, context))

        async def forward_all(requests: AsyncIterator[bytes], context: Any) -> bytes | None:
            source = aiter(requests)
            first = await anext(source, None)
            if first is None:
                raise InvalidUsage(f"{method.name} has no message")
            session = await self._session(self._decode(kind, first))

            async def all_of_them() -> AsyncIterator[bytes]:
                yield first
                async for data in source:
                    yield data

            return await self._known(
                session,
                self._upstream.send_all(
                    method.name,
                    all_of_them(),
                    timeout=context.time_remaining(),
                    metadata=passed_on(context.invocation_metadata()),
                ),
            )

        async def forward_stream(data: bytes, context: Any) -> None:
            self._decode(kind, data)
            stream = self._upstream.stream(
                method.name,
                data,
                timeout=context.time_remaining(),
                metadata=passed_on(context.invocation_metadata()),
            )
            async with aclosing(stream) as answers:
                async for answer in answers:
                    await context.write(answer)

        if method.client_streaming:
            return forward_all
        return forward_stream if method.server_streaming else forward

    async def _pass_on(self, method: str, data: bytes, context: Any) -> bytes:
        """Forward a call to Spark and return the answer. Raises Spark's error."""
        return await self._upstream.call(
            method,
            data,
            timeout=context.time_remaining(),
            metadata=passed_on(context.invocation_metadata()),
        )

    def _decode(self, kind: Any, data: bytes) -> ProtoMessage:
        """Decode a request. Raises `AccessDenied` if its caller may not make such a request."""
        request = decode_request(kind, data, self._settings.connect_message_bytes_max)
        who = caller()
        # Check requests of every method, so that methods of later releases are refused.
        if not who.runs_code:
            check_form(request, who.role)
        return request
