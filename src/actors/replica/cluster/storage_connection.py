"""The storage half's conversation with a client, and its wire.

As `connection.ComputeConversation`, and simpler: every command goes to every worker, one by one.
The `ConnectionAcceptor` decides which connection is served; this half has its own, with its own
adapters and nonces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import anyio
import msgspec

from actors.channel_adapter import FromClient
from actors.model.protocol.compute import ConnectionRefused, Hello, InitializationComplete
from actors.model.protocol.storage import (
    Command,
    DroppedId,
    FilesStaged,
    FrontierUpper,
    Response,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    StagedBatches,
    StagingFailed,
    StagingResult,
    StatisticsUpdates,
    StatusUpdate,
)
from actors.replica.cluster.client import WireClient
from actors.replica.cluster.connection import (
    AcceptorMessage,
    AcknowledgementWindow,
    ClientConversation,
    RoutedCommand,
    RunListener,
)
from actors.replica.cluster.serving import ConversationServer
from actors.replica.cluster.storage_rules import StorageCommandRules
from actors.replica.storage.history import StorageDefinitions
from actors.runtime.errors import OperationCanceled, PenstockError, RemoteProtocolError
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import Frontier, ObjectId
from actors.runtime.settings import Settings
from actors.runtime.telemetry import split_context
from actors.runtime.transport.address import NetworkAddress as Place
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial
from actors.runtime.transport.security import for_dialler, for_listener

# The storage half of one replica out of N workers: commands are split, responses merged. Pure
# Rules of `absorb`:
#
# - uppers: each worker's is joined (it cannot go back); the meet is emitted when it advances. An
#   upper of an untracked object is an error, and so is one after the same worker's `DroppedId`;
# - `DroppedId` is emitted when all workers have sent it; one that sends it twice is an error;
# - a one-shot ingestion is answered when all workers have answered: Canceled before another error,
#   an error before the batches of all;
# - statuses and statistics pass through.
#
# Invariants: emitted uppers strictly advance; a drop and an answer are emitted once; with nothing
# in flight nothing is kept.


class _Object(msgspec.Struct):
    """One object: each worker's upper, the emitted meet, and the workers that have dropped it."""

    uppers: list[Frontier]
    reported: Frontier = 0
    dropped: set[int] = msgspec.field(default_factory=set)


