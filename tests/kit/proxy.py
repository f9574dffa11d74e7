"""A proxy between a client and a service that breaks the network on request.

    async with TcpProxy("127.0.0.1:0", service.address) as proxy:
        client = await Client.connect(proxy.address)
        proxy.throttle(10_000)

Theory of operation. Each connection to the proxy becomes one to the target, and two pumps carry
the bytes, one per direction. Faults apply to present and later connections, until `heal`:

- `cut()` resets all connections on both sides; `refuse()` also resets every later one.
- `vanish()` passes no more bytes in either direction and closes no connection, like a pulled cable.
- `delay(ms)` makes bytes arrive that much later, in order.
- `throttle(bytes_s)` passes at most this many bytes per second in each direction.
- `half_close(side)` lets the peer of that side see the end of the stream; the other direction
  continues.
- `stop_reading(side)` stops reading bytes from that side; the other direction continues.

A side is ``"client"`` or ``"target"``. A pump stops reading while `CHUNKS_MAX` chunks are unsent.
Addresses are those of `actors.runtime.transport.address`, so Unix sockets work too. The proxy does
not interpret the bytes, so TLS passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import anyio

from actors.runtime.transport import sockets
from actors.runtime.transport.address import NetworkAddress

Side: TypeAlias = Literal["client", "target"]
SIDES: Final[tuple[Side, Side]] = ("client", "target")
CHUNK_BYTES: Final = 64 * 1024
CHUNKS_MAX: Final = 64
"""Most chunks in flight in one direction."""


class _Faults:
    """The current faults. `changed` is replaced at every change."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_s = 0
        self.refusing = False
        self.stopped: set[Side] = set()
        self.changed = anyio.Event()

    def change(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()


class _Direction:
    """Carries bytes from one socket to another."""

    def __init__(
        self, side: Side, source: socket.socket, sink: socket.socket, faults: _Faults
    ) -> None:
        self._side = side
        self._source = source
        self._sink = sink
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._moved = anyio.Event()
        self.half_closed = False

    def _move(self) -> None:
        moved, self._moved = self._moved, anyio.Event()
        moved.set()

    async def read(self) -> None:
        """Read into the queue; an empty chunk means the end."""
        while True:
            while self._side in self._faults.stopped:
                await self._faults.changed.wait()
            while len(self._chunks) >= CHUNKS_MAX:
                await self._moved.wait()
            data = await self._loop.sock_recv(self._source, CHUNK_BYTES)
            self._chunks.append((self._loop.time(), data))
            self._move()
            if not data:
                return

    async def write(self) -> None:
        """Write the chunks of the queue when they are due."""
        while True:
            while not self._chunks:
                await self._moved.wait()
            came, data = self._chunks[0]
            await self._due(came)
            if not data:
                self.half_close()
                return
            size = max(1, self._faults.bytes_s // 20) if self._faults.bytes_s else len(data)
            part, rest = data[:size], data[size:]
            if not self.half_closed:
                await self._loop.sock_sendall(self._sink, part)
            if self._faults.bytes_s:
                await anyio.sleep(len(part) / self._faults.bytes_s)
            if rest:
                self._chunks[0] = (came, rest)
            else:
                self._chunks.popleft()
                self._move()

    async def _due(self, came: float) -> None:
        """Wait until a chunk may pass, under faults that may change meanwhile."""
        while True:
            faults = self._faults
            if self._side in faults.stopped:
                await faults.changed.wait()
                continue
            wait_s = came + faults.delay_s - self._loop.time()
            if wait_s <= 0:
                return
            with anyio.move_on_after(wait_s):
                await faults.changed.wait()

    def half_close(self) -> None:
        """Let the sink see the end of the stream; later bytes are dropped."""
        if not self.half_closed:
            self.half_closed = True
            with contextlib.suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)


class _Pair:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, target: socket.socket, faults: _Faults) -> None:
        self._sockets = {"client": client, "target": target}
        self._directions = {
            "client": _Direction("client", client, target, faults),
            "target": _Direction("target", target, client, faults),
        }
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """Carry bytes both ways until both directions have ended or one side is lost."""
        lost = False
        with self._scope:
            try:
                async with anyio.create_task_group() as group:
                    for direction in self._directions.values():
                        group.start_soon(direction.read)
                        group.start_soon(direction.write)
            except* OSError:
                lost = True
        self.close(reset=lost or self._scope.cancel_called)

    def half_close(self, side: Side) -> None:
        """End the stream of one side; see `TcpProxy.half_close`."""
        self._directions[side].half_close()

    def cut(self) -> None:
        """Reset both connections."""
        self._scope.cancel()

    def close(self, *, reset: bool) -> None:
        """Close both sockets; with `reset`, so that the peers see a reset."""
        for sock in self._sockets.values():
            if reset:
                with contextlib.suppress(OSError):
                    linger = (1).to_bytes(4, "little") + bytes(4)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.close()


