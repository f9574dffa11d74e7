"""The codecs: golden bytes both ways, round trips, every truncation, every malformed field."""

from __future__ import annotations

import tracemalloc
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wal_messages import (  # type: ignore[import-not-found]
    FEEDBACKS,
    GOLDEN,
    PROPOSERS,
    acceptor_messages,
    golden_bytes,
    proposer_messages,
)

from actors.runtime.errors import LocalProtocolError, MalformedFrame
from actors.wal import codec_v3
from actors.wal.feedback_codec import decode_feedback, encode_feedback
from actors.wal.messages import (
    AcceptorGreeting,
    AppendRequest,
    AppendResponse,
    ConfigMember,
    MembershipConfig,
    PageserverFeedback,
    ProposerElected,
    ProposerGreeting,
    TermEntry,
    VoteRequest,
    VoteResponse,
)
from tests.kit import proposer_v2

CODECS = {2: proposer_v2, 3: codec_v3}
BYTES = golden_bytes()
PROPOSER_NAMES = [name for name, message in GOLDEN.items() if isinstance(message, PROPOSERS)]
ACCEPTOR_NAMES = [name for name in GOLDEN if name not in PROPOSER_NAMES]
VERSIONS = pytest.mark.parametrize("version", [2, 3])


def codec_of(name: str) -> ModuleType:
    return CODECS[int(name[1])]


def test_every_golden_message_is_in_the_file() -> None:
    assert sorted(BYTES) == sorted(GOLDEN)


@pytest.mark.parametrize("name", PROPOSER_NAMES)
def test_golden_proposer_messages(name: str) -> None:
    codec = codec_of(name)
    assert codec.encode_proposer(GOLDEN[name]).hex(" ") == BYTES[name].hex(" ")
    assert codec.decode_proposer(BYTES[name]) == GOLDEN[name]
    assert codec.decode_proposer(memoryview(BYTES[name])) == GOLDEN[name]
    # what follows a message is ignored
    assert codec.decode_proposer(BYTES[name] + b"more") == GOLDEN[name]


@pytest.mark.parametrize("name", ACCEPTOR_NAMES)
def test_golden_acceptor_messages(name: str) -> None:
    codec = codec_of(name)
    assert codec.encode_acceptor(GOLDEN[name]).hex(" ") == BYTES[name].hex(" ")
    assert codec.decode_acceptor(BYTES[name]) == GOLDEN[name]


@pytest.mark.parametrize("name", ACCEPTOR_NAMES)
def test_an_acceptors_message_has_its_exact_length(name: str) -> None:
    with pytest.raises(MalformedFrame):
        codec_of(name).decode_acceptor(BYTES[name] + b"\x01")


@pytest.mark.parametrize("name", list(GOLDEN))
def test_every_truncation_is_malformed(name: str) -> None:
    codec = codec_of(name)
    decode = codec.decode_proposer if name in PROPOSER_NAMES else codec.decode_acceptor
    head = {"v3": 53, "v2": 56}[name[:2]]
    for size in range(len(BYTES[name])):
        if "feedback" in name and size == head:
            # a response without feedback is a message too
            assert decode(BYTES[name][:size]).pageserver is None
            continue
        with pytest.raises(MalformedFrame):
            decode(BYTES[name][:size])


