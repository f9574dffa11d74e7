"""Connections of controllers: the acceptor, and one connection actor for the active client.

A cluster serves one client at a time. A newer client displaces the active one when it has proved
itself: a valid opening, a Hello with a fresh nonce, and a CreateInstance that the running instance
can serve. Its `ClusterConnection` splits commands, merges responses (`PartitionedState`) and hands
them to its `ResponseSink`, one batch at a time.

Flow control: ``client → connection → adapters`` waits for room. Responses are bounded by each
worker's window, which acknowledgements (`ResponsesAcked`) reopen.

A client that breaks a rule gets a last response with the reason (`ConnectionRefused`) and is
disconnected.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeAlias, assert_never

import msgspec

from actors.channel_adapter import (
    ConnectClient,
    DisconnectClient,
    FromClient,
    FromWorker,
    ManyFromWorker,
    ResponsesAcked,
)
from actors.cluster.partitioned import ConnectionLimits, PartitionedState
from actors.cluster.rules import CommandRules, check_instance, check_name
from actors.cluster.shortcut import PeekShortcut
from actors.compute.index import ClusterPartitions
from actors.compute.outbox import response_bytes
from actors.errors import (
    ConnectionBroken,
    ConnectionDisplaced,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    to_wire,
)
from actors.kernel import STOP, Actor, ActorAddress, ReplySlot
from actors.progress import Nonce
from actors.protocol.compute import (
    Command,
    CommandBatch,
    ConnectionRefused,
    CopyToResponse,
    CreateInstance,
    Frontiers,
    Hello,
    Peek,
    PeekResponse,
    Response,
    ScheduleDataflow,
    SubscribeResponse,
)
from actors.settings import TOKEN_BYTES_MAX, Settings
from actors.spans import accept, span_below
from actors.telemetry import CONNECTION_COMMAND

# -- Batched acknowledgements of responses to the workers. Pure ------------------------------------
# Each worker allows only so many responses, and so many bytes, in flight (`compute.outbox`).
# Responses that have left are acknowledged in batches of at most a quarter of that window. So at
# least three quarters of each window are open or truly in flight: no worker waits for an
# acknowledgement that is withheld here.


class AcknowledgementWindow:
    """Responses that have left and are not acknowledged yet, by worker. `messages_max` and
    `bytes_max` are those of a worker's window."""

    def __init__(self, workers: int, messages_max: int, bytes_max: int) -> None:
        self._messages = max(1, messages_max // 4)
        self._bytes = max(1, bytes_max // 4)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        self._left_bytes = [0] * workers
        self._due: set[int] = set()

    def left(self, worker: int, serial: int, response: Response) -> None:
        """Note that a response has left, or that nothing was sent for it. Serial 0: no
        acknowledgement is due."""
        # No worker counts a response that the connection answered itself.
        if not serial:
            return
        serials = self._left[worker]
        serials.append(serial)
        self._left_bytes[worker] += response_bytes(response)
        if (
            len(serials) >= self._messages
            or self._left_bytes[worker] >= self._bytes
            # A dataflow or copy waits for the acknowledgement of its batch: it is sent at once.
            or isinstance(response, SubscribeResponse | CopyToResponse)
        ):
            self._due.add(worker)

    def due(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return and forget the (worker, serials) to be acknowledged now."""
        if not self._due:
            return []
        left = [(worker, tuple(self._left[worker])) for worker in sorted(self._due)]
        for worker, _ in left:
            self._left[worker] = []
            self._left_bytes[worker] = 0
        self._due.clear()
        return left


log = logging.getLogger("penstock.cluster")


def refusal(error: PenstockError) -> ConnectionRefused:
    """Return the last response of a connection that is closed because of `error`."""
    code, text, _ = to_wire(error)
    return ConnectionRefused(code, text)


LOT_MAX: Final = 256
"""Limit of commands that are passed on together."""
AT_ONCE_MAX: Final = 64
"""Limit of peeks that are answered in one turn of the connection; each takes far below a
millisecond."""


class ResponseSink(Protocol):
    """Sink of a connection's responses."""

    async def send(self, response: Response, /) -> None:
        """Send one response, waiting while the client is slow. Raises `ConnectionBroken` or
        `ResourceClosed`."""
        ...

    def offer(self, responses: Sequence[Response], /) -> int:
        """Send as many of the first responses as possible without waiting; return their number.
        Raises as `send`."""
        ...

    def end(self, error: PenstockError, /) -> None:
        """End the connection with a reason. The first reason counts."""
        ...


class ClientCommands(msgspec.Struct, frozen=True, gc=False):
    """Commands of the client, in order, for its half."""

    commands: tuple[Any, ...]


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """All responses of `_sending` were sent."""


class _OutletFailed(msgspec.Struct, frozen=True, gc=False):
    error: Exception


ConnectionMessage: TypeAlias = ClientCommands | FromWorker | ManyFromWorker | _Sent | _OutletFailed


class ClusterConnection(Actor[ConnectionMessage]):
    """One client's conversation with all workers."""

    def __init__(
        self,
        hello: Hello,
        instance: CreateInstance,
        adapters: Sequence[ActorAddress[Any]],
        outlet: ResponseSink,
        running: CreateInstance,
        limits: ConnectionLimits,
        partitions: ClusterPartitions,
        settings: Settings,
    ) -> None:
        self._hello = hello
        self._instance = instance
        self._adapters = adapters
        self._outlet = outlet
        self._rules = CommandRules(running, settings)
        self._parts = PartitionedState(len(adapters), limits)
        self._shortcut = PeekShortcut(partitions, limits)
        self._queue: deque[tuple[Response, int, int]] = deque()
        """Merged responses, with the worker and the serial of the response that completed them."""
        self._sending: list[tuple[Response, int, int]] = []
        self._acks = AcknowledgementWindow(
            len(adapters), settings.responses_in_flight_max, settings.subscribe_inflight_bytes_max
        )
        self._lot: list[Command] = []
        """Commands to be passed on together. Before InitializationComplete nothing takes effect, so
        they may collect; afterwards each call passes them on."""

    async def on_start(self) -> None:
        """Attach to all adapters, then send Hello and CreateInstance to them."""
        # All adapters before Hello: each must know this connection when its worker answers.
        for adapter in self._adapters:
            await _send(adapter, ConnectClient(self._hello.nonce, self.ctx.self))
        await self._commands((self._hello, self._instance))

    async def receive(self, message: ConnectionMessage) -> None:
        """Handle commands of the client or responses of a worker."""
        match message:
            case ClientCommands(commands=commands):
                await self._commands(commands)
            case FromWorker(worker, nonce, response, serial):
                await self._responses(worker, nonce, ((serial, response),))
            case ManyFromWorker(worker, nonce, responses):
                await self._responses(worker, nonce, responses)
            case _Sent():
                sent, self._sending = self._sending, []
                self._have_left(sent)
                self._send_next()
                await self._acknowledge()
            case _OutletFailed(error=error):
                named = error if isinstance(error, PenstockError) else ConnectionBroken(str(error))
                self._end(named)
            case _:
                assert_never(message)

    # -- downwards -----------------------------------------------------------------------------

    async def _commands(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            try:
                self._rules.check(command)
            except PenstockError as error:
                await self._pass_on()
                # Ordered after `_pass_on`: the commands before the wrong one count.
                self._end(error)
                return
            if isinstance(command, Peek) and self._answers(command):
                continue
            self._shortcut.heard(command)
            if isinstance(command, Peek | ScheduleDataflow) and command.traceparent is not None:
                await self._traced(command)
            else:
                await self._command(command)
        if self._rules.complete:
            await self._pass_on()
        self._send_next()

    def _answers(self, peek: Peek) -> bool:
        """Answer a peek here, if its rows are there and can leave soon; return whether it was
        answered."""
        # No worker's window bounds these answers, so the queue must.
        if self._sending or len(self._queue) >= AT_ONCE_MAX or not self._rules.complete:
            return False
        rows = self._shortcut.answer(peek)
        if rows is None:
            return False
        self._rules.answered(peek.uuid)
        self._queue.append((PeekResponse(peek.uuid, rows), 0, 0))
        return True

    async def _command(self, command: Command) -> None:
        for part, split in self._parts.split(command):
            # Hello goes to every worker, so it is not batched with part 0's commands.
            if part == 0 and not isinstance(split, Hello):
                self._lot.append(split)
            else:
                await _send(self._adapters[part], FromClient(self._hello.nonce, split))
        if len(self._lot) >= LOT_MAX:
            await self._pass_on()

    async def _traced(self, command: Peek | ScheduleDataflow) -> None:
        """Pass on a command with a trace context; a sampled one goes alone, so that its spans show
        its own way."""
        parent = accept(command.traceparent)
        if parent is None:
            await self._command(msgspec.structs.replace(command, traceparent=None))
            return
        if self._rules.complete:
            await self._pass_on()
        with span_below(parent, CONNECTION_COMMAND) as opened:
            if opened is not None:
                if isinstance(command, Peek):
                    opened.describe(self._hello.nonce, command.uuid, command.target.id)
                else:
                    opened.describe(self._hello.nonce, "", command.id)
                command = msgspec.structs.replace(command, traceparent=opened.traceparent)
            await self._command(command)
            if self._rules.complete:
                await self._pass_on()

    async def _pass_on(self) -> None:
        if not self._lot:
            return
        lot, self._lot = self._lot, []
        command = lot[0] if len(lot) == 1 else CommandBatch(tuple(lot))
        await _send(self._adapters[0], FromClient(self._hello.nonce, command))

    # -- upwards -------------------------------------------------------------------------------

    async def _responses(
        self, worker: int, nonce: Nonce, responses: tuple[tuple[int, Response], ...]
    ) -> None:
        # A late response to a displaced client.
        if nonce != self._hello.nonce:
            return
        for serial, response in responses:
            try:
                merged = self._parts.absorb(worker, response)
            except PenstockError as error:
                log.error("%s: %s", self.ctx.path, error)
                self._end(error)
                return
            # Ordered before the response leaves: the client may reuse the ids at once.
            for id in self._parts.ended:
                self._rules.ended(id)
            self._parts.ended.clear()
            # Acknowledged at once; a response that completes a merged one only when that was sent.
            if merged is None:
                self._acks.left(worker, serial, response)
                continue
            if isinstance(merged, PeekResponse):
                self._rules.answered(merged.uuid)
            elif isinstance(merged, Frontiers):
                self._shortcut.note(merged)
            self._queue.append((merged, worker, serial))
        self._send_next()
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        for worker, serials in self._acks.due():
            await _send(self._adapters[worker], ResponsesAcked(self._hello.nonce, serials))

    def _send_next(self) -> None:
        """Send the responses that can leave without waiting in one write; the rest in an effect."""
        # One batch at a time keeps the order.
        if self._sending or not self._queue:
            return
        batch = list(self._queue)
        self._queue.clear()
        try:
            count = self._outlet.offer([response for response, _, _ in batch])
        except PenstockError as error:
            self._end(error)
            return
        self._have_left(batch[:count])
        self._sending = batch[count:]
        if not self._sending:
            return
        rest = [response for response, _, _ in self._sending]

        async def run() -> None:
            sent = 0
            while sent < len(rest):
                await self._outlet.send(rest[sent])
                sent += 1
                sent += self._outlet.offer(rest[sent:])

        self.ctx.effect(run, done=lambda _: _Sent(), failed=_OutletFailed)

    def _have_left(self, sent: list[tuple[Response, int, int]]) -> None:
        for response, worker, serial in sent:
            self._acks.left(worker, serial, response)

    def _end(self, error: PenstockError) -> None:
        self._outlet.end(error)
        self.ctx.stop()

    async def on_stop(self) -> None:
        """End the outlet, so that its waiters wake up."""
        self._outlet.end(ResourceClosed("the connection was closed"))

    def describe(self) -> str:
        """Return the client's nonce and the number of responses to send."""
        return f"client {self._hello.nonce}, {len(self._queue) + len(self._sending)} to send"


async def _send(address: ActorAddress[Any], message: Any) -> None:
    """Send to an adapter; errors are ignored, since a stopping cluster may have none."""
    with suppress(ResourceClosed, ConnectionBroken):
        await address.send(message)


# -- the acceptor ----------------------------------------------------------------------------------


class AcceptConnection(msgspec.Struct, frozen=True, gc=False):
    """A client has sent its first two commands: make it the active one, if allowed. The reply is
    the connection's address; it fails, and displaces no client, if the nonce was used before or the
    running instance is not the requested one."""

    hello: Hello
    instance: CreateInstance | None
    """None for a client of the storage half."""
    outlet: ResponseSink
    reply: ReplySlot[ActorAddress[ConnectionMessage]]


class ReleaseConnection(msgspec.Struct, frozen=True, gc=False):
    """The client of that nonce has left. Answered when its connection has stopped."""

    nonce: Nonce
    reply: ReplySlot[None] | None = None


NONCES_MAX: Final = 1024
"""Nonces remembered, so that none is used twice: adapters and workers identify clients by them."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    nonce: Nonce


class RunListener(msgspec.Struct, frozen=True, gc=False):
    """Run a coroutine (a listener) for as long as the acceptor lives."""

    run: Any


AcceptorMessage: TypeAlias = AcceptConnection | ReleaseConnection | RunListener | _Ended


class ConnectionAcceptor(Actor[AcceptorMessage]):
    """Decides which connection is served. `adapters` may be filled after construction."""

    def __init__(
        self,
        adapters: Sequence[ActorAddress[Any]],
        settings: Settings,
        make: Callable[[Hello, ResponseSink], Actor[Any]] | None = None,
        partitions: ClusterPartitions | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """`make`: makes the connections of another half than compute's. `partitions`, `limits`: the
        partitions that compute's connections may read themselves, and their limits."""
        self._adapters = adapters
        self._partitions = partitions or ClusterPartitions(len(adapters))
        self._settings = settings
        self._make = make
        self._running = CreateInstance(settings.workers, expiration_ms=settings.expiration_ms)
        self._limits = limits or ConnectionLimits(
            settings.result_bytes_max, settings.inline_bytes_max
        )
        self._nonces: OrderedDict[Nonce, None] = OrderedDict()
        self._current: tuple[Nonce, ActorAddress[Any], ResponseSink] | None = None
        self._count = 0
        self._displaced = 0

    async def receive(self, message: AcceptorMessage) -> None:
        """Handle one arrival or departure."""
        match message:
            case AcceptConnection():
                await self._accept(message)
            case ReleaseConnection():
                if self._current is not None and self._current[0] == message.nonce:
                    await self._release(ResourceClosed("the client closed the connection"))
                if message.reply is not None:
                    message.reply.set(None)
            case _Ended():
                if self._current is not None and self._current[0] == message.nonce:
                    await self._release(ResourceClosed("the connection has ended"))
            case RunListener():
                self.ctx.effect(message.run, done=lambda _: None)
            case _:
                assert_never(message)

    async def _accept(self, message: AcceptConnection) -> None:
        hello, instance, outlet = message.hello, message.instance, message.outlet
        nonce = hello.nonce
        try:
            check_name(nonce, "the nonce of Hello", TOKEN_BYTES_MAX)
            if nonce in self._nonces:
                raise RemoteProtocolError(f"nonce {nonce} was used before: choose a fresh one")
            if instance is not None:
                check_instance(self._running, instance)
        except PenstockError as error:
            message.reply.fail(error)
            return
        self._nonces[nonce] = None
        if len(self._nonces) > NONCES_MAX:
            self._nonces.popitem(last=False)
        if self._current is not None:
            self._displaced += 1
            # Ordered before the newer connection starts: adapters see connections one after the
            # other.
            await self._release(ConnectionDisplaced(f"a newer connection ({nonce}) took over"))
        self._count += 1
        address = self.ctx.spawn(
            # Must not capture the message: it has gc=False, and a cycle through its outlet (an
            # error, its traceback, this connection) would never be freed.
            lambda: self._connection(hello, instance, outlet),
            f"connection-{self._count}",
            policy=STOP,
        )
        self._current = (nonce, address, outlet)
        self.ctx.watch(address, _Ended(nonce))
        message.reply.set(address)

    def _connection(
        self, hello: Hello, instance: CreateInstance | None, outlet: ResponseSink
    ) -> Actor[Any]:
        if instance is None:
            assert self._make is not None, "compute's clients say CreateInstance"
            return self._make(hello, outlet)
        return ClusterConnection(
            hello,
            instance,
            self._adapters,
            outlet,
            self._running,
            self._limits,
            self._partitions,
            self._settings,
        )

    async def _release(self, error: PenstockError) -> None:
        """End the active connection and tell the adapters that it is gone."""
        assert self._current is not None
        nonce, address, outlet = self._current
        self._current = None
        outlet.end(error)
        # Ordered before Disconnect: a stopped connection sends nothing more to the adapters.
        await self.ctx.stop_child(address)
        for adapter in self._adapters:
            await _send(adapter, DisconnectClient(nonce))

    async def on_stop(self) -> None:
        """End the client's outlet with the reason."""
        if self._current is not None:
            self._current[2].end(ResourceClosed("the cluster has stopped"))

    def describe(self) -> str:
        """Return the active client and the number of connections."""
        client = self._current[0] if self._current is not None else "nobody"
        return f"serves {client}; {self._count} connections so far, {self._displaced} displaced"
