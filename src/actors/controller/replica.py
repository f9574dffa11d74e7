"""The replica task: keeps one replica told of everything that it should run.

It connects with a fresh nonce (for ever, with backoff), asks the controller for the history,
replays Hello and that, sends what comes later, and hands responses to the controller with the
replica's name and the number of the connection they came on, so that late ones can be told
apart. A connection that fails in any way is given up whole.

Of the Schedules only so many are sent as dataflows may hydrate at a time (`Hydrations`); the
history has them all.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, assert_never

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
from actors.protocol.compute import Command, Hello, Response
from actors.settings import Settings

log = logging.getLogger("penstock.controller")


class ClusterClient(Protocol):
    """One connection to a cluster; responses are merged over its workers."""

    async def send(self, command: Command, /) -> None:
        """Sends a command."""
        ...

    async def receive(self) -> Response:
        """The next response. Raises `Broken`."""
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
    response: Response


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
    ) -> None:
        """Connections are numbered beyond `first`; no two tasks of a name share numbers."""
        self._name = name
        self._connect_once = connect
        self._controller = controller
        self._settings = settings
        self._client: ClusterClient | None = None
        self._replayed = False
        """The present connection was given the history."""
        self.incarnation = first
        """Number of the present connection, or of the one being made."""
        self._hydrations = Hydrations(settings.hydrations_max)
        """Of the present connection."""
        self._outbox: deque[Command] = deque()
        self._sending: Effect | None = None
        self._receiving: Effect | None = None
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
                if self._replayed:
                    self._outbox.extend(self._hydrations.command(command))
                    self._send()
            case _Connected(client):
                self._client = client
                await self._tell(ReplicaConnected(self._name, self.incarnation))
            case Replay(incarnation, commands):
                if incarnation == self.incarnation and self._client is not None:
                    self._start(self._client, commands)
            case _Sent(incarnation):
                if incarnation == self.incarnation:
                    self._sending = None
                    self._send()
            case _Received(incarnation, response):
                if incarnation == self.incarnation and self._client is not None:
                    await self._pass_on(response)
                    self._receive(self._client)
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

    def _start(self, client: ClusterClient, commands: tuple[Command, ...]) -> None:
        nonce = f"{self.ctx.random.getrandbits(128):032x}"
        self._replayed = True
        self._hydrations = Hydrations(self._settings.hydrations_max)
        self._outbox = deque([Hello(nonce)])
        for command in commands:
            self._outbox.extend(self._hydrations.command(command))
        self._send()
        self._receive(client)

    def _send(self) -> None:
        """One send at a time; the rest waits in the outbox."""
        client = self._client
        if client is None or self._sending is not None or not self._outbox:
            return
        command = self._outbox.popleft()
        incarnation = self.incarnation
        self._sending = self.ctx.effect(
            lambda: client.send(command),
            done=lambda _: _Sent(incarnation),
            failed=lambda error: Lost(incarnation, error),
        )

    def _receive(self, client: ClusterClient) -> None:
        incarnation = self.incarnation
        self._receiving = self.ctx.effect(
            client.receive,
            done=lambda response: _Received(incarnation, response),
            failed=lambda error: Lost(incarnation, error),
        )

    async def _pass_on(self, response: Response) -> None:
        self._attempts = 0
        scheduled = self._hydrations.responded(response)
        if scheduled:
            self._outbox.extend(scheduled)
            self._send()
        await self._tell(ReplicaResponse(self._name, self.incarnation, response))

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
        await self._tell(ReplicaLost(self._name, self.incarnation, named))
        self.incarnation += 1
        self._attempts += 1
        delay = self._settings.retry_delay_ms(self._attempts)
        log.info("replica %s is gone (%s); connecting again in %d ms", self._name, self._why, delay)
        self.ctx.after(delay, _Retry())

    def describe(self) -> str:
        if self._client is None:
            why = self._why or "none"
            return f"{self._name}: connecting, attempt {self._attempts + 1}; last error: {why}"
        hydrations = self._hydrations
        return (
            f"{self._name}: connected, {len(self._outbox)} commands to send, "
            f"{hydrations.hydrating} dataflows hydrate, {hydrations.waiting} wait to"
        )
