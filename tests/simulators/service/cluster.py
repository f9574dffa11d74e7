"""Simulates a whole service, its clients and their network in one loop from one seed.

Theory of operation. `simulate` runs one `ClusterSchedule`: the real service (`actors.service`,
every actor of it) on an in-memory engine, over stores and links in memory, in a loop of virtual
time. Five streams of randomness come from the seed: the order in which ready callbacks run, the
workload, the faults, the raw clients that displace the controller, and the number of replicas and
the time when one crashes. The process may be killed at any operation on a store; then none of its
code runs any more, and its successor finds only the contents of the `SimulatedDisk`.

A run has two parts. First the clients work while faults strike; any request may fail then, none may
be answered wrongly. Then faults stop: everything must come to rest, be readable, and leave nothing
behind when it is dropped. The checkers report violations; the first `CheckerViolation` ends the
run.

Out of scope: real sockets, threads, files of parts, Spark; two services on one store; a store that
loses or changes what it acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from actors.connectors.storage_connectors import StorageConnectors
from actors.control.controller.reads.memory_reads import MemoryReads
from actors.control.controller.replicas.instance import ReplicaSupply
from actors.control.controller.replicas.replica import ReplicaClient
from actors.durable.persist import PersistClient
from actors.durable.persist.location import CompareAndSet
from actors.model.plan.jobs import ExecutorMessage
from actors.replica.cluster.client import ClusterClient, LocalClient
from actors.replica.cluster.cluster import ClusterStatistics, WorkerCluster
from actors.replica.cluster.hosts import LocalReplicas
from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.runtime.kernel import ActorAddress, ActorCrashed, ActorStatistics, ActorSystem
from actors.runtime.kernel.cell import ActorCell
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import TransportListener
from actors.service import Service
from actors.testing.drawn_settings import constants_of, draw_constants, draw_settings, drawn_text
from actors.testing.virtual_time import VirtualClock, VirtualDeadlock
from actors.worker import Worker
from tests.simulators.service.checkers import ReadsChecker, ViewsChecker, WritesChecker
from tests.simulators.service.crash import LIFE, CrashableLoop, EndlessRun, undisturbed
from tests.simulators.service.engine import FaultyExecutor
from tests.simulators.service.faults import FaultInjector, TraceDigest
from tests.simulators.service.history import CheckerViolation, ShardHistories
from tests.simulators.service.links import (
    DelayedAddress,
    FaultyClusterClient,
    MemoryListener,
    over_wire,
)
from tests.simulators.service.observed import ObservedLink
from tests.simulators.service.outside import SimulatedOutside, SinksChecker
from tests.simulators.service.rivals import ComputeLedger, ControllerWatch
from tests.simulators.service.schedule import ClusterSchedule, ClusterSetting
from tests.simulators.service.storage_checkers import (
    RenderingsChecker,
    StorageHoldsChecker,
    StorageToldChecker,
    halves_of,
)
from tests.simulators.service.storage_rivals import StorageRivalry, StorageWatch
from tests.simulators.service.stores import FaultyBlob, FaultyConsensus, LatePersist, SimulatedDisk

DOWN_S: Final = 0.02
"""Time between the end of a service and the start of its successor, in s."""

log = logging.getLogger("penstock.simulation")


class RunReport(msgspec.Struct, frozen=True):
    """The result of one run."""

    seed: int
    hash: str
    steps: int
    faults: dict[str, int]
    """Number of faults that struck, by kind."""
    violation: str = ""
    """Text of the first violation; "" if there was none."""
    trace: tuple[str, ...] = ()


def report_of(
    seed: int, trace: TraceDigest, struck: Mapping[str, int], violation: object
) -> RunReport:
    """Return the report of a run that has ended; `violation`: "" or None if there was none."""
    faults = dict(sorted(struck.items()))
    lines = tuple(trace.lines)
    return RunReport(seed, trace.hash, trace.steps, faults, str(violation or ""), lines)


KEPT_SETTINGS: Final = frozenset(
    {
        "batches_per_shard_max",
        "commands_in_flight_max",
        "decoded_parts_bytes_max",
        "inline_bytes_max",
        "inline_part_bytes_max",
        "part_bytes_target",
        "part_list_parts_min",
    }
)
"""Settings that the schedule fixes, so that they are not drawn."""


def settings_of(schedule: ClusterSchedule, directory: Path) -> Settings:
    """Return small limits, which a short run reaches; for some seeds more of them are drawn."""
    base = _base_settings(schedule.setting, directory)
    if not schedule.setting.drawn:
        return base
    return draw_settings(schedule.seed, base, KEPT_SETTINGS)


def settings_text(schedule: ClusterSchedule) -> str:
    """Return the settings that a schedule has drawn beside its setting."""
    base = _base_settings(schedule.setting, Path("/"))
    return drawn_text(base, settings_of(schedule, Path("/")))


def _base_settings(setting: ClusterSetting, directory: Path) -> Settings:
    return Settings(
        state_dir=str(directory),
        listen="memory:0",
        workers=setting.workers,
        replicas=setting.replicas,
        commands_in_flight_max=setting.window,
        standby_ms=setting.standby_ms,
        retain_history_ms=setting.retain_history_ms,
        index_history_ms=200,
        group_commit_ms=1,
        hold_downgrade_ms=150,
        maintenance_ms=100,
        reclaim_ms=300,
        oracle_reserve_ms=50,
        peek_deadline_ms=20_000,
        inline_part_bytes_max=16 * 1024 if setting.inline else 1,
        # Room for a few rows: most reads go by the stash.
        inline_bytes_max=1_500 if setting.stash else 4 * 1024 * 1024,
        # Copies make large tables: no client fetches all pieces of a join of two in half a second.
        stash_orphan_ms=5_000 if setting.copies else 500,
        decoded_parts_bytes_max=32 * 1024 * 1024 if setting.decoded else 1,
        batches_per_shard_max=setting.batches_max,
        part_list_parts_min=16 if setting.decoded else 1,
        blob_orphan_grace_ms=500,
        retry_delay_ms_min=5,
        retry_delay_ms_max=500,
        fetch_attempts_max=3,
        stash_responses_max=32,
        arrangement_slack_ms=50,
        source_tick_ms=40,
        statistics_ms=300,
        sink_commit_ms=30,
        sink_frontier_ms=120,
        source_dirs=str(directory),
        part_bytes_target=100 if setting.copies else 64 * 1024 * 1024,
    )


class _Service(Service):
    """The service with its edges in the simulation."""

    def __init__(self, world: SimulatedCluster, life: int) -> None:
        super().__init__(
            world.settings,
            engine=self._start_engine,
            clock=world.clock,
            seed=world.dice.getrandbits(64),
        )
        self._world = world
        self._life = life
        self.listener = MemoryListener(world.injector)
        self.clusters: WorkerCluster | LocalReplicas | None = None
        """Set once the controller has connected to one of them."""
        self.persist: LatePersist | None = None

    def _start_engine(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        address: ActorAddress[Any] = system.spawn(
            lambda: FaultyExecutor(self._world.injector), "engine"
        )
        return address

    async def _open(self, directory: Path) -> PersistClient:
        world = self._world

        def crash() -> None:
            world.kill(self._life)

        self.persist = LatePersist(
            FaultyBlob(world.disk, world.injector, crash, world),
            FaultyConsensus(world.disk, world.injector, crash, world),
            world.settings,
            world.clock,
            random=random.Random(world.dice.getrandbits(64)),
        )
        self.persist.injector = world.injector
        return self.persist

    async def _replicas(self, *given: Any) -> ReplicaSupply:
        supply = await super()._replicas(*given)
        # Else no look-up of a key in an index would come to a worker.
        if self._world.schedule.seed % 2:
            self._memory_reads = MemoryReads()
        return supply

    async def _bind(self, address: str) -> TransportListener:
        return cast(TransportListener, self.listener)

    def _connect(self, client: LocalClient, replica: str) -> ReplicaClient:
        self.clusters = self._clusters
        world = self._world
        if client.half == "storage":
            heard = world.guarded(StorageWatch(world, self._life, controller=True).heard)
            return FaultyClusterClient(self._way(client), world.injector, heard, name="storage")
        watch = ControllerWatch(world, self._life, heard=replica == "r1")
        return FaultyClusterClient(self._way(client), world.injector, world.guarded(watch.heard))

    def _way(self, client: LocalClient) -> ClusterClient:
        """Return the client as the schedule wants it: in this process, or over a wire."""
        world = self._world
        if not world.schedule.setting.wired:
            return client
        return over_wire(client, world.injector, world.settings)

    def _storage_connectors(self, persist: PersistClient) -> StorageConnectors | None:
        return (
            super()._storage_connectors(persist)
            if self._world.schedule.setting.source_rate
            else None
        )

    def _make_connectors(
        self, system: ActorSystem, executor: ActorAddress[ExecutorMessage], scratch: Path
    ) -> SimulatedOutside:
        world = self._world
        return SimulatedOutside(world, self.settings, world.clock, system.random, executor, scratch)

    def _adapter_address(self, adapter: ActorAddress[Any]) -> ActorAddress[Any]:
        return DelayedAddress(adapter, self._world.injector, self._world.told.sent)


class SimulatedCluster:
    """One run: the disk, the service's lives, and the checkers."""

    def __init__(self, schedule: ClusterSchedule, directory: Path, keep_trace: bool) -> None:
        self.schedule = schedule
        self.directory = directory
        self.clock = VirtualClock()
        self.trace = TraceDigest(keep_trace)
        self.injector = FaultInjector(schedule.faults, self.trace)
        self.dice = random.Random(f"system {schedule.seed}")
        self.settings = settings_of(schedule, directory)
        self.disk = SimulatedDisk(self.clock)
        self.history = ShardHistories(self.disk)
        self.views = ViewsChecker(self.history)
        self.reads = ReadsChecker(self.history)
        self.writes = WritesChecker(self.history)
        self.sinks = SinksChecker(self.history)
        self.holds = StorageHoldsChecker(self.history, self.sinks)
        self.told = StorageToldChecker(self.settings.workers, self.history, self.sinks)
        self.renderings = RenderingsChecker()
        self.rivalry = ComputeLedger()
        self.storage_rivalry = StorageRivalry()
        self.violation: CheckerViolation | None = None
        self.failed = asyncio.Event()
        self._lives = 0
        self._life = 0
        self._service: _Service | None = None
        self._ended = asyncio.Event()
        self._closing = False
        self._crashed: Counter[str] = Counter()
        """Replicas that were made to crash in this life, with the number of crashes."""

    # -- watching ------------------------------------------------------------------------------

    def fail(self, violation: CheckerViolation) -> None:
        """Note a violation, unless one was noted before, and end the run."""
        if self.violation is None:
            self.violation = violation
            self.trace.note("violation", violation)
        self.failed.set()

    def guarded(self, check: Callable[..., None]) -> Callable[..., None]:
        """Return a check whose violation ends the run, wherever it is called."""

        def run(*args: Any) -> None:
            try:
                check(*args)
            except CheckerViolation as violation:
                self.fail(violation)

        return run

    def committed(self, ops: Sequence[CompareAndSet]) -> None:
        """Check all invariants after documents became durable."""
        try:
            self.history.committed(ops)
            self.views.check()
            self.holds.check()
            self.look()
        except CheckerViolation as violation:
            self.fail(violation)

    def missing(self, key: str) -> None:
        """Note a violation if a deleted blob of a live shard was read. A stashed result has no
        lease, and a dropped shard has no readers: a late read of these rightly fails."""
        if key.partition("/")[0] in self.history.shards:
            self.fail(CheckerViolation(f"leases: {key} was deleted and then read"))

    # -- lives of the service ------------------------------------------------------------------

    async def supervise(self) -> None:
        """Start the service, and restart it whenever it has ended."""
        while not self._closing:
            self._lives += 1
            life = self._life = self._lives
            self._crashed.clear()
            self._ended.clear()
            context = contextvars.copy_context()
            context.run(LIFE.set, life)
            self.trace.note("life", life)
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._live(life), context=context)
            task.add_done_callback(_forgotten)
            await self._ended.wait()
            self._service = None
            await asyncio.sleep(DOWN_S)

    async def _live(self, life: int) -> None:
        service = _Service(self, life)
        try:
            async with service:
                self._service = service
                await service.wait_stopped()
        except ActorCrashed as error:
            self.fail(CheckerViolation(f"crash: {error}: {error.__cause__!r}"))
        except PenstockError as error:
            self.trace.note("no start", type(error).__name__, error)
        except Exception as error:
            log.exception("the service failed")
            self.fail(CheckerViolation(f"crash: {type(error).__name__}: {error}"))
        if life == self._life:
            service.listener.lost()
            self._ended.set()

    def kill(self, life: int | None = None) -> None:
        """Kill the process at once."""
        life = self._life if life is None else life
        if life != self._life or self._ended.is_set():
            return
        self.check_crashes()
        self.trace.note("kill", life)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CrashableLoop)
        loop.kill(life)
        if self._service is not None:
            self._service.listener.lost()
        self._service = None
        self._life = 0
        # Safe even from the killed life: the supervisor's wake-up runs in its own context.
        self._ended.set()

    def crash(self, replica: str, number: int) -> None:
        """Crash one of the replica's actors; `number` selects it."""
        system = None if self._service is None else self._service._system
        parts = [] if system is None else sorted(_parts_of(system, replica), key=lambda c: c.path)
        if not parts:
            return  # it has crashed, and is not there again yet
        chosen = parts[number % len(parts)]
        self.trace.note("crash", chosen.path)
        self._crashed[replica] += 1
        chosen.crash(RuntimeError("it was made to crash"))

    def check_crashes(self) -> None:
        """Note a violation if a replica crashed without being made to."""
        system = None if self._service is None else self._service._system
        for actor in [] if system is None else system.statistics():
            name = actor.path[1:]
            if actor.crashes > self._crashed[name] and "/" not in name:
                self.fail(CheckerViolation(f"crash: {name} crashed {actor.crashes} times"))

    def stop(self, *, for_good: bool = False) -> None:
        """Request an orderly stop of the service; `for_good`: it is not started again."""
        self.check_crashes()
        self._closing = self._closing or for_good
        if self._service is not None:
            self._service.stop()

    @property
    def ended(self) -> asyncio.Event:
        """Set while the service is down."""
        return self._ended

    def dial(self) -> ObservedLink:
        """Return a client's connection. Raises `ConnectionBroken` while the service is down."""
        if self._service is None:
            raise ConnectionBroken("the service is down")
        return ObservedLink(self._service.listener.dial(), self)

    async def connect_raw(self) -> ReplicaClient:
        """Return a client of the cluster that is not the controller's. Raises `ConnectionBroken`
        while the service is down."""
        service = self._service
        if service is None or service.clusters is None:
            raise ConnectionBroken("the cluster is down")
        if isinstance(service.clusters, LocalReplicas):
            return await service.clusters.connect("r1")
        return await service.clusters.connect()

    async def connect_raw_storage(self) -> ReplicaClient:
        """Return a client as `connect_raw` does, of the storage half that the controller uses."""
        service = self._service
        if service is None or service.clusters is None:
            raise ConnectionBroken("the cluster is down")
        if isinstance(service.clusters, LocalReplicas):
            return await service.clusters.connect("r1", "storage")
        return await service.clusters.connect("storage")

    @property
    def life(self) -> int:
        """Return the number of the service's present life."""
        return self._life

    # -- looking in ----------------------------------------------------------------------------

    def actors(self) -> list[ActorStatistics]:
        """Return the statistics of every live actor."""
        return [] if self._service is None else self._service.actors()

    async def statistics(self) -> ClusterStatistics | None:
        """Return the statistics of the cluster; None while it is down."""
        service = self._service
        if service is None or service.clusters is None:
            return None
        return await service.clusters.statistics()

    def worker_halves(self) -> list[list[Worker]]:
        """Return the workers of every cluster that has begun."""
        system = None if self._service is None else self._service._system
        return [] if system is None else halves_of(system.cells, self.settings.workers)

    def look(self) -> None:
        """Check both halves of all workers in their present states. Raises `CheckerViolation`."""
        if self.schedule.setting.source_rate:
            for workers in self.worker_halves():
                self.renderings.check(workers)

    def readers(self) -> list[str]:
        """Return the shards that still have readers."""
        service = self._service
        if service is None or service.persist is None:
            return []
        return list(service.persist._book._readers)


