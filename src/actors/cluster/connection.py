"""Connections of controllers: the acceptor, and one connection actor for the client of the day.

Theory of operation. A cluster serves one client at a time. The `Acceptor` stops the former
`Connection` when a newer one has proved itself (a valid opening, a Hello of a nonce that was not
used before, and a CreateInstance that the running one can serve), tells the adapters that the
former is gone, and starts the newer; so adapters see connections in one order. The connection
attaches to every adapter *before* it passes Hello on, splits commands, merges responses
(`Partitioned`) and hands them to its `Outlet`, one batch at a time.

Flow: ``client → connection → adapters`` waits for room. Upwards, each worker's window bounds
what is on its way: a response that completed a merged one has left when the outlet has taken it,
any other at once; workers are told (`Took`) as `Acknowledgements` says.

A client that breaks a rule is told so by a last response (`Refused`) and loses its connection.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeAlias, assert_never

import msgspec

from actors.channel_adapter import Connect, Disconnect, FromClient, FromWorker, ManyFromWorker, Took
from actors.cluster.acknowledging import Acknowledgements
from actors.cluster.partitioned import Limits, Partitioned
from actors.cluster.rules import CommandRules, check_instance, check_name
from actors.cluster.shortcut import Shortcut
from actors.compute.partitions import Partitions
from actors.errors import Broken, Closed, Displaced, PenstockError, RemoteProtocolError, to_wire
from actors.kernel import STOP, Actor, Address, Reply
from actors.progress import Nonce
from actors.protocol.compute import (
    Command,
    CreateInstance,
    Frontiers,
    Hello,
    Lot,
    Peek,
    PeekResponse,
    Refused,
    Response,
    Schedule,
)
from actors.settings import TOKEN_BYTES_MAX, Settings
from actors.spans import accept, span_below
from actors.telemetry import CONNECTION_COMMAND

log = logging.getLogger("penstock.cluster")


def refusal(error: PenstockError) -> Refused:
    """The last response of a connection that is closed because of `error`."""
    code, text, _ = to_wire(error)
    return Refused(code, text)


LOT_MAX: Final = 256
"""Commands that are passed on together."""
AT_ONCE_MAX: Final = 64
"""Peeks that are answered in one turn of the connection; each takes far below a millisecond."""


class Outlet(Protocol):
    """Where a connection's responses go."""

    async def send(self, response: Response, /) -> None:
        """Sends one, waiting while the client is slow. Raises `Broken` or `Closed`."""
        ...

    def offer(self, responses: Sequence[Response], /) -> int:
        """Sends the first so many of them, without waiting. Raises as `send`."""
        ...

    def end(self, error: PenstockError, /) -> None:
        """The connection is over, and why. The first reason counts."""
        ...


class ClientCommands(msgspec.Struct, frozen=True, gc=False):
    """Commands of the client, in order, of the half that it speaks to."""

    commands: tuple[Any, ...]


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """All that was being sent."""


class _OutletFailed(msgspec.Struct, frozen=True, gc=False):
    error: Exception


ConnectionMessage: TypeAlias = ClientCommands | FromWorker | ManyFromWorker | _Sent | _OutletFailed


class Connection(Actor[ConnectionMessage]):
    """One client's conversation with all workers."""

    def __init__(
        self,
        hello: Hello,
        instance: CreateInstance,
        adapters: Sequence[Address[Any]],
        outlet: Outlet,
        running: CreateInstance,
        limits: Limits,
        partitions: Partitions,
        settings: Settings,
    ) -> None:
        self._hello = hello
        self._instance = instance
        self._adapters = adapters
        self._outlet = outlet
        self._rules = CommandRules(running, settings)
        self._parts = Partitioned(len(adapters), limits)
        self._shortcut = Shortcut(partitions, limits)
        self._queue: deque[tuple[Response, int, int]] = deque()
        """Merged, with the worker and the number of the response that completed it."""
        self._sending: list[tuple[Response, int, int]] = []
        self._acks = Acknowledgements(
            len(adapters), settings.responses_in_flight_max, settings.subscribe_inflight_bytes_max
        )
        self._lot: list[Command] = []
        """To be passed on together. Before InitializationComplete nothing takes effect, so it may
        fill up; afterwards nothing stays here."""

    async def on_start(self) -> None:
        """Takes over all adapters, then says Hello and CreateInstance to them."""
        for adapter in self._adapters:
            await _send(adapter, Connect(self._hello.nonce, self.ctx.self))
        await self._commands((self._hello, self._instance))

    async def receive(self, message: ConnectionMessage) -> None:
        """Handles commands of the client or responses of a worker."""
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
                named = error if isinstance(error, PenstockError) else Broken(str(error))
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
                self._end(error)
                return
            if isinstance(command, Peek) and self._answers(command):
                continue
            self._shortcut.heard(command)
            if isinstance(command, Peek | Schedule) and command.traceparent is not None:
                await self._traced(command)
            else:
                await self._command(command)
        if self._rules.complete:
            await self._pass_on()
        self._send_next()

    def _answers(self, peek: Peek) -> bool:
        """Answers the peek from here, where its answer is there and can leave soon: the workers'
        windows do not bound these answers."""
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
            if part == 0 and not isinstance(split, Hello):
                self._lot.append(split)
            else:
                await _send(self._adapters[part], FromClient(self._hello.nonce, split))
        if len(self._lot) >= LOT_MAX:
            await self._pass_on()

    async def _traced(self, command: Peek | Schedule) -> None:
        """One with a context: one that is let in goes on alone, to be seen on its way."""
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
        command = lot[0] if len(lot) == 1 else Lot(tuple(lot))
        await _send(self._adapters[0], FromClient(self._hello.nonce, command))

    # -- upwards -------------------------------------------------------------------------------

    async def _responses(
        self, worker: int, nonce: Nonce, responses: tuple[tuple[int, Response], ...]
    ) -> None:
        if nonce != self._hello.nonce:
            return
        for serial, response in responses:
            try:
                merged = self._parts.absorb(worker, response)
            except PenstockError as error:
                log.error("%s: %s", self.ctx.path, error)
                self._end(error)
                return
            # What the client may do from now on is known before it can know it.
            for id in self._parts.ended:
                self._rules.ended(id)
            self._parts.ended.clear()
            if merged is None:
                self._acks.left(worker, serial, response)
                continue
            if isinstance(merged, PeekResponse):
                self._rules.answered(merged.uuid)
            elif isinstance(merged, Frontiers):
                self._shortcut.told(merged)
            self._queue.append((merged, worker, serial))
        self._send_next()
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        for worker, serials in self._acks.due():
            await _send(self._adapters[worker], Took(self._hello.nonce, serials))

    def _send_next(self) -> None:
        """What can leave without waiting leaves now, in one write; the rest beside the actor."""
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
        """Whoever still waits at the outlet learns that it is over."""
        self._outlet.end(Closed("the connection was closed"))

    def describe(self) -> str:
        """Whose it is."""
        return f"client {self._hello.nonce}, {len(self._queue) + len(self._sending)} to send"