def test_sizes_of_the_specification() -> None:
    entry = TermEntry(1, 2)
    for history in ((), (entry,), (entry, entry, entry)):
        extra = 16 * len(history)
        vote = VoteResponse(0, 1, True, 2, 3, history)
        elected = ProposerElected(0, 1, 2, history)
        assert len(codec_v3.encode_acceptor(vote)) == 34 + extra
        assert len(proposer_v2.encode_acceptor(vote)) == 52 + extra
        assert len(codec_v3.encode_proposer(elected)) == 25 + extra
        assert len(proposer_v2.encode_proposer(elected)) == 36 + extra
    assert len(codec_v3.encode_acceptor(AcceptorGreeting(1, MembershipConfig(), 2))) == 29
    assert len(proposer_v2.encode_acceptor(AcceptorGreeting(1, MembershipConfig(), 2))) == 24
    assert len(codec_v3.encode_proposer(VoteRequest(0, 1))) == 13
    assert len(proposer_v2.encode_proposer(VoteRequest(0, 1))) == 32
    append = AppendRequest(0, 1, 8, 16, 0, 0, bytes(8))
    assert len(codec_v3.encode_proposer(append)) == 45 + 8
    assert len(proposer_v2.encode_proposer(append)) == 72 + 8
    assert len(codec_v3.encode_acceptor(AppendResponse(0, 1))) == 53
    assert len(proposer_v2.encode_acceptor(AppendResponse(0, 1))) == 56
    greeting = ProposerGreeting("0" * 32, "1" * 32, MembershipConfig(), 0, 0, 0)
    assert len(proposer_v2.encode_proposer(greeting)) == 80
    feedback = PageserverFeedback()
    assert len(encode_feedback(feedback)) == 132
    assert len(encode_feedback(PageserverFeedback(shard_number=1))) == 132 + 21


@VERSIONS
@given(data=st.data())
def test_proposer_messages_return(version: int, data: st.DataObject) -> None:
    codec = CODECS[version]
    message = data.draw(proposer_messages(version))
    encoded = codec.encode_proposer(message)
    assert codec.decode_proposer(encoded) == message
    assert codec.decode_proposer(encoded + data.draw(st.binary(max_size=9))) == message
    with pytest.raises(MalformedFrame):
        codec.decode_proposer(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@VERSIONS
@given(data=st.data())
def test_acceptor_messages_return(version: int, data: st.DataObject) -> None:
    codec = CODECS[version]
    message = data.draw(acceptor_messages(version))
    encoded = codec.encode_acceptor(message)
    assert codec.decode_acceptor(encoded) == message
    with pytest.raises(MalformedFrame):
        # a feedback of no keys would be one byte 0
        codec.decode_acceptor(encoded + b"\x07")


@given(feedback=FEEDBACKS)
def test_feedback_returns(feedback: PageserverFeedback) -> None:
    assert decode_feedback(encode_feedback(feedback)) == feedback


def key(name: str, value: bytes, length: int | None = None) -> bytes:
    size = len(value) if length is None else length
    return name.encode() + b"\0" + size.to_bytes(4, "big", signed=True) + value


def test_feedback_of_newer_and_of_unknown_peers() -> None:
    newer = bytes([6]) + b"".join(
        [
            key("last_received_lsn", (24).to_bytes(8, "big")),
            key("disk_consistent_lsn", (16).to_bytes(8, "big")),
            key("something_new", b"of any length at all"),
            key("remote_consistent_lsn", (8).to_bytes(8, "big")),
            key("replytime", (-5).to_bytes(8, "big", signed=True)),
            key("", b""),
        ]
    )
    assert decode_feedback(newer) == PageserverFeedback(0, 24, 16, 8, -5)
    # a peer of before the feedback: no key at all
    assert decode_feedback(b"\0") == PageserverFeedback()
    # a key that comes twice: the last one
    twice = (
        bytes([2]) + key("shard_number", bytes(3) + b"\1") + key("shard_number", bytes(3) + b"\2")
    )
    assert decode_feedback(twice).shard_number == 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the number of keys of the feedback needs 1 bytes, but 0 remain"),
        (
            b"\xff" + bytes(20),
            "255 keys of the feedback of at least 5 bytes do not fit in the remaining 20",
        ),
        (b"\1" + b"name without an end", "a key of the feedback has no terminating NUL"),
        (b"\1" + b"n" * 256 + bytes(9), "a key of the feedback is longer than 255 bytes"),
        (b"\1" + b"\xff\xfe" + bytes(5), "a key of the feedback is not valid UTF-8: fffe"),
        (b"\1" + key("ps_writelsn", b"", -1), "negative length of 'ps_writelsn': -1"),
        (b"\1" + key("other", b"", 2**31 - 1), "needs 2147483647 bytes, but 0 remain"),
        (b"\1" + key("ps_writelsn", bytes(4)), "'ps_writelsn' has 4 bytes: expected 8"),
        (b"\1" + key("corruption_detected", b"\2"), "corruption_detected is 2: expected 0 or 1"),
        (b"\0\0", "1 extra bytes after its end"),
    ],
)
def test_malformed_feedback(data: bytes, text: str) -> None:
    with pytest.raises(MalformedFrame, match="PageserverFeedback: ") as raised:
        decode_feedback(data)
    assert text in str(raised.value)


