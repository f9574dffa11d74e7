"""Raw clients of the cluster that come beside the service's own controller and displace it.

Theory of operation. A rival speaks the replica protocol itself, over the cluster's in-process
client with delays and breaks of its own. It knows the controller's commands (`RivalLedger`), as a
second controller with the same catalog would, and never requests less history than these: it
compacts nothing. Its connection is one *visit*, by the kind of its operation:

- ``replay``: the controller's whole history, then reads of its own: peeks of every index and of
  a shard of every view, some canceled, and a subscribe. It stays until it is displaced;
- ``usurp``: InitializationComplete right after CreateInstance, so that nothing goes on running;
- ``stall``: a part of the history, and no InitializationComplete;
- ``greet``: a Hello and nothing else;
- ``misfit``: requests an instance with another number of workers;
- ``used nonce``: a Hello that was said before.

At the end of its visit a rival closes its connection, or vanishes without a word.

Rules that are checked: on each connection both sides keep the rules of the protocol; its reads
return the history's contents; a misfit and a used nonce are refused by name; a misfit and a mere
Hello displace no client; no visit hangs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from actors.model.plan.updates import from_ipc
from actors.model.protocol.api import SubscribeChanges, SubscribeObject
from actors.model.protocol.compute import (
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardTarget,
    SubscribeBatch,
    SubscribeExport,
    SubscribeResponse,
    ViewExport,
)
from actors.replica.cluster.client import ClusterClient
from actors.replica.compute.history import ComputeHistory
from actors.replica.storage.history import StorageHistory
from actors.runtime.errors import (
    ConnectionBroken,
    ConnectionDisplaced,
    InvalidUsage,
    PenstockError,
    ResourceClosed,
)
from actors.runtime.errors import RemoteProtocolError as ProtocolError
from tests.simulators.service.checkers import ReplicaChecker, SubscribeChecker, difference
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.links import FaultyClusterClient
from tests.simulators.service.queries import Bag, contents
from tests.simulators.service.schedule import ClientOperation

if TYPE_CHECKING:
    from tests.simulators.service.cluster import SimulatedCluster

H = TypeVar("H", bound=ComputeHistory | StorageHistory)
VISIT_S: Final = 30.0
"""Virtual time within which a visit ends."""
STAYS_MS: Final = (0, 5, 30, 100, 400, 1_500)
"""Time for which a rival stays after its last command, by the operation's number (from 1)."""
NEVER_IN_POWER: Final = "visitor"
"""Prefix of the nonces of clients that must not displace another."""


class RivalLedger(Generic[H]):
    """Knowledge that the rivals of a run share; `H` is the history of the half that they visit."""

    def __init__(self, history: Callable[..., H]) -> None:
        self._new_history = history
        self._history = history()
        self.used: list[tuple[int, str]] = []
        """(life of the service, nonce) of the clients that were surely served."""
        self._count = 0

    def fresh(self, what: str) -> str:
        """Return a name that was not used before."""
        self._count += 1
        return f"{what}-{self._count}"

    def learn(self, commands: Sequence[Any]) -> None:
        """Note the commands of the controller's new connection."""
        self._history = self._new_history(commands)

    def add(self, command: Any) -> None:
        """Note a further command of the controller."""
        self._history.push(command)


class ComputeLedger(RivalLedger[ComputeHistory]):
    """The ledger of rivals of the compute half."""

    def __init__(self) -> None:
        super().__init__(ComputeHistory)

    def replay(self, workers: int) -> list[Command]:
        """Return the commands after the Hello of a client that repeats the whole history."""
        self._history.reduce()
        said: list[Command] = [
            command for command in self._history.commands() if not isinstance(command, Hello)
        ]
        if not said:
            said = [CreateInstance(workers), InitializationComplete()]
        return said


class ControllerWatch:
    """Checks one connection of the controller, and notes its commands for the rivals."""

    def __init__(self, world: SimulatedCluster, life: int, *, heard: bool) -> None:
        """Watch a connection; `heard`: it is to the replica that the rivals visit, so its commands
        are noted for them."""
        self._told = heard
        self._rivalry = world.rivalry
        self._life = life
        self._checker = ReplicaChecker(world.settings)
        self._said: list[Command] = []
        self._complete = False

    def heard(self, message: object) -> None:
        """Check a command, a response, or the error that ended the connection."""
        if isinstance(message, ConnectionDisplaced) and f"({NEVER_IN_POWER}" in str(message):
            raise CheckerViolation(f"rivals: the controller lost its place to a visitor: {message}")
        self._checker.heard(message)
        if not self._told:
            return
        if isinstance(message, Command):
            self._command(message)
        elif isinstance(message, PeekResponse):
            self._note(CancelPeek(message.uuid))  # as the controller's own history does

    def _command(self, command: Command) -> None:
        if len(self._said) == 2 and isinstance(self._said[0], Hello):
            self._rivalry.used.append((self._life, self._said[0].nonce))
        self._note(command)
        if isinstance(command, InitializationComplete):
            self._complete = True
            self._rivalry.learn(self._said)

    def _note(self, command: Command) -> None:
        self._said.append(command)
        if self._complete:
            self._rivalry.add(command)


