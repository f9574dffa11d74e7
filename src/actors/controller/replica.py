"""The replica task: keeps one replica told of everything that it should run.

It connects with a fresh nonce (for ever, with backoff), asks the controller for the history,
replays Hello and that, sends what comes later, and hands responses to the controller with the
replica's name and the number of the connection they came on, so that late ones can be told
apart. A connection that fails in any way is given up whole.

It speaks for one half. Of compute's Schedules only so many are sent as dataflows may hydrate at a
time (`Hydrations`, a `Gate`); the history has them all. The storage half needs no gate.

What can go without waiting goes in the turn in which it was pushed; the rest waits in the outbox
for one effect at a time. Responses come in lots, a few of them under way at a time, so that the
cluster is held back while the controller is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, assert_never

import msgspec

from actors.controller.hydrations import Hydrations
from actors.controller.messages import (
    Push,
    Replay,
    ReplicaConnected,
    ReplicaLost,
    ReplicaResponse,
)
from actors.errors import Broken, Closed, PenstockError
from actors.kernel import Actor, Address, Effect
from actors.protocol.compute import Hello, Peek, PeekResponse, PeekRows
from actors.protocol.internal import Half
from actors.settings import Settings

log = logging.getLogger("penstock.controller")

LOT_MAX: Final = 64
"""Responses that are taken together."""
LOTS_MAX: Final = 4
"""Of them on their way from the connection to the controller."""


class Gate(Protocol):
    """What may hold commands of a connection back, until its responses let them go."""

    @property
    def waiting(self) -> int:
        """How many it holds."""
        ...

    def command(self, command: Any, /) -> Iterable[Any]:
        """What may be sent now."""
        ...

    def responded(self, response: Any, /) -> Sequence[Any]:
        """What a response lets go."""
        ...


class Open:
    """A gate that holds nothing."""

    waiting = 0

    def command(self, command: Any) -> Iterable[Any]:
        """See `Gate`."""
        return (command,)

    def responded(self, response: Any) -> Sequence[Any]:
        """See `Gate`."""
        return ()


class ClusterClient(Protocol):
    """One connection to a half of a cluster; responses are merged over its workers."""

    async def send(self, command: Any, /) -> None:
        """Sends a command."""
        ...

    def offer(self, commands: Sequence[Any], /) -> int:
        """Sends the first so many of them, without waiting. Raises as `send`, for the first."""
        ...

    def answer(self, peek: Peek, /) -> PeekRows | None:
        """The answer to a peek that need not be sent at all, because it is there."""
        ...

    async def receive(self) -> Any:
        """The next response. Raises `Broken`."""
        ...

    def at_hand(self, count_max: int, /) -> list[Any]:
        """What has come already and follows what `receive` gave last. An error waits for it."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


Connect: TypeAlias = Callable[[], Awaitable[ClusterClient]]


class _Connected(msgspec.Struct, frozen=True, gc=False):
    client: ClusterClient


class _Sent(msgspec.Struct, frozen=True, gc=False):
    incarnation: int


class _Received(msgspec.Struct, frozen=True, gc=False):
    incarnation: int
    responses: tuple[Any, ...]


class Lost(msgspec.Struct, frozen=True, gc=False):
    """Connection number `incarnation` failed."""

    incarnation: int
    error: Exception


class _Retry(msgspec.Struct, frozen=True, gc=False):
    """The backoff is over."""


_Message: TypeAlias = Push | Replay | _Connected | _Sent | _Received | Lost | _Retry