def replaced(name: str, at: int, new: bytes) -> bytes:
    data = bytearray(BYTES[name])
    data[at : at + len(new)] = new
    return bytes(data)


U32_MAX = b"\xff" * 4
U64_MAX = b"\xff" * 8


@pytest.mark.parametrize(
    ("version", "data", "text"),
    [
        (3, b"x", "unknown tag 0x78: expected g, v, e or a"),
        (2, b"x" + bytes(7), "unknown tag 0x78: expected g, v, e or a"),
        (2, b"a" + bytes(6) + b"\1", "unknown tag 0x100000000000061"),
        (3, replaced("v3 append", 13, U64_MAX), "end_lsn 6093753680 is less than begin_lsn 1844"),
        (2, replaced("v2 append", 24, U64_MAX), "end_lsn 6093753680 is less than begin_lsn 1844"),
        (3, replaced("v3 append", 21, U64_MAX), "bytes (limit 131072)"),
        (2, replaced("v2 append", 32, U64_MAX), "bytes (limit 131072)"),
        (3, replaced("v3 elected", 21, U32_MAX), "4294967295 history entries of at least 16"),
        (2, replaced("v2 elected", 24, U32_MAX), "4294967295 history entries of at least 16"),
        (
            2,
            replaced("v2 proposer greeting", 8, b"\3"),
            "it has version 3, in a stream of version",
        ),
        (3, replaced("v3 proposer greeting", 1, b"x"), "invalid tenant 'x011"),
        (3, replaced("v3 proposer greeting", 33, b"0"), "tenant is longer than 32 bytes"),
        (3, replaced("v3 proposer greeting", 20, b"\0"), "expected 32 hexadecimal digits"),
        (3, replaced("v3 proposer greeting", 1, b"\xff"), "tenant is not valid UTF-8"),
        (3, replaced("v3 proposer greeting", 71, U32_MAX), "4294967295 members of at least 11"),
        (3, replaced("v3 proposer greeting", 75, U32_MAX), "4294967295 members of at least 11"),
        (3, replaced("v3 proposer greeting", 67, b"\0\0\0\1"), "generation 1 has no members"),
        (
            3,
            replaced("v3 proposer greeting with a joint configuration", 67, bytes(4)),
            "generation 0 means no configuration, but has 3 members",
        ),
        (
            3,
            replaced("v3 proposer greeting with a joint configuration", 89, bytes(7) + b"\1"),
            "duplicate member in one set of generation 7: [1, 1]",
        ),
    ],
)
def test_malformed_proposer_messages(version: int, data: bytes, text: str) -> None:
    with pytest.raises(MalformedFrame) as raised:
        CODECS[version].decode_proposer(data)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("version", "data", "text"),
    [
        (3, b"e" + bytes(99), "unknown tag 0x65: expected g, v or a"),
        (2, b"e" + bytes(99), "unknown tag 0x65: expected g, v or a"),
        (3, replaced("v3 vote response", 13, b"\2"), "vote_given is 2: expected 0 or 1"),
        (2, replaced("v2 vote response", 17, b"\1"), "vote_given is 257: expected 0 or 1"),
        (3, replaced("v3 vote response", 30, U32_MAX), "4294967295 history entries of at least"),
        (2, replaced("v2 vote response", 40, U32_MAX), "4294967295 history entries of at least"),
        (3, replaced("v3 vote response", 33, b"\1"), "16 extra bytes after its end"),
        (2, BYTES["v2 acceptor greeting"] + b"!", "AcceptorGreeting: 1 extra bytes after"),
    ],
)
def test_malformed_acceptor_messages(version: int, data: bytes, text: str) -> None:
    with pytest.raises(MalformedFrame) as raised:
        CODECS[version].decode_acceptor(data)
    assert text in str(raised.value)


