"""SCRAM-SHA-256: the RFC's own example, psycopg's libpq's habits, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.pgwire.scram import (
    SaslInitial,
    ScramExchange,
    check_password,
    make_verifier,
    mock_verifier,
    parse_sasl_initial,
    parse_verifier,
    prepare_password,
)
from actors.runtime.errors import AuthenticationFailed, InvalidUsage, MalformedFrame

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
VERIFIER = make_verifier("pencil", SALT)


def client_final(
    challenge: bytes, bare: str, password: str = "pencil", binding: str = "biws"
) -> bytes:
    """A client's second message."""
    parts = dict(part.split("=", 1) for part in challenge.decode().split(","))
    salted = hashlib.pbkdf2_hmac(
        "sha256", password.encode(), base64.b64decode(parts["s"]), int(parts["i"])
    )
    key = hmac.digest(salted, b"Client Key", "sha256")
    unproved = f"c={binding},r={parts['r']}"
    signed = f"{bare},{challenge.decode()},{unproved}".encode()
    signature = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
    proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
    return f"{unproved},p={base64.b64encode(proof).decode()}".encode()


def test_the_example_of_rfc_7677() -> None:
    # The RFC's server nonce is no base64: put in by hand.
    exchange = ScramExchange([VERIFIER], b"")
    exchange._nonce = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    challenge = exchange.first(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
    assert challenge == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    final = exchange.final(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert final == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.mark.parametrize(("flag", "binding"), [("n", "biws"), ("y", "eSws")])
def test_a_client_without_a_name(flag: str, binding: str) -> None:
    """As libpq does it."""
    exchange = ScramExchange([VERIFIER], bytes(18))
    challenge = exchange.first(f"{flag},,n=,r=abc".encode())
    assert exchange.final(client_final(challenge, "n=,r=abc", binding=binding)).startswith(b"v=")


def test_wrong_proofs() -> None:
    for verifier, password in ((VERIFIER, "pen"), (mock_verifier("nobody", b"secret"), "pencil")):
        exchange = ScramExchange([verifier], bytes(18))
        challenge = exchange.first(b"n,,n=,r=abc")
        with pytest.raises(AuthenticationFailed, match="password"):
            exchange.final(client_final(challenge, "n=,r=abc", password))
    exchange = ScramExchange([VERIFIER], bytes(18))
    challenge = exchange.first(b"y,,n=,r=abc")
    with pytest.raises(AuthenticationFailed, match="channel binding"):
        exchange.final(client_final(challenge, "n=,r=abc", binding="biws"))
    with pytest.raises(AuthenticationFailed, match="nonce"):
        exchange.final(b"c=eSws,r=abcd,p=" + base64.b64encode(bytes(32)))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedFrame),
        (b"\xff", MalformedFrame),
        (b"x,,n=,r=a", MalformedFrame),
        (b"p=tls-server-end-point,,n=,r=a", AuthenticationFailed),
        (b"n,a=other,n=,r=a", AuthenticationFailed),
        (b"n,,m=x,n=,r=a", MalformedFrame),
        (b"n,,n=", MalformedFrame),
        (b"n,,n=,x=a", MalformedFrame),
        (b"n,,n=,r=", MalformedFrame),
        (b"n,,n=,r=a b", MalformedFrame),
        (b"n", MalformedFrame),
    ],
)
def test_first_messages_that_are_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        ScramExchange([VERIFIER], bytes(18)).first(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"c=biws",
        b"c=biws,x=1,p=",
        b"r=a,c=biws,p=",
        b"c=biws,r={r},p=!!",
        b"c=biws,r={r},p=YQ==",
    ],
)
def test_second_messages_that_are_refused(data: bytes) -> None:
    exchange = ScramExchange([VERIFIER], bytes(18))
    nonce = exchange.first(b"n,,n=,r=abc").split(b",")[0][2:]
    with pytest.raises(MalformedFrame):
        exchange.final(data.replace(b"{r}", nonce))


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_random_messages_are_refused(first: bytes, final: bytes) -> None:
    exchange = ScramExchange([VERIFIER], bytes(18))
    for step, data in ((exchange.first, first), (exchange.final, final)):
        with pytest.raises((MalformedFrame, AuthenticationFailed)):
            step(data)


def test_verifiers() -> None:
    assert parse_verifier(VERIFIER.text()) == VERIFIER
    assert VERIFIER.text().startswith("SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$")
    assert check_password("pencil", VERIFIER)
    assert not check_password("pencils", VERIFIER)
    good = VERIFIER.text()
    for text in ("", "md5abc", "SCRAM-SHA-256$1:a$b:c", good.replace("256", "1"),
                 good.replace("4096", "0"), "SCRAM-SHA-256$4096:YQ==$YQ==:YQ=="):  # fmt: skip
        with pytest.raises(InvalidUsage, match="SCRAM"):
            parse_verifier(text)


def test_an_unknown_user_looks_like_a_known_one() -> None:
    mock = mock_verifier("nobody", b"secret")
    assert mock == mock_verifier("nobody", b"secret")
    assert mock.salt != mock_verifier("somebody", b"secret").salt
    assert len(mock.salt) == len(make_verifier("x", bytes(16)).salt)
    assert mock.iterations == VERIFIER.iterations


@pytest.mark.parametrize(
    ("password", "prepared"),
    [
        ("user", b"user"),
        ("I\u00adX", b"IX"),
        ("\u00aa", b"a"),
        ("\u2168", b"IX"),
        ("a\u00a0b", b"a b"),
        ("\u0007", b"\x07"),  # prohibited: as it is
        ("\u0627\u0031", "\u0627\u0031".encode()),  # mixed directions: as it is
        ("", b""),
    ],
)
def test_passwords_are_prepared(password: str, prepared: bytes) -> None:
    assert prepare_password(password) == prepared


def test_the_choice_of_a_mechanism() -> None:
    body = b"SCRAM-SHA-256\0" + struct.pack("!I", 3) + b"n,,"
    assert parse_sasl_initial(body) == SaslInitial("SCRAM-SHA-256", b"n,,")
    assert parse_sasl_initial(b"X\0\xff\xff\xff\xff") == SaslInitial("X", b"")
    for wrong in (b"", b"X", b"X\0\0\0", body + b"x", body[:-1], b"\xff\0\0\0\0\0"):
        with pytest.raises(MalformedFrame):
            parse_sasl_initial(wrong)
