"""Signed tokens: what each opens, and all that is refused."""

from __future__ import annotations

import asyncio
import base64
import builtins
import json
from pathlib import Path
from typing import Any

import jwt
import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from test_wal_served import served  # type: ignore[import-not-found]
from wal_wires import TENANT, TIMELINE  # type: ignore[import-not-found]

from actors.model.pgwire.messages import CLEARTEXT_PASSWORD_REQUEST
from actors.runtime.errors import AuthenticationFailed, BadSettings
from actors.runtime.settings import Settings
from actors.wal.startup import StartupHandshake, TenantGrant
from actors.wal.tokens import TOKEN_BYTES_MAX, load_keys, token_check, verify_token

KEY = ed25519.Ed25519PrivateKey.generate()
OTHER = ed25519.Ed25519PrivateKey.generate()
KEYS = (KEY.public_key(),)
FAR = 1 << 40


def public_pem(key: Any) -> bytes:
    made: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return made


def signed(key: Any = KEY, algorithm: str = "EdDSA", **claims: Any) -> bytes:
    return jwt.encode(claims, key, algorithm=algorithm).encode()


def forged(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> bytes:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)


def test_what_tokens_allow() -> None:
    assert verify_token(signed(scope="tenant", tenant_id=TENANT), KEYS) == TenantGrant(TENANT)
    assert verify_token(signed(scope="tenant", tenant_id=TENANT.upper()), KEYS) == TenantGrant(
        TENANT
    )
    assert verify_token(signed(scope="safekeeperdata", exp=FAR, aud="x"), KEYS) == TenantGrant()
    both = (OTHER.public_key(), *KEYS)
    assert verify_token(signed(scope="safekeeperdata"), both) == TenantGrant()
    tenants = verify_token(signed(scope="tenant", tenant_id=TENANT), KEYS, is_tenants_only=True)
    assert tenants == TenantGrant(TENANT)
    with pytest.raises(AuthenticationFailed, match="only tokens of scope tenant"):
        verify_token(signed(scope="safekeeperdata"), KEYS, is_tenants_only=True)


PEM = public_pem(KEY)
WIDE = {"scope": "safekeeperdata"}


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (signed(OTHER, **WIDE), "not signed with any of wal_jwt_keys"),
        (signed(exp=1, **WIDE), "expired"),
        (signed(nbf=FAR, **WIDE), "not valid yet"),
        (signed(exp="soon", **WIDE), "not a signed token"),
        (signed(scope="tenant"), "must have a tenant_id"),
        (signed(scope="tenant", tenant_id="../.."), "32 hexadecimal digits"),
        (signed(scope="tenant", tenant_id=7), "claims"),
        (signed(scope="pageserverapi"), "scope 'pageserverapi'"),
        (signed(tenant_id=TENANT), "claims"),
        (signed(scope=["safekeeperdata"]), "claims"),
        (forged({"alg": "none"}, WIDE), "algorithm"),
        (forged({"alg": "HS256"}, WIDE, b"x" * 32), "algorithm"),
        (jwt.encode(WIDE, "k" * 64, algorithm="HS256").encode(), "algorithm"),
        (signed(ed448.Ed448PrivateKey.generate(), **WIDE), "not signed with any of wal_jwt_keys"),
        (forged({"alg": "EdDSA"}, WIDE), "not signed with any of wal_jwt_keys"),
        (b"", "not a signed token"),
        (b"\xff.\xff.\xff", "not a signed token"),
        (b"opensesame", "not a signed token"),
        (signed(**WIDE)[:-4], "not signed with any of wal_jwt_keys|not a signed token"),
        (signed(filler="x" * TOKEN_BYTES_MAX, **WIDE), "token too long"),
    ],
)
def test_what_is_refused(token: bytes, why: str) -> None:
    with pytest.raises(AuthenticationFailed, match=why):
        verify_token(token, KEYS)


def test_a_public_key_is_no_secret_to_sign_with() -> None:
    """The old trick: the key that everybody may know, used as that of an HMAC."""
    import hashlib
    import hmac

    unsigned = forged({"alg": "HS256", "typ": "JWT"}, WIDE).rpartition(b".")[0]
    mac = hmac.new(PEM, unsigned, hashlib.sha256).digest()
    token = unsigned + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")
    with pytest.raises(AuthenticationFailed, match="algorithm"):
        verify_token(token, KEYS)


@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_anything_else_is_one_named_error(token: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        verify_token(token, KEYS)


def test_keys_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_bytes(PEM)
    (tmp_path / "b.pem").write_bytes(public_pem(OTHER))
    (tmp_path / "notes.txt").write_text("no key")
    assert len(load_keys(tmp_path)) == 2
    check = token_check(Settings(wal_jwt_keys=str(tmp_path / "b.pem")))
    assert check is not None
    assert check(signed(OTHER, **WIDE)) == TenantGrant()
    with pytest.raises(AuthenticationFailed):
        check(signed(**WIDE))
    assert token_check(Settings()) is None


def test_keys_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "absent": None,
        "curve": public_pem(ec.generate_private_key(ec.SECP256R1())),
        "private": KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "text": b"no key",
    }
    for name, data in made.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(BadSettings, match="wal_jwt_keys"):
            load_keys(tmp_path / name)
    with pytest.raises(BadSettings, match="0 keys"):
        load_keys(tmp_path)
    (tmp_path / "key").write_bytes(PEM)
    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name == "jwt":
            raise ImportError("No module named 'jwt'")
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadSettings, match=r"penstock-views\[jwt\]"):
        load_keys(tmp_path / "key")


def startup(options: str) -> bytes:
    return b"\0\3\0\0" + b"".join(part + b"\0" for part in (b"options", options.encode(), b""))


@pytest.mark.parametrize("options", [f"-c tenant_id={TENANT}", ""])
def test_a_tenants_token_opens_that_tenant(options: str) -> None:
    handshake = StartupHandshake(has_tls=False, knows=None, check=lambda _: TenantGrant(TENANT))
    assert handshake.packet(startup(options)).data == CLEARTEXT_PASSWORD_REQUEST
    handshake.password(b"token\0")
    assert handshake.target is not None
    assert handshake.target.tenant == TENANT


def test_a_tenants_token_opens_no_other() -> None:
    handshake = StartupHandshake(has_tls=False, knows=None, check=lambda _: TenantGrant("9" * 32))
    handshake.packet(startup(f"-c tenant_id={TENANT} timeline_id={TIMELINE}"))
    with pytest.raises(AuthenticationFailed, match="is for tenant 9999"):
        handshake.password(b"token\0")
    assert handshake.target is None


async def test_over_a_port(tmp_path: Path) -> None:
    """By psycopg, as a password; a token of the file opens it, too."""

    def check(token: bytes) -> TenantGrant:
        return verify_token(token, KEYS)

    async with served(tmp_path, lambda token: token == b"opensesame", check=check) as node:
        for password in (signed(scope="tenant", tenant_id=TENANT), b"opensesame"):
            rows = await asyncio.to_thread(node.rows, "PEER_STATUS", password=password.decode())
            assert rows == []
        for token, why in (
            (signed(scope="tenant", tenant_id="9" * 32), "is for tenant"),
            (signed(OTHER, **WIDE), "is not signed with any of wal_jwt_keys"),
        ):
            with pytest.raises(psycopg.OperationalError, match=why):
                await asyncio.to_thread(node.rows, "PEER_STATUS", password=token.decode())
