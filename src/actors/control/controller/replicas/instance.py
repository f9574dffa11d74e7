"""The running instance: one link to each replica; the links carry out what `ReplicaMerge` decides.

A part of the controller, which runs in its task. Replicas come from a `ReplicaSupply`: clusters in
this process (`cluster.hosts`), or processes that have registered in the stores (`registered`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from actors.control.controller.replicas.replica import (
    Connect,
    HydrationTurns,
    ReplicaClient,
    ReplicaConnected,
    ReplicaLink,
    ReplicaLost,
    ReplicaResponse,
)
from actors.control.controller.replicas.replica_merge import MergedResponses, ReplicaMerge
from actors.durable.persist import CompareAndSet, PersistClient
from actors.durable.persist.small_documents import decode_document
from actors.model.protocol.api import ChangeReplicas, ReplicaReport, ReplicaStatus
from actors.model.protocol.compute import Command
from actors.replica.cluster.client import LocalClient
from actors.replica.cluster.cluster import ClusterStatistics
from actors.replica.cluster.hosts import LocalReplicas
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    StorageError,
    UnknownObject,
)
from actors.runtime.kernel import ActorAddress, ActorContext, RetryLoop
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import HISTORY_COMMANDS, HYDRATIONS, REPLICAS
from actors.runtime.progress import EMPTY
from actors.runtime.settings import REPLICAS_MAX, Settings

# -- the durable document of the replicas' names ---------------------------------------------------
#
# The setting `replicas` gives the initial number: r1, r2, …. Names that are added or dropped at run
# time are stored under the consensus key `replicas`, together with the value of the setting. If the
# service starts with a value different from the document's, the setting wins and the stored names
# are forgotten.


REPLICAS_KEY: Final = "replicas"
FORMAT_VERSION: Final = 1
ATTEMPTS_MAX: Final = 5


class ReplicaSet(msgspec.Struct, frozen=True):
    """The durable document."""

    format: int
    setting: int
    """Value of the setting `replicas` when the document was written."""
    names: tuple[str, ...]


def encode(setting: int, names: Sequence[str]) -> bytes:
    """Encode the durable document."""
    return msgspec.msgpack.encode(ReplicaSet(FORMAT_VERSION, setting, tuple(names)))


def decode(data: bytes) -> ReplicaSet:
    """Decode the durable document. Raises `StateDirectoryError` (a newer format), `CorruptData`."""
    what = "the document of replicas"
    return decode_document(REPLICAS_KEY, data, ReplicaSet, what=what, format=FORMAT_VERSION)


def names_of(found: ReplicaSet | None, setting: int) -> tuple[str, ...]:
    """Return the names of the replicas to start with. Pure."""
    if found is None or found.setting != setting or not found.names:
        return tuple(f"r{number}" for number in range(1, setting + 1))
    return found.names


async def load(persist: PersistClient, settings: Settings) -> tuple[str, ...]:
    """Read the durable document and return the names of the replicas to start with. Raises
    `StateDirectoryError`, `StorageError`."""
    head = await persist.head(REPLICAS_KEY)
    found = None if head is None else decode(head.data)
    names = names_of(found, settings.replicas)
    if found is not None and found.names != names:
        log.info(
            "the setting replicas changed from %d to %d: the stored names %s are forgotten",
            found.setting,
            settings.replicas,
            ", ".join(found.names),
        )
    return names


async def store_names(persist: PersistClient, settings: Settings, names: Sequence[str]) -> None:
    """Make the names durable. Raises `StorageError`, which is indeterminate if they may be
    durable."""
    data, unknown = encode(settings.replicas, names), False
    # Retry here is safe: a state directory has one process, which makes one change at a time, so no
    # other writer's document is overwritten.
    retry = RetryLoop(settings, failures_max=ATTEMPTS_MAX - 1)
    while True:
        try:
            head = await persist.head(REPLICAS_KEY)
            # An earlier attempt succeeded, though its answer was lost.
            if head is not None and head.data == data:
                return
            cas = CompareAndSet(REPLICAS_KEY, None if head is None else head.seqno, data)
            if await persist.compare_and_set([cas]):
                return
        except StorageError as error:
            if error.determinate and not unknown:
                raise
            unknown = True
        if not await retry.pause():
            break
    raise StorageError(
        f"the store did not confirm that the replicas are now {', '.join(names)}: check with "
        "`penstock replicas`, and try again",
        determinate=False,
    )


log = logging.getLogger("penstock.controller")


class ReplicaSupply(Protocol):
    """Starts, stops and connects replicas."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the replicas to start with."""
        ...

    async def connect(self, name: str) -> ReplicaClient:
        """Return a connection to a replica."""
        ...

    @property
    def owner(self) -> str:
        """Return the name by which this process owns the stores, for replicas in other processes;
        "" for replicas in this one."""
        ...

    @property
    def storage(self) -> Connect | None:
        """Return a function that connects to the storage half of one replica; None if replicas have
        no storage half."""
        ...

    @property
    def arrivals(self) -> Callable[[], Awaitable[Mapping[str, str]]] | None:
        """Return a function that waits until replicas have come or gone on their own, and returns
        all of them by name, each with an id that changes when the replica restarts. None if
        replicas come and go only by command."""
        ...

    async def store_names(self, names: Sequence[str]) -> None:
        """Make the set of replicas durable. Raises `StorageError`."""
        ...

    async def start(self, name: str) -> None:
        """Start another replica. Raises `InvalidUsage` if that is not possible."""
        ...

    async def stop(self, name: str) -> None:
        """Stop a replica and remove its scratch folder. Raises `InvalidUsage`."""
        ...

    async def statistics(self) -> ClusterStatistics | None:
        """Return the statistics of all replicas; None if they cannot be reached."""
        ...


