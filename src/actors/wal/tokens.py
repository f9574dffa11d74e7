"""Signed tokens (JWT, EdDSA) as passwords of acceptors, and the tenants that each token allows.

``scope`` is ``tenant``, with the one ``tenant_id`` that is allowed, or ``safekeeperdata``, which
allows every tenant unless the port accepts only tenants' tokens. ``exp`` and ``nbf`` are checked if
present, once, when the connection starts. A refused token raises `AuthenticationFailed` with the
reason.

Source: the claims are those of Neon's safekeepers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from actors.runtime.errors import AuthenticationFailed, BadSettings, WalRefused
from actors.runtime.settings import Settings
from actors.wal.startup import TenantGrant, checked_id

TOKEN_BYTES_MAX: Final = 8_192
KEYS_MAX: Final = 64
ALGORITHM: Final = "EdDSA"
Check: TypeAlias = Callable[[bytes], TenantGrant]
"""Takes a token and returns what it allows. Raises `AuthenticationFailed`."""


class _Claims(msgspec.Struct, frozen=True):
    scope: str
    tenant_id: str | None = None


def token_check(settings: Settings) -> Check | None:
    """Return the check that the settings configure, or None without keys. Raise `BadSettings`."""
    if not settings.wal_jwt_keys:
        return None
    keys = load_keys(Path(settings.wal_jwt_keys))
    is_tenants_only = settings.wal_jwt_tenants_only
    return lambda token: verify_token(token, keys, is_tenants_only=is_tenants_only)


def load_keys(path: Path) -> tuple[Any, ...]:
    """Read the public keys of a PEM file, or of all ``*.pem`` files in a folder, one key per file.

    Raise `BadSettings`.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise _missing(error) from None
    found = []
    try:
        files = sorted(path.glob("*.pem")) if path.is_dir() else [path]
        # Reading one file more than allowed is enough to detect that there are too many.
        for file in files[: KEYS_MAX + 1]:
            key = load_pem_public_key(file.read_bytes())
            if not isinstance(key, Ed25519PublicKey):
                raise BadSettings(
                    f"wal_jwt_keys: {file} is not an Ed25519 key: create one with"
                    " `openssl genpkey -algorithm ed25519`"
                )
            found.append(key)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadSettings(
            f"wal_jwt_keys = {path}: not a public key in PEM format: {error}"
        ) from None
    if not 0 < len(found) <= KEYS_MAX:
        raise BadSettings(f"wal_jwt_keys = {path}: {len(found)} keys: expected 1 to {KEYS_MAX}")
    try:
        # PyJWT is an optional extra: its absence must be noticed at the start, not at the first
        # token.
        import jwt  # noqa: F401
    except ImportError as error:
        raise _missing(error) from None
    return tuple(found)


def _missing(error: ImportError) -> BadSettings:
    return BadSettings(f"wal_jwt_keys requires PyJWT ({error}): pip install 'penstock-views[jwt]'")


def verify_token(
    token: bytes, keys: Sequence[Any], *, is_tenants_only: bool = False
) -> TenantGrant:
    """Verify a token and return what it allows. Raise `AuthenticationFailed`."""
    if len(token) > TOKEN_BYTES_MAX:
        raise AuthenticationFailed(f"token too long: {len(token)} bytes (limit {TOKEN_BYTES_MAX})")
    claims = _verified(token, keys)
    if claims.scope == "tenant":
        if claims.tenant_id is None:
            raise AuthenticationFailed("a token of scope tenant must have a tenant_id")
        try:
            return TenantGrant(checked_id("tenant", claims.tenant_id.lower()))
        except WalRefused as error:
            raise AuthenticationFailed(f"invalid token: {error}") from None
    if claims.scope != "safekeeperdata":
        raise AuthenticationFailed(
            f"unsupported token scope {claims.scope[:40]!r}: expected tenant or safekeeperdata"
        )
    if is_tenants_only:
        raise AuthenticationFailed("this port accepts only tokens of scope tenant")
    return TenantGrant()


def _verified(token: bytes, keys: Sequence[Any]) -> _Claims:
    import jwt

    refused = "it is not signed with any of wal_jwt_keys"
    for key in keys:
        try:
            # A token never chooses its algorithm: only this one is tried, whatever its header says.
            claims = jwt.decode(token, key, algorithms=[ALGORITHM], options={"verify_aud": False})
            return msgspec.convert(claims, _Claims)
        except jwt.InvalidSignatureError:
            # Another key may have signed it; every other error is the same for all keys.
            continue
        except jwt.InvalidAlgorithmError:
            refused = f"its algorithm is not {ALGORITHM}"
        except jwt.ExpiredSignatureError:
            refused = "it has expired"
        except jwt.ImmatureSignatureError:
            refused = "it is not valid yet"
        except msgspec.ValidationError as error:
            refused = f"invalid claims: {error}"
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            refused = "it is not a signed token"
        break
    raise AuthenticationFailed(f"invalid token: {refused}")
