"""Addresses to listen on and to connect to: ``tcp://host:port`` or ``unix:/path``. Pure."""

from __future__ import annotations

import ipaddress
from typing import Self

import msgspec

from actors.runtime.errors import BadSettings

PATH_BYTES_MAX = 107
"""The kernel's limit for the path of a Unix socket."""


class NetworkAddress(msgspec.Struct, frozen=True):
    """A TCP address (`path` is empty) or a Unix socket (`host` is empty)."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, name: str = "address") -> Self:
        """Parse ``tcp://host:port``, ``host:port`` or ``unix:/path``.

        An empty host means loopback; an IPv6 address is written in brackets. Raises `BadSettings`,
        which calls the address `name`.
        """
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if not path.startswith("/"):
                raise BadSettings(
                    f"{name} = {text!r}: the path must be absolute, for example unix:/run/x.sock"
                )
            if len(path.encode()) > PATH_BYTES_MAX:
                raise BadSettings(
                    f"{name} = {text!r}: the path of a socket must have at most {PATH_BYTES_MAX} "
                    f"bytes, this one has {len(path.encode())}"
                )
            return cls(path=path)
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        whole = host.startswith("[") == host.endswith("]") and (":" not in host or "[" in host)
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or not whole:
            raise BadSettings(
                f"{name} = {text!r}: expected host:port, tcp://host:port or unix:/path"
            )
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port))

    @property
    def is_unix(self) -> bool:
        """Return whether this is a Unix socket."""
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach it: a Unix socket or a loopback address."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        # A host name may resolve to any address.
        except ValueError:
            return False

    def __str__(self) -> str:
        """Return the address as `parse` reads it, TCP without the scheme."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
