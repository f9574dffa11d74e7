"""Addresses: what is read, what is refused, and what only this machine reaches."""

from __future__ import annotations

import pytest

from actors.runtime.errors import BadSettings
from actors.runtime.transport.address import NetworkAddress


@pytest.mark.parametrize(
    ("text", "shown", "local"),
    [
        ("127.0.0.1:6874", "127.0.0.1:6874", True),
        ("tcp://127.8.0.1:1", "127.8.0.1:1", True),
        (":0", "127.0.0.1:0", True),
        ("localhost:1", "localhost:1", True),
        ("[::1]:80", "[::1]:80", True),
        ("[::]:80", "[::]:80", False),
        ("0.0.0.0:80", "0.0.0.0:80", False),
        ("tcp://db.example:65535", "db.example:65535", False),
        ("localhost.example:1", "localhost.example:1", False),
        ("unix:/run/penstock/api.sock", "unix:/run/penstock/api.sock", True),
    ],
)
def test_what_is_read(text: str, shown: str, local: bool) -> None:
    address = NetworkAddress.parse(text)
    assert (str(address), address.is_local) == (shown, local)
    assert NetworkAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nowhere",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "host:²",
        "::1:80",
        "[::1:80",
        "unix:",
        "unix:relative.sock",
        "unix:/" + "x" * 107,
    ],
)
def test_what_is_refused_is_named(text: str) -> None:
    with pytest.raises(BadSettings, match="cluster_listen = '"):
        NetworkAddress.parse(text, "cluster_listen")
