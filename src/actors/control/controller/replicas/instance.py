"""The running instance: one link to each replica, which do what `ReplicaMerge` decides.

It is a part of the controller and runs in its task. Replicas come from a `ReplicaSupply`: clusters
in this process (`cluster.hosts`), or processes that have registered in the stores (`registered`).
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

# -- The names of the replicas, as last commanded or configured: one durable document --------------
# The setting `replicas` gives the initial number: r1, r2, …. Names that are added or dropped at run
# time are kept under the consensus key `replicas`, with the setting as it was. If the service
# starts with another setting than the document's, the setting counts and the names are forgotten.


REPLICAS_KEY: Final = "replicas"
FORMAT_VERSION: Final = 1
ATTEMPTS_MAX: Final = 5


class ReplicaSet(msgspec.Struct, frozen=True):
    """The durable document."""

    format: int
    setting: int
    """Value of `replicas` when it was written."""
    names: tuple[str, ...]


def encode(setting: int, names: Sequence[str]) -> bytes:
    """Return the durable document."""
    return msgspec.msgpack.encode(ReplicaSet(FORMAT_VERSION, setting, tuple(names)))


def decode(data: bytes) -> ReplicaSet:
    """Return the decoded document. Raises `StateDirectoryError` (a newer format), `CorruptData`."""
    what = "the document of replicas"
    return decode_document(REPLICAS_KEY, data, ReplicaSet, what=what, format=FORMAT_VERSION)


def names_of(found: ReplicaSet | None, setting: int) -> tuple[str, ...]:
    """Return the replicas to start with. Pure."""
    if found is None or found.setting != setting or not found.names:
        return tuple(f"r{number}" for number in range(1, setting + 1))
    return found.names


async def load(persist: PersistClient, settings: Settings) -> tuple[str, ...]:
    """Return the replicas to start with, by the durable document. Raises `StateDirectoryError`,
    `StorageError`."""
    head = await persist.head(REPLICAS_KEY)
    found = None if head is None else decode(head.data)
    names = names_of(found, settings.replicas)
    if found is not None and found.names != names:
        log.info(
            "the setting replicas was %d and is %d: it counts, and replicas %s are forgotten",
            found.setting,
            settings.replicas,
            ", ".join(found.names),
        )
    return names


async def store_names(persist: PersistClient, settings: Settings, names: Sequence[str]) -> None:
    """Make the names durable. Raises `StorageError`, which is indeterminate if they may be
    durable."""
    data, unknown = encode(settings.replicas, names), False
    # Retry here is safe: a state directory has one process, and it makes one change at a time, so
    # no other writer's document is overwritten.
    retry = RetryLoop(settings, failures_max=ATTEMPTS_MAX - 1)
    while True:
        try:
            head = await persist.head(REPLICAS_KEY)
            # An earlier attempt was carried out, though its answer was lost.
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
        f"whether the replicas are {', '.join(names)} from the next start on is not known: the "
        "store does not say; look with `penstock replicas`, and try again",
        determinate=False,
    )


log = logging.getLogger("penstock.controller")


class ReplicaSupply(Protocol):
    """Starts, stops and connects replicas."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the replicas that are there from the start."""
        ...

    async def connect(self, name: str) -> ReplicaClient:
        """Return a connection to a replica."""
        ...

    @property
    def owner(self) -> str:
        """Return the name by which this process owns the stores, for replicas in others; "" for
        replicas of this one."""
        ...

    @property
    def storage(self) -> Connect | None:
        """Return a function that connects to the storage half of one replica; None: they have
        none."""
        ...

    @property
    def arrivals(self) -> Callable[[], Awaitable[Mapping[str, str]]] | None:
        """Return a function that waits until replicas have come or gone by themselves, and returns
        all, by name with a mark of each one's life; None: they do so by command alone."""
        ...

    async def store_names(self, names: Sequence[str]) -> None:
        """Make durable that these are the replicas. Raises `StorageError`."""
        ...

    async def start(self, name: str) -> None:
        """Start one more replica. Raises `InvalidUsage` where that is not possible."""
        ...

    async def stop(self, name: str) -> None:
        """Stop a replica and remove its scratch. Raises `InvalidUsage`."""
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
        """See `ReplicaSupply`: nothing is kept, as the names are fixed."""

    @property
    def names(self) -> Sequence[str]:
        """See `ReplicaSupply`."""
        return list(self._connects)

    async def connect(self, name: str) -> ReplicaClient:
        """See `ReplicaSupply`."""
        return await self._connects[name]()

    @property
    def storage(self) -> Connect | None:
        """See `ReplicaSupply`."""
        return self._storage

    async def start(self, name: str) -> None:
        """See `ReplicaSupply`."""
        raise InvalidUsage(
            f"replica {name} cannot be started from here: start the service with replicas = 2 or "
            "more"
        )

    async def stop(self, name: str) -> None:
        """Leave the replica running."""

    async def statistics(self) -> ClusterStatistics | None:
        """See `ReplicaSupply`."""
        return None if self._inspect is None else await self._inspect()


class LocalReplicaSupply:
    """The replicas of this process. `wrap` decorates each connection to a half; `remember` makes
    their names durable."""

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
        """See `ReplicaSupply`."""
        await self._remember(names)

    @property
    def names(self) -> Sequence[str]:
        """See `ReplicaSupply`."""
        return self._hosts.names

    async def connect(self, name: str) -> ReplicaClient:
        """See `ReplicaSupply`."""
        return self._wrap(await self._hosts.connect(name), name)

    @property
    def storage(self) -> Connect | None:
        """See `ReplicaSupply`. Connects to the oldest replica."""
        if not self._hosts.stores:
            return None

        async def connect() -> ReplicaClient:
            # One replica alone: an external system should be read once.
            name = self._hosts.names[0]
            return self._wrap(await self._hosts.connect(name, "storage"), name)

        return connect

    async def start(self, name: str) -> None:
        """See `ReplicaSupply`."""
        await self._hosts.start(name)

    async def stop(self, name: str) -> None:
        """See `ReplicaSupply`."""
        await self._hosts.stop(name)

    async def statistics(self) -> ClusterStatistics | None:
        """See `ReplicaSupply`."""
        return await self._hosts.statistics()