class Rival:
    """One connection of a raw client, and its visit; see the module's docstring."""

    def __init__(
        self, world: SimulatedCluster, operation: ClientOperation, used: list[tuple[int, str]]
    ) -> None:
        self._world = world
        self._operation = operation
        self._client: Any = None
        self._used = [nonce for life, nonce in used if life == world.life]

    def _commands(self, kind: str) -> Sequence[Any]:
        """Return the commands of the visit."""
        raise NotImplementedError

    def _refusals(self, kind: str) -> tuple[type[PenstockError], ...]:
        """Return the errors with one of which the visit must end."""
        return (ProtocolError,) if kind.endswith("used nonce") else ()

    async def _more(self, listening: asyncio.Task[None]) -> None:
        """Run what a visit does after its commands."""

    async def visit(self) -> None:
        """Run the whole visit. Raises the error that ended it early; `CheckerViolation` for a
        forbidden one."""
        kind, number = self._operation.kind, self._operation.number
        refused = self._refusals(kind)
        if kind.endswith("used nonce") and not self._used:
            return
        commands = self._commands(kind)
        listening = asyncio.get_running_loop().create_task(self._listen(refused))
        try:
            for command in commands:
                await self._client.send(command)
            stay_s = STAYS_MS[(number - 1) % len(STAYS_MS)] / 1000
            await self._more(listening)
            await asyncio.wait((listening,), timeout=VISIT_S if refused else stay_s)
            if refused and not listening.done():
                raise CheckerViolation(f"rivals: a {kind} was neither served nor refused")
        finally:
            listening.cancel()
            await asyncio.wait((listening,))
        if not listening.cancelled():
            listening.result()
        if number % 2:
            await self._client.close()

    async def _listen(self, refused: tuple[type[PenstockError], ...]) -> None:
        """Receive responses. Raises `CheckerViolation` unless the connection ends as it should."""
        kind = self._operation.kind
        while True:
            try:
                response = await self._client.receive()
            except ConnectionDisplaced:
                if refused:
                    raise CheckerViolation(
                        f"rivals: a {kind} was served, and then displaced"
                    ) from None
                return
            except PenstockError as error:
                if isinstance(error, (ConnectionBroken, ResourceClosed, *refused)):
                    return
                name = type(error).__name__
                raise CheckerViolation(f"rivals: a {kind} was ended by {name}: {error}") from None
            if refused:
                raise CheckerViolation(f"rivals: a {kind} was answered: {response}")


