"""Accepting connections, for all listeners: which are let in, and which are dropped.

`ConnectionGate.accept` accepts connections of a listening socket and runs each as a task. Every
connection starts as unproven, TLS handshake included, under the rule of `unproven_connections`.
When its peer has proved itself, the listener calls `AcceptedConnection.prove`, and from then on it
counts among the proven connections, which have a limit of their own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel

from actors.runtime.errors import ResourceBusy
from actors.runtime.transport.unproven_connections import UnprovenConnections

log = logging.getLogger("penstock.transport")

ACCEPT_RETRY_S: Final = 0.1
"""Delay after a failed accept, for example when there are no file descriptors left."""


class AcceptedConnection:
    """One accepted connection, as its listener's gate sees it."""

    def __init__(self, gate: ConnectionGate, number: int) -> None:
        self.number = number
        self.dropped = False
        """True if the connection was dropped for a newer one: its end must not wait for its
        peer."""
        self.abort: Callable[[], None] | None = None
        """Closes the connection at once. Set by whoever makes the connection's transport."""
        self.scope = anyio.CancelScope()
        self._gate = gate

    def prove(self) -> None:
        """Count the connection among the proven ones from now on. Does nothing if it is one
        already. Raises `ResourceBusy` if there are as many as may be."""
        self._gate.prove(self.number)

    def drop(self) -> None:
        """End the connection at once."""
        self.dropped = True
        if self.abort is not None:
            self.abort()
        self.scope.cancel()


Converse: TypeAlias = Callable[[socket.socket, AcceptedConnection], Awaitable[None]]
"""Serves one connection to its end, and closes its socket."""


class ConnectionGate:
    """Decides which connections of one listener go on.

    At most `unproven_max` connections are unproven. At most `proven_max` are proven; `setting` is
    the name of that limit, for errors.
    """

    def __init__(self, unproven_max: int, proven_max: int, setting: str) -> None:
        self._unproven = UnprovenConnections(unproven_max)
        self._proven: set[int] = set()
        self._proven_max = proven_max
        self._setting = setting
        self._open: dict[int, AcceptedConnection] = {}
        self._numbers = 0
        self._left = anyio.Event()
        """Set when a connection is unproven no longer."""

    @property
    def connections(self) -> int:
        """Return the number of open connections, proven or not."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Return whether no further connection can prove itself."""
        return len(self._proven) >= self._proven_max

    @property
    def busy(self) -> ResourceBusy:
        """Return the error of a connection that finds all places of proven ones taken."""
        return ResourceBusy(
            f"{len(self._proven)} clients are connected ({self._setting}): try again later"
        )

    def prove(self, number: int) -> None:
        """See `AcceptedConnection.prove`."""
        # It is proven already, or its place was given to another one and it is about to end.
        if number not in self._unproven:
            return
        if self.is_full:
            raise self.busy
        self._proven.add(number)
        self._remove(number)

    async def accept(
        self, listening: socket.socket, group: anyio.abc.TaskGroup, converse: Converse
    ) -> None:
        """Accept connections until cancelled, and run `converse` for each in the group."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_room(loop)
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("cannot accept connections just now: %s", error)
                # File descriptors may have run out: one that an unproven connection holds is freed.
                if len(self._unproven):
                    self._drop(self._unproven.oldest())
                await anyio.sleep(ACCEPT_RETRY_S)
                continue
            self._numbers += 1
            number = self._numbers
            for oldest in self._unproven.admit(number, loop.time() * 1000):
                self._open[oldest].drop()
            accepted = self._open[number] = AcceptedConnection(self, number)
            group.start_soon(self._run, sock, accepted, converse)
            # One connection each turn of the loop: those that are open go on during a flood.
            await anyio.lowlevel.checkpoint()

    async def _wait_for_room(self, loop: asyncio.AbstractEventLoop) -> None:
        # Meanwhile new connections wait in the kernel's queue.
        while (wait_ms := self._unproven.wait_ms(loop.time() * 1000)) > 0:
            self._left = anyio.Event()
            with anyio.move_on_after(wait_ms / 1000):
                await self._left.wait()

    def _drop(self, number: int) -> None:
        self._remove(number)
        self._open[number].drop()

    def _remove(self, number: int) -> None:
        self._unproven.remove(number)
        self._left.set()

    async def _run(
        self, sock: socket.socket, accepted: AcceptedConnection, converse: Converse
    ) -> None:
        try:
            with accepted.scope:
                await converse(sock, accepted)
        finally:
            del self._open[accepted.number]
            self._proven.discard(accepted.number)
            self._remove(accepted.number)
