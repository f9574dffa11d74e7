"""Authenticates clients of PostgreSQL's protocol.

A client authenticates with a TLS certificate that `tls_authority` signed for the role's name, or
else with its password. The password is verified by SCRAM-SHA-256, which does not transmit it or,
with TLS and `pg_cleartext_passwords`, sent in cleartext.

While roles are not required, the password is a token of ``token_file``. With TLS it is sent in
cleartext, and without TLS verified by SCRAM. So no password is ever transmitted unencrypted.

Every refusal has the same text, whether the role does not exist, may not log in, has no password,
or has another password.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import anyio.to_thread

from actors.control.access.access_rules import RoleLogin
from actors.doors.postgres.pg_server.wire import PgWire
from actors.model.pgwire import messages as pg
from actors.model.pgwire.scram import (
    MECHANISM,
    NONCE_BYTES,
    SALT_BYTES,
    ScramExchange,
    ScramVerifier,
    check_password,
    make_verifier,
    parse_sasl_initial,
)
from actors.model.protocol.relations import fold
from actors.runtime.errors import AuthenticationFailed
from actors.runtime.settings import Settings
from actors.runtime.transport.security import TransportSecurity

log = logging.getLogger("penstock.pg")

_NO_REPLY: Final = "no password was given"


async def prove_role(wire: PgWire, settings: Settings, user: str, login: RoleLogin) -> None:
    """Authenticate a client as this user. Raises `AuthenticationFailed`, and `MalformedFrame` for
    an invalid message of the mechanism."""
    # TLS has verified that `tls_authority` signed the certificate.
    if login.role and fold(wire.certificate_name()) == fold(login.role):
        return
    try:
        if wire.encrypted and settings.pg_cleartext_passwords:
            await _prove_by_password(wire, login)
        else:
            await _prove_by_scram(wire, login.verifier)
    except AuthenticationFailed as error:
        # Log the reason only: it would tell the client which roles exist.
        log.warning("%s failed to authenticate as %r: %s", wire.peer, user, error)
        raise AuthenticationFailed(f'password authentication failed for user "{user}"') from None


class TokenProof:
    """Checks tokens that clients send as their password."""

    def __init__(self, security: TransportSecurity) -> None:
        self._security = security
        # All tokens share a salt, because the challenge contains it before the client reveals which
        # token it has.
        salt = secrets.token_bytes(SALT_BYTES)
        self._verifiers = [make_verifier(token, salt) for token in security.tokens]

    async def prove(self, wire: PgWire, user: str) -> None:
        """Verify that a client has one of the tokens. Raises `AuthenticationFailed`, and
        `MalformedFrame` for an invalid message of the mechanism."""
        try:
            # With TLS the token is sent in cleartext, which works for clients without SCRAM.
            if wire.encrypted:
                await wire.send(pg.CLEARTEXT_PASSWORD_REQUEST)
                if not self._security.knows((await _reply(wire)).rstrip(b"\0")):
                    raise AuthenticationFailed("wrong token")
            else:
                await _prove_by_scram(wire, *self._verifiers)
        except AuthenticationFailed as error:
            log.warning("%s failed to authenticate with a token: %s", wire.peer, error)
            raise AuthenticationFailed(
                f'password authentication failed for user "{user}"'
            ) from None


async def _reply(wire: PgWire) -> bytes:
    reply = await wire.receive()
    if not isinstance(reply, pg.AuthenticationReply):
        raise AuthenticationFailed(_NO_REPLY)
    return reply.body


async def _prove_by_scram(wire: PgWire, *verifiers: ScramVerifier) -> None:
    await wire.send(pg.encode_sasl_request([MECHANISM]))
    begun = parse_sasl_initial(await _reply(wire))
    if begun.mechanism != MECHANISM:
        raise AuthenticationFailed(f"mechanism {begun.mechanism[:64]!r} was not offered")
    # A new nonce for each attempt, so that an intercepted proof cannot be replayed.
    exchange = ScramExchange(verifiers, secrets.token_bytes(NONCE_BYTES))
    await wire.send(pg.encode_sasl_continue(exchange.first(begun.data)))
    await wire.send(pg.encode_sasl_final(exchange.final(await _reply(wire))))


async def _prove_by_password(wire: PgWire, login: RoleLogin) -> None:
    await wire.send(pg.CLEARTEXT_PASSWORD_REQUEST)
    given = (await _reply(wire)).rstrip(b"\0").decode(errors="surrogateescape")
    # In a thread, because the check is slow by design and must not block the event loop.
    fits = await anyio.to_thread.run_sync(check_password, given, login.verifier)
    if not fits:
        raise AuthenticationFailed("wrong password")
