"""The storage half over a socket: the cluster's side and the client's.

As `serving` and `client.connect` for the compute half. The opening is one frame, the Hello: there
is no instance to compare, so a timely Hello with a fresh nonce displaces the active client.
"""

from __future__ import annotations

from typing import Any, Final

import anyio

from actors.cluster.client import WireClient
from actors.cluster.connection import AcceptorMessage, RunListener
from actors.cluster.serving import ConversationServer
from actors.errors import RemoteProtocolError
from actors.kernel import ActorAddress
from actors.protocol.compute import Hello
from actors.protocol.storage import Command, Response
from actors.settings import Settings
from actors.transport.address import NetworkAddress as Place
from actors.transport.connection import FramedConnection, TransportListener, dial
from actors.transport.security import for_dialler, for_listener

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
                hello = await connection.receive()
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
