"""How a client of PostgreSQL's protocol proves a role.

By a certificate of the role's name, if the connection has TLS and the client showed one that
`tls_authority` signed; else by its password: by SCRAM-SHA-256, in which the password does not
travel, or as it is, inside TLS alone and if `pg_cleartext_passwords` is set.

While no role is wanted, the password is a token of ``token_file``: it is sent as it is inside TLS,
and proved by SCRAM without. So no password travels in the clear.

Every refusal has one text, whether there is no such role, it may not log in, it has no password, or
the password is another one.
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
    """Let a client prove that it is this user's. Raises `AuthenticationFailed`, and
    `MalformedFrame` for what is no message of the mechanism."""
    # TLS has checked that the certificate is signed by our authority.
    if login.role and fold(wire.certificate_name()) == fold(login.role):
        return
    try:
        if wire.encrypted and settings.pg_cleartext_passwords:
            await _prove_by_password(wire, login)
        else:
            await _prove_by_scram(wire, login.verifier)
    except AuthenticationFailed as error:
        # The reason is for the log: to the client it would tell which roles there are.
        log.warning("%s did not prove to be %r: %s", wire.peer, user, error)
        raise AuthenticationFailed(f'password authentication failed for user "{user}"') from None


class TokenProof:
    """Checks tokens that clients show as their password."""

    def __init__(self, security: TransportSecurity) -> None:
        self._security = security
        # One salt for all: the challenge names it before the client shows which token it has.
        salt = secrets.token_bytes(SALT_BYTES)
        self._verifiers = [make_verifier(token, salt) for token in security.tokens]

    async def prove(self, wire: PgWire, user: str) -> None:
        """Let a client prove that it has one of the tokens. Raises `AuthenticationFailed`, and
        `MalformedFrame` for what is no message of the mechanism."""
        try:
            # Clients that do not know SCRAM have shown their token so since there are tokens.
            if wire.encrypted:
                await wire.send(pg.CLEARTEXT_PASSWORD_REQUEST)
                if not self._security.knows((await _reply(wire)).rstrip(b"\0")):
                    raise AuthenticationFailed("another token")
            else:
                await _prove_by_scram(wire, *self._verifiers)
        except AuthenticationFailed as error:
            log.warning("%s did not show a token: %s", wire.peer, error)
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
    # A fresh nonce for each attempt: a proof that was overheard proves nothing later.
    exchange = ScramExchange(verifiers, secrets.token_bytes(NONCE_BYTES))
    await wire.send(pg.encode_sasl_continue(exchange.first(begun.data)))
    await wire.send(pg.encode_sasl_final(exchange.final(await _reply(wire))))


async def _prove_by_password(wire: PgWire, login: RoleLogin) -> None:
    await wire.send(pg.CLEARTEXT_PASSWORD_REQUEST)
    given = (await _reply(wire)).rstrip(b"\0").decode(errors="surrogateescape")
    # In a thread: it is slow on purpose, and the loop serves all others.
    fits = await anyio.to_thread.run_sync(check_password, given, login.verifier)
    if not fits:
        raise AuthenticationFailed("another password")
