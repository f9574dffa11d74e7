"""The composition root: creates all actors in one event loop and stops them in order.

Start:

1. Check the settings and lock the state directory. A directory that is in use, or that a newer
   version wrote, is refused.
2. Open the stores: the state directory's own, or those named by URLs. In the second case an older
   service on the same stores is fenced and halts.
3. Bind the listeners and empty the scratch directory.
4. Start the engine, the replicas, the controller and the sessions.

The service answers requests while Spark is still starting; those that need Spark wait. A failed
start undoes what it has done so far.

Stop: sessions first, the stores last, within `shutdown_deadline_ms`. If an actor crashes and its
supervision cannot repair it, the service ends with that error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import anyio
from msgspec.structs import replace

from actors.connectors.factory import ConnectorFactory
from actors.connectors.storage_connectors import StorageConnectors
from actors.control.access.access_rules import RoleLogin
from actors.control.access.open_sessions import OpenSession, OpenSessions
from actors.control.controller.catalog import boot
from actors.control.controller.catalog.analysis_requests import analyzer, plan_checker
from actors.control.controller.catalog.ddl import CatalogStore
from actors.control.controller.catalog.subscribed_views import drop_left_views
from actors.control.controller.catalog.upgrades import upgrade_views
from actors.control.controller.controller import Controller
from actors.control.controller.maintenance import FollowTask, MaintenanceTask
from actors.control.controller.messages import FindLogin
from actors.control.controller.readiness import (
    ReadinessCheck,
    ReadinessReport,
    check_objects,
    check_owner,
    count_replicas,
)
from actors.control.controller.reads.memory_reads import MemoryReads
from actors.control.controller.replicas import instance as replica_set
from actors.control.controller.replicas.instance import (
    FixedReplicas,
    LocalReplicaSupply,
    ReplicaSupply,
)
from actors.control.controller.replicas.registered import RegisteredReplicas
from actors.control.controller.replicas.replica import ReplicaClient
from actors.control.controller.sessions.memory_link import MemoryConnection
from actors.control.controller.sessions.server import ApiServer, ConnectInProcess
from actors.doors.client.client import Client
from actors.doors.postgres.pg_server.connection import FindRole
from actors.doors.postgres.pg_server.server import PgListener, PgServer
from actors.durable.object_store.file_modes import PRIVATE_FOLDER
from actors.durable.persist import PersistClient
from actors.durable.persist.registrations import (
    describe_replica,
    register_replica,
    remove_registrations,
    watch_registration,
)
from actors.engine.spark.cores import cores, format_cores, pin_threads
from actors.engine.spark.engine_memory import machine_memory_bytes
from actors.engine.spark.query_engine import (
    has_query_engine,
    query_settings,
    view_settings,
)
from actors.engine.spark_executor import SparkExecutor
from actors.model.plan.jobs import ExecutorMessage
from actors.model.protocol.api import (
    CLIENT_MAGIC,
    CLIENT_MAGIC_VERSION,
    ClientMessage,
    ServiceMessage,
)
from actors.replica.cluster.checked import CheckedClient
from actors.replica.cluster.client import LocalClient
from actors.replica.cluster.cluster import WorkerCluster, actor_factory
from actors.replica.cluster.hosts import LocalReplicas
from actors.replica.cluster.serving import bind_listener
from actors.runtime.errors import BadSettings, ResourceClosed, ServiceExpired, StorageError
from actors.runtime.kernel import (
    ActorAddress,
    ActorClock,
    ActorStatistics,
    ActorSystem,
    SystemClock,
)
from actors.runtime.kernel.clock import ThreadedClock
from actors.runtime.measurement import Measurement
from actors.runtime.settings import Settings, without_user
from actors.runtime.transport.address import NetworkAddress as Place
from actors.runtime.transport.connection import TransportListener
from actors.runtime.transport.security import for_listener

log = logging.getLogger("penstock.service")

SCRATCH: Final = "scratch"
StartEngine: TypeAlias = Callable[[ActorSystem, Settings, Path], ActorAddress[ExecutorMessage]]
"""Starts an engine that uses the given scratch directory."""


def start_spark(
    system: ActorSystem, settings: Settings, scratch: Path
) -> ActorAddress[ExecutorMessage]:
    """Start the executor that owns Spark, without waiting for Spark to start."""
    address: ActorAddress[Any] = system.spawn(lambda: SparkExecutor(settings, scratch), "spark")
    return address


def start_query_spark(
    system: ActorSystem, settings: Settings, scratch: Path
) -> ActorAddress[ExecutorMessage]:
    """Start the executor of the separate Spark for queries, which starts at the first query."""
    own = query_settings(settings)
    address: ActorAddress[Any] = system.spawn(
        lambda: SparkExecutor(own, scratch, at_first_job=True), "queries"
    )
    return address


class DoorConnector:
    """Connects the clients of a door (PostgreSQL, Spark Connect) to a service in this process."""

    def __init__(
        self, service: Service, role: str | None = None, session: OpenSession | None = None
    ) -> None:
        """Create the connector.

        `session` is the session that the door has opened. None means that the clients are part of
        the service; their sessions are then not listed.
        """
        self._service = service
        self._role = role
        self._session = session

    def of_role(self, role: str | None) -> DoorConnector:
        """Return a connector for clients with this role."""
        return DoorConnector(self._service, role)

    async def connect_in_process(self) -> MemoryConnection[Any, Any]:
        """Return a new client connection without a socket."""
        return await self._service.connect_door(self._role, self._session)


def role_finder(controller: ActorAddress[Any]) -> FindRole:
    """Return a function that asks the controller how a user may log in."""

    async def find(name: str) -> RoleLogin:
        found: RoleLogin = await controller.ask(lambda reply: FindLogin(name, reply))
        return found

    return find


class Service:
    """One Penstock service: ``async with Service(settings) as service: …``.

    `engine` replaces Spark, `clock` replaces the machine's clock, and `seed` fixes the randomness
    of all actors (for tests).
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        engine: StartEngine = start_spark,
        clock: ActorClock | None = None,
        seed: int | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self._engine = engine
        self._given_clock = clock
        self._clock: ActorClock = clock or SystemClock()
        self._seed = seed
        self._stack: AsyncExitStack | None = None
        """Everything to undo at the end, in reverse; set once the service has started."""
        self._system: ActorSystem | None = None
        """The actors; None before the start and from the stop on."""
        self._persist: PersistClient | None = None
        """The shards; None before the start."""
        self._server: ActorAddress[Any] | None = None
        """The `ApiServer`; None before the start and from the stop on."""
        self._listener: TransportListener | None = None
        """The listener for clients; None until it is bound."""
        self._pg_listener: PgListener | None = None
        """The listener for PostgreSQL clients; None without `pg_listen`."""
        self._cluster_listener: TransportListener | None = None
        """The listener for the compute half of the replica protocol; None without
        `cluster_listen`."""
        self._clusters: WorkerCluster | LocalReplicas | None = None
        """The replicas of this process, once started; None for a controller without any."""
        self._memory_reads = MemoryReads()
        """Tables and index partitions in memory, from which doors read without asking a worker.
        Replaced when the replicas of this process start."""
        self._sessions = OpenSessions(
            lambda: self._clock.now_ms(), lambda: self._clock.monotonic_ms()
        )
        """The open sessions of all doors."""
        self._gateway: Any = None
        """The bound Spark Connect gateway; None without `connect_listen`."""
        self.execute_statement: Any = None
        """Executes Penstock's SQL statements for Spark Connect clients in place of
        `ServiceStatements`, if set before the start (`connect_gateway.statement_execution`)."""
        self._readiness: ReadinessCheck | None = None
        """The readiness check; None until the start is complete."""
        self._stopping = anyio.Event()
        """Set when the service is asked to stop, or begins to."""
        self._expired = False
        """True once `expiration_ms` is over."""
        self._halted: Exception | None = None
        """The error that made the service halt, such as `WriterFenced`; None unless it has."""

    # -- starting ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the service.

        Raises `BadSettings`, `InvalidUsage` (an invalid URL of a store), `StateDirectoryError`,
        `AddressInUse` or `StorageError`.
        """
        self.settings.check()
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        if self._given_clock is None:
            own = ThreadedClock((os.cpu_count() or 1) + 4)  # as many as ThreadPoolExecutor has
            stack.push_async_callback(asyncio.to_thread, own.close)
            self._clock = own
        if settings.pin_cores:
            mine = cores()
            pin_threads(mine.service)
            stack.callback(pin_threads, mine.all)
            log.info("the service runs on core %s", format_cores(mine.service))
            log.info("the engine runs on cores %s", format_cores(mine.engine))
        directory = _directory_of(settings)
        persist = self._persist = await self._open(directory)
        stack.push_async_callback(persist.close)
        await self._start_role(stack, persist, directory / SCRATCH)
        if settings.expiration_ms is not None:
            loop = asyncio.get_running_loop()
            stack.callback(loop.call_later(settings.expiration_ms / 1000, self._expire).cancel)
        log.info("listening on %s, state in %s", self.address, _state_locations(settings))

    async def _start_role(
        self, stack: AsyncExitStack, persist: PersistClient, scratch: Path
    ) -> None:
        """Start everything that this role runs here. `ReplicaService` overrides it for a replica in
        a separate process."""
        settings, clock = self.settings, self._clock
        found = await boot.load(persist)
        # Bind before the engine starts, so that an address in use fails immediately.
        self._listener = listener = await self._bind(settings.listen)
        stack.push_async_callback(listener.aclose)
        if settings.pg_listen:
            self._pg_listener = await PgListener.bind(settings.pg_listen)
            stack.push_async_callback(self._pg_listener.aclose)
        await self._bind_gateway(stack)
        system, executor = await self._run_engine(stack, persist, scratch)
        queries = executor
        if self._separates_queries():
            queries = start_query_spark(system, settings, scratch / "query-engine")
        found = await drop_left_views(found, persist, CatalogStore(persist, executor, settings))
        # Before the controller: it creates the dataflows of the upgraded plans.
        found = await upgrade_views(
            found,
            persist,
            analyzer(executor, "upgrade"),
            plan_checker(executor, "upgrade-check"),
            settings,
        )
        self._connectors = self._make_connectors(system, executor, scratch / "outside")
        supply = await self._replicas(stack, system, persist, executor, scratch)
        maintenance = system.spawn(lambda: MaintenanceTask(persist, settings), "maintenance")
        controller = system.spawn(
            lambda: Controller(
                found,
                persist,
                executor,
                supply,
                settings,
                scratch / "tables",
                maintenance,
                self._connectors,
                self._memory_reads,
                queries,
                self._sessions,
            ),
            "controller",
        )
        api = (listener, controller, settings, self._sessions)
        self._server = system.spawn(lambda: ApiServer(*api), "sessions")
        if self._pg_listener is not None:
            # A tuple, because the factory runs again after a crash and must use the same values.
            pg = (self._pg_listener, settings, self._client_of, role_finder(controller))
            system.spawn(lambda: PgServer(*pg, self._sessions, self._memory_reads), "pg")
        if settings.connect_listen:
            self._start_gateway(system, controller, queries, persist, scratch)
        # Last of all: this ends the state `starting`.
        active = count_replicas(controller, settings)
        objects = check_objects(controller, settings)
        self._readiness = ReadinessCheck(persist, active, executor, clock, settings, objects)

    async def _run_engine(
        self, stack: AsyncExitStack, persist: PersistClient, scratch: Path
    ) -> tuple[ActorSystem, ActorAddress[ExecutorMessage]]:
        """Start what every role has: the actor that follows the stores, and the engine."""
        settings, clock = self.settings, self._clock
        await clock.run_blocking(lambda: _empty_scratch(scratch))
        system = ActorSystem(clock=clock, seed=self._seed)
        await stack.enter_async_context(system)
        self._system = system
        # This runs before the system's own exit, which would wait without a deadline.
        stack.push_async_callback(self._stop_actors)
        # Other processes may write to shared stores, and another service may take them over.
        if not persist.exclusive:
            system.spawn(lambda: FollowTask(persist.follow, self._halt), "following")
        own = view_settings(settings) if self._separates_queries() else settings
        return system, self._engine(system, own, scratch / "engine")

    def _separates_queries(self) -> bool:
        """Return whether queries run in a separate Spark. A test's engine serves both."""
        own = has_query_engine(self.settings, machine_memory_bytes())
        return own and self._engine is start_spark and self.settings.role != "replica"

    async def _bind_gateway(self, stack: AsyncExitStack) -> None:
        """Bind the Spark Connect gateway's address, if `connect_listen` is set."""
        if self.settings.connect_listen:
            # Imported here, because its packages are installed only where a gateway is used.
            from actors.doors.connect_gateway.server import bind_gateway

            self._gateway = await bind_gateway(self.settings)
            # Registered now, so that a failed start frees the port as well.
            stack.push_async_callback(self._gateway.aclose)

    def _start_gateway(
        self,
        system: ActorSystem,
        controller: ActorAddress[Any],
        executor: ActorAddress[ExecutorMessage],
        persist: PersistClient,
        scratch: Path,
    ) -> None:
        from actors.doors.connect_gateway.server import (
            ConnectFrontServer,
            ConnectGateway,
            GatewayParts,
        )
        from actors.doors.connect_gateway.service_statements import ServiceStatements

        bound, folder = self._gateway, scratch / "connect"
        own = ServiceStatements(self._client_as, self.settings)
        statements = self.execute_statement or own
        own_clients = DoorConnector(self)
        parts = GatewayParts(
            own_clients, controller, executor, persist, folder, self._sessions, statements
        )
        system.spawn(lambda: ConnectFrontServer(bound.front), "connect-front")
        # Started last, so stopped first: its clients need all other actors.
        system.spawn(lambda: ConnectGateway(self.settings, bound, parts), "connect")
        log.info("Spark Connect on %s", self.connect_address)

    async def _replicas(
        self,
        stack: AsyncExitStack,
        system: ActorSystem,
        persist: PersistClient,
        executor: ActorAddress[ExecutorMessage],
        scratch: Path,
    ) -> ReplicaSupply:
        """Start this process's replicas and return how the controller reaches all of them.

        The process has one fixed replica or several that can be added and dropped. The replicas of
        a controller (`role`) run in other processes, which register themselves.
        """
        settings, place = self.settings, scratch / "cluster"
        if settings.role == "controller":
            return RegisteredReplicas(persist, settings)
        connectors = self._storage_connectors(persist)
        if settings.replicas > 1:
            names = await replica_set.load(persist, settings)
            self._clusters = hosts = LocalReplicas(
                system, settings, persist, executor, place, self._adapter_address, connectors, names
            )
            self._memory_reads = MemoryReads(lambda: hosts.partitions)
            return LocalReplicaSupply(
                hosts,
                self._connect,
                lambda kept: replica_set.store_names(persist, settings, kept),
            )
        self._clusters = cluster = await WorkerCluster.start(
            system,
            settings,
            persist,
            executor,
            place,
            reach=self._adapter_address,
            connectors=connectors,
        )
        self._memory_reads = MemoryReads(lambda: [cluster.partitions])
        if settings.cluster_listen:
            self._cluster_listener = await cluster.listen(settings.cluster_listen)
            stack.push_async_callback(self._cluster_listener.aclose)
        if settings.storage_listen:
            storage_listener = await cluster.listen(settings.storage_listen, "storage")
            stack.push_async_callback(storage_listener.aclose)

        async def connect() -> ReplicaClient:
            return self._connect(await cluster.connect(), "r1")

        async def connect_storage() -> ReplicaClient:
            return self._connect(await cluster.connect("storage"), "r1")

        storage = None if connectors is None else connect_storage
        return FixedReplicas({"r1": connect}, cluster.statistics, storage)

    # The methods that reach the outside world. A simulation overrides them.

    async def _open(self, directory: Path) -> PersistClient:
        return await PersistClient.open(directory, self.settings, self._clock)

    def _connect(self, client: LocalClient, replica: str) -> ReplicaClient:
        return CheckedClient(client.trust(), self.settings, client.half)

    def _make_connectors(
        self, system: ActorSystem, executor: ActorAddress[ExecutorMessage], scratch: Path
    ) -> ConnectorFactory:
        return ConnectorFactory(self.settings, self._clock, system.random, executor, scratch)

    def _storage_connectors(self, persist: PersistClient) -> StorageConnectors | None:
        """Return what connects the storage halves to external systems; None if nothing does."""
        return self._connectors.half(persist)

    def _adapter_address(self, adapter: ActorAddress[Any]) -> ActorAddress[Any]:
        """Return the address through which connections reach an adapter."""
        return adapter

    async def _bind(self, address: str) -> TransportListener:
        place = Place.parse(address, "listen")
        settings = self.settings
        return await TransportListener.bind(
            place,
            ServiceMessage,
            ClientMessage,
            settings,
            CLIENT_MAGIC,
            CLIENT_MAGIC_VERSION,
            identity=settings.identity,
            security=for_listener("listen", place, settings, "token_file"),
        )

    # -- running -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Return the client listener's address: host:port or unix:/path."""
        assert self._listener is not None, "the service has not been started"
        return str(self._listener.address)

    @property
    def connect_address(self) -> str:
        """Return the address of the Spark Connect gateway; "" if there is none."""
        return "" if self._gateway is None else str(self._gateway.address)

    @property
    def cluster_address(self) -> str:
        """Return the address of the replica protocol's listener; "" if there is none."""
        return "" if self._cluster_listener is None else str(self._cluster_listener.address)

    @property
    def pg_address(self) -> str:
        """Return the address of the listener for PostgreSQL clients; "" if there is none."""
        return "" if self._pg_listener is None else self._pg_listener.address

    async def _client_as(self, role: str) -> Client:
        """Return an in-process client with the rights of a role."""
        return await Client.in_process(DoorConnector(self, role), settings=self.settings)

    async def _client_of(self, session: OpenSession) -> Client:
        """Return an in-process client for a door's session."""
        connector = DoorConnector(self, session.role, session)
        return await Client.in_process(connector, settings=self.settings)

    async def connect_in_process(self, role: str | None = None) -> MemoryConnection[Any, Any]:
        """Return a client connection without a socket, as `Client.in_process` uses.

        With `role` the connection has the rights of that role
        (`actors.control.access.access_rules`). Raises `ResourceClosed` before the start.
        """
        if self._server is None:
            raise ResourceClosed("the service has not been started")
        return await self._server.ask(lambda reply: ConnectInProcess(reply, role))

    async def connect_door(
        self, role: str | None, session: OpenSession | None
    ) -> MemoryConnection[Any, Any]:
        """Return a connection for a client of a door (`DoorConnector`)."""
        assert self._server is not None, "doors are started after the sessions"
        return await self._server.ask(lambda reply: ConnectInProcess(reply, role, session, ""))

    def stop(self) -> None:
        """Make `wait_stopped` return. The service stops when its context is left."""
        self._stopping.set()

    def _halt(self, error: Exception) -> None:
        self._halted = error
        self.stop()

    def _expire(self) -> None:
        self._expired = True
        self.stop()

    async def wait_stopped(self) -> None:
        """Wait until `stop` is called or an actor fails for good; in the second case leaving the
        context raises `ActorCrashed`.

        Raises `ServiceExpired` when `expiration_ms` is over, and `WriterFenced` when another
        service has taken over the stores.
        """
        assert self._system is not None, "the service has not been started"
        async with anyio.create_task_group() as group:
            for event in (self._stopping, self._system.failed):
                group.start_soon(_cancel_after, event, group.cancel_scope)
        if self._halted is not None:
            raise self._halted
        if self._expired:
            raise ServiceExpired(
                f"the service has run for {self.settings.expiration_ms} ms (expiration_ms) and "
                "stopped: start it again, no data is lost"
            )

    def actors(self) -> list[ActorStatistics]:
        """Return the statistics of every live actor."""
        assert self._system is not None, "the service has not been started"
        return self._system.statistics()

    def measures(self) -> Iterator[Measurement]:
        """Yield the service's metrics at this moment; nothing before it has begun to start."""
        if self._system is not None:
            yield from self._system.measures()
        if self._persist is not None:
            yield from self._persist.measures()

    async def readiness(self) -> ReadinessReport:
        """Report whether the service and its parts can serve requests. Works in any state, also
        while starting and stopping."""
        if self._stopping.is_set():
            return ReadinessReport("stopping")
        if self._readiness is None:
            return ReadinessReport("starting")
        return await self._readiness.run()

    # -- stopping ------------------------------------------------------------------------------

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None, "the service has not been started"
        await stack.__aexit__(kind, error, trace)

    async def _stop_actors(self) -> None:
        """Stop the actors in reverse order of their start; cancel them if that takes too long."""
        system, self._system, self._server = self._system, None, None
        assert system is not None
        self._stopping.set()
        with anyio.move_on_after(self.settings.shutdown_deadline_ms / 1000, shield=True) as limit:
            await system.stop()
        if limit.cancelled_caught:
            busy = ", ".join(path for path, _ in system.describe())
            log.warning("abandoned after %d ms: %s", self.settings.shutdown_deadline_ms, busy)
            # Aborting is always safe: everything acknowledged is durable.
            system.abort()


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _directory_of(settings: Settings) -> Path:
    """Return the state directory as an absolute path."""
    # Spark and its workers get paths below it and run in other working directories.
    return Path(settings.state_dir).absolute()


