"""Fuzzed bytes for the parsers of the WAL: accepted, or rejected with exactly one named error.

Pure. A `FuzzTarget` gives bytes to one parser and returns the error or None. It raises any other
error, which is a bug, as is a message that cannot be encoded again or then decodes to another one.
The test suite and ``tests/proof/fuzz_wal.py`` share this module.

To add a parser, add a line to `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, TypeAlias

from actors.runtime.errors import AuthenticationFailed, MalformedFrame, PenstockError, WalRefused
from actors.wal import codec_v3
from actors.wal.dialling import read_row
from actors.wal.feedback_codec import decode_feedback, encode_feedback
from actors.wal.messages import PageserverFeedback, TermEntry
from actors.wal.peer_status import PeerStatus, parse_status, status_row
from actors.wal.replication import parse_reader
from actors.wal.startup import StartupHandshake, TenantGrant, parse_command
from tests.kit import proposer_v2
from tests.kit.wire_fuzz import mutated

Target: TypeAlias = Callable[[bytes], PenstockError | None]


def message_of(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Target:
    """Return a target that reads one message."""

    def read(data: bytes) -> PenstockError | None:
        try:
            message = decode(data)
        except MalformedFrame as error:
            return error
        said = encode(message)
        assert decode(said) == message, (data.hex(), said.hex())
        assert encode(decode(said)) == said, (data.hex(), said.hex())
        return None

    return read


def read_startup(data: bytes) -> PenstockError | None:
    """Read a first packet, and the bytes after its first 0xFF as a password.

    No token is known; every password of even length counts as a signed token for one tenant.
    """
    packet, _, password = data.partition(b"\xff")

    def check(password: bytes) -> TenantGrant:
        if len(password) % 2:
            raise AuthenticationFailed("odd")
        return TenantGrant(_TENANT)

    try:
        for asked in (None, check):
            handshake = StartupHandshake(has_tls=False, knows=None, check=asked)
            answer = handshake.packet(packet)
            if handshake.asks_password:
                assert asked is not None
                handshake.password(password)
                assert handshake.target is not None
                assert handshake.target.tenant == _TENANT
            else:
                assert answer.data or answer.ends
    except (MalformedFrame, WalRefused, AuthenticationFailed) as error:
        return error
    return None


def read_command(data: bytes) -> PenstockError | None:
    """Read a simple query."""
    try:
        parse_command(data.decode("utf-8", "replace"))
    except WalRefused as error:
        return error
    return None


def read_reader(data: bytes) -> PenstockError | None:
    """Read a message of a reader of the log."""
    try:
        parse_reader(data)
    except MalformedFrame as error:
        return error
    return None


def read_peer_status(data: bytes) -> PenstockError | None:
    """Read a row with a peer's status. An accepted status must survive a round trip through our own
    row."""
    try:
        status = parse_status(read_row(data))
    except MalformedFrame as error:
        return error
    assert parse_status(status_row(status)) == status
    return None


_TENANT: Final = "9e4c8f36063c6c6e93bc20d65a820f3d"
_TIMELINE: Final = "4d1e1d3d1f4a5c0f9d6e3c8b7a695847"


def _packet(options: str) -> bytes:
    texts = ("user", "penstock", "options", options)
    return b"\0\3\0\0" + b"".join(text.encode() + b"\0" for text in texts) + b"\0"


def _row(cells: Sequence[str]) -> bytes:
    said = [len(cell).to_bytes(4) + cell.encode() for cell in cells]
    return len(cells).to_bytes(2) + b"".join(said)


def _status(*history: TermEntry) -> bytes:
    term = history[-1].term if history else 0
    return _row(status_row(PeerStatus(7, term, 0x3000, 0x2000, 0x1000, 0, 0, history)))


_FEEDBACK: Final = encode_feedback(PageserverFeedback(1, 2, 3, 4, 5))

OPENINGS: Final[dict[str, list[bytes]]] = {
    "startup": [
        (80877103).to_bytes(4),
        (80877102).to_bytes(4) + (1 << 32 | 7).to_bytes(8),
        _packet(f"-c tenant_id={_TENANT} timeline_id={_TIMELINE}") + b"\xff1234\0",
        _packet(rf"-c\ x ztenantid={_TENANT}") + b"\xffsecret\0",
    ],
    "command": [
        b"IDENTIFY_SYSTEM;",
        b"TIMELINE_STATUS",
        b"PEER_STATUS",
        b"RECEIVER_STATUS",
        b"START_WAL_PUSH (proto_version '3', allow_timeline_creation 'false')",
        b"START_REPLICATION SLOT a PHYSICAL 16/B374D848 TIMELINE 1 (term='12')",
        b"SHOW wal_segment_size",
    ],
    "reader": [
        b"r" + bytes(range(33)),
        b"h" + bytes(range(24)),
        b"z" + len(_FEEDBACK).to_bytes(8) + _FEEDBACK,
    ],
    "peer status": [
        _status(),
        _status(TermEntry(1, 0x1000)),
        _status(TermEntry(1, 8), TermEntry(5, 0x2000)),
    ],
}
"""Seeds for parsers without golden bytes: texts before and around messages."""

TARGETS: Final[dict[str, Target]] = {
    "v3 proposer": message_of(codec_v3.decode_proposer, codec_v3.encode_proposer),
    "v3 acceptor": message_of(codec_v3.decode_acceptor, codec_v3.encode_acceptor),
    "v2 proposer": message_of(proposer_v2.decode_proposer, proposer_v2.encode_proposer),
    "v2 acceptor": message_of(proposer_v2.decode_acceptor, proposer_v2.encode_acceptor),
    "feedback": message_of(decode_feedback, encode_feedback),
    "startup": read_startup,
    "command": read_command,
    "reader": read_reader,
    "peer status": read_peer_status,
}


def mutated_wal(data: bytes, others: list[bytes], rng: Random) -> bytes:
    """Return the bytes with a few changes, made with knowledge of the formats.

    Half of the changes work on reversed bytes, so that numbers of either byte order are changed.
    """
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            data = mutated(data, others, rng)
        else:
            data = mutated(data[::-1], others, rng)[::-1]
    return data
