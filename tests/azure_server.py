"""A real Azure Blob server for tests: Azurite, on a free port of loopback, with nothing on disk."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from actors.testing.postgres_server import NotInstalled

ACCOUNT = "tests"
KEY = base64.b64encode(b"the secret of the tests, not short").decode()
OPTIONS = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
_VERSION = "2021-12-02"
_NUMBERS = itertools.count(1)


class Azure:
    """The server."""

    def __init__(self, program: str) -> None:
        self._process = subprocess.Popen(
            [program, "--blobHost", "127.0.0.1", "--blobPort", "0", *OPTIONS],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.url = self._address()
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _address(self) -> str:
        said = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"(http://127\S+)", line):
                return f"{found[1]}/{ACCOUNT}"
            said.append(line)
        raise AssertionError(f"Azurite did not start: {''.join(said)[-500:]}")

    def _drain(self) -> None:
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            pass

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def new_container(self) -> str:
        name = f"container-{next(_NUMBERS)}"
        date = formatdate(usegmt=True)
        # Its name for the account comes twice: in the path, as it does not stand in the host.
        place = f"/{ACCOUNT}/{ACCOUNT}/{name}"
        headers = [f"x-ms-date:{date}", f"x-ms-version:{_VERSION}"]
        signed = "\n".join(["PUT", *[""] * 11, *headers, place, "restype:container"])
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(
            f"{self.url}/{name}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": _VERSION,
                "Content-Length": "0",
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            },
        )
        with urllib.request.urlopen(request, timeout=30):
            return name


@contextmanager
def serving() -> Iterator[Azure]:
    """A server until the block ends. Raises `NotInstalled`."""
    program = shutil.which("azurite-blob")
    if program is None:
        raise NotInstalled(
            "azurite-blob is not on PATH: Azure is tested on Azurite (npm install -g azurite)"
        )
    served = Azure(program)
    try:
        yield served
    finally:
        served.stop()


def point_to(monkeypatch: pytest.MonkeyPatch, served: Azure) -> None:
    """The environment of a service that may write there."""
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_ENDPOINT": served.url,
        "AZURE_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