def _empty_scratch(scratch: Path) -> None:
    """Remove everything that an earlier process left in the scratch directory."""
    scratch.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    for place in scratch.iterdir():
        # `persist` is already using this folder and empties it itself.
        if place.name != "persist":
            shutil.rmtree(place, ignore_errors=True)


def _state_locations(settings: Settings) -> str:
    """Return where the state is (directory and URLs without credentials), for the log."""
    urls = [without_user(url) for url in (settings.blob_url, settings.consensus_url) if url]
    return ", ".join([settings.state_dir, *urls])


# -- a replica in a separate process ---------------------------------------------------------------

_WILDCARDS: Final = ("0.0.0.0", "::")
_REMOVAL_SECONDS: Final = 2.0
"""Timeout for removing the registration at the end. Controllers try a registration that is left
over in vain until it is dropped."""


def advertised_address(bound: Place, settings: Settings) -> str:
    """Return the address at which controllers can reach a listener.

    Raises `BadSettings` if the listener is bound to a wildcard address and `cluster_advertise` is
    not set.

    >>> advertised_address(Place("10.0.0.2", 6875), Settings())
    '10.0.0.2:6875'
    >>> advertised_address(Place("0.0.0.0", 6875), Settings(cluster_advertise="b.example"))
    'b.example:6875'
    """
    host = settings.cluster_advertise or bound.host
    if not bound.is_unix and host in _WILDCARDS:
        raise BadSettings(
            f"cluster_listen = {bound}: controllers cannot connect to {host}; set cluster_advertise"
            " to the name or address of this machine"
        )
    return str(bound if bound.is_unix else replace(bound, host=host))


