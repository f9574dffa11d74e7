"""The server side of SCRAM-SHA-256, without channel binding. Pure.

The server stores no passwords, only verifiers in PostgreSQL's form:
``SCRAM-SHA-256$4096:salt$StoredKey:ServerKey``. `ScramExchange` checks a client's proof against a
verifier. For an unknown user it gets a `mock_verifier`, so that the answers do not reveal whether
the user exists.

Source: RFC 5802, RFC 7677, RFC 4013 (SASLprep); PostgreSQL's auth-scram.c.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import stringprep
import struct
import unicodedata
from collections.abc import Sequence
from typing import Final

import msgspec

from actors.runtime.errors import AuthenticationFailed, InvalidUsage, MalformedFrame

MECHANISM: Final = "SCRAM-SHA-256"
ITERATIONS: Final = 4096
SALT_BYTES: Final = 16
NONCE_BYTES: Final = 18
_KEY_BYTES: Final = 32
_ITERATIONS_MAX: Final = 10_000_000
_NO_LENGTH: Final = 0xFFFF_FFFF
_PRINTABLE: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,1024}")
"""Characters allowed in a nonce: all printable ones except the comma."""


class ScramVerifier(msgspec.Struct, frozen=True):
    """Keys that the server stores instead of a password. They can verify proofs but not create
    them."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def text(self) -> str:
        """Return the verifier in PostgreSQL's form."""
        salt, stored, server = map(_base64, (self.salt, self.stored_key, self.server_key))
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def make_verifier(password: str, salt: bytes, iterations: int = ITERATIONS) -> ScramVerifier:
    """Derive the verifier of a password. `salt` is `SALT_BYTES` of cryptographic randomness. Takes
    some milliseconds on purpose."""
    salted = hashlib.pbkdf2_hmac("sha256", prepare_password(password), salt, iterations)
    stored_key = hashlib.sha256(_hmac(salted, b"Client Key")).digest()
    return ScramVerifier(iterations, salt, stored_key, _hmac(salted, b"Server Key"))


def mock_verifier(user: str, secret: bytes) -> ScramVerifier:
    """Return a verifier that matches no password. It is always the same for a user, as a real one
    would be.

    `secret` must stay on the server and must not change between its starts.
    """
    # A new salt for each attempt would reveal that the user does not exist.
    seed = _hmac(secret, user.encode(errors="replace"))
    return ScramVerifier(
        ITERATIONS, seed[:SALT_BYTES], _hmac(seed, b"stored key"), _hmac(seed, b"server key")
    )


def parse_verifier(text: str) -> ScramVerifier:
    """Parse a verifier in PostgreSQL's form. Raises `InvalidUsage`, whose text does not contain the
    verifier.

    >>> parse_verifier(make_verifier("secret", bytes(16)).text()).iterations
    4096
    """
    try:
        mechanism, head, keys = text.split("$")
        iterations, salt = head.split(":")
        stored, server = keys.split(":")
        made = ScramVerifier(int(iterations), _bytes(salt), _bytes(stored), _bytes(server))
    except ValueError:
        # Do not show the text: with it, whoever reads the log could try passwords.
        raise InvalidUsage(
            "invalid SCRAM verifier: expected SCRAM-SHA-256$4096:salt$StoredKey:ServerKey"
        ) from None
    keys_fit = len(made.stored_key) == len(made.server_key) == _KEY_BYTES
    if mechanism != MECHANISM or not keys_fit or not 0 < made.iterations <= _ITERATIONS_MAX:
        raise InvalidUsage("invalid SCRAM verifier: wrong mechanism or length of keys")
    return made


def _bytes(text: str) -> bytes:
    try:
        # Without `validate`, invalid characters would be skipped, so a value would have many texts.
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def prepare_password(password: str) -> bytes:
    """Prepare a password with SASLprep and return its bytes. Like PostgreSQL, use the text
    unchanged if SASLprep forbids it.

    >>> prepare_password("\\u2168"), prepare_password("a\\u00adb")
    (b'IX', b'ab')
    """
    raw = password.encode(errors="surrogatepass")
    mapped = "".join(
        " " if stringprep.in_table_c12(char) else char
        for char in password
        if not stringprep.in_table_b1(char)
    )
    text = unicodedata.normalize("NFKC", mapped)
    if not text or any(_is_prohibited(char) for char in text):
        return raw
    # Right-to-left text must start and end with such characters and contain no left-to-right ones.
    if any(map(stringprep.in_table_d1, text)) and (
        any(map(stringprep.in_table_d2, text))
        or not stringprep.in_table_d1(text[0])
        or not stringprep.in_table_d1(text[-1])
    ):
        return raw
    return text.encode()


def _is_prohibited(char: str) -> bool:
    tables = (
        stringprep.in_table_a1,
        stringprep.in_table_c12,
        stringprep.in_table_c21_c22,
        stringprep.in_table_c3,
        stringprep.in_table_c4,
        stringprep.in_table_c5,
        stringprep.in_table_c6,
        stringprep.in_table_c7,
        stringprep.in_table_c8,
        stringprep.in_table_c9,
    )
    return any(table(char) for table in tables)


class SaslInitial(msgspec.Struct, frozen=True):
    """A client's choice of a mechanism, with its first message."""

    mechanism: str
    data: bytes


