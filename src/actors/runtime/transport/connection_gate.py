"""Accepts the connections of all listeners and limits their number.

`ConnectionGate.accept` accepts the connections of a listening socket and runs each as a task. A
connection starts as unproven, before its TLS handshake, under the rule of `unproven_connections`.
When its peer has proved itself, the listener calls `AcceptedConnection.prove`. From then on it
counts as a proven connection; these have a limit of their own.
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
"""Delay after a failed accept, for example when no file descriptors are left."""


class AcceptedConnection:
    """One accepted connection, as its listener's gate sees it."""

    def __init__(self, gate: ConnectionGate, number: int) -> None:
        self.number = number
        self.dropped = False
        """True once the connection was dropped for a newer one. Closing it must not wait for its
        peer."""
        self.abort: Callable[[], None] | None = None
        """Closes the connection immediately. Set by the creator of its transport; None before."""
        self.scope = anyio.CancelScope()
        """Scope of the task that serves the connection; `drop` cancels it."""
        self._gate = gate

    def prove(self) -> None:
        """Count the connection as proven from now on. Does nothing if it is proven already.

        Raises `ResourceBusy` if the limit of proven connections is reached.
        """
        self._gate.prove(self.number)

    def drop(self) -> None:
        """End the connection immediately."""
        self.dropped = True
        if self.abort is not None:
            self.abort()
        self.scope.cancel()


Converse: TypeAlias = Callable[[socket.socket, AcceptedConnection], Awaitable[None]]
"""Serves one connection to its end, and closes its socket."""


class ConnectionGate:
    """Accepts connections for one listener, within its limits.

    At most `unproven_max` connections are unproven and at most `proven_max` are proven. `setting`
    names the second limit in errors.
    """

    def __init__(self, unproven_max: int, proven_max: int, setting: str) -> None:
        self._unproven = UnprovenConnections(unproven_max)
        self._proven: set[int] = set()
        """Numbers of the proven connections."""
        self._proven_max = proven_max
        self._setting = setting
        self._open: dict[int, AcceptedConnection] = {}
        """All open connections by number."""
        self._numbers = 0
        """Number of connections accepted so far."""
        self._left = anyio.Event()
        """Set when a connection stops being unproven; replaced for each wait."""

    @property
    def connections(self) -> int:
        """Return the number of open connections, proven or not."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Return whether the limit of proven connections is reached."""
        return len(self._proven) >= self._proven_max

    @property
    def busy(self) -> ResourceBusy:
        """Return the error for a connection beyond the limit of proven ones."""
        return ResourceBusy(
            f"{len(self._proven)} clients are connected ({self._setting}): try again later"
        )

    def prove(self, number: int) -> None:
        """Count a connection as proven; see `AcceptedConnection.prove`."""
        # It is proven already, or was dropped for another one and is about to end.
        if number not in self._unproven:
            return
        if self.is_full:
            raise self.busy
        self._proven.add(number)
        self._remove(number)

    async def accept(
        self, listening: socket.socket, group: anyio.abc.TaskGroup, converse: Converse
    ) -> None:
        """Accept connections until cancelled, and run `converse` for each as a task of `group`."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_room(loop)
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("cannot accept connections, will retry: %s", error)
                # File descriptors may have run out: dropping an unproven connection frees one.
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
            # One connection per turn of the loop, so that open ones make progress during a flood.
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
