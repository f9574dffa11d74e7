"""Authentication of peers: TLS 1.3 with certificates on both sides, and bearer tokens.

The rules are the same for the listeners of clients and of the replica protocol:

- An address that only this machine can reach (loopback, a Unix socket) needs neither. At any other
  address, a listener without both is refused at the start.
- Both sides check the other's certificate against one authority, which should be this
  installation's own. The connecting side also checks that the certificate is for the host to which
  it connects.
- A token is one line of a file. The connecting side sends the first one, and never unencrypted to
  another machine. Files are read once, at the start.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
from pathlib import Path
from typing import Self

from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress

log = logging.getLogger("penstock.security")


class TransportSecurity:
    """The credentials of one side and what it requires of peers. No `certificate` means no TLS."""

    def __init__(
        self,
        certificate: str = "",
        key: str = "",
        authority: str = "",
        *,
        tokens: tuple[str, ...] = (),
    ) -> None:
        self._files = (certificate, key, authority)
        # A listener accepts every token of its file, so that tokens can be rotated.
        self._digests = tuple(_digest(token.encode()) for token in tokens)
        self.tokens = tokens
        """The tokens that a listener accepts."""
        self.token = tokens[0].encode() if tokens else b""
        """The token that the connecting side sends."""

    @classmethod
    def of(cls, settings: Settings, token_file: str) -> Self:
        """Load the credentials that the settings name. Raises `BadSettings`."""
        files = {
            "tls_certificate": settings.tls_certificate,
            "tls_key": settings.tls_key,
            "tls_authority": settings.tls_authority,
        }
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            raise BadSettings(
                f"TLS needs {', '.join(files)}: also set {', '.join(missing)}, or none of them"
            )
        tokens = _tokens(token_file) if token_file else ()
        return cls(*files.values(), tokens=tokens)

    @property
    def has_tls(self) -> bool:
        """Return whether this side uses TLS."""
        return bool(self._files[0])

    @property
    def has_tokens(self) -> bool:
        """Return whether this side uses tokens."""
        return bool(self._digests)

    def knows(self, token: bytes) -> bool:
        """Return whether a token is accepted. Takes constant time."""
        digest = _digest(token)
        # `any` would stop at the first match, and its duration would reveal the match's position.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the TLS context of a listener (`server`) or of the connecting side.

        Raises `BadSettings` for invalid files.
        """
        certificate, key, authority = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # no resumption: every connection authenticates
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise BadSettings(
                f"tls_certificate = {certificate}, tls_key = {key}: cannot load a PEM certificate "
                f"with its key: {error}"
            ) from None
        try:
            context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadSettings(
                f"tls_authority = {authority}: cannot load a PEM certificate: {error}"
            ) from None
        _warn_if_open(key)
        return context


def for_listener(
    name: str, address: NetworkAddress, settings: Settings, token_name: str, *, checks: bool = False
) -> TransportSecurity | None:
    """Return what a listener requires of its peers; None if nothing.

    `name` and `token_name` are names of settings. `checks` means that the listener checks tokens of
    another kind in any case. Raises `BadSettings` if other machines can reach the address and TLS
    or tokens are missing.
    """
    # The file mode of a Unix socket decides who may connect.
    if address.is_unix:
        return None
    security = TransportSecurity.of(settings, getattr(settings, token_name))
    if not address.is_local and not (security.has_tls and (security.has_tokens or checks)):
        raise BadSettings(
            f"{name} = {address}: other machines can reach this address, so it needs TLS and "
            f"tokens: set tls_certificate, tls_key, tls_authority and {token_name} "
            "(docs/guides/tls-and-tokens.md), or listen on 127.0.0.1 or unix:/path"
        )
    return security if security.has_tls or security.has_tokens else None


def for_dialler(
    address: NetworkAddress, settings: Settings, token_file: str
) -> TransportSecurity | None:
    """Return the credentials for connecting to an address; None if there are none.

    Raises `BadSettings` if a token would leave this machine unencrypted.
    """
    if address.is_unix:
        return None
    security = TransportSecurity.of(settings, token_file)
    if security.has_tokens and not security.has_tls and not address.is_local:
        raise BadSettings(
            f"refusing to send a token to {address} without TLS: set tls_certificate, tls_key and "
            "tls_authority"
        )
    return security if security.has_tls or security.has_tokens else None


def dialling_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context for connecting to WAL acceptors; None if the settings name no
    certificate. Raises `BadSettings`."""
    security = TransportSecurity.of(settings, "")
    return security.context(server=False) if security.has_tls else None


def _tokens(path: str) -> tuple[str, ...]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"cannot read tokens from {path}: {error}") from None
    lines = (line.strip() for line in text.splitlines())
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise BadSettings(f"{path} contains no token: write one per line")
    if short := [number for number, token in enumerate(tokens, 1) if len(token) < TOKEN_CHARS_MIN]:
        raise BadSettings(
            f"token {short[0]} of {path} has fewer than {TOKEN_CHARS_MIN} characters: create one "
            "with `openssl rand -hex 32`"
        )
    _warn_if_open(path)
    return tokens


TOKEN_CHARS_MIN = 16


def _warn_if_open(path: str) -> None:
    mode = Path(path).stat().st_mode
    if mode & 0o077:
        log.warning("other users can access %s (mode %03o): chmod 600", path, mode & 0o777)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