def storage_address(settings: Settings) -> Place:
    """Return the address on which the storage half listens: `storage_listen`, or by default the
    host of the compute half with a free port (a Unix socket: its path plus ``.storage``)."""
    if settings.storage_listen:
        return Place.parse(settings.storage_listen, "storage_listen")
    compute = Place.parse(settings.cluster_listen, "cluster_listen")
    if compute.is_unix:
        return replace(compute, path=f"{compute.path}.storage")
    return replace(compute, port=0)


class ReplicaService(Service):
    """One replica in a separate process; used like a `Service`.

    It opens the stores without taking them over (`persist.replica_fence`), serves both halves of
    the replica protocol, and registers its address so that a controller finds it. If one of its
    actors crashes, the process ends and must be restarted from outside; the controller and the
    other replicas only see a lost connection.
    """

    @property
    def address(self) -> str:
        """Return the address of the compute half's listener: host:port or unix:/path."""
        return self.cluster_address

    async def _start_role(
        self, stack: AsyncExitStack, persist: PersistClient, scratch: Path
    ) -> None:
        settings, clock = self.settings, self._clock
        fence = persist.commanded
        assert fence is not None, "the settings name the role"
        # Before the engine starts, so that an address fails immediately if it is in use or if no
        # controller could connect to it.
        listener = self._cluster_listener = await bind_listener(settings.cluster_listen, settings)
        stack.push_async_callback(listener.aclose)
        name = advertised_address(listener.address, settings)
        system, executor = await self._run_engine(stack, persist, scratch)
        self._connectors = self._make_connectors(system, executor, scratch / "outside")
        place = scratch / "cluster"
        cluster = self._clusters = await WorkerCluster.start(
            system,
            settings,
            persist,
            executor,
            place,
            factory=actor_factory(persist, executor, settings, place, name),
            reach=self._adapter_address,
            replica=name,
            connectors=self._storage_connectors(persist),
        )
        await cluster.serve(listener)
        storage = await cluster.listen(storage_address(settings), "storage")
        stack.push_async_callback(storage.aclose)
        await self._register(stack, persist, name, storage)
        connected = check_owner(fence)
        self._readiness = ReadinessCheck(persist, connected, executor, clock, settings)
        # When the process stops this runs first: compare-and-sets stop waiting for a controller.
        stack.callback(fence.leave)

    async def _register(
        self,
        stack: AsyncExitStack,
        persist: PersistClient,
        name: str,
        storage: TransportListener,
    ) -> None:
        settings, fence, system = self.settings, persist.commanded, self._system
        assert fence is not None
        assert system is not None
        store = fence.inner
        own = describe_replica(
            name,
            advertised_address(storage.address, settings),
            persist.process,
            self._clock,
        )
        await register_replica(store, own, settings)

        async def remove() -> None:
            with (
                anyio.move_on_after(_REMOVAL_SECONDS, shield=True),
                suppress(StorageError),
            ):
                await remove_registrations(store, [own.address], own.process)

        stack.push_async_callback(remove)
        system.spawn(
            lambda: FollowTask(lambda: watch_registration(store, own, settings), self._halt),
            "registration",
        )


def service_of(settings: Settings, **given: Any) -> Service:
    """Return the service for the role in the settings; `given` is passed on to its constructor."""
    kind = ReplicaService if settings.role == "replica" else Service
    return kind(settings, **given)
