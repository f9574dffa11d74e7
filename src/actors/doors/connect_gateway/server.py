"""The gateway's actor, which starts and stops its server, runs operations and sweeps sessions."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import anyio
import msgspec

from actors.control.access.access_rules import TokenLogin
from actors.control.access.open_sessions import OpenSessions
from actors.control.controller.messages import FindToken
from actors.doors.client.client import Client
from actors.doors.client.requests import InProcess
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import EngineReady, ExecutorMessage, LocateConnect
from actors.runtime.errors import AddressInUse, BadSettings
from actors.runtime.kernel import Actor, ActorAddress, ReplySlot
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.security import TransportSecurity, for_listener

# Set these before the import, when gRPC reads them. Otherwise gRPC writes to our stderr, and its
# fork handlers may hang a process that is started during a call.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
try:
    import grpc
    import grpc.aio

    from actors.doors.connect_gateway.callers import FindRoleOfToken
    from actors.doors.connect_gateway.execution_routes import PlanRouter
    from actors.doors.connect_gateway.front import ConnectFront
    from actors.doors.connect_gateway.gateway import GatewayCalls
    from actors.doors.connect_gateway.object_catalog import ObjectDirectory, SharedClient
    from actors.doors.connect_gateway.object_rows import ObjectRows
    from actors.doors.connect_gateway.pipelines import PipelineCommands
    from actors.doors.connect_gateway.plan_guard import PlanGuard
    from actors.doors.connect_gateway.session_ledger import SessionLedger
    from actors.doors.connect_gateway.spark_calls import SparkCalls
    from actors.doors.connect_gateway.spark_upstream import (
        ConnectPlace,
        SparkUpstream,
        place_of_address,
        place_of_engine,
    )
    from actors.doors.connect_gateway.statement_execution import ExecuteStatement
    from actors.engine.spark.remote_address import is_remote
except ImportError as error:
    raise BadSettings(
        "connect_listen: the Spark Connect gateway needs additional packages: pip install "
        f"'penstock-views[connect]' ({error})"
    ) from None

log = logging.getLogger("penstock.connect")

SWEEP_MS: Final = 5_000
CALLS_PER_OPERATION: Final = 8
"""Maximum concurrent calls for each permitted operation and session."""
CALLS_PER_CONNECTION: Final = 64
LOOKAHEAD_BYTES: Final = 64 * 1024
"""Bytes of a call that gRPC accepts before the call is read."""
STOP_SECONDS: Final = 2.0
"""How long running calls may take to end when the gateway stops."""


class RoleService(Protocol):
    """The service, as the gateway's own clients connect to it."""

    def of_role(self, role: str | None) -> InProcess:
        """Return the service for clients of a role; None: for a trusted client."""
        ...


class GatewayParts(msgspec.Struct, frozen=True):
    """The parts of the service that the gateway uses."""

    service: RoleService
    controller: Any
    executor: Any
    persist: PersistClient | None
    scratch: Path
    sessions: OpenSessions
    execute_statement: ExecuteStatement | None = None


class BoundGateway(msgspec.Struct, frozen=True):
    """A bound listener that does not serve yet."""

    server: Any
    """The gRPC server, to which the front relays."""
    front: ConnectFront
    address: NetworkAddress
    security: TransportSecurity | None

    async def aclose(self) -> None:
        """Stop listening, and free the address."""
        self.front.close()
        await self.server.stop(None)


async def bind_gateway(settings: Settings) -> BoundGateway:
    """Bind the address of `connect_listen`. Raises `BadSettings` and `AddressInUse`."""
    place = NetworkAddress.parse(settings.connect_listen, "connect_listen")
    if place.is_unix:
        raise BadSettings(
            f"invalid connect_listen {settings.connect_listen!r}: Spark Connect clients need "
            "host:port"
        )
    required = settings.roles_required
    security = for_listener("connect_listen", place, settings, "token_file", checks=required)
    server = grpc.aio.server(
        options=_options(settings),
        # Sessions also make calls other than their operations. gRPC refuses further calls.
        maximum_concurrent_rpcs=CALLS_PER_OPERATION
        * (settings.connect_operations_max + settings.connect_sessions_max),
    )
    front = ConnectFront(settings)
    try:
        _bind(server, front.inner_address, settings, security)
        address = await front.bind(place)
    except OSError as error:
        front.close()
        raise BadSettings(f"tls_certificate, tls_key: {error}") from None
    except (RuntimeError, AddressInUse) as error:
        front.close()
        raise AddressInUse(f"connect_listen = {place}: {error}") from None
    return BoundGateway(server, front, address, security)


