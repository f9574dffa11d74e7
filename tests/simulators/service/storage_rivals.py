"""Raw clients of the storage half that come beside the service's own controller and displace it.

Theory of operation. As `rivals`, on the other connection. All rivals know the controller's commands
to the storage half (`StorageRivalry`); a rival requests the same objects, on the same shards, never
with less history than the controller needs. Its visit, by kind:

- ``storage replay``: all of it, then compactions, one-shot ingestions, some canceled, and settings;
- ``storage usurp``: InitializationComplete right after Hello, so that nothing goes on running;
- ``storage part``: some of the objects; the others are dropped;
- ``storage stall``: a part of it, and no InitializationComplete;
- ``storage greet``: a Hello and nothing else, which displaces, too: this half needs no more proof;
- ``storage alter``: sources and sinks under other names and delays: only updates that are allowed
  (a forbidden one would stay if its object ran nowhere, and the controller would be refused ever
  after);
- ``storage drop``: all of it, with even numbers as updates, then every object is dropped, and run
  again once the drop is reported;
- ``storage used nonce``: a Hello that was said before.

At the end of its visit a rival closes its connection, or vanishes without a word.

Rules that are checked: on each connection both sides keep the rules of the protocol; responses are
for this client, and true (`storage_checkers.StorageToldChecker`); a used nonce is refused and
displaces no client; a drop is reported; no visit hangs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from actors.cluster.client import ClusterClient
from actors.errors import ConnectionBroken, ConnectionDisplaced, PenstockError, ResourceClosed
from actors.errors import RemoteProtocolError as ProtocolError
from actors.progress import EMPTY, ObjectId
from actors.protocol.compute import AllowCompaction, AllowWrites, Hello, InitializationComplete
from actors.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    ConnectorConfiguration,
    DroppedId,
    IngestionDescription,
    Response,
    RetryDelays,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
    UpdateStorageConfiguration,
)
from actors.storage.history import StorageHistory
from tests.simulators.service.checkers import StorageChecker
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.links import FaultyClusterClient
from tests.simulators.service.rivals import (
    NEVER_IN_POWER,
    STAYS_MS,
    VISIT_S,
    run_visit,
)
from tests.simulators.service.schedule import ClientOperation

if TYPE_CHECKING:
    from tests.simulators.service.cluster import SimulatedCluster

DROP_S: Final = 10.0
"""Virtual time within which the drop of an object is reported, unless the rival is displaced."""


class StorageRivalry:
    """Knowledge that the storage rivals of a run share."""

    def __init__(self) -> None:
        self._history = StorageHistory()
        self.used: list[tuple[int, str]] = []
        """(life of the service, nonce) of the clients that were surely served."""
        self._count = 0

    def fresh(self, what: str) -> str:
        """Return a name that was not used before."""
        self._count += 1
        return f"{what}-{self._count}"

    def learn(self, commands: list[Command]) -> None:
        """Note the commands of the controller's new connection."""
        self._history = StorageHistory(commands)

    def add(self, command: Command) -> None:
        """Note a further command of the controller."""
        self._history.push(command)

    def definitions(self) -> list[Command]:
        """Return the commands between Hello and InitializationComplete of a client that repeats the
        history."""
        self._history.reduce()
        ends = Hello | InitializationComplete | AllowWrites
        return [each for each in self._history.commands() if not isinstance(each, ends)]


class StorageWatch:
    """Checks one connection to a storage half, the controller's or a rival's."""

    def __init__(self, world: SimulatedCluster, life: int, *, controller: bool) -> None:
        self._world = world
        self._life = life
        self._controller = controller
        self._checker = StorageChecker(world.settings)
        self._nonce = ""
        self._said: list[Command] = []
        self._complete = False

    def heard(self, message: Any) -> None:
        """Check a command, a response, or the error that ended the connection."""
        if isinstance(message, ConnectionDisplaced) and f"({NEVER_IN_POWER}" in str(message):
            raise CheckerViolation(f"rivals: the controller lost its place to a visitor: {message}")
        self._checker.heard(message)
        if isinstance(message, Response):
            self._world.told.told(self._nonce, message)
        elif isinstance(message, Command):
            self._command(message)
        self._world.look()

    def _command(self, command: Command) -> None:
        rivalry = self._world.storage_rivalry
        if isinstance(command, Hello):
            self._nonce = command.nonce
        if len(self._said) == 1:  # its Hello was taken
            rivalry.used.append((self._life, self._nonce))
        self._said.append(command)
        if not self._controller:
            return
        if self._complete:
            rivalry.add(command)
        elif isinstance(command, InitializationComplete):
            self._complete = True
            rivalry.learn(self._said)