class ReplicaTask(Actor[_Message]):
    """Drives the replica `name`. `controller` hears `ReplicaConnected` (and answers it with a
    `Replay`), `ReplicaResponse` and `ReplicaLost`."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        controller: Address[Any],
        settings: Settings,
        first: int = 0,
        half: Half = "compute",
    ) -> None:
        """Connections are numbered beyond `first`; no two tasks of a name and half share
        numbers."""
        self._name = name
        self._connect_once = connect
        self._controller = controller
        self._settings = settings
        self._client: ClusterClient | None = None
        self._replayed = False
        """The present connection was given the history."""
        self.incarnation = first
        """Number of the present connection, or of the one being made."""
        self._half: Half = half
        self._gate = self._new_gate()
        """Of the present connection."""
        self._outbox: deque[Any] = deque()
        self._sending: Effect | None = None
        self._receiving: Effect | None = None
        self._room = asyncio.Semaphore(LOTS_MAX)
        """For lots of the present connection."""
        self._attempts = 0
        self._why = ""

    async def on_start(self) -> None:
        self._connect()

    async def on_stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(PenstockError):
                await client.close()

    async def receive(self, message: _Message) -> None:
        match message:
            case Push(command):
                if self._replayed and not await self._answers(command):
                    self._outbox.extend(self._gate.command(command))
                    self._send()
            case _Connected(client):
                self._client = client
                await self._tell(ReplicaConnected(self._name, self.incarnation, self._half))
            case Replay(incarnation, commands):
                if incarnation == self.incarnation and self._client is not None:
                    self._start(self._client, commands)
            case _Sent(incarnation):
                if incarnation == self.incarnation:
                    self._sending = None
                    self._send()
            case _Received(incarnation, responses):
                if incarnation == self.incarnation:
                    for response in responses:
                        await self._pass_on(response)
                    self._room.release()
            case Lost(incarnation, error):
                if incarnation == self.incarnation:
                    await self._lost(error)
            case _Retry():
                self._connect()
            case _:
                assert_never(message)

    def _connect(self) -> None:
        self.incarnation += 1
        incarnation = self.incarnation
        self.ctx.effect(
            self._connect_once,
            done=_Connected,
            failed=lambda error: Lost(incarnation, error),
        )

    def _new_gate(self) -> Gate:
        if self._half == "storage":
            return Open()
        return Hydrations(self._settings.hydrations_max)

    def _start(self, client: ClusterClient, commands: tuple[Any, ...]) -> None:
        nonce = f"{self.ctx.random.getrandbits(128):032x}"
        self._replayed = True
        self._gate = self._new_gate()
        self._outbox = deque([Hello(nonce)])
        for command in commands:
            self._outbox.extend(self._gate.command(command))
        self._send()
        self._receive(client)

    def _send(self) -> None:
        """What goes without waiting goes now; of the rest one at a time."""
        client, incarnation = self._client, self.incarnation
        if client is None or self._sending is not None:
            return
        try:
            for _ in range(client.offer(self._outbox) if self._outbox else 0):
                self._outbox.popleft()
        except Exception as error:  # noqa: BLE001 (of any kind: the connection is given up)
            self.ctx.self.reply(Lost(incarnation, error))
            return
        if not self._outbox:
            return
        command = self._outbox.popleft()
        self._sending = self.ctx.effect(
            lambda: client.send(command),
            done=lambda _: _Sent(incarnation),
            failed=lambda error: Lost(incarnation, error),
        )

    def _receive(self, client: ClusterClient) -> None:
        incarnation = self.incarnation
        room = self._room = asyncio.Semaphore(LOTS_MAX)

        async def receive() -> None:
            while True:
                await room.acquire()
                first = await client.receive()
                lot = (first, *client.at_hand(LOT_MAX - 1))
                self.ctx.self.reply(_Received(incarnation, lot))

        self._receiving = self.ctx.effect(
            receive, done=lambda _: None, failed=lambda error: Lost(incarnation, error)
        )

    async def _answers(self, command: Any) -> bool:
        """Whether it is a peek whose answer is there, which then need not be said."""
        if not isinstance(command, Peek) or self._client is None:
            return False
        rows = self._client.answer(command)
        if rows is None:
            return False
        answer = PeekResponse(command.uuid, rows)
        await self._tell(ReplicaResponse(self._name, self.incarnation, answer))
        return True

    async def _pass_on(self, response: Any) -> None:
        self._attempts = 0
        let_go = self._gate.responded(response)
        if let_go:
            self._outbox.extend(let_go)
            self._send()
        await self._tell(ReplicaResponse(self._name, self.incarnation, response, self._half))

    async def _tell(self, message: ReplicaConnected | ReplicaResponse | ReplicaLost) -> None:
        """Tells the controller; when that has stopped, so does this."""
        try:
            await self._controller.send(message)
        except (Closed, Broken):
            self.ctx.stop()

    async def _lost(self, error: Exception) -> None:
        self._why = f"{type(error).__name__}: {error}"
        named = error if isinstance(error, PenstockError) else Broken(self._why)
        if not isinstance(error, PenstockError):
            log.error("%s: its connection failed by a fault of ours", self._name, exc_info=error)
        for effect in (self._sending, self._receiving):
            if effect is not None:
                effect.cancel()
        self._sending = self._receiving = None
        client, self._client = self._client, None
        self._replayed = False
        self._outbox.clear()
        if client is not None:
            self.ctx.effect(client.close, done=lambda _: None, failed=lambda _: None)
        await self._tell(ReplicaLost(self._name, self.incarnation, named, self._half))
        self.incarnation += 1
        self._attempts += 1
        delay = self._settings.retry_delay_ms(self._attempts)
        log.info("replica %s is gone (%s); connecting again in %d ms", self._name, self._why, delay)
        self.ctx.after(delay, _Retry())

    def describe(self) -> str:
        if self._client is None:
            why = self._why or "none"
            return f"{self._name}: connecting, attempt {self._attempts + 1}; last error: {why}"
        return (
            f"{self._name}, {self._half}: connected, {len(self._outbox)} commands to send, "
            f"{self._gate.waiting} held back"
        )