def parse_sasl_initial(body: bytes) -> SaslInitial:
    """Parse the body of a SASLInitialResponse. Raises `MalformedFrame`."""
    name, nul, rest = body.partition(b"\0")
    if not nul or len(rest) < 4 or not name.isascii():
        raise MalformedFrame("invalid SASLInitialResponse: too short")
    (length,) = struct.unpack_from("!I", rest)
    data = rest[4:]
    if length != len(data) and not (length == _NO_LENGTH and not data):
        raise MalformedFrame(f"invalid SASLInitialResponse: {len(data)} bytes instead of {length}")
    return SaslInitial(name.decode(), data)


class ScramExchange:
    """Verifies one client's proof: pass its first message to `first` and its second to `final`.

    The proof must match one of the verifiers, which must have the same salt and number of
    iterations. `nonce` is the server's part of the nonce: `NONCE_BYTES` of cryptographic
    randomness. Both methods raise `MalformedFrame` for an invalid message, and
    `AuthenticationFailed`.
    """

    def __init__(self, verifiers: Sequence[ScramVerifier], nonce: bytes) -> None:
        self._verifiers = verifiers
        self._nonce = _base64(nonce)
        """The server's nonce; after `first`, with the client's nonce in front."""
        self._binding = ""
        """The expected value of the attribute c, set by `first`."""
        self._signed = b""
        """The signed messages so far, without the client's last one."""

    def first(self, data: bytes) -> bytes:
        """Return the challenge that answers a client's first message."""
        text = _ascii_or_utf8(data)
        flag, _, rest = text.partition(",")
        if flag.startswith("p="):
            raise AuthenticationFailed("channel binding was not offered")
        # y: the client supports channel binding and saw that the server does not offer it, which is
        # true.
        if flag not in ("n", "y"):
            raise MalformedFrame("invalid SCRAM message: no channel binding flag")
        authorized, comma, bare = rest.partition(",")
        if not comma:
            raise MalformedFrame("invalid SCRAM message: incomplete header")
        if authorized:
            raise AuthenticationFailed("SCRAM authorization as another user is not supported")
        self._binding = _base64(f"{flag},,".encode())
        if bare.startswith("m="):
            raise MalformedFrame("invalid SCRAM message: unknown extension")
        # The user name is ignored; libpq leaves it empty, because the startup packet has it.
        attributes = bare.split(",")
        if len(attributes) < 2 or not attributes[0].startswith("n="):
            raise MalformedFrame("invalid SCRAM message: no user name")
        nonce = _attribute(attributes[1], "r")
        if _PRINTABLE.fullmatch(nonce) is None:
            raise MalformedFrame("invalid SCRAM message: invalid character in the nonce")
        self._nonce = nonce + self._nonce
        salt, iterations = _base64(self._verifiers[0].salt), self._verifiers[0].iterations
        challenge = f"r={self._nonce},s={salt},i={iterations}"
        self._signed = f"{bare},{challenge}".encode()
        return challenge.encode()

    def final(self, data: bytes) -> bytes:
        """Return the server's own proof if the client's proof is right."""
        text = _ascii_or_utf8(data)
        # The proof is the last attribute, and the only one that is not signed.
        unproved, _, proof_text = text.rpartition(",p=")
        attributes = unproved.split(",")
        if len(attributes) < 2:
            raise MalformedFrame("invalid SCRAM message: no nonce or proof")
        if _attribute(attributes[0], "c") != self._binding:
            raise AuthenticationFailed("SCRAM channel binding differs from the first message")
        nonce = _attribute(attributes[1], "r")
        if not hmac.compare_digest(nonce.encode(), self._nonce.encode()):
            raise AuthenticationFailed("SCRAM nonce differs from the challenge")
        try:
            proof = _bytes(proof_text)
        except ValueError:
            raise MalformedFrame("invalid SCRAM message: the proof is not base64") from None
        if len(proof) != _KEY_BYTES:
            raise MalformedFrame(f"invalid SCRAM message: a proof of {len(proof)} bytes")
        signed = self._signed + b"," + unproved.encode()
        # Try all verifiers, each in constant time, so that the duration reveals nothing.
        fitting = [each for each in self._verifiers if _fits(proof, signed, each.stored_key)]
        if not fitting:
            raise AuthenticationFailed("password authentication failed")
        return f"v={_base64(_hmac(fitting[0].server_key, signed))}".encode()


def _fits(proof: bytes, signed: bytes, stored_key: bytes) -> bool:
    """Return whether a client's proof was made with the password of this key."""
    signature = _hmac(stored_key, signed)
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    return hmac.compare_digest(hashlib.sha256(client_key).digest(), stored_key)


def check_password(password: str, verifier: ScramVerifier) -> bool:
    """Return whether a password sent in clear text matches a verifier. Slow on purpose."""
    made = make_verifier(password, verifier.salt, verifier.iterations)
    return hmac.compare_digest(made.stored_key, verifier.stored_key)


def _ascii_or_utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedFrame("invalid SCRAM message: not UTF-8") from None


def _attribute(text: str, name: str) -> str:
    """Return the value in ``name=value``."""
    if not text.startswith(f"{name}="):
        raise MalformedFrame(f"invalid SCRAM message: no attribute {name}")
    return text[2:]
