"""The Spark Connect server of the service's own Spark: calls to it, as bytes.

It is inside the JVM of the engine's process, on a port of loopback that is another after each
start; or it is the server that `spark_master` names.
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

"""Begin of `spark_master` where it is a Connect server of somebody else's."""
SERVICE: Final = "/spark.connect.SparkConnectService/"
_SPARE_BYTES: Final = 1024 * 1024
_KEPT_HEADERS: Final = "x-"
"""Prefix of the metadata of a client that is passed on."""
_ADDRESS_PARAMETERS: Final = frozenset({"use_ssl", "token", "user_id", "user_agent", "session_id"})

Metadata = Sequence[tuple[str, str]]


class ConnectPlace(msgspec.Struct, frozen=True):
    """The address of a Connect server, and what each call shows it."""

    target: str
    secure: bool
    metadata: tuple[tuple[str, str], ...]


def place_of_engine(ready: EngineReady) -> ConnectPlace:
    """Return the server in the JVM of an engine. Raises `EngineUnavailable` if it has none."""
    if not ready.connect_port:
        raise EngineUnavailable("the engine serves no Spark Connect")
    bearer = (("authorization", f"Bearer {ready.connect_token}"),)
    return ConnectPlace(f"127.0.0.1:{ready.connect_port}", False, bearer)


def place_of_address(master: str) -> ConnectPlace:
    """Return the server of a well-formed address ``sc://host:port/;name=value``.

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
    # As Spark's own clients take it: a token alone means TLS, but to this machine.
    secure = values.get("use_ssl", "").lower() == "true" or (bool(token) and host != "localhost")
    return ConnectPlace(f"{host}:{url.port or 15002}", secure, tuple(headers))


class SparkUpstream:
    """Calls to the server, over one channel."""

    def __init__(self, settings: Settings, locate: Callable[[], Awaitable[ConnectPlace]]) -> None:
        """Take a function that tells where the server is now, and waits until there is one."""
        self._locate = locate
        size = settings.connect_message_bytes_max + settings.connect_inline_bytes_max
        self._options = [
            ("grpc.max_send_message_length", size + _SPARE_BYTES),
            ("grpc.max_receive_message_length", size + _SPARE_BYTES),
            # Calls of all clients go over one channel: its own pings must not look like a flood.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.enable_retries", 0),
        ]
        self._place: ConnectPlace | None = None
        self._channel: Any = None
        self.server = 0
        """Number of the server that was called last: another one knows no session of the former."""

    async def call(
        self, method: str, request: bytes, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        """Make a call with one request and one answer. Raises `grpc.aio.AioRpcError`, and
        `EngineUnavailable`."""
        channel, own = await self._open()
        answer: bytes = await channel.unary_unary(SERVICE + method)(
            request, timeout=timeout, metadata=(*metadata, *own)
        )
        return answer

    async def stream(
        self, method: str, request: bytes, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers of a call with one request, each when the one before was taken. Leaving
        the loop cancels the call. Raises as `call` does."""
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
        """Make a call with many requests and one answer. Raises as `call` does."""
        channel, own = await self._open()
        answer: bytes = await channel.stream_unary(SERVICE + method)(
            requests, timeout=timeout, metadata=(*metadata, *own)
        )
        return answer

    async def _open(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        # Asked each time: another engine has another port, and the answer costs microseconds.
        place = await self._locate()
        if place != self._place:
            former, self.server = self._channel, self.server + 1
            self._place, self._channel = place, self._dial(place)
            if former is not None:
                # The engine was replaced: what still runs over it has no one to answer it.
                await former.close()
        return self._channel, place.metadata

    def _dial(self, place: ConnectPlace) -> Any:
        # Either loopback, or an address whose owner chose to go without TLS.
        if not place.secure:
            return grpc.aio.insecure_channel(place.target, options=self._options)
        credentials = grpc.ssl_channel_credentials()
        return grpc.aio.secure_channel(place.target, credentials, options=self._options)

    async def aclose(self) -> None:
        """Close the channel, which cancels what runs over it."""
        channel, self._channel, self._place = self._channel, None, None
        if channel is not None:
            await channel.close()


def passed_on(metadata: Any) -> Metadata:
    """Return the metadata of a client that is for Spark: its own headers, and no secrets."""
    found = ((str(key).lower(), value) for key, value in metadata or ())
    return [(key, value) for key, value in found if key.startswith(_KEPT_HEADERS)]


def is_forgotten(error: Any) -> bool:
    """Return whether the server says that it has not, or not any more, a session."""
    text = str(error.details() or "")
    return any(
        f"INVALID_HANDLE.{name}" in text
        for name in ("SESSION_CHANGED", "SESSION_CLOSED", "SESSION_NOT_FOUND")
    )
