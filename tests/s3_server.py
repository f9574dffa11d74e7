"""A real S3 server for tests (moto's), on a free port of loopback, that fails where it is told to.

A *rule* looks at each request, a line ``METHOD /bucket/key?query``, and says what becomes of it:

- None: it is served;
- ``"fail"``: it is not, and is answered with 500;
- ``"late"``: it is served, and answered with 500;
- ``"hang"``: it is not, and waits until `release`, or the end;
- ``"deny"``: it is not, and is answered with 403;
- ``"busy"``: it is not, and is answered with 429.
"""

from __future__ import annotations

import itertools
import logging
import re
import socket
import threading
import urllib.request
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, TypeAlias

import pytest

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import moto.s3.models
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server
except ImportError as error:
    MISSING: str | None = str(error)
else:
    MISSING = None

Fate: TypeAlias = Literal["fail", "late", "hang", "deny", "busy"] | None
Rule: TypeAlias = Callable[[str], Fate]

_NUMBERS = itertools.count(1)
"""Of buckets: what is stored is one for all servers of a process."""
KEY_ID = "AKIDOFTHETESTS"
SECRET = "the+secret/of+the+tests"
FATES = {
    "busy": ("429 Too Many Requests", b"<Error><Code>rateLimitExceeded</Code></Error>"),
    "fail": ("500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>"),
    "deny": (
        "403 Forbidden",
        f"<Error><Code>AccessDenied</Code><Message>{KEY_ID} {SECRET}</Message></Error>".encode(),
    ),
}


class S3:
    """The server, and what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rule: Rule = lambda _: None
        self.moved: Counter[str] = Counter()
        """Bytes of bodies, either way, by the key id that asked."""
        self.put_at_once = 0
        """Most pieces that were on their way at a time."""
        self._putting = 0
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._one = threading.Lock()
        """Moto compares and then writes: a condition holds for both only if nobody else does."""
        self._app = DomainDispatcherApplication(create_backend_app)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._listen(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def go_away(self) -> None:
        """Refuses connections, and cuts those that there are: what was asked may have happened."""
        self.stop()
        for connection in list(self._accepted):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        """Serves again what is stored, at the same port."""
        self._released = threading.Event()
        self._listen(self._server.server_port)

    def _listen(self, port: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server = make_server("127.0.0.1", port, self._answer, threaded=True)
        accept = self._server.get_request

        def accepted() -> tuple[socket.socket, Any]:
            connection, address = accept()
            self._accepted.add(connection)
            return connection, address

        self._server.get_request = accepted
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """What hangs goes on, and fails."""
        self._released.set()

    def forget(self) -> None:
        """As new, but for what is stored."""
        self.rule = lambda _: None
        self.calls.clear()
        self._released.set()
        self._released = threading.Event()

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}" + (
            f"?{query}" if query else ""
        )
        if environ.get("HTTP_X_FROM") == "tests":
            return self._app(environ, start)  # type: ignore[no-any-return]
        with self._lock:
            self.calls.append(line)
            self._putting += line.startswith("PUT")
            self.put_at_once = max(self.put_at_once, self._putting)
            released = self._released
        try:
            return self._fate(self.rule(line), environ, start, released)
        finally:
            with self._lock:
                self._putting -= line.startswith("PUT")

    def _fate(self, fate: Fate, environ: Any, start: Any, released: Any) -> Iterable[bytes]:
        if fate in (None, "late"):
            begun: list[Any] = []
            conditional = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
            with self._one if conditional else nullcontext():
                body = list(self._app(environ, lambda *given: begun.append(given)))
            if fate is None:
                given = int(environ.get("CONTENT_LENGTH") or 0)
                with self._lock:
                    self.moved[_key_id(environ)] += given + sum(map(len, body))
                start(*begun[0])
                return body
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fate == "hang":
            released.wait(60)
        status, text = FATES.get(fate, FATES["fail"])
        start(status, [("Content-Length", str(len(text)))])
        return [text]

    # -- looking in ----------------------------------------------------------------------------

    def ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """A request of the tests' own: no rule sees it."""
        scope = f"{KEY_ID}/20260101/us-east-1/s3/aws4_request"
        headers = {"X-From": "tests", "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}"}
        headers["Content-Type"] = "application/octet-stream"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=100) as answer:
            found: bytes = answer.read()
            return found

    def new_bucket(self) -> str:
        name = f"bucket-{next(_NUMBERS)}"
        self.ask("PUT", f"/{name}")
        return name

    def keys(self, bucket: str) -> list[str]:
        """All that is in there."""
        found = self.ask("GET", f"/{bucket}?list-type=2").decode()
        assert "<IsTruncated>false" in found
        return re.findall(r"<Key>([^<]*)</Key>", found)

    def uploads(self, bucket: str) -> list[str]:
        """Keys of uploads that were begun and neither completed nor aborted."""
        return re.findall(r"<Key>([^<]*)</Key>", self.ask("GET", f"/{bucket}?uploads").decode())

    def get(self, bucket: str, key: str) -> bytes:
        return self.ask("GET", f"/{bucket}/{key}")


def _key_id(environ: dict[str, Any]) -> str:
    """The key id that a request is signed with; empty if it is not."""
    found = re.search(r"Credential=([^/,]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    return found[1] if found else ""


def check_installed() -> None:
    """Fails the test where the server cannot be started."""
    if MISSING is not None:
        pytest.fail(
            f"buckets are tested on an S3 server ({MISSING}): run `make test`, which "
            "installs requirements/dev.txt, or pip install 'moto[s3]' flask flask-cors",
            pytrace=False,
        )
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)


@contextmanager
def serving() -> Iterator[S3]:
    """A server until the block ends."""
    check_installed()
    served = S3()
    try:
        yield served
    finally:
        served.stop()


def point_to(monkeypatch: pytest.MonkeyPatch, served: S3) -> None:
    """The environment of a service that may write there. Pieces may be small."""
    for name, value in variables(served).items():
        monkeypatch.setenv(name, value)
    take_small_pieces(monkeypatch)


def variables(served: S3) -> dict[str, str]:
    """The variables of such an environment."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": served.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }


def take_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of an upload may be of any size."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