class StorageRival:
    """One connection of a raw client; see the module's docstring."""

    def __init__(
        self, world: SimulatedCluster, inner: ClusterClient, operation: ClientOperation
    ) -> None:
        self._world = world
        self._operation = operation
        self._watch = StorageWatch(world, world.life, controller=False)
        self._client: Any = FaultyClusterClient(inner, world.injector, self._heard, "storage.rival")
        self._used = [nonce for life, nonce in world.storage_rivalry.used if life == world.life]
        self._dropped: set[ObjectId] = set()
        self._news = asyncio.Event()

    def _heard(self, message: object) -> None:
        self._world.guarded(self._watch.heard)(message)
        if isinstance(message, DroppedId):
            self._dropped.add(message.id)
        self._news.set()

    async def visit(self) -> None:
        """Run the whole visit. Raises the error that ended it early; `CheckerViolation` for a
        forbidden one."""
        kind, number = self._operation.kind, self._operation.number
        refused = kind == "storage used nonce"
        if refused and not self._used:
            return
        listening = asyncio.get_running_loop().create_task(self._listen(refused))
        try:
            for command in self._commands(kind):
                await self._client.send(command)
            stay_s = STAYS_MS[(number - 1) % len(STAYS_MS)] / 1000
            if kind == "storage drop":
                await self._drop_all(listening)
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

    async def _listen(self, refused: bool) -> None:
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
                if isinstance(
                    error, (ConnectionBroken, ResourceClosed, *((ProtocolError,) * refused))
                ):
                    return
                name = type(error).__name__
                raise CheckerViolation(f"rivals: a {kind} was ended by {name}: {error}") from None
            if refused:
                raise CheckerViolation(f"rivals: a {kind} was answered: {response}")

    # -- its commands ----------------------------------------------------------------------------

    def _commands(self, kind: str) -> list[Command]:
        rivalry, number = self._world.storage_rivalry, self._operation.number
        if kind == "storage used nonce":
            return [Hello(self._used[-min(number, len(self._used))])]
        hello, end = Hello(rivalry.fresh("storage-rival")), InitializationComplete()
        if kind == "storage greet":
            return [hello]
        if kind == "storage usurp":
            return [hello, end]
        all_ = rivalry.definitions()
        if kind == "storage stall":
            return [hello, *all_[: len(all_) * number // 6]]
        if kind == "storage part":
            runs = [each for each in all_ if isinstance(each, RunIngestion | RunSink)]
            return [hello, *runs[number % 2 :: 2], end, AllowWrites()]
        if kind == "storage alter":
            return [hello, *map(self._altered, all_), end, AllowWrites()]
        if kind == "storage drop":
            said = all_ if number % 2 else map(self._altered, all_)  # an update starts look-ups
            return [hello, *said, end, AllowWrites()]
        return [hello, *all_, end, AllowWrites(), *self._allowed(all_), *self._oneshots()]

    def _altered(self, command: Command) -> Command:
        """Return the command with the same object under another name and delay."""
        number = self._operation.number
        retry = RetryDelays(number, 10 * number)
        match command:
            case RunIngestion(description=made):
                return RunIngestion(msgspec.structs.replace(made, name="other", retry=retry))
            case RunSink(description=made):
                return RunSink(msgspec.structs.replace(made, name="other", retry=retry))
        return command

    def _allowed(self, all_: list[Command]) -> list[Command]:
        """Return compactions that no client loses history by, and one of an unknown object."""
        found: list[Command] = [AllowCompaction("unknown", EMPTY)]
        for each in all_:
            if isinstance(each, RunSink):
                found.append(AllowCompaction(each.description.id, each.description.as_of))
            elif isinstance(each, RunIngestion):
                found += [AllowCompaction(id_, 1) for id_ in each.description.ids]
        return found

    def _oneshots(self) -> list[Command]:
        """Return one-shot ingestions and settings; the service carries none of the former out."""
        rivalry = self._world.storage_rivalry
        table = next((e for e in self._world.history.catalog.objects if e.kind == "table"), None)
        found: list[Command] = [
            UpdateStorageConfiguration(source_tick_ms=20 + self._operation.number)
        ]
        if table is None or table.shard is None:
            return found
        for number in range(self._operation.number % 3):
            uuid = rivalry.fresh("oneshot")
            nowhere = ConnectorConfiguration("nowhere")
            found.append(RunOneshotIngestion(uuid, table.id, table.shard, table.schema, nowhere))
            found += [CancelOneshotIngestion(uuid)] * (number % 2)
        return found

    async def _drop_all(self, listening: asyncio.Task[None]) -> None:
        """Drop every object, wait for the reports of the drops, and run the objects again."""
        runs: dict[ObjectId, Command] = {}
        for each in self._world.storage_rivalry.definitions():
            if isinstance(each, RunIngestion | RunSink):
                runs[each.description.id] = each
        if self._operation.number % 2:  # else at once, before any look-up
            await asyncio.sleep(0.05)
        for id_ in runs:
            await self._client.send(AllowCompaction(id_, EMPTY))
        ids = {id_ for each in runs.values() for id_ in _ids(each)}
        try:
            async with asyncio.timeout(DROP_S):
                while not ids <= self._dropped and not listening.done():
                    self._news.clear()
                    news = asyncio.get_running_loop().create_task(self._news.wait())
                    await asyncio.wait((news, listening), return_when=asyncio.FIRST_COMPLETED)
                    news.cancel()
        except TimeoutError:
            raise CheckerViolation(f"rivals: {ids - self._dropped} were not told dropped") from None
        if not listening.done() and self._operation.number > 2:
            for each in runs.values():
                await self._client.send(each)


def _ids(command: Command) -> tuple[ObjectId, ...]:
    match command:
        case RunIngestion(description=IngestionDescription() as made):
            return made.ids
        case RunSink(description=SinkDescription() as made):
            return (made.id,)
    return ()


async def compete_for_storage(world: SimulatedCluster, operations: list[ClientOperation]) -> None:
    """Run all visits of one rival, one after the other."""
    for operation in operations:
        await asyncio.sleep(operation.pause_ms / 1000)
        try:
            inner = await world.connect_raw_storage()
        except PenstockError:
            continue
        world.trace.note("rival", operation.client, operation.kind)
        await run_visit(world, StorageRival(world, inner, operation), operation)
