"""A few read-only pages over HTTP/1.1 for monitoring, with one request per connection.

Clients cannot harm the service: the size of a request, the duration of a connection and the number
of connections are bounded. A connection ends with its only request, so it stays unproven
(`transport.unproven_connections`). At the limit, the oldest connection is dropped for a new one, so
silent clients keep nobody out.

The access rules are those of the other listeners (`security.py`), except that clients need no
certificate, because probes and Prometheus have none. If there are tokens, a private page requires
one (``Authorization: Bearer TOKEN``). A public page is answered without a token, but may answer
more to a client that sends one.
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
"""Maximum size of a request's head."""
REQUEST_TIMEOUT_MS: Final = 5_000
"""Maximum duration of a connection, from its start to its end."""

log = logging.getLogger("penstock.http")

TEXT: Final = "text/plain; charset=utf-8"
_END: Final = b"\r\n\r\n"
_LINGER_BYTES: Final = 65_536
"""Bytes that a client may still send after its answer before the connection is reset."""


class HttpResponse(msgspec.Struct, frozen=True):
    """The answer of a page."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self, *, with_body: bool = True) -> bytes:
        """Encode the response, without its body if it answers a HEAD request."""
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
    """One page.

    `respond(trusted, query)` makes the response. A client is trusted if it sent a valid token or if
    none is required; `query` is the text after the question mark.
    """

    respond: Callable[[bool, str], Awaitable[HttpResponse]]
    private: bool = False
    """True if the page is only for trusted clients."""


PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_page(measures: Callable[[], bytes]) -> HttpPage:
    """Return the page of metrics in Prometheus text format."""

    async def respond(_: bool, query: str) -> HttpResponse:
        return HttpResponse(measures(), content_type=PROMETHEUS)

    return HttpPage(respond, private=True)


def liveness_page() -> HttpPage:
    """Return a page that answers ``ok`` as long as the event loop runs."""

    async def respond(_: bool, query: str) -> HttpResponse:
        return HttpResponse(b"ok\n")

    return HttpPage(respond)


class HttpRequestHead(msgspec.Struct, frozen=True):
    """The head of a request."""

    method: str
    path: str
    token: bytes | None
    query: str = ""
    """Text after the question mark."""


def parse_head(head: bytes) -> HttpRequestHead | None:
    """Parse the head of a request, including its empty line. Return None if it is malformed.

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
        # RFC 9112, section 5.1: no blank before the colon; folded lines are obsolete.
        if not colon or not name or name != name.strip():
            return None
        scheme, _, shown = value.strip().partition(" ")
        if name.lower() == "authorization" and scheme.lower() == "bearer":
            token = shown.strip().encode("latin-1")
    path, _, query = words[1].partition("?")
    return HttpRequestHead(words[0], path, token, query)


class HttpPages:
    """A listener that serves pages by path."""

    def __init__(self, pages: Mapping[str, HttpPage], settings: Settings) -> None:
        """Create the listener for `pages`, by path. The settings have limits and credentials."""
        self._pages = pages
        self._settings = settings
        self._security: TransportSecurity | None = None
        """Requirements for clients, set by `serve`; None if there are none."""
        self._tls: ssl.SSLContext | None = None
        """The TLS context, set by `serve`; None without TLS."""
        self._gate = ConnectionGate(settings.http_connections_max, 0, "http_connections_max")

    @asynccontextmanager
    async def serve(self, text: str, name: str) -> AsyncIterator[str]:
        """Serve on the address `text` (host:port) while the block runs; yield the URL without path.

        An empty host is loopback, and port 0 picks a free one. `name` is the name of the setting,
        for errors. Raises `BadSettings` or `AddressInUse`.
        """
        address = NetworkAddress.parse(text, name)
        if address.is_unix:
            raise BadSettings(f"{name} = {text!r}: expected host:port")
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
        """Answer one request and close the connection."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_MS / 1000):
                reader, writer = await sockets.attach_streams(sock, self._tls, REQUEST_BYTES_MAX)
                accepted.abort = writer.transport.abort
                await self._answer(reader, writer)
        # A client that hangs up, stalls or does not speak TLS is not an error of the service.
        except (OSError, TimeoutError):
            pass
        finally:
            sock.close()
            if writer is not None:
                # Not `close`, which would wait until the client has read the rest.
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
            return HttpResponse(b"not an HTTP/1.1 request\n", HTTPStatus.BAD_REQUEST)
        page = self._pages.get(head.path)
        if page is None:
            known = "not found; the pages are " + ", ".join(self._pages) + "\n"
            return HttpResponse(known.encode(), HTTPStatus.NOT_FOUND)
        if head.method not in ("GET", "HEAD"):
            allow = (("Allow", "GET, HEAD"),)
            return HttpResponse(
                b"only GET and HEAD are allowed\n", HTTPStatus.METHOD_NOT_ALLOWED, headers=allow
            )
        security = self._security
        trusted = security is None or not security.has_tokens
        if not trusted and head.token is not None:
            assert security is not None
            trusted = security.knows(head.token)
        if page.private and not trusted:
            wanted = (("WWW-Authenticate", "Bearer"),)
            return HttpResponse(
                b"token required: send Authorization: Bearer TOKEN\n",
                HTTPStatus.UNAUTHORIZED,
                headers=wanted,
            )
        try:
            return await page.respond(trusted, head.query)
        except Exception:
            # An error in one page must not end the service.
            log.exception("page %s failed: internal error", head.path)
            return HttpResponse(b"internal error\n", HTTPStatus.INTERNAL_SERVER_ERROR)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the client has hung up, or has sent too much."""
    # Closing with unread bytes resets the connection, and the client may lose its answer. TLS
    # cannot close a single direction; the close itself flushes it.
    if not writer.can_write_eof():
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return
    writer.write_eof()
    left = _LINGER_BYTES
    while left > 0 and (chunk := await reader.read(min(left, 4096))):
        left -= len(chunk)
