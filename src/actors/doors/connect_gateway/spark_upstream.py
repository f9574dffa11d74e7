"""Calls to the Spark Connect server of the service's Spark, with messages as bytes.

The server runs in the JVM of the engine's process, on a loopback port that changes at each start,
or it is the remote server of the setting `spark_master`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import grpc
import grpc.aio
import msgspec

from actors.engine.spark.remote_address import SCHEME
from actors.model.plan.jobs import EngineReady
from actors.runtime.errors import EngineUnavailable
from actors.runtime.settings import Settings

SERVICE: Final = "/spark.connect.SparkConnectService/"
_SPARE_BYTES: Final = 1024 * 1024
_KEPT_HEADERS: Final = "x-"
"""Prefix of the keys of client metadata to forward."""
_ADDRESS_PARAMETERS: Final = frozenset({"use_ssl", "token", "user_id", "user_agent", "session_id"})

Metadata = Sequence[tuple[str, str]]


class ConnectPlace(msgspec.Struct, frozen=True):
    """The address of a Connect server."""

    target: str
    """Host and port."""
    secure: bool
    """True for TLS."""
    metadata: tuple[tuple[str, str], ...]
    """Metadata to send with each call, including the token."""


def place_of_engine(ready: EngineReady) -> ConnectPlace:
    """Return the address of an engine's server. Raises `EngineUnavailable` if it has none."""
    if not ready.connect_port:
        raise EngineUnavailable("the engine has no Spark Connect server")
    bearer = (("authorization", f"Bearer {ready.connect_token}"),)
    return ConnectPlace(f"127.0.0.1:{ready.connect_port}", False, bearer)


def place_of_address(master: str) -> ConnectPlace:
    """Parse a well-formed address ``sc://host:port/;name=value``.

    >>> place_of_address("sc://h:1/;use_ssl=true;x-a=b").metadata
    (('x-a', 'b'),)
    """
    address, _, rest = master.partition(";")
    url = urlsplit(f"//{address.removeprefix(SCHEME)}")
    host = f"[{url.hostname}]" if ":" in str(url.hostname) else str(url.hostname)
    given = dict(each.split("=", 1) for each in rest.split(";") if "=" in each)
    values = {name: unquote(value) for name, value in given.items()}
    headers = [
        (name.lower(), value)
        for name, value in values.items()
        if name not in _ADDRESS_PARAMETERS and not name.startswith("grpc_keepalive")
    ]
    token = values.get("token", "")
    if token:
        headers.append(("authorization", f"Bearer {token}"))
    # As in Spark's own clients, a token implies TLS, except to localhost.
    secure = values.get("use_ssl", "").lower() == "true" or (bool(token) and host != "localhost")
    return ConnectPlace(f"{host}:{url.port or 15002}", secure, tuple(headers))


class SparkUpstream:
    """Makes calls to the server over one channel."""

    def __init__(self, settings: Settings, locate: Callable[[], Awaitable[ConnectPlace]]) -> None:
        """Set up without connecting. `locate` waits for a server if needed, and returns its
        address."""
        self._locate = locate
        size = settings.connect_message_bytes_max + settings.connect_inline_bytes_max
        self._options = [
            ("grpc.max_send_message_length", size + _SPARE_BYTES),
            ("grpc.max_receive_message_length", size + _SPARE_BYTES),
            # Rare enough that the server does not reject the pings as a flood.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.enable_retries", 0),
        ]
        self._place: ConnectPlace | None = None
        """Address of the open channel; None: no channel is open."""
        self._channel: Any = None
        self.server = 0
        """Number of the most recently called server, starting at 1. A new server does not know the
        sessions of the previous one."""

    async def call(
        self, method: str, request: bytes, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        """Make a call with one request and one response. Raises `grpc.aio.AioRpcError` and
        `EngineUnavailable`."""
        channel, own = await self._open()
        answer: bytes = await channel.unary_unary(SERVICE + method)(
            request, timeout=timeout, metadata=(*metadata, *own)
        )
        return answer

    async def stream(
        self, method: str, request: bytes, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[bytes, None]:
        """Make a call with one request, and yield its responses as the caller consumes them.
        Leaving the loop cancels the call. Raises the same as `call`."""
        channel, own = await self._open()
        call = channel.unary_stream(SERVICE + method)(
            request, timeout=timeout, metadata=(*metadata, *own)
        )
        try:
            async for answer in call:
                yield answer
        finally:
            call.cancel()

    async def send_all(
        self,
        method: str,
        requests: AsyncIterator[bytes],
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> bytes:
        """Make a call with many requests and one response. Raises the same as `call`."""
        channel, own = await self._open()
        answer: bytes = await channel.stream_unary(SERVICE + method)(
            requests, timeout=timeout, metadata=(*metadata, *own)
        )
        return answer

    async def _open(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        # Asked for each call, because a new engine has another port. This takes microseconds.
        place = await self._locate()
        if place != self._place:
            former, self.server = self._channel, self.server + 1
            self._place, self._channel = place, self._dial(place)
            if former is not None:
                # The engine was replaced, so calls over the old channel get no response.
                await former.close()
        return self._channel, place.metadata

    def _dial(self, place: ConnectPlace) -> Any:
        # Either loopback, or an address that was configured without TLS.
        if not place.secure:
            return grpc.aio.insecure_channel(place.target, options=self._options)
        credentials = grpc.ssl_channel_credentials()
        return grpc.aio.secure_channel(place.target, credentials, options=self._options)

    async def aclose(self) -> None:
        """Close the channel, which cancels its calls."""
        channel, self._channel, self._place = self._channel, None, None
        if channel is not None:
            await channel.close()


def passed_on(metadata: Any) -> Metadata:
    """Return the client metadata to forward to Spark: custom headers, but no secrets."""
    found = ((str(key).lower(), value) for key, value in metadata or ())
    return [(key, value) for key, value in found if key.startswith(_KEPT_HEADERS)]


def is_forgotten(error: Any) -> bool:
    """Return whether an error of the server says that it does not know, or has closed, a
    session."""
    text = str(error.details() or "")
    return any(
        f"INVALID_HANDLE.{name}" in text
        for name in ("SESSION_CHANGED", "SESSION_CLOSED", "SESSION_NOT_FOUND")
    )