Inspect: TypeAlias = Callable[[], Awaitable[ClusterStatistics]]


Remember: TypeAlias = Callable[[Sequence[str]], Awaitable[None]]
"""Makes the names of the replicas durable. Raises `StorageError`."""


class FixedReplicas:
    """Replicas that this service can neither start nor stop."""

    def __init__(
        self,
        connects: Mapping[str, Connect],
        inspect: Inspect | None = None,
        storage: Connect | None = None,
    ) -> None:
        self._connects = connects
        self._inspect = inspect
        self._storage = storage

    owner = ""
    arrivals = None

    async def store_names(self, names: Sequence[str]) -> None:
        """Do nothing: the names are fixed."""

    @property
    def names(self) -> Sequence[str]:
        """Return the fixed names."""
        return list(self._connects)

    async def connect(self, name: str) -> ReplicaClient:
        """Return a connection to the replica."""
        return await self._connects[name]()

    @property
    def storage(self) -> Connect | None:
        """Return the function given for the storage half."""
        return self._storage

    async def start(self, name: str) -> None:
        """Raise `InvalidUsage`: replicas cannot be started here."""
        raise InvalidUsage(
            f"cannot start replica {name} here: start the service with replicas = 2 or more"
        )

    async def stop(self, name: str) -> None:
        """Leave the replica running."""

    async def statistics(self) -> ClusterStatistics | None:
        """Return None: the replicas cannot be reached for statistics."""
        return None if self._inspect is None else await self._inspect()


class LocalReplicaSupply:
    """The replicas of this process. `wrap` decorates each connection to a half; `remember` makes
    the names durable."""

    owner = ""
    arrivals = None

    def __init__(
        self,
        hosts: LocalReplicas,
        wrap: Callable[[LocalClient, str], ReplicaClient],
        remember: Remember,
    ) -> None:
        self._hosts = hosts
        self._wrap = wrap
        self._remember = remember

    async def store_names(self, names: Sequence[str]) -> None:
        """Make the names durable."""
        await self._remember(names)

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the running replicas."""
        return self._hosts.names

    async def connect(self, name: str) -> ReplicaClient:
        """Return a connection to the replica's compute half."""
        return self._wrap(await self._hosts.connect(name), name)

    @property
    def storage(self) -> Connect | None:
        """Return a function that connects to the storage half of the oldest replica."""
        if not self._hosts.stores:
            return None

        async def connect() -> ReplicaClient:
            # Only one replica: an external system should be read once.
            name = self._hosts.names[0]
            return self._wrap(await self._hosts.connect(name, "storage"), name)

        return connect

    async def start(self, name: str) -> None:
        """Start a replica in this process."""
        await self._hosts.start(name)

    async def stop(self, name: str) -> None:
        """Stop a replica and remove its scratch folder."""
        await self._hosts.stop(name)

    async def statistics(self) -> ClusterStatistics | None:
        """Return the statistics of all replicas of this process."""
        return await self._hosts.statistics()


class ReplicasNoted(msgspec.Struct, frozen=True, gc=False):
    """The names without a dropped replica are durable, so that it may stop; or storing them
    failed."""

    session: ActorAddress[Any]
    request: ChangeReplicas
    error: PenstockError | None = None


class ReplicasChanged(msgspec.Struct, frozen=True, gc=False):
    """A replica was added or dropped, or that failed."""

    session: ActorAddress[Any]
    request: ChangeReplicas
    error: PenstockError | None = None


class ReplicasFound(msgspec.Struct, frozen=True, gc=False):
    """Replicas appeared or disappeared on their own. Contains all current ones, each with its life
    id."""

    lives: Mapping[str, str]