class StoragePartitioned:
    """Splits one client's commands over the workers, merges the workers' responses.

    `ended` collects ids and uuids whose end was emitted; its reader clears it.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._complete = False
        self.ended: list[ObjectId] = []
        self._clear()

    def _clear(self) -> None:
        self._wanted = StorageDefinitions()
        self._objects: dict[ObjectId, _Object] = {}
        self._oneshots: dict[str, dict[int, StagingResult]] = {}

    def idle(self) -> bool:
        """Return whether nothing is being merged."""
        return not (self._objects or self._oneshots)

    def split(self, command: Command) -> list[tuple[int, Command]]:
        """Return (worker, command) for every worker that gets the command."""
        if isinstance(command, Hello):
            self._clear()
            self._complete = False
        elif self._complete:
            self._track(command)
        else:
            self._wanted.add(command)
            if isinstance(command, InitializationComplete):
                self._complete = True
                # Nothing ran before: only what is still wanted now will answer.
                for said in self._wanted.commands():
                    self._track(said)
                self._wanted = StorageDefinitions()
        # Every worker gets all commands, so what its responses may be about is known from here.
        return [(part, command) for part in range(self._parts)]

    def _track(self, command: Command) -> None:
        match command:
            case RunIngestion(description=description):
                self._begin(*description.ids)
            case RunSink(description=description):
                self._begin(description.id)
            case RunOneshotIngestion(uuid=uuid):
                self._oneshots.setdefault(uuid, {})

    def _begin(self, *ids: ObjectId) -> None:
        for id in ids:
            if id not in self._objects:
                self._objects[id] = _Object([0] * self._parts)

    def absorb(self, part: int, response: Response) -> Response | None:
        """Return the merged response that this one completes, or None.

        Raises `RemoteProtocolError` if a worker breaks a rule of the module's docstring.
        """
        match response:
            case FrontierUpper():
                return self._upper(part, response)
            case DroppedId():
                return self._dropped(part, response)
            case StagedBatches():
                return self._staged(part, response)
            case StatusUpdate() | StatisticsUpdates() | ConnectionRefused():
                return response

    def _object(self, part: int, id: ObjectId, what: str) -> _Object:
        found = self._objects.get(id)
        if found is None:
            raise RemoteProtocolError(f"worker {part} told {what} of {id}, which nobody runs")
        if part in found.dropped:
            raise RemoteProtocolError(f"worker {part} told {what} of {id} after its drop")
        return found

    def _upper(self, part: int, response: FrontierUpper) -> FrontierUpper | None:
        found = self._object(part, response.id, "an upper")
        found.uppers[part] = max(found.uppers[part], response.upper)
        meet = min(found.uppers)
        if meet <= found.reported:
            return None
        found.reported = meet
        return FrontierUpper(response.id, meet)

    def _dropped(self, part: int, response: DroppedId) -> DroppedId | None:
        found = self._object(part, response.id, "the drop")
        found.dropped.add(part)
        if len(found.dropped) < self._parts:
            return None
        del self._objects[response.id]
        self.ended.append(response.id)
        return response

    def _staged(self, part: int, response: StagedBatches) -> StagedBatches | None:
        uuid = response.uuid
        answers = self._oneshots.get(uuid)
        if answers is None:
            raise RemoteProtocolError(
                f"worker {part} answered the one-shot ingestion {uuid}, which nobody waits for"
            )
        if part in answers:
            raise RemoteProtocolError(f"worker {part} answered the one-shot ingestion {uuid} twice")
        answers[part] = response.result
        if len(answers) < self._parts:
            return None
        del self._oneshots[uuid]
        self.ended.append(uuid)
        return StagedBatches(uuid, merge_staged([answers[part] for part in sorted(answers)]))


def merge_staged(results: list[StagingResult]) -> StagingResult:
    """Return one result out of all workers', by the precedence in the module's docstring."""
    failed = [result for result in results if isinstance(result, StagingFailed)]
    if failed:
        return min(failed, key=lambda result: result.code != OperationCanceled.__name__)
    staged = [result for result in results if isinstance(result, FilesStaged)]
    return FilesStaged(
        tuple(batch for result in staged for batch in result.batches),
        sum(result.files for result in staged),
        sum(result.bytes for result in staged),
    )


# -- The storage half over a socket: the cluster's side and the client's ---------------------------
# As `serving` and `client.connect` for the compute half. The opening is one frame, the Hello: there
# is no instance to compare, so a timely Hello with a fresh nonce displaces the active client.


# Differs from the compute half's, so that a client of the wrong half fails in the handshake.
STORAGE_MAGIC: Final = b"PENSSTOR"
STORAGE_VERSION: Final = 1


class StorageServer(ConversationServer):
    """Serves the conversations of one listener of the storage half."""

    async def _introduced(self, connection: FramedConnection[Any, Any]) -> tuple[Hello, None]:
        """Return the first frame, a Hello. Raises `RemoteProtocolError` for another, or none in
        time."""
        limit_ms = self._settings.connect_timeout_ms
        try:
            with anyio.fail_after(limit_ms / 1000):
                hello, _ = split_context(await connection.receive())
        except TimeoutError:
            raise RemoteProtocolError(f"no Hello in {limit_ms} ms (connect_timeout_ms)") from None
        if not isinstance(hello, Hello):
            raise RemoteProtocolError(f"{type(hello).__name__} came before Hello")
        return hello, None


async def listen_storage(
    address: Place | str, acceptor: ActorAddress[AcceptorMessage], settings: Settings
) -> TransportListener:
    """Serve the storage half on that address (port 0: a free one), until its acceptor stops or
    `TransportListener.aclose`. Raises `AddressInUse`, and `BadSettings` for an address that needs
    TLS and tokens and has none."""
    place = Place.parse(address, "storage_listen") if isinstance(address, str) else address
    listener = await TransportListener.bind(
        place,
        Response,
        Command,
        settings,
        STORAGE_MAGIC,
        STORAGE_VERSION,
        identity=settings.identity,
        security=for_listener("storage_listen", place, settings, "cluster_token_file"),
    )
    server = StorageServer(acceptor, settings)
    await acceptor.send(RunListener(lambda: listener.serve(server.converse)))
    return listener


async def connect_storage(address: Place | str, settings: Settings) -> WireClient:
    """Connect to a listener of a storage half, ``host:port`` or ``unix:/path``; of the settings,
    `identity`, `tls_…` and `cluster_token_file` count. Raises as `transport.dial`."""
    place = Place.parse(address) if isinstance(address, str) else address
    connection: FramedConnection[Any, Any] = await dial(
        place,
        Command,
        Response,
        settings,
        STORAGE_MAGIC,
        STORAGE_VERSION,
        identity=settings.identity,
        security=for_dialler(place, settings, settings.cluster_token_file),
    )
    return WireClient(connection)


class StorageConversation(ClientConversation):
    """A conversation with the storage half: every command goes to every worker, one by one."""

    def __init__(self, hello: Hello, workers: int, settings: Settings) -> None:
        # A window of one: each response is acknowledged as soon as it has left.
        super().__init__(hello.nonce, AcknowledgementWindow(workers, 1, 1))
        self._hello = hello
        self._rules: StorageCommandRules | None = StorageCommandRules(settings)
        self._parts = StoragePartitioned(workers)

    def open(self) -> list[RoutedCommand]:
        """See `ClientConversation`."""
        return self.route((self._hello,))

    def trust(self) -> None:
        """See `ClientConversation`."""
        self._rules = None

    def route(self, commands: Sequence[Any], *, answer: bool = False) -> list[RoutedCommand]:
        """See `ClientConversation`. This half has no peeks."""
        routed: list[RoutedCommand] = []
        for each in commands:
            # Commands of this half are not traced.
            command, _ = split_context(each)
            try:
                if self._rules is not None:
                    self._rules.check(command)
                split = self._parts.split(command)
            except PenstockError as error:
                self.failed = error
                return routed
            routed += (RoutedCommand(part, FromClient(self.nonce, one)) for part, one in split)
        return routed

    def _merge(self, worker: int, response: Response) -> Response | None:
        merged = self._parts.absorb(worker, response)
        match merged:
            case DroppedId(id=ended) | StagedBatches(uuid=ended):
                if self._rules is not None:
                    self._rules.ended(ended)
        return merged