def _bind(
    server: Any, inner_address: str, settings: Settings, security: TransportSecurity | None
) -> None:
    """Bind the gRPC server to its inner address, with TLS if configured: the front relays bytes
    unchanged."""
    if security is None or not security.has_tls:
        server.add_insecure_port(inner_address)
        return
    key = Path(settings.tls_key).read_bytes()
    chain = Path(settings.tls_certificate).read_bytes()
    # No client certificates: PySpark cannot send one, and authenticates with its token.
    server.add_secure_port(inner_address, grpc.ssl_server_credentials([(key, chain)]))


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.connect_message_bytes_max),
        ("grpc.max_send_message_length", settings.connect_message_bytes_max),
        # By default, gRPC lets a fast client send megabytes ahead of what is read.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        # The byte limit of an unauthenticated connection would allow hundreds of tiny calls.
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", settings.connect_timeout_ms),
        ("grpc.keepalive_time_ms", settings.idle_timeout_ms),
        ("grpc.keepalive_timeout_ms", settings.idle_timeout_ms),
        # Clients send pings while they wait for long queries.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class FrontEnded(msgspec.Struct, frozen=True, gc=False):
    """The front has stopped serving."""


class ConnectFrontServer(Actor[FrontEnded]):
    """Relays clients' connections. It must outlive the `ConnectGateway`, whose last answers it
    relays, so it must be started first."""

    def __init__(self, front: ConnectFront) -> None:
        self._front = front

    async def on_start(self) -> None:
        """Serve connections once the front is open."""
        self.ctx.effect(self._front.serve, done=lambda _: FrontEnded())

    def receive(self, message: FrontEnded) -> None:
        """Log that the listener is closed."""
        log.info("the Spark Connect listener is closed")

    async def on_stop(self) -> None:
        """Close the listener."""
        self._front.close()


class SweepDue(msgspec.Struct, frozen=True, gc=False):
    """The timer for the next sweep of sessions has fired."""


GatewayMessage: TypeAlias = SweepDue


class ConnectGateway(Actor[GatewayMessage]):
    """Serves Spark Connect on a bound listener."""

    def __init__(self, settings: Settings, bound: BoundGateway, parts: GatewayParts) -> None:
        self._settings = settings
        self._bound = bound
        self._parts = parts

    async def on_start(self) -> None:
        """Start the server."""
        settings, parts = self._settings, self._parts
        service = parts.service

        async def connect(role: str | None) -> Client:
            return await Client.in_process(service.of_role(role), settings=settings)

        async def locate() -> ConnectPlace:
            return await _locate(settings, parts.executor)

        clock = self.ctx.clock
        self._client = client = SharedClient(connect)
        self._upstream = SparkUpstream(settings, locate)
        calls = SparkCalls(self._upstream)
        rows = ObjectRows(settings, clock, client, parts.persist, parts.executor, parts.scratch)
        directory = ObjectDirectory(parts.controller, client)
        execute = parts.execute_statement
        pipelines = PipelineCommands(settings, clock, directory, client, calls, execute)
        guard = PlanGuard(parts.executor)
        router = PlanRouter(settings, directory, client, rows, calls, guard, execute, pipelines)
        self._calls = GatewayCalls(
            settings,
            clock,
            self._upstream,
            calls,
            router,
            directory,
            self._run,
            self._bound.security,
            _token_finder(parts.controller),
            SessionLedger(parts.persist, settings.connect_kept_max),
            self._bound.front.prove,
            parts.sessions,
        )
        # Add the handlers only now, when the actor that answers calls is running.
        server = self._bound.server
        server.add_generic_rpc_handlers((self._calls.handlers(),))
        await server.start()
        self._bound.front.open()
        self.ctx.after(SWEEP_MS, SweepDue())

    def receive(self, message: GatewayMessage) -> None:
        """Start a sweep, and the timer for the next one."""
        self.ctx.after(SWEEP_MS, SweepDue())
        self.ctx.effect(self._calls.sweep, done=lambda _: None, failed=_log_sweep)

    async def on_stop(self) -> None:
        """Stop the server, after giving running calls `STOP_SECONDS` to end."""
        self._calls.stop()
        with anyio.CancelScope(shield=True):
            self._bound.front.stop_listening()
            await self._bound.server.stop(STOP_SECONDS)
            await self._calls.end_all()
            await self._upstream.aclose()
            await self._client.aclose()

    def _run(self, run: Any) -> None:
        """Run an operation as a task that ends with the actor."""
        self.ctx.effect(run, done=lambda _: None, failed=lambda _: None)

    def describe(self) -> str:
        """Return a readable description of the open sessions and operations."""
        return f"listens on {self._bound.address}; {self._calls.describe()}"


def _token_finder(controller: ActorAddress[Any]) -> FindRoleOfToken:
    """Return a function that asks the controller for the role of a token."""

    async def find(digest: bytes) -> TokenLogin:
        found: TokenLogin = await controller.ask(lambda reply: FindToken(digest, reply))
        return found

    return find


def _log_sweep(error: Exception) -> None:
    # The next sweep will visit the same sessions.
    log.warning("a sweep of Spark Connect sessions failed: %s", error)


async def _locate(settings: Settings, executor: ActorAddress[ExecutorMessage]) -> ConnectPlace:
    """Return the place of the current Spark Connect server. Raises `EngineUnavailable`."""
    if is_remote(settings.spark_master):
        return place_of_address(settings.spark_master)

    def ask(reply: ReplySlot[EngineReady]) -> ExecutorMessage:
        return LocateConnect(reply)

    return place_of_engine(await executor.ask(ask))