async def _send(address: Address[Any], message: Any) -> None:
    """To an adapter; while the cluster stops there may be none."""
    with suppress(Closed, Broken):
        await address.send(message)


# -- the acceptor ----------------------------------------------------------------------------------


class Accept(msgspec.Struct, frozen=True, gc=False):
    """A client has said its first two commands: make it the one that is served, if it may be.
    Answered with the connection's address; fails, and displaces nobody, when the nonce was used
    before or the running instance is not what the client asks for."""

    hello: Hello
    instance: CreateInstance | None
    """None: a client of the storage half."""
    outlet: Outlet
    reply: Reply[Address[ConnectionMessage]]


class Leave(msgspec.Struct, frozen=True, gc=False):
    """The client of that nonce went away. Answered when nothing of it runs any more."""

    nonce: Nonce
    reply: Reply[None] | None = None


NONCES_MAX: Final = 1024
"""Nonces remembered, so that none is used twice: adapters and workers tell clients apart by it."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    nonce: Nonce


class Serve(msgspec.Struct, frozen=True, gc=False):
    """Runs a coroutine beside the acceptor for as long as it lives (a listener)."""

    run: Any


AcceptorMessage: TypeAlias = Accept | Leave | Serve | _Ended


class Acceptor(Actor[AcceptorMessage]):
    """Decides which connection is served. `adapters` may be filled after construction."""

    def __init__(
        self,
        adapters: Sequence[Address[Any]],
        settings: Settings,
        make: Callable[[Hello, Outlet], Actor[Any]] | None = None,
        partitions: Partitions | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`make`: the connections of another half than compute's. `partitions`, `limits`: what
        compute's may read themselves, and how much."""
        self._adapters = adapters
        self._partitions = partitions or Partitions(len(adapters))
        self._settings = settings
        self._make = make
        self._running = CreateInstance(settings.workers, expiration_ms=settings.expiration_ms)
        self._limits = limits or Limits(settings.result_bytes_max, settings.inline_bytes_max)
        self._nonces: OrderedDict[Nonce, None] = OrderedDict()
        self._current: tuple[Nonce, Address[Any], Outlet] | None = None
        self._count = 0
        self._displaced = 0

    async def receive(self, message: AcceptorMessage) -> None:
        """Handles one arrival or departure."""
        match message:
            case Accept():
                await self._accept(message)
            case Leave():
                if self._current is not None and self._current[0] == message.nonce:
                    await self._release(Closed("the client closed the connection"))
                if message.reply is not None:
                    message.reply.set(None)
            case _Ended():
                if self._current is not None and self._current[0] == message.nonce:
                    await self._release(Closed("the connection has ended"))
            case Serve():
                self.ctx.effect(message.run, done=lambda _: None)
            case _:
                assert_never(message)

    async def _accept(self, message: Accept) -> None:
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
            await self._release(Displaced(f"a newer connection ({nonce}) took over"))
        self._count += 1
        address = self.ctx.spawn(
            # Not over the message: the garbage collector does not look into it, and what an outlet
            # holds at its end (an error, its traceback, this connection) would never be freed.
            lambda: self._connection(hello, instance, outlet),
            f"connection-{self._count}",
            policy=STOP,
        )
        self._current = (nonce, address, outlet)
        self.ctx.watch(address, _Ended(nonce))
        message.reply.set(address)

    def _connection(
        self, hello: Hello, instance: CreateInstance | None, outlet: Outlet
    ) -> Actor[Any]:
        if instance is None:
            assert self._make is not None, "compute's clients say CreateInstance"
            return self._make(hello, outlet)
        return Connection(
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
        """Ends the present connection and tells the adapters that it is gone."""
        assert self._current is not None
        nonce, address, outlet = self._current
        self._current = None
        outlet.end(error)
        await self.ctx.stop_child(address)
        for adapter in self._adapters:
            await _send(adapter, Disconnect(nonce))

    async def on_stop(self) -> None:
        """The client learns that the cluster has stopped."""
        if self._current is not None:
            self._current[2].end(Closed("the cluster has stopped"))

    def describe(self) -> str:
        """Who is served."""
        client = self._current[0] if self._current is not None else "nobody"
        return f"serves {client}; {self._count} connections so far, {self._displaced} displaced"
