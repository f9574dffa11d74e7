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

from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.storage import (
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
from actors.replica.cluster.client import ClusterClient
from actors.replica.storage.history import StorageHistory
from actors.runtime.errors import ConnectionDisplaced
from actors.runtime.progress import EMPTY, ObjectId
from tests.simulators.service.checkers import StorageChecker
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.links import FaultyClusterClient
from tests.simulators.service.rivals import NEVER_IN_POWER, Rival, RivalLedger, run_visits
from tests.simulators.service.schedule import ClientOperation

if TYPE_CHECKING:
    from tests.simulators.service.cluster import SimulatedCluster

DROP_S: Final = 10.0
"""Virtual time within which the drop of an object is reported, unless the rival is displaced."""


class StorageRivalry(RivalLedger[StorageHistory]):
    """The ledger of rivals of the storage half."""

    def __init__(self) -> None:
        super().__init__(StorageHistory)

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


class StorageRival(Rival):
    """A rival of the controller at the storage half."""

    def __init__(
        self, world: SimulatedCluster, inner: ClusterClient, operation: ClientOperation
    ) -> None:
        super().__init__(world, operation, world.storage_rivalry.used)
        self._watch = StorageWatch(world, world.life, controller=False)
        self._client = FaultyClusterClient(inner, world.injector, self._heard, "storage.rival")
        self._dropped: set[ObjectId] = set()
        self._news = asyncio.Event()

    def _heard(self, message: object) -> None:
        self._world.guarded(self._watch.heard)(message)
        if isinstance(message, DroppedId):
            self._dropped.add(message.id)
        self._news.set()

    async def _more(self, listening: asyncio.Task[None]) -> None:
        if self._operation.kind == "storage drop":
            await self._drop_all(listening)

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
    """Run all visits of one rival of the storage half, one after the other."""
    await run_visits(world, operations, world.connect_raw_storage, StorageRival)
