"""What clients send: decoded alike however it is cut, and bounded."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pg_columns import split  # type: ignore[import-not-found]

from actors.model.pgwire.decoder import FrontendDecoder, split_options
from actors.model.pgwire.messages import (
    AuthenticationReply,
    BindPortal,
    CancelRequest,
    ClosePortal,
    CloseStatement,
    CopyInData,
    CopyInDone,
    CopyInFailure,
    DescribePortal,
    DescribePrepared,
    EncryptionRequest,
    ExecutePortal,
    FastpathCall,
    FlushOutput,
    FrontendMessage,
    ParseStatement,
    SimpleQuery,
    StartupPacket,
    SyncPipeline,
    TerminateSession,
    encode_message,
)
from actors.runtime.errors import FrameTooLarge, MalformedFrame, RemoteProtocolError

LIMIT = 100_000


def startup(minor: int = 0, **parameters: str) -> bytes:
    """A startup packet."""
    texts = "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode()
    body = struct.pack("!I", 3 << 16 | minor) + texts + b"\0"
    return struct.pack("!I", len(body) + 4) + body


BEGIN = startup(user="alice")
CASES: list[tuple[bytes, FrontendMessage]] = [
    (encode_message(b"Q", b"SELECT 1\0"), SimpleQuery("SELECT 1")),
    (
        encode_message(b"P", b"s\0SELECT $1\0" + struct.pack("!HI", 1, 23)),
        ParseStatement("s", "SELECT $1", (23,)),
    ),
    (
        encode_message(
            b"B",
            b"p\0s\0"
            + struct.pack("!HhH", 1, 1, 2)
            + struct.pack("!i", -1)
            + struct.pack("!i", 3)
            + b"abc"
            + struct.pack("!Hhh", 2, 0, 1),
        ),
        BindPortal("p", "s", (1,), (None, b"abc"), (0, 1)),
    ),
    (encode_message(b"D", b"Ss\0"), DescribePrepared("s")),
    (encode_message(b"D", b"P\0"), DescribePortal("")),
    (encode_message(b"E", b"p\0" + struct.pack("!i", 50)), ExecutePortal("p", 50)),
    (encode_message(b"E", b"\0" + struct.pack("!i", -1)), ExecutePortal("", 0)),
    (encode_message(b"C", b"Ss\0"), CloseStatement("s")),
    (encode_message(b"C", b"Pp\0"), ClosePortal("p")),
    (encode_message(b"H"), FlushOutput()),
    (encode_message(b"S"), SyncPipeline()),
    (encode_message(b"F", b"\0\0"), FastpathCall(b"\0\0")),
    (encode_message(b"d", b"1\t2\n"), CopyInData(b"1\t2\n")),
    (encode_message(b"d"), CopyInData(b"")),
    (encode_message(b"c"), CopyInDone()),
    (encode_message(b"f", b"why\0"), CopyInFailure("why")),
    (encode_message(b"X"), TerminateSession()),
]


def decoded(pieces: list[bytes], limit: int = LIMIT) -> tuple[list[FrontendMessage], str]:
    """All messages of a client that is let in at once and never encrypted, and the error's class
    that ends them."""
    decoder = FrontendDecoder(limit)
    found: list[FrontendMessage] = []
    try:
        for piece in pieces:
            more = True
            while more:
                more = False
                for message in decoder.feed(piece):
                    found.append(message)
                    if isinstance(message, EncryptionRequest):
                        decoder.decline_encryption()
                        more = True
                    if isinstance(message, StartupPacket):
                        decoder.admit()
                piece = b""
    except RemoteProtocolError as error:
        return found, type(error).__name__
    return found, ""


@pytest.mark.parametrize(("data", "message"), CASES)
def test_each_message(data: bytes, message: FrontendMessage) -> None:
    assert decoded([BEGIN + data]) == ([StartupPacket({"user": "alice"}), message], "")


def test_packets_of_the_start() -> None:
    encryption = struct.pack("!II", 8, 80877104) + struct.pack("!II", 8, 80877103)
    found, error = decoded([encryption + startup(2, user="a", database="")])
    assert found == [
        EncryptionRequest(gss=True),
        EncryptionRequest(gss=False),
        StartupPacket({"user": "a", "database": ""}, 2),
    ]
    assert error == ""
    cancel = struct.pack("!III", 16, 80877102, 7) + b"abcd"
    assert decoded([cancel + b"whatever comes"]) == ([CancelRequest(7, b"abcd")], "")


def test_encryption_begins_with_nothing_in_the_clear() -> None:
    """CVE-2021-23214: what an attacker put before the handshake must not count."""
    request = struct.pack("!II", 8, 80877103)
    decoder = FrontendDecoder(LIMIT)
    assert list(decoder.feed(request)) == [EncryptionRequest(gss=False)]
    decoder.begin_encryption()
    assert list(decoder.feed(BEGIN)) == [StartupPacket({"user": "alice"})]

    decoder = FrontendDecoder(LIMIT)
    assert list(decoder.feed(request + BEGIN)) == [EncryptionRequest(gss=False)]
    with pytest.raises(MalformedFrame, match="unencrypted"):
        decoder.begin_encryption()

    decoder = FrontendDecoder(LIMIT)
    list(decoder.feed(request))
    with pytest.raises(FrameTooLarge):
        list(decoder.feed(bytes(10_001)))

    decoder = FrontendDecoder(LIMIT)
    list(decoder.feed(request))
    decoder.decline_encryption()
    with pytest.raises(MalformedFrame, match="twice"):
        list(decoder.feed(request))


def test_only_replies_before_a_client_is_let_in() -> None:
    decoder = FrontendDecoder(LIMIT)
    assert len(list(decoder.feed(BEGIN))) == 1
    assert list(decoder.feed(encode_message(b"p", b"secret\0"))) == [
        AuthenticationReply(b"secret\0")
    ]
    with pytest.raises(FrameTooLarge, match="16384"):
        list(decoder.feed(b"p" + struct.pack("!I", 65_540)))
    decoder = FrontendDecoder(LIMIT)
    list(decoder.feed(BEGIN))
    with pytest.raises(MalformedFrame, match="before the login"):
        list(decoder.feed(encode_message(b"Q", b"SELECT 1\0")))
    with pytest.raises(MalformedFrame, match="before the login"):
        list(decoder.feed(b""))


def test_sizes_are_judged_before_anything_is_kept() -> None:
    assert decoded([struct.pack("!I", 10_001)])[1] == "FrameTooLarge"
    assert decoded([struct.pack("!I", 7)])[1] == "MalformedFrame"
    assert decoded([BEGIN + b"d" + struct.pack("!I", LIMIT + 5)])[1] == "FrameTooLarge"
    assert decoded([BEGIN + b"Q" + struct.pack("!I", 3)])[1] == "MalformedFrame"
    assert decoded([BEGIN + b"S" + struct.pack("!I", 5)])[1] == "MalformedFrame"
    assert decoded([BEGIN + b"!" + struct.pack("!I", 4)])[1] == "MalformedFrame"


@pytest.mark.parametrize(
    "data",
    [
        encode_message(b"Q", b"no end"),
        encode_message(b"Q", b"two\0ends\0"),
        encode_message(b"Q", b"\xff\0"),
        encode_message(b"P", b"\0\0\0"),
        encode_message(b"P", b"\0\0" + struct.pack("!H", 65535)),
        encode_message(b"P", b"\0\0" + struct.pack("!HI", 0, 1)),
        encode_message(b"B", b"\0\0" + struct.pack("!HH", 0, 65535)),
        encode_message(b"B", b"\0\0" + struct.pack("!HHiH", 0, 1, -2, 0)),
        encode_message(b"B", b"\0\0" + struct.pack("!HHiH", 0, 1, 2**31 - 1, 0)),
        encode_message(b"B", b"\0\0" + struct.pack("!HhHH", 1, 2, 0, 0)),
        encode_message(b"B", b"\0\0" + struct.pack("!HhhHH", 2, 0, 0, 0, 0)),
        encode_message(b"D", b"Xs\0"),
        encode_message(b"D"),
        encode_message(b"C", b"Xs\0"),
        encode_message(b"E", b"\0\0"),
    ],
)
def test_malformed_messages(data: bytes) -> None:
    assert decoded([BEGIN + data]) == ([StartupPacket({"user": "alice"})], "MalformedFrame")


@given(st.lists(st.sampled_from(CASES)), st.lists(st.integers(0, 10_000)), st.booleans())
def test_any_cut_gives_the_same(
    cases: list[tuple[bytes, FrontendMessage]], cuts: list[int], broken: bool
) -> None:
    data = struct.pack("!II", 8, 80877103) + BEGIN + b"".join(each for each, _ in cases)
    data += b"?" + bytes(8) if broken else b""
    found, error = decoded(split(data, cuts))
    assert found[2:] == [message for _, message in cases]
    assert error == ("MalformedFrame" if broken else "")
    assert decoded([data]) == (found, error)
    assert decoded([data[at : at + 1] for at in range(len(data))]) == (found, error)


@given(st.binary(max_size=200), st.booleans(), st.lists(st.integers(0, 200)))
@example(struct.pack("!II", 8, 80877103) * 2, False, [])
def test_random_bytes_are_messages_or_the_error(data: bytes, begun: bool, cuts: list[int]) -> None:
    whole = (BEGIN if begun else b"") + data
    assert decoded([whole]) == decoded(split(whole, cuts))


@pytest.mark.sampled
def test_damaged_messages_are_messages_or_the_error() -> None:
    seen: Counter[tuple[int, str]] = Counter()

    # In every lane as many: each kind of outcome is to be seen.
    @settings(max_examples=100)
    @given(st.sampled_from(CASES), st.data())
    def decode(case: tuple[bytes, FrontendMessage], draw: st.DataObject) -> None:
        data = bytearray(case[0])
        for _ in range(draw.draw(st.integers(1, 3))):
            data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
        found, error = decoded([BEGIN + bytes(data)])
        assert found[0] == StartupPacket({"user": "alice"})
        seen[len(found), error] += 1

    decode()
    assert {error for _, error in seen} == {"", "MalformedFrame", "FrameTooLarge"}
    assert seen[2, ""] > 0


def test_options_are_cut_at_whitespace_that_is_not_escaped() -> None:
    assert split_options(r" a\ b\\ c=\d  e ") == ["a b\\", "c=d", "e"]
    assert split_options("") == []


@given(st.lists(st.text(min_size=1, alphabet=st.characters(exclude_characters="\0"))))
def test_escaped_words_come_back(words: list[str]) -> None:
    escaped = ["".join(f"\\{c}" if c.isspace() or c == "\\" else c for c in w) for w in words]
    assert split_options(" ".join(escaped)) == words
