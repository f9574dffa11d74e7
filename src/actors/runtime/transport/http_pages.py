"""A few read-only pages over HTTP/1.1, for monitors: one request a connection.

Nothing that a client does harms the service: the head of a request, the time of a connection and
the number of connections are bounded. Every connection stays unproven
(`transport.unproven_connections`), since it ends with its one request: when all places are taken,
the oldest one is dropped for a new one, so that clients that say nothing keep nobody out.

Rules of access are those of the other listeners (`security.py`), but that no certificate of the
client is asked for: probes and Prometheus have none. Where there are tokens a private page needs
one, ``Authorization: Bearer TOKEN``; an open page is answered without, and is told whether one was
shown.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Final

import anyio
import msgspec

from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings
from actors.runtime.transport import sockets
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection_gate import AcceptedConnection, ConnectionGate
from actors.runtime.transport.security import TransportSecurity, for_listener

REQUEST_BYTES_MAX: Final = 8_192
REQUEST_TIMEOUT_MS: Final = 5_000
"""Time of one connection, from its beginning to its end."""

log = logging.getLogger("penstock.http")

TEXT: Final = "text/plain; charset=utf-8"
_END: Final = b"\r\n\r\n"
_LINGER_BYTES: Final = 65_536
"""Bytes that a client may still send behind its answer before the connection is reset."""


class HttpResponse(msgspec.Struct, frozen=True):
    """The answer of a page."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self, *, with_body: bool = True) -> bytes:
        """Return the bytes on the wire."""
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        head = "\r\n".join(lines).encode("latin-1") + _END
        return head + self.body if with_body else head


class HttpPage(msgspec.Struct, frozen=True):
    """One page. `respond` gets whether the client is trusted (it showed a token, or none is
    needed), and what follows the question mark."""

    respond: Callable[[bool, str], Awaitable[HttpResponse]]
    private: bool = False
    """True if the page is for trusted clients alone."""


PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_page(measures: Callable[[], bytes]) -> HttpPage:
    """Return the page of measures in Prometheus' text format."""

    async def respond(_: bool, query: str) -> HttpResponse:
        return HttpResponse(measures(), content_type=PROMETHEUS)

    return HttpPage(respond, private=True)


def liveness_page() -> HttpPage:
    """Return a page that answers ``ok`` as long as the event loop runs."""

    async def respond(_: bool, query: str) -> HttpResponse:
        return HttpResponse(b"ok\n")

    return HttpPage(respond)


class HttpRequestHead(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    token: bytes | None
    query: str = ""
    """Text after the question mark."""


def parse_head(head: bytes) -> HttpRequestHead | None:
    """Parse the head of a request, up to its empty line; None: it is malformed.

    >>> parse_head(b"GET /healthz?full HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    HttpRequestHead(method='GET', path='/healthz', token=None, query='full')
    """
    first, *fields = head.removesuffix(_END).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not words[0].isalpha():
        return None
    token = None
    for field in fields:
        name, colon, value = field.partition(":")
        # By RFC 9112, 5.1: no blank before the colon; folded lines are obsolete.
        if not colon or not name or name != name.strip():
            return None
        scheme, _, shown = value.strip().partition(" ")
        if name.lower() == "authorization" and scheme.lower() == "bearer":
            token = shown.strip().encode("latin-1")
    path, _, query = words[1].partition("?")
    return HttpRequestHead(words[0], path, token, query)


class HttpPages:
    """A listener for pages by path."""

    def __init__(self, pages: Mapping[str, HttpPage], settings: Settings) -> None:
        """Take the pages; limits and credentials come from the settings."""
        self._pages = pages
        self._settings = settings
        self._security: TransportSecurity | None = None
        self._tls: ssl.SSLContext | None = None
        self._gate = ConnectionGate(settings.http_connections_max, 0, "http_connections_max")

    @asynccontextmanager
    async def serve(self, text: str, name: str) -> AsyncIterator[str]:
        """Serve on host:port (an empty host is loopback, port 0 a free one); yield the URL without
        a path. `name` is the setting. Raises `BadSettings`, `AddressInUse`."""
        address = NetworkAddress.parse(text, name)
        if address.is_unix:
            raise BadSettings(f"{name} = {text!r}: give host:port")
        security = for_listener(name, address, self._settings, "token_file")
        self._security = security
        if security is not None and security.has_tls:
            self._tls = security.context(server=True)
            self._tls.verify_mode = ssl.CERT_NONE
        async with AsyncExitStack() as stack:
            bound = await sockets.bind(address)
            stack.callback(bound.close)
            group = await stack.enter_async_context(anyio.create_task_group())
            for sock in bound.sockets:
                group.start_soon(self._gate.accept, sock, group, self._converse)
            yield f"{'http' if self._tls is None else 'https'}://{bound.address}"
            group.cancel_scope.cancel()

    async def _converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        """Answer one request, and close the connection."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_MS / 1000):
                reader, writer = await sockets.attach_streams(sock, self._tls, REQUEST_BYTES_MAX)
                accepted.abort = writer.transport.abort
                await self._answer(reader, writer)
        # A client that hangs up, stalls or speaks no TLS is no error of the service.
        except (OSError, TimeoutError):
            pass
        finally:
            sock.close()
            if writer is not None:
                # Not `close`, which would wait for the client to take what is left.
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = parse_head(await reader.readuntil(_END))
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            writer.write(HttpResponse(b"the request is too large\n", too_large).encode())
        else:
            response = await self._respond(head)
            is_head = head is not None and head.method == "HEAD"
            writer.write(response.encode(with_body=not is_head))
        await writer.drain()
        await _linger(reader, writer)

    async def _respond(self, head: HttpRequestHead | None) -> HttpResponse:
        if head is None:
            return HttpResponse(b"this is no request of HTTP/1.1\n", HTTPStatus.BAD_REQUEST)
        page = self._pages.get(head.path)
        if page is None:
            known = "pages are " + ", ".join(self._pages) + "\n"
            return HttpResponse(known.encode(), HTTPStatus.NOT_FOUND)
        if head.method not in ("GET", "HEAD"):
            allow = (("Allow", "GET, HEAD"),)
            return HttpResponse(
                b"only GET and HEAD\n", HTTPStatus.METHOD_NOT_ALLOWED, headers=allow
            )
        security = self._security
        trusted = security is None or not security.has_tokens
        if not trusted and head.token is not None:
            assert security is not None
            trusted = security.knows(head.token)
        if page.private and not trusted:
            wanted = (("WWW-Authenticate", "Bearer"),)
            return HttpResponse(
                b"show a token: Authorization: Bearer TOKEN\n",
                HTTPStatus.UNAUTHORIZED,
                headers=wanted,
            )
        try:
            return await page.respond(trusted, head.query)
        except Exception:
            # A fault of one page must not end the service.
            log.exception("%s: a fault of this program", head.path)
            return HttpResponse(b"internal fault\n", HTTPStatus.INTERNAL_SERVER_ERROR)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the client has hung up, within bounds."""
    # Closing over unread bytes resets the connection, and the client may lose its answer. TLS
    # cannot close one direction alone: it is flushed by the close itself.
    if not writer.can_write_eof():
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return
    writer.write_eof()
    left = _LINGER_BYTES
    while left > 0 and (chunk := await reader.read(min(left, 4096))):
        left -= len(chunk)