def _parts_of(system: ActorSystem, replica: str) -> list[ActorCell[Any]]:
    """Return the actors right below a replica's host."""
    cell = system.cells.get(f"/{replica}")
    return [] if cell is None else list(cell.children.values())


def _forgotten(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


@contextlib.contextmanager
def quiet_run() -> Iterator[None]:
    """Keep the service's log silent, and collect the garbage of a run, which is young, once."""
    collects = gc.isenabled()
    gc.disable()
    quiet = logging.getLogger("penstock")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        quiet.setLevel(level)
        with undisturbed():
            gc.collect(0)
        if collects:
            gc.enable()


@contextlib.contextmanager
def crashable_loop(seed: int) -> Iterator[CrashableLoop]:
    """Make a loop of the seed's order the current one, and close it with all killed tasks."""
    loop = CrashableLoop(f"order {seed}")
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        with undisturbed():
            loop.close_killed_tasks()
        with contextlib.suppress(Exception):
            loop.close()
        asyncio.set_event_loop(None)


def simulate(schedule: ClusterSchedule, *, keep_trace: bool = False) -> RunReport:
    """Run a schedule. Never raises for a fault of the service: see `RunReport.violation`."""
    with quiet_run():
        return _simulate(schedule, keep_trace)


def _simulate(schedule: ClusterSchedule, keep_trace: bool) -> RunReport:
    from tests.simulators.service.run import drive

    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="penstock-sim-", dir=base))
    try:
        with crashable_loop(schedule.seed) as loop:
            world = SimulatedCluster(schedule, directory, keep_trace)
            try:
                constants = draw_constants(schedule.seed) if schedule.setting.drawn else {}
                with constants_of(constants):
                    loop.run_until_complete(drive(world))
            except (VirtualDeadlock, EndlessRun) as error:
                world.violation = world.violation or CheckerViolation(f"liveness: {error}")
            struck = Counter(fault.kind for fault in world.injector.struck)
            return report_of(schedule.seed, world.trace, struck, world.violation)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