class ComputeInstance:
    """All replicas and the links to them. `commands` is the initial history."""

    def __init__(
        self,
        ctx: ActorContext[Any],
        supply: ReplicaSupply,
        settings: Settings,
        commands: Sequence[Command],
    ) -> None:
        self._ctx = ctx
        self._supply = supply
        self._settings = settings
        self._core = ReplicaMerge(commands, settings.result_bytes_max)
        self._links: dict[str, ReplicaLink] = {}
        """Links to the compute halves, by replica."""
        self._turns = HydrationTurns(self._resume)
        """Shared by all links: who may hydrate which view."""
        self._changing = False
        """True while a replica is being added or dropped."""
        self._last_error: dict[str, str] = {}
        """Last error of each replica's connection, for the status."""
        self._connections: dict[str, int] = {}
        """Number of connections to each replica so far."""
        self._serials: dict[str, int] = {}
        """How often each name was added; gives each of its links an own range of connection
        numbers."""
        self._lives: dict[str, str] = {}
        """Current life id of each replica that comes and goes on its own."""
        for name in supply.names:
            self._add(name)

    def _add(self, name: str) -> None:
        self._core.add(name)
        ctx, supply = self._ctx, self._supply
        serial = self._serials[name] = self._serials.get(name, 0) + 1
        # A replica that is added again gets connection numbers above those of its former link, so
        # that late responses of that link can be recognised.
        first = (serial - 1) << 32
        link = ReplicaLink(
            ctx,
            name,
            lambda: supply.connect(name),
            self._settings,
            first,
            owner=supply.owner,
            turns=self._turns,
        )
        self._links[name] = link

    def begin(self) -> None:
        """Connect to all replicas, and watch for others."""
        for link in self._links.values():
            link.connect()
        self._watch()

    def _watch(self) -> None:
        arrivals = self._supply.arrivals
        if arrivals is not None:
            self._ctx.effect(arrivals, done=ReplicasFound)

    def _resume(self) -> None:
        for link in self._links.values():
            link.resume()

    def storage(self) -> ReplicaLink | None:
        """Return a link to the storage half, not connected yet; None if there is no storage
        half."""
        connect = self._supply.storage
        if connect is None:
            return None
        return ReplicaLink(
            self._ctx,
            "storage",
            connect,
            self._settings,
            half="storage",
            owner=self._supply.owner,
        )

    async def aclose(self) -> None:
        """Close all links."""
        for link in self._links.values():
            await link.aclose()

    def command(self, command: Command) -> None:
        """Send a command to the connected replicas. The others get it with the history."""
        for name in self._core.command(command):
            self._links[name].push(command)

    def carry_out(self, merged: MergedResponses) -> None:
        """Send the commands that an event has caused."""
        for name, command in merged.sent:
            self._links[name].push(command)

    # -- news of links -------------------------------------------------------------------------

    def connected(self, message: ReplicaConnected) -> MergedResponses:
        """Send the history to a replica that has connected."""
        name, incarnation = message.replica, message.incarnation
        if name not in self._links:
            return MergedResponses()
        commands, merged = self._core.connected(name, incarnation)
        if name not in self._connections:
            # The error came from an attempt to connect: no connection has ended.
            self._last_error.pop(name, None)
        self._connections[name] = self._connections.get(name, 0) + 1
        self._links[name].replay(incarnation, commands)
        self.carry_out(merged)
        return merged

    def responded(self, message: ReplicaResponse) -> MergedResponses:
        """Merge a response and carry out the consequences."""
        merged = self._core.responded(message.replica, message.incarnation, message.response)
        self.carry_out(merged)
        return merged

    def lost(self, message: ReplicaLost) -> MergedResponses:
        """Record a lost connection."""
        self._last_error[message.replica] = f"{type(message.error).__name__}: {message.error}"
        merged = self._core.lost(message.replica, message.incarnation)
        self.carry_out(merged)
        return merged

    # -- replicas that come and go on their own
    # --------------------------------------------------------

    def found(self, message: ReplicasFound) -> list[MergedResponses]:
        """Connect to replicas that were added, and remove those that are gone."""
        self._watch()
        lives = message.lives
        gone = [name for name, life in self._lives.items() if lives.get(name) != life]
        # Connect to a restarted replica immediately: its former link may not have noticed yet, or
        # may be waiting long for its next attempt.
        merged = [self._end(name) for name in gone if name in self._links]
        for name, life in lives.items():
            if self._lives.get(name) != life:
                self._add(name)
                self._links[name].connect()
                log.info("replica %s was found", name)
        self._lives = dict(lives)
        return merged

    # -- adding and dropping -------------------------------------------------------------------

    def change(self, session: ActorAddress[Any], request: ChangeReplicas) -> ReplicaReport | None:
        """Start a change (`ReplicasNoted` or `ReplicasChanged` follows), or return a report if the
        request changes nothing. Raises `InvalidUsage`."""
        add, drop = request.add, request.drop
        if not add and not drop:
            return self.report(request.request)
        if add and drop:
            raise InvalidUsage("cannot add and drop a replica in one request")
        if self._changing:
            raise InvalidUsage("another replica is being added or dropped: try again")
        if add:
            self._check_new(add)
            self._begin(lambda: self._make(add), ReplicasChanged, session, request)
        else:
            self._check_end(drop)
            left = [name for name in self._links if name != drop]
            # Make it durable first: after a crash in between, the dropped replica must not come
            # back.
            self._begin(lambda: self._supply.store_names(left), ReplicasNoted, session, request)
        self._changing = True
        return None

    def _begin(
        self,
        work: Callable[[], Awaitable[None]],
        answer: type[ReplicasChanged | ReplicasNoted],
        session: ActorAddress[Any],
        request: ChangeReplicas,
    ) -> None:
        self._ctx.effect(
            work,
            done=lambda _: answer(session, request),
            failed=lambda error: answer(session, request, _penstock_error(error)),
        )

    async def _make(self, name: str) -> None:
        """Start a replica and make its name durable."""
        names = [*self._links, name]
        await self._supply.start(name)
        try:
            await self._supply.store_names(names)
        except StorageError:
            # The replica would be gone after a restart, so stop it now and report the error.
            await self._supply.stop(name)
            raise

    def noted(self, message: ReplicasNoted) -> MergedResponses:
        """Drop a replica, now that the names without it are durable. Raises the error if they are
        not."""
        if message.error is not None:
            self._changing = False
            raise message.error
        name = message.request.drop
        # The replica may have been found gone in the meantime.
        merged = self._end(name) if name in self._links else MergedResponses()
        self._begin(
            lambda: self._supply.stop(name), ReplicasChanged, message.session, message.request
        )
        return merged

    def _check_new(self, name: str) -> None:
        if name in self._links:
            raise InvalidUsage(f"replica {name} already exists")
        # A replica's name is also the name of its scratch folder.
        if not (name.isascii() and name.isalnum() and len(name) <= 16):
            raise InvalidUsage(
                f"invalid replica name {name!r}: expected 1 to 16 letters and digits"
            )
        if len(self._links) >= REPLICAS_MAX:
            raise InvalidUsage(
                f"too many replicas: there are already {len(self._links)} (limit {REPLICAS_MAX})"
            )

    def _check_end(self, name: str) -> None:
        if name not in self._links:
            raise UnknownObject(
                f"replica {name} does not exist (available: {', '.join(self._links)})"
            )
        if len(self._links) == 1:
            raise InvalidUsage(f"cannot drop {name}, the last replica: add another one first")

    def _end(self, name: str) -> MergedResponses:
        self._ctx.effect(self._links.pop(name).aclose, done=lambda _: None)
        self._last_error.pop(name, None)
        self._connections.pop(name, None)
        merged = self._core.drop(name)
        self.carry_out(merged)
        return merged

    def changed(self, message: ReplicasChanged) -> ReplicaReport:
        """Report the end of a change. Raises its error."""
        self._changing = False
        if message.error is not None:
            raise message.error
        if message.request.add:
            self._add(message.request.add)
            self._links[message.request.add].connect()
            log.info("replica %s was added", message.request.add)
        else:
            log.info("replica %s was dropped", message.request.drop)
        return self.report(message.request.request)

    # -- reporting -----------------------------------------------------------------------------

    @property
    def connected_count(self) -> int:
        """Return the number of connected replicas."""
        return len(self._core.connected_names)

    def report(self, request: int) -> ReplicaReport:
        """Return the status of all replicas."""
        return ReplicaReport(request, tuple(self._status(name) for name in self._links))

    def _status(self, name: str) -> ReplicaStatus:
        core = self._core
        written = core.written(name)
        lags = [core.upper(id_) - upper for id_, upper in written.items() if upper < EMPTY]
        return ReplicaStatus(
            name,
            "connected" if name in core.connected_names else "connecting",
            self._last_error.get(name, ""),
            self._connections.get(name, 0),
            len(written),
            core.objects,
            # Relative to the empty frontier, a lag in ms would be meaningless.
            max((lag for lag in lags if lag < EMPTY // 2), default=0),
        )

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of the replicas, as they are seen from here."""
        connected = self.connected_count
        yield Measurement(REPLICAS, connected, ("connected",))
        yield Measurement(REPLICAS, len(self._links) - connected, ("disconnected",))
        for name, link in self._links.items():
            for state, count in link.hydrations().items():
                yield Measurement(HYDRATIONS, count, (name, state))
        for command, count in self._core.count_commands().items():
            yield Measurement(HISTORY_COMMANDS, count, ("compute", command))

    def describe(self) -> str:
        """Return the state of all links."""
        return ", ".join(link.describe() for link in self._links.values())


def _penstock_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return PenstockError(f"internal fault: {type(error).__name__}: {error}")
