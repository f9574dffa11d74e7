"""Tells where Spark runs, and parses the address of a Spark Connect server,
``sc://HOST:PORT/;NAME=VALUE;…``, without revealing its secrets.

Spark defines its parameters: ``use_ssl=true`` for TLS, ``token=…`` for a bearer token (which
implies TLS for every host except ``localhost``), ``user_id=…``; any other parameter is sent as a
header. Values can be secret, so an address is never shown: use `strip_parameters` for logs and
errors, and `redact_secrets` for texts from elsewhere.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

from actors.runtime.errors import BadSettings

SCHEME: Final = "sc://"
_LOOPBACK: Final = re.compile(r"localhost|127(?:\.\d{1,3}){3}")
PORT_DEFAULT: Final = 15002
_HARMLESS: Final = frozenset({"use_ssl", "user_id", "user_agent"})
"""Parameters whose values may be shown, in addition to those for gRPC's keepalive."""
_TAKEN: Final = "session_id"
_REMOVED: Final = "***"


def is_remote(master: str) -> bool:
    """Return whether Spark is reached over Spark Connect."""
    return master.startswith(SCHEME)


def on_loopback(master: str) -> bool:
    """Return whether all of Spark is on this machine: local, or a cluster with a loopback
    address."""
    if master.startswith("local"):
        return True
    hosts = [place.rpartition(":")[0] for place in master.removeprefix("spark://").split(",")]
    return master.startswith("spark://") and all(map(_LOOPBACK.fullmatch, hosts))


def strip_parameters(master: str) -> str:
    """Return the ``sc://host:port`` of an address, without its parameters. Raises `BadSettings`."""
    place, parameters = _split(master)
    for text in parameters:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or "=" in value:
            raise BadSettings(
                f"invalid spark_master: parameter {name!r} of {place} must have the form NAME=VALUE"
            )
        if name == _TAKEN:
            raise BadSettings(
                f"invalid spark_master: {place} must not name a {_TAKEN}, since several are used"
            )
    return place


def redact_secrets(text: str, master: str) -> str:
    """Return `text` without the secret values in an address, if `master` is one."""
    if not is_remote(master):
        return text
    secrets = set()
    for parameter in master.partition(";")[2].split(";"):
        name, _, value = parameter.partition("=")
        if value and name not in _HARMLESS and not name.startswith("grpc_keepalive"):
            secrets |= {value, unquote(value)}
    # Longest first, since one secret may contain another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _REMOVED)
    return text


def _split(master: str) -> tuple[str, list[str]]:
    """Return the ``sc://host:port`` and the parameters. Its errors never show more than the
    host."""
    place, _, rest = master.partition(";")
    refused = BadSettings(
        "invalid spark_master: expected the form sc://HOST:PORT or sc://HOST:PORT/;NAME=VALUE;…"
    )
    if "@" in place or "?" in place or "#" in place:
        raise refused
    try:
        url = urlsplit(f"//{place.removeprefix(SCHEME)}")
        host, port = url.hostname, url.port or PORT_DEFAULT
    except ValueError:
        raise refused from None
    if not host or url.path not in ("", "/"):
        raise refused
    name = f"[{host}]" if ":" in host else host
    return f"{SCHEME}{name}:{port}", [text for text in rest.split(";") if text]
