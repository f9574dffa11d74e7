"""Google's store for tests: its XML API, as obstore's client for it speaks it, on moto's S3 server.

No server of Google's can be installed. Its XML API is S3's but for what is done here: each write of
an object gives it a *generation*, which answers say (``x-goog-generation``), on which writes are
conditional (``x-goog-if-generation-match``, 0: nothing is there; 412 where it is another), and by
which a read asks for one version (``?generation=``; 404 where that one is gone).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

import pytest

import s3_server  # type: ignore[import-not-found]

App = Callable[[dict[str, Any], Any], Iterable[bytes]]
_SCOPE = f"{s3_server.KEY_ID}/20260101/us-east-1/s3/aws4_request"
_GONE = ("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
_ANOTHER = ("412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>")


class Generations:
    """What Google's store adds to S3's answers."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._held: dict[str, int] = {}
        """By path."""
        self._numbers = itertools.count(1_700_000_000_000_000)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            status, headers, answer = self._answer(environ, body)
        start(status, headers)
        return [answer]

    def _answer(
        self, environ: dict[str, Any], body: bytes
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        held = self._held.get(path, 0)
        expected = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if expected is not None and int(expected) != held:
            return _refused(*_ANOTHER)
        if "generation" in query and int(query["generation"][0]) != held:
            return _refused(*_GONE)
        status, headers, answer = self._stored(environ, body)
        if status.startswith("2"):
            piece = "partNumber" in query or "uploads" in query
            if method == "DELETE" and "uploadId" not in query:
                self._held.pop(path, None)
            elif method in ("PUT", "POST") and not piece and path.count("/") > 1:
                held = self._held[path] = next(self._numbers)
            if held:
                headers = [*headers, ("x-goog-generation", str(held))]
        return status, headers, answer

    def _stored(
        self, environ: dict[str, Any], body: bytes
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        pairs = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        kept = urlencode([pair for pair in pairs if pair[0] != "generation"])
        given: dict[str, Any] = {"QUERY_STRING": kept, "wsgi.input": BytesIO(body)}
        path = "/" + quote(environ["PATH_INFO"].removeprefix("/"))  # the bucket's name came quoted
        given |= dict.fromkeys(("RAW_URI", "REQUEST_URI"), f"{path}?{kept}" if kept else path)
        signed = {"HTTP_AUTHORIZATION": f"AWS4-HMAC-SHA256 Credential={_SCOPE}"}
        begun: list[Any] = []
        answer = b"".join(
            self._app({**environ, **given, **signed}, lambda *told: begun.append(told))
        )
        status, headers, *_ = begun[0]
        return status, list(headers), answer


def _refused(status: str, text: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
    return status, [("Content-Length", str(len(text)))], text


class Google(s3_server.S3):  # type: ignore[misc]
    """The server, and what it was asked; rules hold as for S3."""

    def __init__(self) -> None:
        super().__init__()
        self._app: App = Generations(self._app)


@contextmanager
def serving() -> Iterator[Google]:
    """A server until the block ends."""
    s3_server.check_installed()
    served = Google()
    try:
        yield served
    finally:
        served.stop()


def point_to(monkeypatch: pytest.MonkeyPatch, served: Google) -> None:
    """The environment of a service that may write there."""
    account = {"gcs_base_url": served.url, "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    s3_server.take_small_pieces(monkeypatch)