class ReplicasNoted(msgspec.Struct, frozen=True, gc=False):
    """The names without a dropped replica are durable, so that it may stop; or that failed."""

    session: ActorAddress[Any]
    request: ChangeReplicas
    error: PenstockError | None = None


class ReplicasChanged(msgspec.Struct, frozen=True, gc=False):
    """A replica was added or dropped, or that failed."""

    session: ActorAddress[Any]
    request: ChangeReplicas
    error: PenstockError | None = None


class ReplicasFound(msgspec.Struct, frozen=True, gc=False):
    """Replicas have come or gone by themselves: all that there are, with a mark of each life."""

    lives: Mapping[str, str]


class ComputeInstance:
    """All replicas. `commands` is the initial history."""

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
        self._turns = HydrationTurns(self._resume)
        self._changing = False
        self._last_error: dict[str, str] = {}
        self._connections: dict[str, int] = {}
        self._serials: dict[str, int] = {}
        self._lives: dict[str, str] = {}
        """Present life of each replica that comes and goes by itself."""
        for name in supply.names:
            self._add(name)

    def _add(self, name: str) -> None:
        self._core.add(name)
        ctx, supply = self._ctx, self._supply
        serial = self._serials[name] = self._serials.get(name, 0) + 1
        # A replica that is added again numbers its connections beyond those of its former link, so
        # that late responses of that link are told apart.
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
        """Return a link to the storage half, not connected yet; None where there is no half."""
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
        """End all links."""
        for link in self._links.values():
            await link.aclose()

    def command(self, command: Command) -> None:
        """Send a command to the replicas that are connected; the others get it with the history."""
        for name in self._core.command(command):
            self._links[name].push(command)

    def carry_out(self, merged: MergedResponses) -> None:
        """Send the commands that follow from an event."""
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
            # The error is of an attempt to connect: no connection has ended.
            self._last_error.pop(name, None)
        self._connections[name] = self._connections.get(name, 0) + 1
        self._links[name].replay(incarnation, commands)
        self.carry_out(merged)
        return merged

    def responded(self, message: ReplicaResponse) -> MergedResponses:
        """Merge a response and carry out what follows."""
        merged = self._core.responded(message.replica, message.incarnation, message.response)
        self.carry_out(merged)
        return merged

    def lost(self, message: ReplicaLost) -> MergedResponses:
        """Take note of a lost connection."""
        self._last_error[message.replica] = f"{type(message.error).__name__}: {message.error}"
        merged = self._core.lost(message.replica, message.incarnation)
        self.carry_out(merged)
        return merged

    # -- coming and going ------------------------------------------------------------------------

    def found(self, message: ReplicasFound) -> list[MergedResponses]:
        """Connect to replicas that have come, and forget those that are gone."""
        self._watch()
        lives = message.lives
        gone = [name for name, life in self._lives.items() if lives.get(name) != life]
        # One that runs anew is connected to at once: its former link may wait long for its next
        # attempt, or may not have noticed yet.
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
        """Begin a change (`ReplicasNoted` or `ReplicasChanged` follows), or return a report if the
        request changes nothing. Raises `InvalidUsage`."""
        add, drop = request.add, request.drop
        if not add and not drop:
            return self.report(request.request)
        if add and drop:
            raise InvalidUsage("add a replica or drop one, not both at once")
        if self._changing:
            raise InvalidUsage("another replica is being added or dropped: try again")
        if add:
            self._check_new(add)
            self._begin(lambda: self._make(add), ReplicasChanged, session, request)
        else:
            self._check_end(drop)
            left = [name for name in self._links if name != drop]
            # Durable first: after a crash in between, the dropped replica must not come back.
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
            # It would be gone after a restart: better now, with an error.
            await self._supply.stop(name)
            raise

    def noted(self, message: ReplicasNoted) -> MergedResponses:
        """Drop a replica, now that the names without it are durable. Raises the error if they are
        not."""
        if message.error is not None:
            self._changing = False
            raise message.error
        name = message.request.drop
        # It may have been found gone meanwhile.
        merged = self._end(name) if name in self._links else MergedResponses()
        self._begin(
            lambda: self._supply.stop(name), ReplicasChanged, message.session, message.request
        )
        return merged

    def _check_new(self, name: str) -> None:
        if name in self._links:
            raise InvalidUsage(f"there is a replica {name} already")
        # A replica's name is also the name of its scratch folder.
        if not (name.isascii() and name.isalnum() and len(name) <= 16):
            raise InvalidUsage(f"replica {name!r}: a name is 1 to 16 letters and digits")
        if len(self._links) >= REPLICAS_MAX:
            raise InvalidUsage(
                f"there are {len(self._links)} replicas, and at most {REPLICAS_MAX} may be"
            )

    def _check_end(self, name: str) -> None:
        if name not in self._links:
            raise UnknownObject(f"there is no replica {name}: {', '.join(self._links)} are there")
        if len(self._links) == 1:
            raise InvalidUsage(f"{name} is the last replica: add another one first")

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
        """Return the number of replicas that are connected."""
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
            # Against the empty frontier a lag would be no number of ms.
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