class RivalConnection(Rival):
    """A rival of the controller at the compute half."""

    def __init__(
        self, world: SimulatedCluster, inner: ClusterClient, operation: ClientOperation
    ) -> None:
        super().__init__(world, operation, world.rivalry.used)
        self._checker = ReplicaChecker(world.settings)
        self._client = FaultyClusterClient(inner, world.injector, self._heard, "rival")
        self._peeks: dict[str, tuple[str, int]] = {}
        """Own peeks: uuid → the object's name and the time."""
        self._streams: dict[str, SubscribeChecker] = {}

    def _heard(self, message: object) -> None:
        self._world.guarded(self._check)(message)

    def _check(self, message: object) -> None:
        self._checker.heard(message)
        match message:
            case PeekResponse(uuid=uuid, result=PeekRows() as rows) if uuid in self._peeks:
                self._check_rows(*self._peeks[uuid], rows)
            case SubscribeResponse(id=id_, batch=SubscribeBatch() as batch) if (
                id_ in self._streams and batch.error is None
            ):
                if batch.parts:  # stashed results are checked at the clients
                    del self._streams[id_]
                    return
                changes = SubscribeChanges(0, batch.lower, batch.upper, batch.arrow)
                self._streams[id_].told(changes)
            case _:
                pass

    def _check_rows(self, name: str, time: int, answer: PeekRows) -> None:
        found: Bag = Counter()
        if answer.arrow:
            table = from_ipc(answer.arrow)
            for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                found[row[:-1]] += row[-1]
        wanted = contents(name, self._world.history.tables_at(time))
        if found != wanted:
            raise CheckerViolation(f"rivals: {name} at {time}: {difference(found, wanted)}")

    def _refusals(self, kind: str) -> tuple[type[PenstockError], ...]:
        return (InvalidUsage,) if kind == "misfit" else super()._refusals(kind)

    # -- its commands ----------------------------------------------------------------------------

    def _commands(self, kind: str) -> list[Command]:
        rivalry, settings = self._world.rivalry, self._world.settings
        instance = CreateInstance(settings.workers, expiration_ms=settings.expiration_ms)
        if kind == "greet":
            return [Hello(rivalry.fresh(NEVER_IN_POWER))]
        if kind == "misfit":
            other = CreateInstance(settings.workers + self._operation.number)
            return [Hello(rivalry.fresh(NEVER_IN_POWER)), other]
        if kind == "used nonce":
            return [Hello(self._used[-min(self._operation.number, len(self._used))]), instance]
        hello = Hello(rivalry.fresh("rival"))
        if kind == "usurp":
            return [hello, instance, InitializationComplete()]
        replay = rivalry.replay(settings.workers)
        if kind == "stall":
            initial = replay[: replay.index(InitializationComplete())]
            return [hello, *initial[: max(1, len(initial) * self._operation.number // 6)]]
        return [hello, *replay, *self._reads(replay)]

    def _reads(self, replay: list[Command]) -> list[Command]:
        """Return own reads, of objects that the history made."""
        found: list[Command] = []
        dataflows = [each.dataflow for each in replay if isinstance(each, CreateDataflow)]
        for number, made in enumerate(dataflows):
            found += self._peek(made, canceled=(number + self._operation.number) % 3 == 0)
        views = [made for made in dataflows if isinstance(made.export, ViewExport | IndexExport)]
        if views:
            found += self._subscribe(views[self._operation.number % len(views)])
        return found

    def _peek(self, made: DataflowDescription, *, canceled: bool) -> list[Command]:
        imported = made.imports[0]
        name = self._world.history.names.get(imported.shard)
        if name is None or isinstance(made.export, SubscribeExport):
            return []
        uuid = self._world.rivalry.fresh("peek")
        self._peeks[uuid] = (name, made.as_of)
        target = (
            IndexTarget(made.id)
            if isinstance(made.export, IndexExport)
            else ShardTarget(made.id, imported)
        )
        peek = Peek(uuid, target, made.as_of)
        return [peek, CancelPeek(uuid)] if canceled else [peek]

    def _subscribe(self, made: DataflowDescription) -> list[Command]:
        imported = made.imports[0]
        name = self._world.history.names.get(imported.shard)
        if name is None:
            return []
        id_ = self._world.rivalry.fresh("rival-subscribe")
        self._streams[id_] = SubscribeChecker(self._world.history, SubscribeObject(0, name))
        export = SubscribeExport(imported.schema)
        wanted = DataflowDescription(id_, id_, (imported,), export, made.as_of)
        return [CreateDataflow(wanted), ScheduleDataflow(id_)]


async def compete(world: SimulatedCluster, operations: list[ClientOperation]) -> None:
    """Run all visits of one rival of the compute half, one after the other."""
    await run_visits(world, operations, world.connect_raw, RivalConnection)


async def run_visits(
    world: SimulatedCluster,
    operations: list[ClientOperation],
    connect: Callable[[], Awaitable[ClusterClient]],
    rival: Callable[[SimulatedCluster, ClusterClient, ClientOperation], Rival],
) -> None:
    """Run all visits of one rival, one after the other."""
    for operation in operations:
        await asyncio.sleep(operation.pause_ms / 1000)
        try:
            inner = await connect()
        except PenstockError:
            continue
        world.trace.note("rival", operation.client, operation.kind)
        await _run_visit(world, rival(world, inner, operation), operation)


async def _run_visit(world: SimulatedCluster, rival: Rival, operation: ClientOperation) -> None:
    """Run one visit; the death of the service ends it."""
    loop = asyncio.get_running_loop()
    visit = loop.create_task(rival.visit())
    ended = loop.create_task(world.ended.wait())
    await asyncio.wait((visit, ended), timeout=2 * VISIT_S, return_when=asyncio.FIRST_COMPLETED)
    if not visit.done() and not ended.done():
        world.fail(CheckerViolation(f"liveness: the visit of a {operation.kind} does not end"))
    for task in (visit, ended):
        task.cancel()
    await asyncio.wait((visit, ended))
    if visit.cancelled():
        return
    error = visit.exception()
    if isinstance(error, CheckerViolation):
        world.fail(error)
    elif error is not None and not isinstance(error, PenstockError):
        raise error