class TcpProxy:
    """A proxy that breaks the network on request: ``async with TcpProxy(listen, target) as proxy:
    …``."""

    def __init__(self, listen: NetworkAddress | str, target: NetworkAddress | str) -> None:
        self._listen = NetworkAddress.parse(listen) if isinstance(listen, str) else listen
        self._target = NetworkAddress.parse(target) if isinstance(target, str) else target
        self._faults = _Faults()
        self._pairs: set[_Pair] = set()
        self._bound: sockets.BoundSockets | None = None
        self._group: Any = None
        self.connections = 0
        """Number of connections made so far."""

    @property
    def address(self) -> str:
        """Return the address to which clients connect."""
        assert self._bound is not None, "the proxy has not been entered"
        return str(self._bound.address)

    async def __aenter__(self) -> Self:
        """Start listening. Raises `AddressInUse`."""
        self._bound = await sockets.bind(self._listen)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        for sock in self._bound.sockets:
            self._group.start_soon(self._accept, sock)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Reset the remaining connections."""
        assert self._bound is not None
        self._group.cancel_scope.cancel()
        try:
            done: bool | None = await self._group.__aexit__(kind, error, trace)
        finally:
            self._bound.close()
        return done

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listening)
            self.connections += 1
            self._group.start_soon(self._carry, sock)

    async def _carry(self, client: socket.socket) -> None:
        unix = self._target.is_unix
        target = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        pair = _Pair(client, target, self._faults)
        target.setblocking(False)
        client.setblocking(False)
        place = self._target.path if unix else (self._target.host, self._target.port)
        try:
            if self._faults.refusing:
                raise ConnectionRefusedError
            await asyncio.get_running_loop().sock_connect(target, place)
        except OSError:
            pair.close(reset=True)
            return
        self._pairs.add(pair)
        try:
            await pair.run()
        finally:
            self._pairs.discard(pair)
            pair.close(reset=True)

    # -- faults --

    def cut(self) -> None:
        """Reset all connections; later ones are not affected."""
        for pair in list(self._pairs):
            pair.cut()

    def refuse(self) -> None:
        """Reset all connections, and later ones immediately."""
        self._faults.refusing = True
        self._faults.change()
        self.cut()

    def vanish(self) -> None:
        """Pass no bytes in either direction, and close no connection."""
        self._faults.stopped = set(SIDES)
        self._faults.change()

    def delay(self, ms: float) -> None:
        """Delay all bytes by `ms` milliseconds."""
        self._faults.delay_s = ms / 1000
        self._faults.change()

    def throttle(self, bytes_s: int) -> None:
        """Pass at most `bytes_s` bytes per second in each direction of each connection; 0 means no
        limit."""
        self._faults.bytes_s = bytes_s
        self._faults.change()

    def half_close(self, side: Side) -> None:
        """Let the peer of `side` see the end of that side's stream."""
        for pair in self._pairs:
            pair.half_close(side)

    def stop_reading(self, side: Side) -> None:
        """Stop reading bytes from `side`."""
        self._faults.stopped = self._faults.stopped | {side}
        self._faults.change()

    def heal(self) -> None:
        """End all lasting faults."""
        self._faults.delay_s = 0.0
        self._faults.bytes_s = 0
        self._faults.refusing = False
        self._faults.stopped = set()
        self._faults.change()
