"""Peers that are not clients: what they send first to a listener, and what they do then.

`hostile_peer` draws one. `HostileCrowd` connects them to an address, one after the other, and keeps
some hundreds of sockets open. A listener must end such connections individually, keep little for
them, and meanwhile serve real clients.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from enum import Enum
from random import Random
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from actors.runtime.transport.address import NetworkAddress

OVERSIZED_BYTES: Final = 512 * 1024
"""Bytes that a peer sends after the header of a large frame, as many as the kernel accepts."""
KEPT_MAX: Final = 300
"""Sockets that a crowd keeps open; the oldest is closed for a new one."""
SOCKET_TIMEOUT_S: Final = 60.0
_U32: Final = struct.Struct("!I")
_SSL_REQUEST: Final = _U32.pack(8) + _U32.pack(80877103)
_TLS_HELLO: Final = bytes.fromhex(
    "16030100b3010000af0303" + "5a" * 32 + "20" + "a5" * 32 + "0006130213031301" + "010000600000"
)
"""The start of a TLS handshake that announces a hundred more bytes."""
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


class HostileHabit(Enum):
    """What a peer does after its first bytes."""

    LEAVES = "closes the connection at once"
    STAYS = "says nothing more, and reads nothing"
    HALF_CLOSES = "ends its sending side, and stays"
    TRICKLES = "sends a byte whenever the next peer comes"


class HostilePeer(msgspec.Struct, frozen=True):
    """One hostile peer."""

    data: bytes
    habit: HostileHabit


def _startup(code: int, body: bytes) -> bytes:
    return _U32.pack(len(body) + 8) + _U32.pack(code) + body


def _openings(rng: Random) -> list[bytes]:
    """Return first bytes of every kind; some of them start a valid conversation."""
    size = rng.randrange(1, 1 << 31)
    magic = rng.choice((b"PNSTKAPI\0\2", b"PENSREPL\0\1", b"PENSSTOR\0\1", b"PENSBUSY\0\1"))
    user = b"user\0" + rng.choice((b"boss", b"x" * 5_000, b"\xff")) + b"\0\0"
    large = rng.randbytes(64) * (OVERSIZED_BYTES // 64)
    return [
        b"",
        rng.randbytes(rng.randrange(1, 400)),
        # half of a TLS handshake
        _TLS_HELLO[: rng.randrange(1, len(_TLS_HELLO))],
        _TLS_HELLO + rng.randbytes(200),
        _SSL_REQUEST,
        _SSL_REQUEST + rng.randbytes(30),
        _SSL_REQUEST + _TLS_HELLO,
        # PostgreSQL
        _startup(196608, user),
        _startup(196608, user) + b"p" + _U32.pack(size) + large,
        _startup(80877102, rng.randbytes(8)),
        _startup(rng.randrange(1 << 32), rng.randbytes(30)),
        _U32.pack(size) + large,
        # frames
        magic[:8] + rng.randbytes(rng.randrange(20)),
        magic + b"\0\0\0" + _U32.pack(size) + large,
        magic + b"\0" + struct.pack(">H", 4096) + rng.randbytes(4096),
        # HTTP
        b"GET /healthz HT",
        b"GET / HTTP/1.1\r\nX: " + large,
        _HTTP2,
        _HTTP2 + _U32.pack(size) + large,
    ]


def hostile_peer(rng: Random) -> HostilePeer:
    """Draw a peer."""
    data = rng.choice(_openings(rng))
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)]
    return HostilePeer(data, rng.choice(list(HostileHabit)))


class HostileCrowd:
    """Hostile peers at one listener."""

    def __init__(self, address: str, rng: Random, kept_max: int = KEPT_MAX) -> None:
        self._place = NetworkAddress.parse(address)
        self._rng = rng
        self._kept_max = kept_max
        self._kept: deque[socket.socket] = deque()
        self._trickling: deque[socket.socket] = deque(maxlen=4)

    async def attack(self, count: int) -> None:
        """Connect this many peers."""
        for _ in range(count):
            peer = hostile_peer(self._rng)
            # In a thread, because the listener may be in this process.
            await anyio.to_thread.run_sync(self._connect, peer)

    def _connect(self, peer: HostilePeer) -> None:
        while len(self._kept) >= self._kept_max:
            self._kept.popleft().close()
        for other in self._trickling:
            _send(other, b"\0")
        family = socket.AF_UNIX if self._place.is_unix else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._kept.append(sock)
        sock.settimeout(SOCKET_TIMEOUT_S)
        sock.connect(self._place.path or (self._place.host, self._place.port))
        # Do not send what the kernel does not accept immediately: the listener does not read it.
        sock.setblocking(False)
        _send(sock, peer.data)
        match peer.habit:
            case HostileHabit.LEAVES:
                sock.close()
            case HostileHabit.HALF_CLOSES:
                _half_close(sock)
            case HostileHabit.TRICKLES:
                self._trickling.append(sock)
            case HostileHabit.STAYS:
                pass

    async def aclose(self) -> None:
        """Close all sockets."""
        while self._kept:
            self._kept.pop().close()


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        while data:
            data = data[sock.send(data) :]
    except OSError:
        pass  # full, closed here, or ended by the listener as it should be


def _half_close(sock: socket.socket) -> None:
    # The listener may have ended the connection.
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