def test_digits_of_either_case_name_the_same_timeline() -> None:
    data = BYTES["v3 proposer greeting"]
    assert (
        codec_v3.decode_proposer(data[:1] + data[1:66].upper() + data[66:])
        == GOLDEN["v3 proposer greeting"]
    )


def test_a_count_allocates_nothing_before_it_was_checked() -> None:
    """A message of a few bytes that promises gigabytes costs no more than its own bytes."""
    promises = [
        replaced("v3 elected", 21, U32_MAX),
        replaced("v3 proposer greeting", 71, U32_MAX),
        replaced("v3 append", 21, BYTES["v3 append"][13:17] + b"\xff" * 4),
    ]
    tracemalloc.start()
    try:
        for data in promises:
            tracemalloc.reset_peak()
            with pytest.raises(MalformedFrame):
                codec_v3.decode_proposer(data)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


ONE = (ConfigMember(1, "a", 1),)


@pytest.mark.parametrize(
    ("version", "message", "text"),
    [
        (3, AppendRequest(0, 1, 8, 24, 0, 0, bytes(8)), "WAL of 8 bytes from 8 to 24"),
        (2, AppendRequest(0, 1, 8, 24, 0, 0, bytes(8)), "WAL of 8 bytes from 8 to 24"),
        (3, AppendRequest(0, 1, 0, 131080, 0, 0, bytes(131080)), "and at most 131072"),
        (2, AppendRequest(1, 1, 8, 8, 0, 0), "version 2 cannot encode generation 1"),
        (2, VoteRequest(1, 1), "version 2 cannot encode generation 1"),
        (2, VoteRequest(0, 1, b"short"), "a proposer's id has 16 bytes, not 5"),
        (2, ProposerElected(1, 1, 1, ()), "version 2 cannot encode generation 1"),
        (3, VoteRequest(0, -1), "cannot encode (0, -1)"),
        (
            3,
            ProposerGreeting("A" * 32, "0" * 32, MembershipConfig(), 0, 0, 0),
            "expected 32 digits",
        ),
        (
            3,
            ProposerGreeting("0" * 32, "0" * 31, MembershipConfig(), 0, 0, 0),
            "expected 32 digits",
        ),
        (
            2,
            ProposerGreeting("0" * 31, "0" * 32, MembershipConfig(), 0, 0, 0),
            "expected 32 digits",
        ),
        (
            2,
            ProposerGreeting("0" * 32, "0" * 32, MembershipConfig(1, ONE), 0, 0, 0),
            "version 2 cannot encode",
        ),
    ],
)
def test_what_a_proposer_cannot_say(version: int, message: object, text: str) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        CODECS[version].encode_proposer(message)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("version", "message", "text"),
    [
        (3, AcceptorGreeting(1, MembershipConfig(1), 1), "generation 1 has no members"),
        (
            3,
            AcceptorGreeting(1, MembershipConfig(0, ONE), 1),
            "generation 0 means no configuration",
        ),
        (3, AcceptorGreeting(1, MembershipConfig(1, ONE + ONE), 1), "duplicate member"),
        (3, AcceptorGreeting(1, MembershipConfig(1, ONE, ONE + ONE), 1), "duplicate member"),
        (
            3,
            AcceptorGreeting(1, MembershipConfig(1, (ConfigMember(1, "a\0", 1),)), 1),
            "without NUL",
        ),
        (
            3,
            AcceptorGreeting(1, MembershipConfig(1, (ConfigMember(1, "a" * 256, 1),)), 1),
            "at most 255",
        ),
        (2, AppendResponse(1, 1), "version 2 cannot encode generation 1"),
        (2, VoteResponse(1, 1, True, 0, 0), "version 2 cannot encode generation 1"),
        (3, AppendResponse(0, 2**64), "cannot encode"),
    ],
)
def test_what_an_acceptor_cannot_say(version: int, message: object, text: str) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        CODECS[version].encode_acceptor(message)
    assert text in str(raised.value)


def test_version_2_leaves_an_acceptors_membership_out() -> None:
    greeting = AcceptorGreeting(42, MembershipConfig(3, ONE), 5)
    assert proposer_v2.encode_acceptor(greeting) == BYTES["v2 acceptor greeting"]
